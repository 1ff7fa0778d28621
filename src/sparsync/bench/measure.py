"""Runs one collective for some steps through a real ``Reducer``: simulated, or on real processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from sparsync.bench.inputs import Draw, gradient
from sparsync.bench.verify import Evidence, Verdict, Verification
from sparsync.collectives.base import Collective, Reduced
from sparsync.errors import ConfigurationError
from sparsync.presets import Algorithm, resolve
from sparsync.reducer import Reducer
from sparsync.sparse import Vector
from sparsync.transports.base import Communicator, run
from sparsync.transports.sim import Links, SimCommunicator, Simulation, simulate
from sparsync.transports.solo import SoloCommunicator
from sparsync.transports.torch import TorchCommunicator
from sparsync.units import Slot, Unit

__all__ = ["Case", "Outcome", "SimulatedRanks", "measure_processes", "measure_simulated"]


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

    def draw(self, rank: int, step: int) -> Tensor:
        """Return a rank's gradient."""
        return gradient(self.input, Draw(self.size, self.ranks, rank, step, self.seed))


@dataclass(frozen=True)
class Outcome:
    """One step, over all ranks.

    Attributes:
        seconds: of the slowest rank.
        sent: most bytes that any rank sent.
        received: most bytes that any rank received.
        verdict: of the verification.
    """

    seconds: float
    sent: int
    received: int
    verdict: Verdict


class SimulatedRanks:
    """P virtual ranks, each with its own reducer, that live from step to step.

    Every step runs on a fresh network: its clock starts at 0 and its ledgers hold this step alone.

    Example:
        >>> ranks = SimulatedRanks(Case("oktopk", ranks=4, size=1000, density=0.01))
        >>> simulation = ranks.step()
        >>> simulation.results[0].total.nnz, simulation.ledgers[0].total().messages_sent > 0
        (10, True)
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.reducers = [_make_reducer(case, SoloCommunicator()) for _ in range(case.ranks)]

    def step(self) -> Simulation[Evidence]:
        """Run the next step of all ranks."""

        async def program(comm: SimCommunicator) -> Evidence:
            reducer = self.reducers[comm.rank]
            reducer.comm = comm
            mine, accumulated = _feed(self.case, reducer)
            await reducer.reduce([mine])
            return _evidence(reducer, accumulated)

        return simulate(program, self.case.ranks, links=self.case.links)


def measure_simulated(case: Case, steps: int) -> Iterator[Outcome]:
    """Yield ``steps`` outcomes under the virtual clock, which charges communication alone."""
    ranks = SimulatedRanks(case)
    for _ in range(steps):
        simulation = ranks.step()
        check = Verification(case.size, case.ranks, case.k)
        for evidence in simulation.results:
            check.add(evidence)
        traffic = [ledger.total() for ledger in simulation.ledgers]
        yield Outcome(
            simulation.seconds,
            max(t.sent for t in traffic),
            max(t.received for t in traffic),
            check.verdict(),
        )


def measure_processes(
    case: Case, steps: int, aside: dist.ProcessGroup, timeout: float = 300.0
) -> Iterator[Outcome | None]:
    """Yield ``steps`` outcomes on rank 0, None on the others; wall clock; every rank calls it.

    Args:
        case: with as many ranks as ``torch.distributed`` has.
        steps: how many.
        aside: a group of all ranks, for what is neither timed nor booked: ranks start every step
            together, and clocks, traffic and evidence go to rank 0.
        timeout: seconds that a rank waits for another.
    """
    comm = TorchCommunicator(timeout=timeout)
    if comm.world_size != case.ranks:
        raise ConfigurationError(f"the case has {case.ranks} ranks, this job {comm.world_size}")
    reducer = _make_reducer(case, comm)
    for _ in range(steps):
        mine, accumulated = _feed(case, reducer)
        dist.barrier(group=aside)
        start = time.perf_counter()
        run(reducer.reduce([mine]))
        seconds = time.perf_counter() - start
        last = comm.ledger.last_step
        slowest = torch.tensor([seconds, last.sent, last.received], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=aside)
        verdict = _verify_at_rank_0(case, _evidence(reducer, accumulated), aside)
        seconds, sent, received = slowest.tolist()
        yield None if verdict is None else Outcome(seconds, int(sent), int(received), verdict)


def _verify_at_rank_0(case: Case, mine: Evidence, aside: dist.ProcessGroup) -> Verdict | None:
    """Send the evidence to rank 0, one rank after the other; judge it there."""
    if dist.get_rank() != 0:
        dist.send(mine.pack(), dst=0, group=aside)
        return None
    check = Verification(case.size, case.ranks, case.k)
    check.add(mine)
    packed = mine.pack()
    for source in range(1, case.ranks):
        dist.recv(packed, src=source, group=aside)
        check.add(Evidence.unpack(packed))
    return check.verdict()


def _make_reducer(case: Case, comm: Communicator) -> Reducer:
    """Build the reducer of one rank, its collective observed."""
    algorithm = resolve(case.collective)
    observed = Algorithm(
        algorithm.name,
        algorithm.make_selector,
        lambda: _Observed(algorithm.make_collective()),
    )
    return Reducer(comm, [case.unit], observed, case.density)


def _feed(case: Case, reducer: Reducer) -> tuple[Tensor, Tensor]:
    """Return a fresh gradient and what it will accumulate to, computed apart from the reducer."""
    mine = case.draw(reducer.comm.rank, reducer.step)
    return mine, mine + _residual(reducer)


def _residual(reducer: Reducer) -> Tensor:
    kept = reducer.residuals[0]
    return torch.zeros_like(kept.accumulated) if kept.value is None else kept.value


def _evidence(reducer: Reducer, accumulated: Tensor) -> Evidence:
    (observed,) = reducer.collectives
    assert isinstance(observed, _Observed)
    selected, reduced = observed.selected, observed.reduced
    return Evidence(accumulated, _residual(reducer), selected, reduced.delivered, reduced.total)


@final
class _Observed(Collective):
    """A collective whose last call can be looked at."""

    selected: Vector
    reduced: Reduced

    def __init__(self, inner: Collective) -> None:
        self.inner = inner

    @property
    def state(self) -> Any:
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self.inner.state = state

    async def reduce(self, comm: Communicator, selected: Vector, k: int, step: int) -> Reduced:
        self.selected = selected
        self.reduced = await self.inner.reduce(comm, selected, k, step)
        return self.reduced
