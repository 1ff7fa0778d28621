"""The ranks of ``sparsync linear``: their rows, and one measured training run per exchange."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from sparsync.cli.launch import StartLine, gather
from sparsync.cli.linear.report import LinearResult
from sparsync.cli.linear.settings import TRIGRAMS, LinearSettings
from sparsync.cli.network_choice import transport_of
from sparsync.cli.output import Bar, progress
from sparsync.errors import require
from sparsync.published.sparcml.linear.data import (
    Shard,
    label_text,
    load_rows,
    load_shard,
    row_range,
)
from sparsync.published.sparcml.linear.model_file import LinearModel
from sparsync.published.sparcml.linear.problem import Problem, Products
from sparsync.published.sparcml.linear.solvers import Meter, Scd, Solver
from sparsync.published.sparcml.linear.trigrams import URL_DIMENSIONS, trigram_shard
from sparsync.transports.agree import digest
from sparsync.transports.driver import Engine, run
from sparsync.transports.sim import SimCommunicator, simulate

__all__ = ["predict", "simulate_all", "train_all"]


@dataclass
class _Report:
    """The measurements of one training run on one rank; lists have one value per epoch."""

    rows: int  # training rows over all ranks
    dimensions: int
    steps: int  # steps per epoch
    objective: list[float] = field(default_factory=list)  # before the first epoch, then after each
    accuracy: list[float] = field(default_factory=list)  # at the same times
    computed: list[list[float]] = field(default_factory=list)  # seconds; see ``Meter``
    exchanged: list[list[tuple[str, float, float]]] = field(default_factory=list)
    # from the ledger: bytes sent and received, messages, and bytes sent without scd's derivatives
    traffic: list[tuple[int, int, int, int]] = field(default_factory=list)
    digest: str = ""  # digest of the weights at the end


def simulate_all(settings: LinearSettings) -> list[LinearResult]:
    """Train on virtual ranks, once per exchange."""
    with progress() as row:
        with row(f"loading {settings.data}"):
            whole = _load(settings, 0, 1)
        cut = [_problems(settings, whole, rank, settings.ranks) for rank in range(settings.ranks)]
        products, results = Products(settings.threads), []
        for given in settings.exchanges:
            name = settings.named(given).label
            with row(name) as bar:

                async def program(
                    comm: SimCommunicator, name: str = name, bar: Bar = bar
                ) -> _Report:
                    training, held_out = cut[comm.rank]
                    meter = Meter(clock=lambda: comm.now)
                    solver = settings.make_solver(
                        comm, training, name, products=products, meter=meter
                    )
                    # the progress bar counts the steps of rank 0
                    report = await _train(settings, solver, held_out, None if comm.rank else bar)
                    _save(settings, name, solver, whole)
                    return report

                reports = simulate(program, settings.ranks, links=settings.links).results
            results.append(_result(settings, name, "sim", reports, one_clock=True))
    return results


def train_all(settings: LinearSettings) -> list[LinearResult]:
    """Train on this rank of a process group, once per exchange; every rank calls it."""
    rank, world_size, group = dist.get_rank(), dist.get_world_size(), dist.new_group()
    line = StartLine(group)
    with progress(shown=rank == 0) as row:
        with row(f"loading {settings.data}"):
            shard = _load(settings, rank, world_size)
        training, held_out = _problems(settings, shard, rank, world_size)
        products, results = Products(settings.threads), []
        for given in settings.exchanges:
            name = settings.named(given).label
            # asynchronous ranks do not wait for each other, so they must not wait for a common start
            meter = Meter() if settings.staleness else Meter(line.wait)
            with (
                row(name) as bar,
                settings.connection().open(name) as comm,
                Engine("linear", [comm]) if settings.staleness else nullcontext() as engine,
            ):
                solver = settings.make_solver(
                    comm, training, name, engine, products=products, meter=meter
                )
                report = run(_train(settings, solver, held_out, bar))
                _save(settings, name, solver, shard)
                transport = transport_of(comm)
            everyone = gather(report, [_Report])
            results.append(_result(settings, name, transport, everyone, line.one_machine))
    return results


def predict(
    data: str, model: Path, cache: Path | None = None
) -> tuple[LinearModel, NDArray[np.float64], float | None]:
    """Return a saved model, its label for every row, and the accuracy if the rows have labels."""
    trained = LinearModel.load(model)
    if data == TRIGRAMS:
        shard = trigram_shard(dimensions=len(trained.weights))
        rows, labels = shard.features, shard.labels
    else:
        rows, labels = load_rows(data, base=trained.base, cache=cache)
    return trained, trained.predict(rows), trained.accuracy(rows, labels)


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
    shard = load_shard(
        settings.data,
        rank=rank,
        world_size=world_size,
        dimensions=settings.dimensions,
        cache=settings.cache,
        positive=settings.positive_labels(),
    )
    found = ", ".join(map(label_text, shard.known))
    require(
        len(shard.known) > 1,
        f"all rows of {settings.data} have the label {found}; give two classes",
    )
    require(
        len(shard.positive) < len(shard.known),
        f"--positive has all labels of {settings.data}, {found}; leave some out",
    )
    return shard


def _problems(
    settings: LinearSettings, shard: Shard, rank: int, world_size: int
) -> tuple[Problem, Problem]:
    """Return a rank's training rows, and its held-out rows (the training rows if none are held out).

    The shard contains these rows, and may also contain rows of other ranks.
    """
    # choose by the row's global number, so that the choice does not depend on the number of ranks
    numbers = np.arange(*row_range(shard.rows_total, rank=rank, world_size=world_size))
    every, model = settings.held_out_every, (settings.model, settings.l1, settings.l2)
    out = numbers % every == every - 1 if every else np.zeros(len(numbers), bool)
    training, held_out = (
        Problem(shard.features[rows], shard.labels[rows], *model)
        for rows in (numbers[~out] - shard.first_row, numbers[out] - shard.first_row)
    )
    return training, held_out if every else training


# ---- one training ---------------------------------------------------------------------------------


async def _train(
    settings: LinearSettings, solver: Solver, held_out: Problem, bar: Bar | None
) -> _Report:
    """Train and evaluate; evaluations are neither timed nor counted in the ledger."""
    await solver.start(settings.epochs)
    ledger, weights = solver.comm.ledger, solver.weights
    report = _Report(sum(solver.rows), solver.problem.dimensions, solver.epoch_steps)

    async def evaluate() -> None:
        report.objective.append((await solver.evaluate()).objective)
        report.accuracy.append((await solver.evaluate(held_out)).accuracy)

    def advance(steps: int) -> None:
        if bar is not None:
            bar(steps * settings.epochs)

    await evaluate()
    for number in range(settings.epochs):
        solver.meter.clear()
        ledger.begin_step(ledger.step + 1)
        await solver.epoch(number, advance)
        sent, phase = ledger.current_step(), ledger.phases.get(Scd.DERIVATIVES)
        updates = sent.sent - (phase.sent if phase else 0)
        report.traffic.append((sent.sent, sent.received, sent.messages_sent, updates))
        report.computed.append(solver.meter.computed)
        report.exchanged.append(solver.meter.exchanged)
        ledger.begin_step(ledger.step + 1)
        await evaluate()
    at_end = np.append(weights.to_dense(), np.float64(weights.intercept))
    report.digest = digest(torch.from_numpy(at_end))
    return report


def _save(settings: LinearSettings, exchange: str, solver: Solver, shard: Shard) -> None:
    """Write one model file; exchanges are lossless, so all runs and ranks end with the same model."""
    if settings.save is None or solver.comm.rank or exchange != settings.exchanges[0]:
        return
    meaning = {"labels": shard.known, "positive": shard.positive, "base": shard.base}
    LinearModel.of(solver.weights, **meaning).save(settings.save)


# ---- all ranks ------------------------------------------------------------------------------------


def _result(
    settings: LinearSettings,
    name: str,
    transport: str,
    reports: Sequence[_Report],
    one_clock: bool,
) -> LinearResult:
    of_all = ("rows", "dimensions", "steps", "objective", "accuracy")
    computed = [
        sum(map(max, zip(*ranks, strict=True)))
        for ranks in zip(*(r.computed for r in reports), strict=True)
    ]
    together = one_clock and not settings.staleness  # common starts, on one clock
    exchanged = [
        _exchange_seconds(ranks, together)
        for ranks in zip(*(r.exchanged for r in reports), strict=True)
    ]
    most = np.max([report.traffic for report in reports], axis=0)  # [epoch, kind]
    sent, received, messages, updates = most.T.tolist()
    return LinearResult(
        exchange=name,
        **{key: getattr(settings, key) for key in ("solver", "model", "data", "staleness")},
        ranks=len(reports),
        transport=transport,
        lab=settings.connection().bits_per_second,
        links=settings.lab,
        **{key: getattr(reports[0], key) for key in of_all},
        accuracy_on="held-out rows" if settings.held_out_every else "training rows",
        seconds=[a + b for a, (b, _) in zip(computed, exchanged, strict=True)],
        seconds_communication=[both for both, _ in exchanged],
        seconds_updates=[alone for _, alone in exchanged],
        bytes_sent=sent,
        bytes_received=received,
        messages_sent=messages,
        bytes_updates=updates,
        replicas_equal=len({report.digest for report in reports}) == 1,
    )


def _exchange_seconds(
    ranks: Sequence[Sequence[tuple[str, float, float]]], together: bool
) -> tuple[float, float]:
    """Return the seconds that an epoch's exchanges took, with and without exchanges of derivatives.

    An exchange lasts from the common start until the last rank ends.  If ranks do not start together,
    the slowest rank's time counts.
    """
    every = without = 0.0
    for exchange in zip(*ranks, strict=True):
        phases, starts, ends = zip(*exchange, strict=True)
        each = [end - start for start, end in zip(starts, ends, strict=True)]
        took = max(ends) - max(starts) if together else max(each)
        every += took
        without += 0.0 if phases[0] == Scd.DERIVATIVES else took
    return every, without
