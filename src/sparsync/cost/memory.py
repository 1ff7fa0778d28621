"""Predict how much memory a rank needs for training, and how much ``attach`` adds.

Training needs memory for the weights, the gradients, DDP's buckets, and the optimizer's state.
``attach`` adds, depending on whether gradients or updates are exchanged::

    gradients   the residual, n words, and 12 bytes for each of k entries
    updates     the shared weights and the residual, n words each, and the messages that an exchange
                holds: three values of a few bits per element

For a GPT with 124 million parameters, measured additions were 1.1 words per parameter for gradients, and
2.0 to 2.1 for updates (``benchmarks/memory_gpt.md``).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, get_args

from sparsync.collectives.costs import WORD_BYTES
from sparsync.errors import require

__all__ = ["Footprint", "Optimizer", "footprints"]

Optimizer = Literal["sgd", "sgd-momentum", "adamw", "muon"]

# words of optimizer state per parameter; Muon keeps one momentum for its matrices
_STATES: Final = MappingProxyType({"sgd": 0, "sgd-momentum": 1, "adamw": 2, "muon": 1})
_REPLICA: Final = 3  # weights, gradients, DDP's buckets
_ENTRY: Final = 12  # bytes of a selected entry: its index, its value, its position in a message
# the default for models above a million parameters: 2 bits per element, and a scale of 16 bits per block
_BITS: Final = 2 + 16 / 512
_MESSAGES: Final = 3  # an exchange holds its own message, and the messages of both rounds


@dataclass(frozen=True)
class Footprint:
    """The bytes that a rank needs: ``device`` on the model's device, and ``host`` in host memory.

    If the model is on a GPU, the ``host`` bytes are pinned.  torch rounds each allocation of pinned
    memory up to a power of two; ``pinned`` is the resulting total.
    """

    name: str
    device: int
    host: int
    pinned: int = 0


def footprints(size: int, k: int, optimizer: Optimizer) -> list[Footprint]:
    """Return the memory for training itself, followed by what each way to attach adds to it.

    Args:
        size: number of trained parameters, in float32.
        k: number of entries of a gradient that are exchanged.
        optimizer: "sgd", "sgd-momentum", "adamw" or "muon".

    Raises:
        ConfigurationError: the optimizer is unknown.

    Example:
        >>> for one in footprints(10**9, 10**7, "adamw")[:2]:
        ...     print(one.name, one.device / 1e9, one.host / 1e9, one.pinned / 1e9)
        training itself 20.0 0.0 0.0
        updates 4.76171875 4.0 4.294967296
    """
    known = get_args(Optimizer)
    require(optimizer in known, f"optimizer is {optimizer!r}; choose one of {', '.join(known)}")
    vector = WORD_BYTES * size
    messages, pinned = int(size * _BITS / 8 * _MESSAGES), 1 << (vector - 1).bit_length()
    training = Footprint("training itself", (_REPLICA + _STATES[optimizer]) * vector, 0)
    if optimizer.startswith("sgd"):
        return [training, Footprint("gradients", vector + _ENTRY * k, 0)]
    return [
        training,
        Footprint("updates", vector + messages, vector, pinned),
        Footprint("updates, offload=True", messages, 2 * vector, 2 * pinned),
        Footprint("updates, offload=False", 2 * vector + messages, 0),
    ]
