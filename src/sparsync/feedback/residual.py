"""Error feedback: entries that were not delivered are kept and added to the next gradient.

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


class Residual:
    """The residual of one unit; while a step is open, its accumulated gradient.

    float32 where gradients have 16 bits: in bfloat16 a residual of 256 times a gradient no longer
    grows when that is added, and mass would vanish before the law begins.

    Memory: n elements, and while a step is open 8 bytes per entry that was collected and one more
    copy of 16-bit gradients.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        wide = torch.promote_types(dtype, torch.float32)
        # [n] the residual, plus the gradients that the open step has accumulated so far
        self.accumulated = torch.zeros(size, dtype=wide, device=device)
        # The residual before the open step is zero: nothing to keep or to undo.  The buffer may then hold
        # anything, such as the total of a dense step, and is written over by the next gradients.
        self.empty = True
        self._pieces: list[_Piece] = []
        # starts, indices and values of the collected entries; None: not asked for, or there were too many
        self._found: list[tuple[int, Tensor, Tensor]] | None = []
        self._key, self._count = 1, 0  # the key that collected entries reach, and their number

    @property
    def value(self) -> Tensor | None:
        """`[n]` the mass not delivered yet; None stands for zeros.  Between steps only."""
        return None if self.empty else self.accumulated

    def accumulate(
        self, start: int, gradient: Tensor, key: int | None = None, limit: int = 0
    ) -> None:
        """``accumulated = residual + gradient`` on ``[start, start + len(gradient))``.

        The memory of ``gradient``, 1-D and contiguous, is the residual's until ``retain`` or ``restore``.
        Entries that reach the magnitude ``key``, the same for all pieces of a step, are collected in the
        same pass, unless there are more than ``limit`` in all pieces together.
        """
        # Collecting costs next to nothing in a pass that reads every element anyway; a selector would
        # need another pass over n elements.
        here = self.accumulated[start : start + gradient.numel()]
        # of 16 bits: a wide copy, which holds the undo, for which theirs has no room
        gradient = gradient.to(here.dtype)
        key, limit = None if self._found is None else key, limit - self._count
        if self.empty:
            here.copy_(gradient)
            found = None if key is None else kernels.find(here, key, limit)
        else:
            found = kernels.accumulate_(here, gradient, key, limit)
        self._pieces.append(_Piece(start, gradient))
        if found is None or key is None or self._found is None:
            self._found = None
            return
        # copies: kernels return the beginnings of buffers with room for ``limit``, which views would keep
        self._key, self._count = key, self._count + found[1].numel()
        narrow = torch.int32 if len(self.accumulated) < 1 << 31 else torch.int64
        indices = found[0].to(narrow, copy=True).add_(start)
        self._found.append((start, indices, found[1].clone()))

    def collected(self, key: int = 1, limit: int | None = None) -> SparseVector | None:
        """Return the collected entries that reach ``key``; their indices have 32 bits if those suffice.

        None if there are more than ``limit``, or if there were too many to collect.
        """
        if not self._found:
            return None
        for tensor in (tensor for _, *pair in self._found for tensor in pair if tensor.is_cuda):
            # Allocated on the stream of the backward pass, read on this one: without the note PyTorch's
            # caching allocator gives the memory to that stream again while it is being read.
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        if len(self._found) > 1:
            self._join()
        _, indices, values = self._found[0]
        whole = SparseVector(indices, values, len(self.accumulated))
        if key <= self._key:
            return None if limit is not None and whole.nnz > limit else whole
        found = kernels.find(values, key, limit)
        return None if found is None else whole.keep(found[0])

    def forget_collected(self) -> None:
        """Free the memory of the collected entries, once the unit is selected."""
        self._found = None

    def retain(self, delivered: Vector) -> None:
        """``residual = accumulated - delivered``: the commit of a step."""
        self._close()
        # By identity: a dense allreduce in place has put the total into this very buffer, so there is
        # nothing left to subtract from.  By type: ``values`` of a vector in messages decodes them all.
        if type(delivered) is DenseVector and delivered.values is self.accumulated:
            self.empty = True  # everything was delivered; the buffer is written over
            return
        delivered.subtract_from_(self.accumulated)
        self.empty = False

    def keep(self) -> None:
        """Close the open step, of which nothing was delivered: ``residual = accumulated``.

        For ``Reducer.regroup``, where the other ranks are at another step.
        """
        # pieces were added to the buffer, so it is not empty any more
        self.empty = self.empty and not self._pieces
        self._close()

    def restore(self) -> None:
        """Undo the open step, bit for bit; memory lent by gradients becomes zero."""
        # copied back, not subtracted: (residual + gradient) - gradient is rounded, and NaN where the
        # gradient is NaN or Inf, the very reason for refusing a step
        for piece in self._pieces:
            if not self.empty:
                self.accumulated[piece.start : piece.start + piece.before.numel()] = piece.before
            piece.before.zero_()
        self._close()

    def scale_(self, factor: float) -> None:
        """Multiply the residual between steps, when the gradients' units change."""
        if not self.empty:
            self.accumulated.mul_(factor)

    def load(self, value: Tensor | None) -> None:
        """Set the residual between steps; None for zeros."""
        self.empty = value is None
        if value is not None:
            self.accumulated.copy_(value)

    def _close(self) -> None:
        self._pieces.clear()
        self._found, self._count = [], 0

    def _join(self) -> None:
        """Join the collected entries of all pieces, each of which is freed on the way."""
        # pieces come in the order of the backward pass, selectors want ascending indices
        waiting, at = sorted(self._found or [], key=lambda part: -part[0]), 0
        indices, values = (column.new_empty(self._count) for column in waiting[0][1:])
        self._found = [(0, indices, values)]
        while waiting:
            _, here, entries = waiting.pop()
            indices[at : at + len(here)], values[at : at + len(here)] = here, entries
            at += len(here)
