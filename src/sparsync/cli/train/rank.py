"""The ranks of ``sparsync train``: one measured training run per algorithm."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sparsync.cli.lab import local_traffic
from sparsync.cli.launch import gather
from sparsync.cli.output import Bar, progress
from sparsync.cli.train.exchanges import Exchange, make_exchange
from sparsync.cli.train.results import Goal, TrainResult, seconds_of_all
from sparsync.cli.train.schedule import Plateau, parse_schedule
from sparsync.cli.train.settings import TrainSettings
from sparsync.cli.workloads.delays import parse_delay
from sparsync.cli.workloads.workload import Draw, Evaluation, Workload, outputs_of
from sparsync.errors import PeerError, SparsyncError
from sparsync.transports.agree import digest

__all__ = ["BeforeStep", "train_rank"]

BeforeStep = Callable[[int, int], None]


def train_rank(
    settings: TrainSettings, algorithms: Sequence[str], before_step: BeforeStep | None = None
) -> list[TrainResult]:
    """Train once per algorithm, on the same data and from the same initial weights; all ranks call it.

    Args:
        settings: equal for all algorithms.
        algorithms: names of presets, schemes or PyTorch's hooks.  "dense" is plain DDP without any
            hook; it runs first if it sets the target of the other runs.
        before_step: an importable function that every rank calls with (rank, step).

    Returns:
        One result per algorithm, the same on all ranks.

    Raises:
        PeerError: another rank died or did not answer; the message names the calling rank and the step.
    """
    workload = settings.make_workload()
    with _naming_gloo(f"rank {dist.get_rank()}, before the first step"):
        computation = _computation_seconds(settings, workload)
    if settings.target_step is not None:
        algorithms = sorted(algorithms, key=lambda name: name != "dense")
    results: list[TrainResult] = []
    goal: Goal | None = None
    with progress(shown=dist.get_rank() == 0, keep=True) as row:
        for name in algorithms:
            with row(name) as bar:
                exchange, mine = _train(settings, name, workload, goal, before_step, bar)
            everyone = gather(mine, [_RankReport, Evaluation, Counter])
            results.append(_result(settings, name, workload, computation, exchange, everyone))
            if name == "dense" and settings.target_step is not None:
                goal = Goal.of(results[-1].loss, settings.target_step)
    return results


def _train(
    settings: TrainSettings,
    name: str,
    workload: Workload,
    goal: Goal | None,
    before_step: BeforeStep | None,
    bar: Bar,
) -> tuple[Exchange, _RankReport]:
    """Train until the last step, or until the goal is reached."""
    rank, model = dist.get_rank(), workload.make_model(settings.seed)
    # seed each rank differently, so that dropout removes different units on each
    torch.manual_seed(settings.seed * dist.get_world_size() + rank)
    exchange = make_exchange(settings, name, model)
    delay, schedule = parse_delay(settings.delay), parse_schedule(settings.lr_schedule)
    plateau = Plateau(schedule) if schedule.kind == "plateau" else None
    mine = _RankReport()
    dist.barrier()  # setup may have sent data over a slow link, which must not delay the first step
    losses: list[float] = []  # mean losses over all ranks, if there is a goal
    for step in range(settings.steps_of(name)):
        if before_step is not None:
            before_step(rank, step)
        link, started = _link_sent(), time.perf_counter()
        time.sleep(delay.seconds(step, rank, dist.get_world_size(), settings.seed))
        with _naming_gloo(f"rank {rank}, step {step}"):
            factor = 1.0 if plateau is None else plateau.factor
            loss = _step(settings, exchange, workload, step, factor)
            exchange.after_step()
        mine.seconds.append(time.perf_counter() - started)
        mine.kernel.append(_link_sent() - link)
        mine.loss.append(loss)
        sent, received = exchange.traffic()
        mine.sent.append(sent)
        mine.received += received
        bar(settings.steps_of(name), f"loss {loss:.3f} on rank 0 at step {step + 1}")
        if plateau is not None and plateau.is_due(loss):
            plateau.judge(_mean_of_ranks(plateau.mean))
        if goal is not None:
            losses.append(_mean_of_ranks(loss))
            if goal.reached_by(losses):
                break
    started = time.perf_counter()
    with _naming_gloo(f"rank {rank}, finish"):
        exchange.finish()
        if exchange.comm is not None:
            sent, received = exchange.traffic()
            mine.sent[-1] += sent
            mine.received += received
    mine.finish = time.perf_counter() - started
    if exchange.averager is not None:
        counted = exchange.averager.stats()
        names = ("averages", "stale_contributions", "largest_staleness", "seconds_waited")
        mine.averaging = [counted[name] for name in names]
    exchange.close()
    with _naming_gloo(f"rank {rank}, evaluation"):
        mine.evaluation = workload.evaluate(model, rank=rank, world_size=dist.get_world_size())
    mine.parameters = sum(parameter.numel() for parameter in model.parameters())
    mine.digests = [digest(parameter) for parameter in model.parameters()]
    return exchange, mine


def _mean_of_ranks(loss: float) -> float:
    """Return the mean of a loss over all ranks; call this between steps, so that it is not timed."""
    mean = torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def _link_sent() -> int:
    """Return the bytes that the kernel counts as sent on this rank's link, or 0 outside a lab."""
    counted = local_traffic()
    return 0 if counted is None else counted[0]


def _computation_seconds(settings: TrainSettings, workload: Workload, *, steps: int = 5) -> float:
    """Return the slowest rank's median seconds for a step without exchange, with all ranks computing.

    An additional, untimed first step warms up caches and allocators.
    """
    model, seconds = workload.make_model(settings.seed), []
    alone = Exchange(model, settings.make_optimizers(model))
    dist.barrier()
    for step in range(steps + 1):
        started = time.perf_counter()
        _step(settings, alone, workload, step)
        seconds.append(time.perf_counter() - started)
    slowest = torch.tensor(median(seconds[1:]), dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def _step(
    settings: TrainSettings,
    exchange: Exchange,
    workload: Workload,
    step: int,
    factor: float = 1.0,
) -> float:
    """Run one step; return this rank's loss before the step.  ``factor`` scales the learning rate."""
    divisor = settings.lr_divisor(sums=exchange.sums)
    for optimizer in exchange.optimizers:
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] = factor * settings.learning_rate_at(step) / divisor
    draw = Draw(settings.seed, step, dist.get_rank(), dist.get_world_size(), settings.batch_size)
    inputs, targets = workload.batch(draw)
    loss = workload.loss(outputs_of(exchange.model, inputs), targets)
    loss.backward()  # type: ignore[no-untyped-call]
    if settings.clip and not exchange.clips:
        nn.utils.clip_grad_norm_(exchange.model.parameters(), settings.clip)
    for optimizer in exchange.optimizers:
        optimizer.step()
    return loss.item()


@contextmanager
def _naming_gloo(where: str) -> Iterator[None]:
    """Turn gloo's errors inside plain DDP into errors that name the rank and the step."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, SparsyncError) or "gloo" not in str(error):
            raise
        first_line = str(error).splitlines()[0].split(". This is ")[0]
        raise PeerError(
            f"{where}: a collective of torch.distributed failed; another rank is gone, or did not "
            f"answer within --timeout ({first_line})"
        ) from error


@dataclass
class _RankReport:
    """The measurements of one rank, gathered once at the end.  Lists have one entry per step."""

    parameters: int = 0  # trained elements
    finish: float = 0.0  # seconds to make all replicas equal
    loss: list[float] = field(default_factory=list)  # loss on this rank's batch
    seconds: list[float] = field(default_factory=list)  # seconds, including the rank's delay
    sent: list[int] = field(default_factory=list)  # bytes sent
    received: int = 0  # bytes received in all steps together
    kernel: list[int] = field(default_factory=list)  # bytes sent, as counted on this rank's link
    # for a scheme: number of averages, number with a stale model of this rank, age of the oldest such
    # model in steps, seconds waited
    averaging: list[float] = field(default_factory=list)
    evaluation: Evaluation = field(default_factory=Evaluation)  # on this rank's held-out share
    digests: list[str] = field(default_factory=list)  # parameters' digests at the end


def _result(
    settings: TrainSettings,
    name: str,
    workload: Workload,
    computation: float,
    exchange: Exchange,
    everyone: Sequence[_RankReport],
) -> TrainResult:
    evaluation = Evaluation.total(r.evaluation for r in everyone)
    seconds = seconds_of_all([r.seconds for r in everyone])
    total = max(sum(r.seconds) + r.finish for r in everyone)
    elements = everyone[0].parameters * len(seconds)
    kernel = [max(nbytes) for nbytes in zip(*(r.kernel for r in everyone), strict=True)]
    density: Any = (exchange.options or {}).get("density", settings.density)
    averaging: dict[str, Any] = {}
    if everyone[0].averaging:
        averages, stale, oldest, waited = zip(*(r.averaging for r in everyone), strict=True)
        averaging["stale_share"] = sum(stale) / max(sum(averages), 1)
        averaging |= {"largest_staleness": max(oldest), "seconds_waited": fmean(waited)}
    of_settings = ("workload", "seed", "batch_size", "optimizer", "lr", "nesterov", "weight_decay")
    same: dict[str, Any] = {
        key: getattr(settings, key) for key in (*of_settings, "delay", "lr_schedule", "momentum")
    }
    same |= {key: getattr(workload, key, None) for key in ("context", "layers", "width")}
    return TrainResult(
        algorithm=name,
        ranks=len(everyone),
        steps=len(seconds),
        density=density if exchange.sparse else 1.0,
        parameters=everyone[0].parameters,
        loss=[fmean(losses) for losses in zip(*(r.loss for r in everyone), strict=True)],
        eval_loss=evaluation.loss,
        seconds_total=total,
        seconds_per_step_mean=fmean(seconds),
        seconds_per_step_median=median(seconds),
        bytes_sent_per_step_max=max(max(r.sent) for r in everyone),
        replicas_equal=all(r.digests == everyone[0].digests for r in everyone),
        bytes_sent=max((r.sent for r in everyone), key=sum),
        sent_per_parameter_and_step=max(sum(r.sent) for r in everyone) / elements,
        received_per_parameter_and_step=max(r.received for r in everyone) / elements,
        warmup_steps=settings.warmup_steps if exchange.sparse and exchange.options is None else 0,
        seconds=seconds,
        seconds_computation_median=computation,
        seconds_rest_median=max(median(seconds) - computation, 0.0),
        bytes_counted="formula" if exchange.comm is None else "ledger",
        bytes_kernel=None if local_traffic() is None else kernel,
        transport=exchange.transport,
        lab=settings.connection().bits_per_second,
        links=settings.lab,
        accuracy=evaluation.accuracy if workload.classifies else None,
        metrics=workload.objective.figures(evaluation),
        clip=settings.clip or None,
        options=exchange.options,
        dense_share=exchange.dense_share,
        lr_divisor=settings.lr_divisor(sums=exchange.sums),
        momentum_corrected=exchange.corrected,
        **averaging,
        seconds_finish=max(total - sum(seconds), 0.0),
        **same,
    )
