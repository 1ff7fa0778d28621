"""Compute how much the weights have changed since an exchange: one pass on a GPU, otherwise 2 or 3."""

from __future__ import annotations

import importlib
from typing import Final

import torch
from torch import Tensor

from sparsync.kernels import backend_of, native, reference

__all__ = ["move_", "move_plainly_"]

_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)


def move_(
    made: Tensor,
    shared: Tensor,
    withheld: Tensor | None,
    weights: Tensor | None,
    *,
    shown: float = 1.0,
    dtype: torch.dtype | None = None,
) -> None:
    """``made = rounded(shared - shown * withheld) - weights``.

    Args:
        made: the output, 1-D, with the dtype of ``shared``; shares no memory with the other tensors.
        shared: the shared weights, with the length of ``made``, like all other tensors.
        withheld: the part that is subtracted from ``shared``; None means zeros.
        weights: this rank's weights, of any floating-point dtype; None means zeros.
        shown: the factor by which ``withheld`` is multiplied.
        dtype: the dtype to which ``shared - shown * withheld`` is rounded; None for no rounding.
    """
    vectors = [made, shared, *([] if withheld is None else [withheld])]
    every = vectors if weights is None else [*vectors, weights]
    # with a factor other than 1, the product would have to be rounded as torch rounds it, which differs
    # between devices
    simple = shown == 1.0 and {dtype or torch.float32, every[-1].dtype} <= set(_FLOATS)
    backend = backend_of(*vectors)
    if simple and backend not in (reference, native) and all(v.is_contiguous() for v in every):
        fused = importlib.import_module("sparsync.kernels.triton_moves")
        fused.move_(made, shared, withheld, weights, dtype)
    else:
        move_plainly_(made, shared, withheld, weights, shown=shown, dtype=dtype)


@torch.no_grad()
def move_plainly_(
    made: Tensor,
    shared: Tensor,
    withheld: Tensor | None,
    weights: Tensor | None,
    *,
    shown: float = 1.0,
    dtype: torch.dtype | None = None,
) -> None:
    """Compute the same as ``move_`` in plain PyTorch; this is the specification."""
    if withheld is None:
        made.copy_(shared)
    else:
        torch.sub(shared, withheld, alpha=shown, out=made)
    if dtype not in (None, made.dtype):
        made.copy_(made.to(dtype))
    if weights is not None:
        made.sub_(weights)
