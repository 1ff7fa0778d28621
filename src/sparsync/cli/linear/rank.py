"""The ranks of ``sparsync linear``: their rows, one training per exchange, and its measurement."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch.distributed as dist

from sparsync.cli.launch import StartLine, gather
from sparsync.cli.linear.report import LinearResult
from sparsync.cli.linear.settings import TRIGRAMS, LinearSettings
from sparsync.cli.network import transport_of
from sparsync.cli.output import Bar, progress
from sparsync.linear.data import Shard, load_shard, row_range
from sparsync.linear.exchanges import gradient_exchange, update_exchange
from sparsync.linear.problem import Penalty, Problem, loss_named
from sparsync.linear.products import Products
from sparsync.linear.scd import Scd
from sparsync.linear.sgd import Sgd
from sparsync.linear.solver import Exchanged, Meter, Schedule, Solver
from sparsync.linear.trigrams import URL_DIMENSIONS, trigram_shard
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import Engine, run
from sparsync.transports.sim import SimCommunicator, simulate

__all__ = ["simulate_all", "train_all"]

_DERIVATIVES = "derivatives"  # scd's sums, which every exchange does alike


@dataclass
class _Epoch:
    """One epoch on one rank; bytes are the ledger's."""

    objective: float  # over all ranks' rows of the training
    accuracy: float  # on the rows that were held out
    computed: list[float] = field(default_factory=list)  # seconds of every stretch of computation
    exchanged: list[Exchanged] = field(default_factory=list)
    sent: int = 0
    received: int = 0
    messages: int = 0
    updates: int = 0  # bytes sent, without scd's derivatives


@dataclass
class _Report:
    """The measurements of one training on one rank."""

    transport: str
    rows: int  # of the training, over all ranks
    dimensions: int
    steps: int  # of an epoch
    one_clock: bool  # the ranks share a clock, so that moments compare
    epochs: list[_Epoch]  # the first is the state before any step
    digest: str  # of the weights at the end


def simulate_all(settings: LinearSettings) -> list[LinearResult]:
    """Train on virtual ranks, once per exchange."""
    with progress() as row:
        with row(f"loading {settings.data}"):
            whole = _load(settings, 0, 1)
        parts = [_share(whole, rank, settings.ranks) for rank in range(settings.ranks)]
        cut = [_problems(settings, part) for part in parts]
        products, results = Products(settings.threads), []
        for name in settings.exchanges:
            with row(name) as bar:

                async def program(
                    comm: SimCommunicator, name: str = name, bar: Bar = bar
                ) -> _Report:
                    training, held_out = cut[comm.rank]
                    meter = Meter(clock=lambda: comm.now)
                    solver = _solver(settings, name, comm, training, products, meter)
                    shown = bar if comm.rank == 0 else None  # one rank's stands for all
                    return await _train(settings, solver, held_out, "sim", True, shown)

                reports = simulate(program, settings.ranks, links=settings.links).results
            results.append(_result(settings, name, reports))
        products.close()
    return results


def train_all(settings: LinearSettings) -> list[LinearResult]:
    """Train on this rank of a process group, once per exchange; every rank calls it."""
    rank, group = dist.get_rank(), dist.new_group()
    one_clock = len(set(gather(socket.gethostname()))) == 1
    line = StartLine(group, one_machine=one_clock)
    with progress(shown=rank == 0) as row:
        with row(f"loading {settings.data}"):
            shard = _load(settings, rank, dist.get_world_size())
        training, held_out = _problems(settings, shard)
        products, results = Products(settings.threads), []
        for name in settings.exchanges:
            engine = Engine("linear") if settings.staleness else None
            # a rank that does not wait for the others' exchanges does not wait for their computation
            meter = Meter() if settings.staleness else Meter(line.wait)
            with row(name) as bar, settings.connection().open(name) as comm:
                solver = _solver(settings, name, comm, training, products, meter, engine)
                report = run(_train(settings, solver, held_out, transport_of(comm), one_clock, bar))
                if engine is not None:
                    engine.close()
            results.append(_result(settings, name, gather(report, [_Report, _Epoch, Exchanged])))
        products.close()
    return results


# ---- rows -------------------------------------------------------------------------------------------


def _load(settings: LinearSettings, rank: int, world_size: int) -> Shard:
    """Load the rows of a rank."""
    if settings.data == TRIGRAMS:
        return trigram_shard(
            dimensions=settings.dimensions or URL_DIMENSIONS,
            rank=rank,
            world_size=world_size,
            rows=settings.rows,
            positive=settings.positive,
        )
    return load_shard(
        settings.data,
        rank=rank,
        world_size=world_size,
        dimensions=settings.dimensions,
        cache=settings.cache,
        positive=settings.positive_labels(),
    )


def _share(whole: Shard, rank: int, world_size: int) -> Shard:
    """Return what ``_load`` gives that rank, out of all rows."""
    first, stop = row_range(whole.rows_total, rank=rank, world_size=world_size)
    return replace(
        whole,
        features=whole.features[first:stop],
        labels=whole.labels[first:stop],
        first_row=first,
    )


def _problems(settings: LinearSettings, shard: Shard) -> tuple[Problem, Problem]:
    """Return the rows to train on, and those held out (the training itself, if there are none)."""
    loss, penalty = loss_named(settings.model), Penalty(settings.l1, settings.l2)
    if settings.held_out_every == 0:
        everything = Problem(shard.features, shard.labels, loss, penalty)
        return everything, everything
    # by the row's number in the whole, so that it does not depend on the number of ranks
    numbers = shard.first_row + np.arange(len(shard.labels))
    out = numbers % settings.held_out_every == settings.held_out_every - 1
    training, held_out = (
        Problem(shard.features[chosen], shard.labels[chosen], loss, penalty)
        for chosen in (np.flatnonzero(~out), np.flatnonzero(out))
    )
    return training, held_out


# ---- one training ---------------------------------------------------------------------------------


def _solver(
    settings: LinearSettings,
    name: str,
    comm: Communicator,
    problem: Problem,
    products: Products,
    meter: Meter,
    engine: Engine | None = None,
) -> Solver:
    if settings.solver == "scd":
        return Scd(
            comm,
            problem,
            update_exchange(name, problem.dtype),
            products=products,
            coordinates=settings.coordinates,
            seed=settings.seed,
            steps=settings.steps,
            meter=meter,
        )
    return Sgd(
        comm,
        problem,
        gradient_exchange(name, problem.dtype),
        products=products,
        batch_size=settings.batch_size,
        schedule=Schedule(settings.schedule, settings.lr or 1.0),
        lr_is_factor=settings.lr is None,
        staleness=settings.staleness,
        background=engine,
        seed=settings.seed,
        steps=settings.steps,
        meter=meter,
    )


async def _train(
    settings: LinearSettings,
    solver: Solver,
    held_out: Problem,
    transport: str,
    one_clock: bool,
    bar: Bar | None,
) -> _Report:
    """Train and evaluate; the evaluations are neither timed nor booked."""
    await solver.start()

    async def evaluated() -> _Epoch:
        objective = (await solver.evaluate()).objective
        return _Epoch(objective, (await solver.evaluate(held_out)).accuracy)

    def advance(steps: int) -> None:
        if bar is not None:
            bar(steps * settings.epochs)

    epochs = [await evaluated()]
    for number in range(settings.epochs):
        solver.meter.clear()
        solver.comm.ledger.begin_step(solver.comm.ledger.step + 1)
        await solver.epoch(number, advance)
        traffic = solver.comm.ledger.current_step()
        derivatives = solver.comm.ledger.phases.get(_DERIVATIVES)
        solver.comm.ledger.begin_step(solver.comm.ledger.step + 1)
        epoch = await evaluated()
        epoch.computed, epoch.exchanged = solver.meter.computed, solver.meter.exchanged
        epoch.sent, epoch.received = traffic.sent, traffic.received
        epoch.messages = traffic.messages_sent
        epoch.updates = traffic.sent - (derivatives.sent if derivatives else 0)
        epochs.append(epoch)
    rows = (await solver.evaluate()).rows
    weights = solver.weights.to_dense().tobytes() + np.float64(solver.weights.intercept).tobytes()
    return _Report(
        transport,
        rows,
        solver.problem.dimensions,
        solver.epoch_steps,
        one_clock,
        epochs,
        hashlib.sha256(weights).hexdigest(),
    )


# ---- all ranks ------------------------------------------------------------------------------------


def _result(settings: LinearSettings, name: str, reports: Sequence[_Report]) -> LinearResult:
    first = reports[0]
    across = list(zip(*(report.epochs for report in reports), strict=True))  # [epoch][rank]
    trained = across[1:]
    computed = [sum(map(max, zip(*(e.computed for e in ranks), strict=True))) for ranks in trained]
    together = first.one_clock and not settings.staleness  # after a fence, on one clock
    exchanged = [_exchange_seconds(ranks, together) for ranks in trained]
    communication = [sum(phases.values()) for phases in exchanged]
    return LinearResult(
        exchange=name,
        solver=settings.solver,
        model=settings.model,
        data=settings.data,
        ranks=len(reports),
        transport=first.transport,
        lab=settings.connection().bits_per_second,
        rows=first.rows,
        dimensions=first.dimensions,
        steps=first.steps,
        staleness=settings.staleness,
        objective=[ranks[0].objective for ranks in across],
        accuracy=[ranks[0].accuracy for ranks in across],
        accuracy_on="held-out rows" if settings.held_out_every else "training rows",
        seconds=[a + b for a, b in zip(computed, communication, strict=True)],
        seconds_communication=communication,
        seconds_updates=[
            sum(phases.values()) - phases.get(_DERIVATIVES, 0.0) for phases in exchanged
        ],
        bytes_sent=[max(e.sent for e in ranks) for ranks in trained],
        bytes_received=[max(e.received for e in ranks) for ranks in trained],
        messages_sent=[max(e.messages for e in ranks) for ranks in trained],
        bytes_updates=[max(e.updates for e in ranks) for ranks in trained],
        replicas_equal=len({report.digest for report in reports}) == 1,
    )


def _exchange_seconds(ranks: Sequence[_Epoch], together: bool) -> dict[str, float]:
    """Return the seconds per phase: from all ranks' start to the end of the last.

    Where they do not start together: the time of the slowest rank.
    """
    seconds: dict[str, float] = {}
    for exchange in zip(*(epoch.exchanged for epoch in ranks), strict=True):
        if together:
            took = max(e.end for e in exchange) - max(e.start for e in exchange)
        else:
            took = max(e.end - e.start for e in exchange)
        phase = exchange[0].phase
        seconds[phase] = seconds.get(phase, 0.0) + took
    return seconds
