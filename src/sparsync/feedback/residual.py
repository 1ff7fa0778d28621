"""Error feedback: what was not delivered is kept and added to the next gradient.

``accumulate`` swaps: the residual's buffer receives ``residual + gradient`` and the gradient's memory
receives the old residual, in one pass.  So a step that is refused is undone exactly, and error
feedback costs one buffer of n elements, not two.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.sparse import DenseVector, SparseVector, Vector

__all__ = ["Residual"]


class _Piece(NamedTuple):
    """One run of elements that was accumulated in the open step."""

    start: int
    before: Tensor  # the old residual, in the gradient's memory; not written where it was zero
    collected: SparseVector | None  # what was asked for; None if nothing, or too much was there


class Residual:
    """The residual of one unit; while a step is open, its accumulated gradient.

    float32 where gradients have 16 bits: in bfloat16 a residual of 256 times a gradient no longer
    grows when that is added, and mass would vanish before the law begins.

    Memory: n elements; one more copy of 16-bit gradients while a step is open.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        wide = torch.promote_types(dtype, torch.float32)
        # [n] residual + gradient of what the open step has accumulated so far
        self.accumulated = torch.zeros(size, dtype=wide, device=device)
        self.empty = True  # the residual before the open step is zero: nothing to keep or to undo
        self._pieces: list[_Piece] = []

    @property
    def value(self) -> Tensor | None:
        """`[n]` what has not been delivered yet; None stands for zeros.  Between steps only."""
        return None if self.empty else self.accumulated

    def accumulate(
        self, start: int, gradient: Tensor, key: int | None = None, limit: int = 0
    ) -> None:
        """``accumulated = residual + gradient`` on ``[start, start + len(gradient))``.

        The memory of ``gradient``, 1-D and contiguous, is the residual's until ``retain`` or ``restore``.
        What reaches the magnitude ``key`` is collected in the same pass, unless more than ``limit`` do.
        """
        here = self.accumulated[start : start + gradient.numel()]
        gradient = gradient.to(here.dtype)
        if self.empty:
            here.copy_(gradient)
            found = None if key is None else kernels.find(here, key, limit)
        else:
            found = kernels.accumulate_(here, gradient, key, limit)
        collected = None
        if found is not None:
            collected = SparseVector(*found, here.numel()).embed(start, len(self.accumulated))
        self._pieces.append(_Piece(start, gradient, collected))

    def collected(self, key: int = 1, limit: int | None = None) -> SparseVector | None:
        """Return the collected entries that reach ``key``; None if too many do, in a piece or in all."""
        pieces = sorted(self._pieces, key=lambda piece: piece.start)
        parts = [piece.collected for piece in pieces if piece.collected is not None]
        if len(parts) < len(pieces) or not pieces:
            return None
        whole = parts[0] if len(parts) == 1 else SparseVector.join(parts)
        found = kernels.find(whole.values, key, limit)
        if found is None:
            return None
        return whole if found[0].numel() == whole.nnz else whole.keep(found[0])

    def retain(self, delivered: Vector) -> None:
        """``residual = accumulated - delivered``: the commit of a step."""
        self._pieces.clear()
        if type(delivered) is DenseVector and delivered.values is self.accumulated:
            self.empty = True  # everything was delivered; the buffer is written over
            return
        delivered.subtract_from_(self.accumulated)
        self.empty = False

    def restore(self) -> None:
        """Undo the open step, bit for bit; the gradients of it are zeroed."""
        for piece in self._pieces:
            if not self.empty:
                self.accumulated[piece.start : piece.start + piece.before.numel()] = piece.before
            piece.before.zero_()
        self._pieces.clear()

    def scale_(self, factor: float) -> None:
        """Multiply the residual between steps, when the gradients' units change."""
        if not self.empty:
            self.accumulated.mul_(factor)

    def load(self, value: Tensor | None) -> None:
        """Set the residual between steps; None for zeros."""
        self.empty = value is None
        if value is not None:
            self.accumulated.copy_(value)
