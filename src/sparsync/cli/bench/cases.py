"""One row of a bench: its gradients, its watched reducer, and the verification of every step.

Verified are the sum, its equality on all ranks, and the law of conservation.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from sparsync.cli.bench.inputs import Draw, gradient
from sparsync.collectives.base import Collective, Reduced
from sparsync.feedback.reducer import Reducer
from sparsync.presets import Algorithm, resolve
from sparsync.sparse import DenseVector, SparseVector, Vector
from sparsync.transports.communicator import Communicator
from sparsync.transports.sim import Links
from sparsync.units import Slot, Unit

__all__ = ["VECTORS", "Case", "Evidence", "Verdict", "Verification", "WatchedReducer", "digest"]

VECTORS = 6  # that make up a rank's evidence

_ROUNDING = 2.0**-24  # half a unit in the last place of float32
_TINY = 2.0**-150  # below every float32: where nothing was accumulated, nothing may differ


@dataclass(frozen=True)
class Case:
    """One row of a bench.

    Attributes:
        collective: a preset's name, or an algorithm.
        ranks: number of ranks P.
        size: number of elements n.
        density: k / n asked for.
        input: name of a kind of gradient (``sparsync.cli.bench.inputs``).
        seed: of the gradients.
        links: the simulated network.
    """

    collective: str | Algorithm
    ranks: int
    size: int
    density: float
    input: str = "uniform"
    seed: int = 0
    links: Links = field(default_factory=Links)

    @property
    def unit(self) -> Unit:
        """The whole vector as one unit: the papers' semantics."""
        return Unit((Slot("gradient", 0, self.size),), torch.float32, torch.device("cpu"))

    @property
    def k(self) -> int:
        """Number of entries asked for."""
        return self.unit.entries(self.density)

    @property
    def name(self) -> str:
        """The algorithm's name."""
        return resolve(self.collective).name

    @property
    def title(self) -> str:
        """The row in words, for its progress."""
        return f"{self.name}, n = {self.size:,}, density {self.density:g}"

    def draw(self, rank: int, step: int) -> Tensor:
        """Return a rank's gradient, fresh on every step: error feedback sees no repetition."""
        return gradient(self.input, Draw(self.size, self.ranks, rank, step, self.seed))


@final
class WatchedReducer:
    """A rank's reducer, and a look at its last step.

    Attributes:
        reducer: a real one; only its collective is wrapped.
        fence: called when the entries are selected and before they are exchanged; returns the time
            from which the exchange counts.  None: the exchange follows at once and is not timed.
        keep: copy the vectors that pass by, as evidence; ``copying`` has the time of the copies.
        copying: seconds that the last step spent on copies for the evidence.
        exchanged: when the last exchange ended, by ``time.perf_counter``.
        exchange_started: what ``fence`` returned.
    """

    def __init__(self, case: Case, comm: Communicator) -> None:
        algorithm = resolve(case.collective)
        watched = Algorithm(
            algorithm.name,
            algorithm.make_selector,
            lambda: _Watched(algorithm.make_collective(), self),
            average=algorithm.average,
        )
        self.case = case
        self.fence: Callable[[], float] | None = None
        self.keep = True
        self.copying = self.exchanged = self.exchange_started = 0.0
        self._accumulated: Tensor | None = None
        self.reducer = Reducer(comm, [case.unit], watched, case.density)

    def feed(self) -> Tensor:
        """Return the step's gradient; keep the sum that it will accumulate to, worked out apart."""
        mine = self.case.draw(self.reducer.comm.rank, self.reducer.step)
        self._accumulated = mine + self._residual() if self.keep else None
        return mine

    def evidence(self) -> Evidence:
        """Return the evidence of the last step, which must have been kept."""
        assert self._accumulated is not None, "this step was not kept"
        nothing = SparseVector.empty(self.case.size, self._accumulated)
        return Evidence(
            self._accumulated,
            self._residual(),
            self.selected,
            self.reduced.delivered,
            self.reduced.total,
            self.reduced.lost or nothing,
        )

    def _residual(self) -> Tensor:
        kept = self.reducer.residuals[0].value
        return torch.zeros(self.case.size) if kept is None else kept

    def saw(self, selected: Vector, reduced: Reduced) -> None:
        """Keep the vectors of an exchange; the reducer may overwrite its buffers later in the step."""
        self.exchanged = time.perf_counter()
        if self.keep:
            selected = _copy(selected)
            lost = None if reduced.lost is None else _copy(reduced.lost)
            reduced = Reduced(_copy(reduced.total), _copy(reduced.delivered), lost)
        self.selected, self.reduced = selected, reduced
        self.copying = time.perf_counter() - self.exchanged


def _copy(vector: Vector) -> Vector:
    if isinstance(vector, SparseVector):
        return SparseVector(vector.indices.clone(), vector.values.clone(), vector.size)
    return DenseVector(vector.values.clone())


@final
class _Watched(Collective):
    """A collective whose calls a ``WatchedReducer`` sees."""

    def __init__(self, inner: Collective, watcher: WatchedReducer) -> None:
        self.inner, self.watcher = inner, watcher

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
        if self.watcher.fence is not None:
            with comm.stage("fence"):  # waiting for the others is no communication
                self.watcher.exchange_started = self.watcher.fence()
        reduced = await self.inner.reduce(comm, selected, k, step)
        self.watcher.saw(selected, reduced)
        return reduced


# ---- verification ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evidence:
    """The vectors of one rank in one step; see the life of a gradient in ``sparsync``.

    Attributes:
        accumulated: `[n]`, the residual of the last step plus the gradient, computed apart.
        residual: `[n]`, after the commit.
        selected: entered the collective.
        delivered: by this rank, according to the collective.
        total: the sum that the collective returned.
        lost: of ``delivered``, rounded away and kept by nobody, on purpose.
    """

    accumulated: Tensor
    residual: Tensor
    selected: Vector
    delivered: Vector
    total: Vector
    lost: Vector

    def write_(self, packed: Tensor) -> None:
        """Write everything into one `[6, n]` tensor, for the rank that verifies."""
        vectors = (v.to_dense() for v in (self.selected, self.delivered, self.total, self.lost))
        for row, vector in zip(packed, (self.accumulated, self.residual, *vectors), strict=True):
            row.copy_(vector)

    @staticmethod
    def unpack(packed: Tensor) -> Evidence:
        """Undo ``write_``; the vectors come back dense."""
        accumulated, residual, *vectors = packed
        return Evidence(accumulated, residual, *(DenseVector(v) for v in vectors))


class Verdict(NamedTuple):
    """The outcome of one step.

    Attributes:
        wrong: entries of the total that differ between ranks or from the sum of what was delivered.
        law_error: the largest |sum(accumulated) - total - sum(residual) - sum(lost)| in units of its
            tolerance ``(P + 2) 2^-24 sum (max(|accumulated|, |delivered|) + |lost|)``; above 1 the law
            is broken.
        entries: entries of the total / min(k, entries of the sum of what was selected); 1 if dense.
    """

    wrong: int
    law_error: float
    entries: float

    @staticmethod
    def of_totals(k: int, selected: int, total: Vector, digests: Set[int]) -> Verdict:
        """Judge a step by its totals alone: no law; ``wrong`` counts at least one if they differ.

        Args:
            k: number of entries asked for.
            selected: the most entries that any rank selected: as many has the sum, barring sums of 0.
            total: any rank's.
            digests: of all ranks' totals.
        """
        wanted = min(k, selected)
        full = not isinstance(total, SparseVector) or not wanted
        return Verdict(len(digests) - 1, 0.0, 1.0 if full else total.values.numel() / wanted)


def digest(total: Vector) -> int:
    """Return 63 bits that two totals share only if they are bit-identical.

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


class Verification:
    """Collects the evidence of all ranks, in rank order, in O(n) memory.

    Totals must be equal on all ranks, and equal to the sum of what was delivered to the law's
    tolerance: the tree of additions, and where a codec rounds, are the collective's own.

    Args:
        size: number of elements n.
        world_size: number of ranks P.
        k: number of entries asked for.

    Example:
        >>> one = DenseVector(torch.tensor([1.0, 0.0]))
        >>> check = Verification(size=2, world_size=1, k=2)
        >>> zeros = torch.zeros(2)
        >>> check.add(Evidence(one.values, zeros, one, one, one, DenseVector(zeros)))
        >>> check.verdict()
        Verdict(wrong=0, law_error=0.0, entries=1.0)
    """

    def __init__(self, size: int, world_size: int, k: int) -> None:
        self.k, self.unit = k, (world_size + 2) * _ROUNDING
        self.accumulated = torch.zeros(size, dtype=torch.float64)
        self.magnitude = torch.zeros(size, dtype=torch.float64)
        self.residual = torch.zeros(size, dtype=torch.float64)
        self.delivered = torch.zeros(size, dtype=torch.float64)
        self.selected = torch.zeros(size)
        self.differs = torch.zeros(size, dtype=torch.bool)
        self.total: Vector | None = None

    def add(self, evidence: Evidence) -> None:
        """Add the next rank's evidence."""
        lost = evidence.lost.to_dense().double()
        self.accumulated += evidence.accumulated
        delivered = evidence.delivered.to_dense()
        # a codec may deliver more than an entry has (a mean): roundings are relative to that
        self.magnitude += evidence.accumulated.abs().maximum(delivered.abs()) + lost.abs()
        self.residual += evidence.residual + lost
        self.delivered += delivered - lost
        self.selected += evidence.selected.to_dense()
        if self.total is None:
            self.total = evidence.total
        else:
            self.differs |= evidence.total.to_dense() != self.total.to_dense()

    def verdict(self) -> Verdict:
        """Judge the step."""
        assert self.total is not None
        total, tolerance = self.total.to_dense().double(), self.unit * self.magnitude
        wrong = self.differs | ~((total - self.delivered).abs() <= tolerance)
        difference = (self.accumulated - total - self.residual).abs()
        errors = difference / tolerance.clamp(min=_TINY)
        worst = torch.finfo(errors.dtype).max  # stands for NaN, which JSON does not know
        errors = errors.nan_to_num(nan=worst, posinf=worst)
        law_error = float(errors.max()) if errors.numel() else 0.0
        return Verdict(int(wrong.sum()), law_error, self._entries())

    def _entries(self) -> float:
        wanted = min(self.k, int(self.selected.count_nonzero()))
        if isinstance(self.total, SparseVector) and wanted:
            return self.total.nnz / wanted
        return 1.0
