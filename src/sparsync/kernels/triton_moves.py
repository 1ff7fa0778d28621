# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Passes over weights and moments on a CUDA device.

The results are bit-equal to ``moves.py`` and ``gradient_noise.py``.

See ``triton.py`` for how kernels are written.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from sparsync.kernels.native import Moments
from sparsync.kernels.triton import _cover, _positions, jit, tl
from sparsync.kernels.triton_levels import _quotient

__all__ = ["lengthen_", "lengthen_rows_", "move_"]

# how the kernel below reads and rounds each dtype
_KINDS: Final = MappingProxyType({torch.float32: 0, torch.bfloat16: 1, torch.float16: 2})


def move_(
    made: Tensor,
    shared: Tensor,
    withheld: Tensor | None,
    weights: Tensor | None,
    dtype: torch.dtype | None,
) -> None:
    """``made = rounded(shared - withheld) - weights``.  Cost: one pass over the four vectors."""
    n, read = made.numel(), shared if weights is None else weights
    _cover(
        _move,
        n,
        made,
        shared,
        shared if withheld is None else withheld,
        # Triton's interpreter has no bf16, so pass its bits, which are the upper half of a float32
        read.view(torch.int16) if read.dtype == torch.bfloat16 else read,
        n,
        WITHHELD=withheld is not None,
        WEIGHTS=weights is not None,
        STORED=_KINDS[read.dtype],
        ROUNDED=_KINDS[dtype or torch.float32],
    )


def lengthen_(first: Tensor, second: Tensor, weights: Tensor, moments: Moments) -> None:
    """Correct Adam's steps.  Cost: one pass that reads three vectors and writes one."""
    n = weights.numel()
    _cover(_lengthen, n, weights, first, second, second, n, 1, *map(float, moments), ROWS=False)


def lengthen_rows_(
    first: Tensor, second: Tensor, weights: Tensor, factors: Tensor, moments: Moments
) -> None:
    """Do the same as ``lengthen_``, but with a desired factor per row instead of ``moments[0]``."""
    n, columns = weights.numel(), weights.numel() // max(len(weights), 1)
    given = weights, first, second, factors, n, columns
    _cover(_lengthen, n, *given, *map(float, moments), ROWS=True)


# ==== on the device ===================================================================================


@jit
def _rounded(values, KIND: tl.constexpr):
    """Round float32 to float32, bf16 or fp16 like a cast in torch: to nearest, ties to even."""
    if KIND == 1:
        bits = values.to(tl.int32, bitcast=True)
        upper = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        nan = (bits & 0x7FFFFFFF) > 0x7F800000
        values = tl.where(nan, bits, upper).to(tl.float32, bitcast=True)
    elif KIND == 2:
        values = values.to(tl.float16).to(tl.float32)
    return values


@jit
def _move(
    made_ptr,
    shared_ptr,
    withheld_ptr,
    weights_ptr,
    n,
    BLOCK: tl.constexpr,
    WITHHELD: tl.constexpr,
    WEIGHTS: tl.constexpr,
    STORED: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    """``made = rounded(shared - withheld) - weights``; bf16 weights are read as int16."""
    at = _positions(BLOCK)
    inside = at < n
    values = tl.load(shared_ptr + at, mask=inside, other=0.0)
    if WITHHELD:
        values -= tl.load(withheld_ptr + at, mask=inside, other=0.0)
    values = _rounded(values, ROUNDED)
    if WEIGHTS:
        stored = tl.load(weights_ptr + at, mask=inside, other=0)
        if STORED == 1:
            values -= (stored.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        else:
            values -= stored.to(tl.float32)
    tl.store(made_ptr + at, values, mask=inside)


@jit
def _root(x):
    """Return the square root of float32 with a single rounding."""
    return tl.sqrt(x.to(tl.float64)).to(tl.float32)


@jit
def _lengthen(
    weights_ptr,
    first_ptr,
    second_ptr,
    factors_ptr,
    n,
    columns,
    lengthened,
    own,
    eps,
    rate,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """``weights += rate * first * (1 / (sqrt(lengthened * v) + eps) - 1 / (sqrt(own * v) + eps))``.

    With ROWS, ``lengthened`` is read from ``factors``, one per row.
    """
    at = _positions(BLOCK)
    inside = at < n
    if ROWS:
        lengthened = tl.load(factors_ptr + at // columns, mask=inside, other=1.0)
    square = tl.load(second_ptr + at, mask=inside, other=1.0)
    one = tl.full([BLOCK], 1.0, tl.float32)
    missing = _quotient(one, _root(square * lengthened) + eps)
    missing -= _quotient(one, _root(square * own) + eps)
    missing *= tl.load(first_ptr + at, mask=inside, other=0.0) * rate
    weights = tl.load(weights_ptr + at, mask=inside, other=0.0)
    tl.store(weights_ptr + at, weights + missing, mask=inside)
