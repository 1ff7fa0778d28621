"""What the tests of quantised messages share: settings, and many samples of one block."""

import torch
from hypothesis import strategies as st

from sparsync.wire.quantiser import Quantiser

SETTINGS = [(bits, scale) for bits in (2, 4, 8) for scale in ("l2", "max")]
COPIES = 4000


def options(blocks=(1, 3, 8, 1024)):
    """Draw the arguments of a codec."""
    return st.fixed_dictionaries(
        {
            "bits": st.sampled_from([2, 4, 8]),
            "scale": st.sampled_from(["l2", "max"]),
            "shrink": st.booleans(),
            "block": st.sampled_from(blocks),
        }
    )


def uint8(raw: bytes) -> torch.Tensor:
    return torch.tensor(list(raw), dtype=torch.uint8)


def hex_of(payload: torch.Tensor) -> str:
    return bytes(payload.tolist()).hex()


def deviations(quantiser: Quantiser, x: torch.Tensor) -> torch.Tensor:
    """The standard deviation of every entry of one block, by the definition of the scheme."""
    x = x.double()
    scale = float(x.norm()) if quantiser.scale == "l2" else float(x.abs().max())
    exact = x.abs() / scale * quantiser.levels
    fraction = exact - exact.floor()
    return scale / quantiser.levels * (fraction * (1 - fraction)).sqrt()
