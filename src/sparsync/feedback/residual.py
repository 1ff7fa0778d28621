"""Error feedback: undelivered entries are kept and added to the next gradient.

``accumulate`` swaps: in one pass, the residual's buffer receives ``residual + gradient`` and the
gradient's memory receives the old residual.  A refused step can thus be undone exactly, although error
feedback has only one buffer of n elements.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, final

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.sparse import DenseVector, SparseVector, Vector, host_memory, runs

__all__ = ["Growth", "Residual", "Runs"]

# a threshold that rises by 2 octaves (a factor of 4) within 8 windows indicates a growing residual
_OCTAVES, _MEMORY = 2.0, 8

# A function that returns elements [start, stop) of a gradient, in separate memory. It also gets the
# residual's elements there (None stands for zeros), because the gradient may depend on them.
Runs = Callable[[int, int, Tensor | None], Tensor]


class _Piece(NamedTuple):
    """One run of elements that was accumulated in the open step."""

    start: int
    # the gradient's memory, which now holds the old residual, unless the residual was zero
    before: Tensor


class Residual:
    """The residual of one unit; while a step is open, it holds the accumulated gradient.

    The residual is float32 if gradients have 16 bits.  A bfloat16 residual 256 times as large as a
    gradient would not change when the gradient is added, so mass would vanish.

    Memory: n elements.  While a step is open, also 8 bytes per collected entry, and a float32 copy of
    16-bit gradients.  A gradient that exists only in runs (``accumulate_later``) takes no memory.  With
    ``on_host``, the elements live in host memory, and runs are copied to ``device`` and back.
    """

    def __init__(
        self, size: int, dtype: torch.dtype, device: torch.device, *, on_host: bool = False
    ) -> None:
        wide, self._device = torch.promote_types(dtype, torch.float32), device
        # `[n]`, the residual plus the gradients that the open step has accumulated so far
        if on_host:
            self.accumulated = host_memory(size, wide, device)
        else:
            self.accumulated = torch.zeros(size, dtype=wide, device=device)
        # True if the residual was zero before the open step, so that there is nothing to keep or undo.
        # The buffer may then hold anything, e.g. the total of a dense step; the next gradients overwrite
        # it.
        self.empty = True
        self._pieces: list[_Piece] = []
        # the gradients of the open step, if they are accumulated only at its commit
        self._later: Runs | None = None
        # starts, indices and values of the collected entries; None if they were not requested, or if
        # there are too many
        self._found: list[tuple[int, Tensor, Tensor]] | None = []
        self._key, self._count = 1, 0  # the key that collected entries reach, and their number

    @property
    def value(self) -> Tensor | None:
        """The undelivered mass, `[n]`; None stands for zeros.  Valid only between steps."""
        return None if self.empty else self.accumulated

    def accumulate(
        self, start: int, gradient: Tensor, key: int | None = None, limit: int = 0
    ) -> None:
        """``accumulated = residual + gradient`` on ``[start, start + len(gradient))``.

        The memory of ``gradient``, 1-D and contiguous, belongs to the residual until ``retain`` or
        ``restore``.  Entries that reach the magnitude ``key`` are collected in the same pass, unless all
        pieces of the step together have more than ``limit`` of them.  The key must be the same for all
        pieces.
        """
        # Entries are collected in this pass, because it reads every element anyway; a selector would need
        # another pass over n elements.
        here = self.accumulated[start : start + gradient.numel()]
        # A 16-bit gradient is widened, because its memory is too small for the old residual.  If the
        # residual lives in host memory, the gradient is copied there, and the unit is exchanged there.
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
        # the tensors are copied, because kernels return views of buffers with room for ``limit``
        # entries, and the views would keep these buffers alive
        self._key, self._count = key, self._count + found[1].numel()
        narrow = torch.int32 if len(self.accumulated) < 1 << 31 else torch.int64
        indices = found[0].to(narrow, copy=True).add_(start)
        self._found.append((start, indices, found[1].clone()))

    def accumulate_later(self, gradient: Runs) -> DenseVector:
        """Return ``accumulated = residual + gradient`` as a vector computed in runs on every access.

        The residual itself changes only in ``retain``, so refusing a step costs nothing.  Until
        then the gradient must not change.
        """
        self._later = gradient
        return _Accumulated(self)

    def run(self, start: int, stop: int) -> Tensor:
        """Return a run of the vector that ``accumulate_later`` returned, in separate memory."""
        made, *rest = self.terms(start, stop)
        for residual in rest:
            made.add_(residual)
        return made

    def terms(self, start: int, stop: int) -> tuple[Tensor, ...]:
        """Return the terms that ``run`` adds: the gradient, in separate memory, and any residual."""
        made, residual = self._read(start, stop)
        if residual is None:
            return (made,)
        # the two terms may be returned separately only if their dtypes are equal
        return (made, residual) if made.dtype == residual.dtype else (made.add_(residual),)

    def _read(self, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """Return a run of the gradient, in separate memory, and the same run of the residual or None."""
        assert self._later is not None
        # the residual may be in host memory, so it is copied only once, and the gradient uses this copy
        residual = None if self.empty else self.accumulated[start:stop].to(self._device)
        return self._later(start, stop, residual), residual

    def collected(self, key: int = 1, limit: int | None = None) -> SparseVector | None:
        """Return the collected entries that reach ``key``, with 32-bit indices if these suffice.

        Return None if more than ``limit`` entries reach the key, or if there were too many to collect.
        """
        if not self._found:
            return None
        for tensor in (tensor for _, *pair in self._found for tensor in pair if tensor.is_cuda):
            # The memory was allocated on the stream of the backward pass, but is read on this stream.
            # Without this call, PyTorch's caching allocator could reuse the memory while it is
            # being read.
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
        """Free the memory of the collected entries, once the unit's entries are selected."""
        self._found = None

    def retain(self, delivered: Vector) -> None:
        """Commit a step: ``residual = accumulated - delivered``."""
        if self._later is not None:
            assert isinstance(delivered, DenseVector)
            whole = isinstance(delivered, _Accumulated)
            for start, stop in () if whole else runs(len(self.accumulated), delivered.run(0, 0)):
                here, (made, rest) = self.accumulated[start:stop], self._read(start, stop)
                if rest is None:
                    delivered.subtract_from_(made, start)
                    here.copy_(made)
                    continue
                # On the gradients' device, ``rest`` is the residual's own memory, and takes the result in
                # place, which saves a pass over all elements.
                delivered.subtract_from_(rest, start, plus=made)
                if rest.device != here.device:
                    here.copy_(rest)
            self._close()
            self.empty = whole
            return
        self._close()
        # If both names refer to the same tensor, a dense allreduce has written the total into this very
        # buffer, so nothing is left to subtract from.  The type is tested first, because other vectors
        # decode messages when ``values`` is read.
        if type(delivered) is DenseVector and delivered.values is self.accumulated:
            self.empty = True  # everything was delivered; the buffer will be overwritten
            return
        delivered.subtract_from_(self.accumulated)
        self.empty = False

    def keep(self) -> None:
        """Close the open step with nothing delivered: ``residual = accumulated``.

        ``Reducer.regroup`` calls this if the other ranks are at a different step.
        """
        # an empty residual is no longer empty once gradients have been added
        self.empty = self.empty and not self._pieces
        self._close()

    def restore(self) -> None:
        """Undo the open step, bit for bit, and zero the gradients' memory."""
        # Old values are copied back, because subtracting the gradient would round.  Subtraction would
        # even give NaN if the gradient contains NaN or Inf, the usual reason for refusing a step.
        for piece in self._pieces:
            if not self.empty:
                self.accumulated[piece.start : piece.start + piece.before.numel()] = piece.before
            piece.before.zero_()
        self._close()

    def scale_(self, factor: float) -> None:
        """Multiply the residual by ``factor``, the change of the gradients' scale, between steps."""
        if not self.empty:
            self.accumulated.mul_(factor)

    def load(self, value: Tensor | None) -> None:
        """Set the residual between steps; None means zeros."""
        self.empty = value is None
        if value is not None:
            self.accumulated.copy_(value)

    def clear(self, where: slice) -> None:
        """Set a part of the residual to zero, between steps."""
        if where == slice(0, len(self.accumulated)):
            self.empty = True
        elif not self.empty:
            self.accumulated[where] = 0

    def _close(self) -> None:
        self._pieces.clear()
        self._later = None
        self._found, self._count = [], 0

    def _join(self) -> None:
        """Concatenate the collected entries of all pieces; free each piece's memory immediately."""
        # pieces are in the order of the backward pass, so they are sorted: selectors need ascending
        # indices
        waiting, at = sorted(self._found or [], key=lambda part: -part[0]), 0
        indices, values = (column.new_empty(self._count) for column in waiting[0][1:])
        self._found = [(0, indices, values)]
        while waiting:
            _, here, entries = waiting.pop()
            indices[at : at + len(here)], values[at : at + len(here)] = here, entries
            at += len(here)


@final
class _Accumulated(DenseVector):
    """The accumulated gradient of an open step, computed in runs."""

    def __init__(self, residual: Residual) -> None:
        self._residual = residual

    @property
    def values(self) -> Tensor:
        """All elements, computed on every access."""
        return self.run(0, self.size)

    @property
    def size(self) -> int:
        """The number of elements n."""
        return len(self._residual.accumulated)

    nnz = size

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the elements."""
        return self._residual.accumulated.dtype

    def run(self, start: int, stop: int) -> Tensor:
        """Return elements ``[start, stop)``."""
        return self._residual.run(start, stop)

    def terms(self, start: int, stop: int) -> tuple[Tensor, ...]:
        """Return the gradient's elements, and those of the residual unless it is zero."""
        return self._residual.terms(start, stop)


@final
class Growth:
    """Detects a residual that grows without bound, by the threshold at which entries are selected.

    Error feedback delays an entry by about 1 / density steps.  If the learning rate or the momentum is
    too high for this delay, a correction arrives when its cause no longer exists.  It overshoots,
    gradients grow, and the residual grows with them.  All entries in the residual are below the
    threshold, which selectors know without another pass.

    Thresholds are averaged, as logarithms, over windows of 1 / density steps.  The first window, in
    which the residual fills up, is ignored.  Afterwards, the threshold of a healthy run stays constant or
    falls with the gradients.  If training diverges, or the residual grows linearly, the threshold rises
    by two octaves over the minimum of the last eight windows.  Slower growth is not reported.

    Args:
        window: length of a window in steps: 1 / density.

    Cost: an addition per step; never a wait for a GPU.   State: local to this process, not saved.

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
        """Add a step's threshold, as a binary logarithm; return whether the residual grows too fast."""
        self._sum, self._count = self._sum + threshold, self._count + 1
        if self._count < self.window:
            return False
        mean, filling = self._sum / self._count, self._filling
        self._sum, self._count, self._filling = 0.0, 0, False
        if filling:
            return False
        self._means.append(mean)
        return mean - min(self._means) >= _OCTAVES
