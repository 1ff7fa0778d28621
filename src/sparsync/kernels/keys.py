"""Magnitude keys: integers that order floats by magnitude, on any device.

The key of x consists of the bits of ``|x|``, read as an integer.  Keys order finite floats like ``abs``,
with Inf above them and NaN above Inf.  So a NaN is always selected and noticed, and never lost silently.
"""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError

__all__ = ["check_pair", "key_range", "magnitude_keys"]

# for each dtype, the integer dtype of the same width, and the number of mantissa bits
_BITS = MappingProxyType(
    {
        torch.float32: (torch.int32, 23),
        torch.float64: (torch.int64, 52),
        torch.float16: (torch.int16, 10),
        torch.bfloat16: (torch.int16, 7),
    }
)


def magnitude_keys(x: Tensor) -> Tensor:
    """Return integers of the same shape, ordered like ``|x|``; only zeros have the key 0.

    Example:
        >>> keys = magnitude_keys(torch.tensor([0.0, -2.0, 1.0, float("nan"), float("inf")]))
        >>> keys.argsort().tolist()
        [0, 2, 1, 4, 3]
    """
    integer, _ = _bits_of(x.dtype)
    return x.contiguous().view(integer) & torch.iinfo(integer).max


def key_range(dtype: torch.dtype) -> tuple[int, int]:
    """Return ``(largest, octave)``: no key exceeds ``largest``, and doubling |x| adds ``octave``."""
    integer, mantissa = _bits_of(dtype)
    return torch.iinfo(integer).max, 1 << mantissa


def _bits_of(dtype: torch.dtype) -> tuple[torch.dtype, int]:
    if dtype not in _BITS:
        raise ConfigurationError(
            f"magnitudes of {dtype} are not defined; use one of "
            f"{', '.join(str(d).removeprefix('torch.') for d in _BITS)}"
        )
    return _BITS[dtype]


def check_pair(residual: Tensor, gradient: Tensor) -> None:
    """Refuse two vectors that cannot swap their contents."""
    kinds = [(t.shape, t.dtype, t.device, t.is_contiguous()) for t in (residual, gradient)]
    if kinds[0] != kinds[1] or residual.dim() != 1 or not residual.is_contiguous():
        ours, theirs = (f"{[*t.shape]} x {t.dtype} on {t.device}" for t in (residual, gradient))
        raise ConfigurationError(
            f"accumulate_: residual is {ours}, gradient {theirs}; they swap their contents and must "
            "be alike, 1-D and contiguous: convert the gradient first, or pass a flat buffer"
        )
