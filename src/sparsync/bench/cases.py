"""One row of a bench: its gradients, its reducer, and a look at what passes through the reducer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from sparsync.bench.inputs import Draw, gradient
from sparsync.bench.verify import Evidence
from sparsync.collectives.base import Collective, Reduced
from sparsync.presets import Algorithm, resolve
from sparsync.reducer import Reducer
from sparsync.sparse import DenseVector, SparseVector, Vector
from sparsync.transports.base import Communicator
from sparsync.transports.sim import Links
from sparsync.units import Slot, Unit

__all__ = ["Case", "WatchedReducer"]


@dataclass(frozen=True)
class Case:
    """One row of a bench.

    Attributes:
        collective: a preset's name, or an algorithm.
        ranks: number of ranks P.
        size: number of elements n.
        density: k / n asked for.
        input: name of a kind of gradient (``sparsync.bench.inputs``).
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

    def draw(self, rank: int, step: int) -> Tensor:
        """Return a rank's gradient, fresh on every step: error feedback sees no repetition."""
        return gradient(self.input, Draw(self.size, self.ranks, rank, step, self.seed))


@final
class WatchedReducer:
    """A rank's reducer, and what its last step did.

    Attributes:
        reducer: the real thing; only its collective is wrapped, to be looked at.
        fence: called when the entries are selected and before they are exchanged; returns the time
            from which the exchange counts.  None: the exchange follows at once and is not timed.
        keep: copy what passes by, as evidence; the copies' time is told in ``copying``.
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
        """Return the step's gradient; work out apart what it will accumulate to, if that is kept."""
        mine = self.case.draw(self.reducer.comm.rank, self.reducer.step)
        self._accumulated = mine + self._residual() if self.keep else None
        return mine

    def evidence(self) -> Evidence:
        """Return what the last step did; it must have been kept."""
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
        """Note what passed by; the reducer may overwrite its buffers later in the step."""
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
    """A collective whose calls are looked at."""

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
