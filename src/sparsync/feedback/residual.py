"""Error feedback: entries that were not delivered are kept and added to the next gradient.

``accumulate`` swaps: the residual's buffer receives ``residual + gradient`` and the gradient's memory
receives the old residual, in one pass.  So a step that is refused is undone exactly, and error
feedback costs one buffer of n elements, not two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, final

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.sparse import DenseVector, SparseVector, Vector, host_memory, runs

__all__ = ["Growth", "Residual"]

_OCTAVES, _MEMORY = 2.0, 8  # doublings that are too many, and the windows in which they happen

# elements [start, stop) of a gradient, in memory of their own
Runs = Callable[[int, int], Tensor]


class _Piece(NamedTuple):
    """One run of elements that was accumulated in the open step."""

    start: int
    before: Tensor  # the old residual, in the gradient's memory; not written where it was zero


class Residual:
    """The residual of one unit; while a step is open, its accumulated gradient.

    float32 where gradients have 16 bits: in bfloat16 a residual of 256 times a gradient no longer
    grows when that is added, and mass would vanish before the law begins.

    Memory: n elements, and while a step is open 8 bytes per entry that was collected and one more
    copy of 16-bit gradients.  A gradient that is there by runs alone (``accumulate_later``) takes none.
    With ``on_host`` all of it is in host memory, and runs are copied to ``device`` and back.
    """

    def __init__(
        self, size: int, dtype: torch.dtype, device: torch.device, *, on_host: bool = False
    ) -> None:
        wide = torch.promote_types(dtype, torch.float32)
        # [n] the residual, plus the gradients that the open step has accumulated so far
        if on_host:
            self.accumulated = host_memory(size, wide, device)
        else:
            self.accumulated = torch.zeros(size, dtype=wide, device=device)
        # The residual before the open step is zero: nothing to keep or to undo.  The buffer may then hold
        # anything, such as the total of a dense step, and is written over by the next gradients.
        self.empty = True
        self._pieces: list[_Piece] = []
        self._later: Runs | None = (
            None  # of the open step, if nothing is accumulated before its commit
        )
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
        # of 16 bits: a wide copy, which holds the undo, for which theirs has no room.  Of another device:
        # the residual is in host memory, where all of this unit is then exchanged
        gradient = gradient.to(here.device, here.dtype)
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

    def accumulate_later(self, gradient: Runs) -> DenseVector:
        """Return ``accumulated = residual + gradient``, of which runs are computed on every access.

        The residual itself changes in ``retain``, so a step is refused at no cost.  Until then the
        gradient must stay the same.
        """
        self._later = gradient
        return _Accumulated(self)

    def run(self, start: int, stop: int) -> Tensor:
        """Return a run of what ``accumulate_later`` has announced, in memory of its own."""
        assert self._later is not None
        made = self._later(start, stop)
        # on the device of gradients: the residual may be in host memory
        return made if self.empty else made.add_(self.accumulated[start:stop].to(made.device))

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
        if self._later is not None:
            assert isinstance(delivered, DenseVector)
            whole = isinstance(delivered, _Accumulated)
            for start, stop in () if whole else runs(len(self.accumulated), delivered.run(0, 0)):
                rest = self.run(start, stop)
                delivered.subtract_from_(rest, start)
                self.accumulated[start:stop] = rest
            self._close()
            self.empty = whole
            return
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

    def clear(self, where: slice) -> None:
        """Set a part of the residual to zero between steps."""
        if where == slice(0, len(self.accumulated)):
            self.empty = True
        elif not self.empty:
            self.accumulated[where] = 0

    def _close(self) -> None:
        self._pieces.clear()
        self._later = None
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


@final
class _Accumulated(DenseVector):
    """The accumulated gradient of an open step, computed run by run."""

    def __init__(self, residual: Residual) -> None:
        self._residual = residual

    @property
    def values(self) -> Tensor:
        """All elements, computed on every access."""
        return self.run(0, self.size)

    @property
    def size(self) -> int:
        """Number of elements n."""
        return len(self._residual.accumulated)

    nnz = size

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the elements."""
        return self._residual.accumulated.dtype

    def run(self, start: int, stop: int) -> Tensor:
        """Return elements ``[start, stop)``."""
        return self._residual.run(start, stop)


@final
class Growth:
    """Notices a residual that grows without bound, by the magnitude from which entries are selected.

    Error feedback delays an entry by about 1 / density steps.  If the learning rate or the momentum is
    too high for that delay, a correction arrives after its cause is gone: it overshoots, gradients grow,
    and the residual grows with them.  All entries that wait are smaller than the threshold, which
    selectors know without another pass.

    Thresholds are averaged, as logarithms, over windows of 1 / density steps.  In the first window the
    residual fills, so it tells nothing.  From then on the threshold of a training that goes well stays,
    or falls with the gradients, while that of one that diverges, or whose residual grows linearly, rises
    by two octaves over the least of the last eight windows.  Slower growth is not reported.

    Args:
        window: steps of a window: 1 / density.

    Cost: an addition per step; never a wait for a GPU.   State: of this process, not saved.

    Example:
        >>> growth = Growth(window=2)
        >>> [growth.observe(0.5 * step) for step in range(8)]  # a doubling in two steps
        [False, False, False, False, False, False, False, True]
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self._means: deque[float] = deque(maxlen=_MEMORY)
        self._sum, self._count, self._filling = 0.0, 0, True

    def observe(self, threshold: float) -> bool:
        """Take a step's threshold, as a logarithm to base 2; tell whether the residual grows too fast."""
        self._sum, self._count = self._sum + threshold, self._count + 1
        if self._count < self.window:
            return False
        mean, filling = self._sum / self._count, self._filling
        self._sum, self._count, self._filling = 0.0, 0, False
        if filling:
            return False
        self._means.append(mean)
        return mean - min(self._means) >= _OCTAVES
