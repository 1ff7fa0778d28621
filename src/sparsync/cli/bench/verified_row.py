"""One row of a bench: its gradients, its watched reducer, and the verification of every step."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from sparsync.algorithm import Algorithm
from sparsync.cli.bench.inputs import Draw, gradient
from sparsync.cli.named_algorithms import algorithm_of
from sparsync.collectives.collective import Collective, Reduced
from sparsync.feedback.reducer import Reducer
from sparsync.sparse import DenseVector, SparseVector, Vector
from sparsync.transports.communicator import Communicator
from sparsync.transports.sim import Links
from sparsync.units import Slot, Unit

__all__ = ["Case", "Evidence", "Verdict", "WatchedReducer", "compare", "digest", "judge"]

_ROUNDING = 2.0**-24  # half a unit in the last place of float32
# replaces a tolerance of 0; smaller than every positive float32, so that an element to which nothing
# was added must be exactly 0
_TINY = 2.0**-150


@dataclass(frozen=True)
class Case:
    """One row of a bench."""

    collective: str | Algorithm  # a preset's name, possibly with options, or an algorithm
    ranks: int
    size: int
    density: float
    input: str = "uniform"  # see ``sparsync.cli.bench.inputs``
    seed: int = 0
    links: Links = field(default_factory=Links)  # links of the simulated network

    @property
    def unit(self) -> Unit:
        """The whole vector as one unit, as in the papers."""
        return Unit((Slot("gradient", 0, self.size),), torch.float32, torch.device("cpu"))

    @property
    def k(self) -> int:
        """Number of requested entries."""
        return self.unit.entries(self.density)

    @property
    def name(self) -> str:
        """The algorithm's name, with its options."""
        return self.collective if isinstance(self.collective, str) else self.collective.name

    def draw(self, rank: int, step: int) -> Tensor:
        """Return a rank's gradient for a step; gradients change from step to step, as in training."""
        return gradient(self.input, Draw(self.size, self.ranks, rank, step, self.seed))


@final
class _Watched(Collective):
    """Forwards calls to a collective, and stores the vectors and times of the last call."""

    def __init__(self, inner: Collective) -> None:
        self.inner = inner
        self.watch(keep=True)
        self.started = self.ended = self.copying = 0.0  # copying: the seconds spent on copies
        self.processor = 0.0  # processor seconds of the exchange, over all threads of this process

    def watch(self, *, keep: bool, fence: Callable[[], float] | None = None) -> None:
        """Prepare for the next call.

        Args:
            keep: whether to store the vectors; they are copied, because the reducer may overwrite its
                buffers.
            fence: called before the exchange, which starts when ``fence`` returns; with None, the
                exchange starts immediately.
        """
        self.keep, self.fence = keep, fence

    @property
    def state(self) -> Any:
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self.inner.state = state

    @property
    def whole(self) -> bool:
        return self.inner.whole

    async def reduce(self, comm: Communicator, selected: Vector, k: int, step: int) -> Reduced:
        if self.fence is not None:
            with comm.stage("fence"):  # waiting for other ranks does not count as communication
                self.started = self.fence()
        before = time.process_time()
        reduced = await self.inner.reduce(comm, selected, k, step)
        self.ended, self.processor = time.perf_counter(), time.process_time() - before
        self.selected, self.reduced = selected, reduced
        if self.keep:
            self.selected = _copy(selected)
            lost = reduced.lost and _copy(reduced.lost)
            self.reduced = Reduced(_copy(reduced.total), _copy(reduced.delivered), lost)
        self.copying = time.perf_counter() - self.ended
        return reduced


def _copy(vector: Vector) -> Vector:
    if isinstance(vector, SparseVector):
        return SparseVector(vector.indices.clone(), vector.values.clone(), vector.size)
    return DenseVector(vector.values.clone())


@final
class WatchedReducer:
    """A rank's real reducer; its collective ``seen`` stores the last step's vectors and times."""

    def __init__(self, case: Case, comm: Communicator) -> None:
        algorithm = algorithm_of(case.collective)
        self.case, self.seen = case, _Watched(algorithm.make_collective())
        watched = replace(algorithm, make_collective=lambda: self.seen)
        self.reducer = Reducer(comm, [case.unit], watched, case.density)
        self._accumulated: Tensor | None = None

    def feed(self, *, keep: bool, fence: Callable[[], float] | None = None) -> Tensor:
        """Return the gradient of the next step; with ``keep``, store the evidence of this step."""
        self.seen.watch(keep=keep, fence=fence)
        mine = self.case.draw(self.reducer.comm.rank, self.reducer.step)
        self._accumulated = mine + self._residual() if keep else None
        return mine

    def evidence(self) -> Evidence:
        """Return the evidence of the last step, which must have been kept."""
        assert self._accumulated is not None, "this step was not kept"
        reduced = self.seen.reduced
        lost = reduced.lost or SparseVector.empty(self.case.size, self._accumulated)
        return Evidence(
            self._accumulated,
            self._residual(),
            self.seen.selected,
            reduced.delivered,
            reduced.total,
            lost,
        )

    def _residual(self) -> Tensor:
        kept = self.reducer.residuals[0].value
        return torch.zeros(self.case.size) if kept is None else kept


# ---- verification ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evidence:
    """The vectors of one rank in one step; see the life of a gradient in ``sparsync``."""

    # `[n]`, the last step's residual plus the gradient, computed independently of the reducer
    accumulated: Tensor
    residual: Tensor  # `[n]`, after the commit
    selected: Vector  # the vector that entered the collective
    delivered: Vector  # the part that this rank delivered, according to the collective
    total: Vector  # the sum that the collective returned
    lost: Vector  # part of ``delivered`` that was rounded away and deliberately not kept


class Verdict(NamedTuple):
    """The outcome of one step.

    Attributes:
        wrong: entries of the total that differ between ranks or from the sum of delivered entries.
        law_error: the largest |sum(accumulated) - total - sum(residual) - sum(lost)| in units of its
            tolerance ``(P + 2) 2^-24 sum (max(|accumulated|, |delivered|) + |lost|)``.  Above 1, the law
            of conservation is broken.
        entries: entries of the total / min(k, entries of the sum of selections); 1 if dense.
    """

    wrong: int
    law_error: float
    entries: float


def judge(k: int, everyone: Iterable[Evidence]) -> Verdict:
    """Judge a step by the evidence of all ranks, in O(n) memory.

    Totals must be equal on all ranks, and equal to the sum of all delivered vectors.  That sum is
    compared within the law's tolerance, because collectives add in different orders and round at
    different places.

    Example:
        >>> one, zeros = DenseVector(torch.tensor([1.0, 0.0])), torch.zeros(2)
        >>> judge(2, [Evidence(one.values, zeros, one, one, one, DenseVector(zeros))])
        Verdict(wrong=0, law_error=0.0, entries=1.0)
    """
    total: Vector | None = None
    ranks = 0
    for mine in everyone:
        ranks += 1
        given, lost = mine.delivered.to_dense(), mine.lost.to_dense().double()
        if total is None:
            total, dense = mine.total, mine.total.to_dense()
            accumulated, magnitude, residual, delivered = torch.zeros(4, len(dense)).double()
            selected, differs = torch.zeros_like(dense), torch.zeros_like(dense, dtype=torch.bool)
        accumulated += mine.accumulated
        # a codec may deliver a value larger than the entry, e.g. a mean; the rounding error is then
        # relative to the delivered value
        magnitude += mine.accumulated.abs().maximum(given.abs()) + lost.abs()
        residual += mine.residual + lost
        delivered += given - lost
        selected += mine.selected.to_dense()
        differs |= mine.total.to_dense() != dense
    assert total is not None, "no rank gave evidence"
    tolerance = (ranks + 2) * _ROUNDING * magnitude
    wrong = differs | ~((dense.double() - delivered).abs() <= tolerance)
    errors = (accumulated - dense.double() - residual).abs() / tolerance.clamp(min=_TINY)
    worst = torch.finfo(errors.dtype).max  # replaces NaN, which JSON cannot represent
    errors = errors.nan_to_num(nan=worst, posinf=worst)
    law_error = float(errors.max()) if errors.numel() else 0.0
    return Verdict(int(wrong.sum()), law_error, _entries(k, int(selected.count_nonzero()), total))


def compare(k: int, selected: int, total: Vector, digests: Set[int]) -> Verdict:
    """Judge a step by one rank's total and the digests of all totals; skip the law of conservation.

    ``selected`` is the largest number of entries that any rank selected.  The sum has at least as many
    entries, unless some cancel to 0.
    """
    return Verdict(len(digests) - 1, 0.0, _entries(k, selected, total))


def _entries(k: int, selected: int, total: Vector) -> float:
    wanted = min(k, selected)
    return total.nnz / wanted if isinstance(total, SparseVector) and wanted else 1.0


def digest(total: Vector) -> int:
    """Return a 63-bit hash of a total; bit-identical totals have equal hashes.

    Example:
        >>> one, other = (DenseVector(torch.tensor([x, 0.0])) for x in (1.0, 2.0))
        >>> digest(one) == digest(one), digest(one) == digest(other)
        (True, False)
    """
    state = hashlib.sha256()
    if isinstance(total, SparseVector):
        state.update(total.indices.contiguous().numpy().data)
    state.update(total.values.contiguous().numpy().data)
    return int.from_bytes(state.digest()[:8], "little") >> 1
