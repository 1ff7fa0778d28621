"""One run, in which rank processes train, evaluate along the way, and count bytes and seconds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from frontier.methods import METHODS, TIMEOUT, Exchange, Volume, elements
from frontier.tasks import TASKS, make_optimizers, rate_at
from sparsync.cli.lab import local_traffic
from sparsync.cli.launch import gather
from sparsync.cli.network_choice import Connection
from sparsync.cli.output import progress
from sparsync.cli.train.results import seconds_of_all
from sparsync.cli.workloads.workload import Draw, Evaluation, Workload, outputs_of
from sparsync.transports.agree import digest

POINTS = 12  # number of evaluations during training
SHARES = 8  # evaluations during training use one in this many held-out samples


@dataclass(frozen=True)
class Run:
    """The settings that identify a run, equal on all ranks; its line in the results begins with them."""

    task: str
    steps: int
    ranks: int
    batch: int  # samples per rank and step
    method: str
    optimizer: str  # "adamw" or "muon"
    lr: float
    seed: int
    knobs: Mapping[str, Any] = field(default_factory=dict)
    lab: str | None = None  # rate of the links, without evaluation; None: unshaped links

    def make(self, label: str) -> dict[str, Any]:
        """Train on processes of this machine; return the measurements."""
        connection = Connection("auto", TIMEOUT, lab=self.lab)
        measured: dict[str, Any] = connection.start(train_rank, self.ranks, self, label)
        return measured


def train_rank(run: Run, label: str) -> dict[str, Any]:
    """Train as one rank; return the measurements of all ranks."""
    torch.set_num_threads(1)
    rank, workload, started = dist.get_rank(), TASKS[run.task].workload, time.perf_counter()
    computation = _computation_seconds(run, workload)
    model = workload.make_model(run.seed)
    torch.manual_seed(run.seed * run.ranks + rank)
    method = METHODS[run.method]
    settings = {**method.settings, **method.untuned, **run.knobs}
    exchange = method.make(model, run.optimizer, run.lr, run.steps, **settings)
    volumes, seconds, curve = [_volume(exchange, 0)], [], []
    between = max(1, run.steps // POINTS)
    dist.barrier()
    with progress(shown=rank == 0, keep=True) as row, row(label) as bar:
        for step in range(run.steps):
            moment = time.perf_counter()
            loss = _step(run, exchange, workload, step)
            seconds.append(time.perf_counter() - moment)
            volumes.append(_volume(exchange, step + 1))
            if not run.lab and ((step + 1) % between == 0 or step + 1 == run.steps):
                evaluation = _evaluate(exchange, model, workload, SHARES)
                curve.append((step + 1, evaluation.loss))
            bar(run.steps, f"loss {curve[-1][1] if curve else loss:.3f}")
    hidden = exchange.hidden()
    exchange.settle()
    volumes[-1] = _volume(exchange, run.steps)
    evaluation = None if run.lab else _evaluate(exchange, model, workload, 1)
    with exchange.shared():
        digests = [digest(parameter) for parameter in model.parameters()]
    exchange.close()
    everyone = gather((seconds, [tuple(v) for v in volumes], digests, time.process_time()))
    first = min(exchange.dense_steps, run.steps)
    walls = seconds_of_all([theirs[0] for theirs in everyone])
    both = [[Volume(*v) for v in theirs[1]] for theirs in everyone]
    return {
        "loss": None if evaluation is None else evaluation.loss,
        "accuracy": None if evaluation is None else evaluation.accuracy,
        "curve": curve,
        "parameters": elements(model),
        "counted": "kernel" if run.lab else exchange.counted,
        "dense": _phase(walls, both, 0, first),
        "rest": _phase(walls, both, first, run.steps),
        "computation": computation,
        "hidden": hidden,  # on rank 0
        "replicas_equal": all(theirs[2] == digests for theirs in everyone),
        "seconds": time.perf_counter() - started,
        "core_seconds": sum(theirs[3] for theirs in everyone),
    }


def _phase(
    walls: list[float], volumes: list[list[Volume]], begin: int, end: int
) -> dict[str, float] | None:
    """Return means per step from ``begin`` to ``end``; bytes are the busiest rank's."""
    if begin == end:
        return None
    spans = [(ours[begin], ours[end]) for ours in volumes]
    return {
        "steps": end - begin,
        "seconds": fmean(walls[begin:end]),
        "sent": max(last.sent - first.sent for first, last in spans) / (end - begin),
        "received": max(last.received - first.received for first, last in spans) / (end - begin),
    }


def _volume(exchange: Exchange, made: int) -> Volume:
    """Return the bytes so far, as counted on this rank's link if it has one."""
    counted = local_traffic()
    return exchange.volume(made) if counted is None else Volume(*counted)


def _step(run: Run, exchange: Exchange, workload: Workload, step: int) -> float:
    """Run one step of an ordinary training loop; return this rank's loss before the step."""
    for optimizer in exchange.optimizers:
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] = run.lr * rate_at(step, run.steps)
    inputs, targets = workload.batch(Draw(run.seed, step, dist.get_rank(), run.ranks, run.batch))
    loss = workload.loss(outputs_of(exchange.model, inputs), targets)
    loss.backward()
    nn.utils.clip_grad_norm_(exchange.model.parameters(), TASKS[run.task].clip)
    for optimizer in exchange.optimizers:
        optimizer.step()
    return loss.item()


def _evaluate(exchange: Exchange, model: nn.Module, workload: Workload, shares: int) -> Evaluation:
    """Evaluate on one in ``shares`` held-out samples, divided among the ranks; all ranks call it."""
    ranks = dist.get_world_size()
    with exchange.shared():
        mine = workload.evaluate(model, rank=dist.get_rank(), world_size=shares * ranks)
    total = torch.tensor([mine.loss_sum, mine.hits, mine.count], dtype=torch.float64)
    dist.all_reduce(total)
    return Evaluation(float(total[0]), int(total[1]), int(total[2]))


def _computation_seconds(run: Run, workload: Workload, *, steps: int = 5) -> float:
    """Return the slowest rank's median seconds per step without exchange; all ranks compute at once."""
    model, seconds = workload.make_model(run.seed), []
    alone = Exchange(
        model, make_optimizers(model, run.optimizer, run.lr), lambda _: Volume(0, 0), ""
    )
    dist.barrier()
    for step in range(steps + 1):  # one more: the first warms up caches and allocators
        started = time.perf_counter()
        _step(run, alone, workload, step)
        seconds.append(time.perf_counter() - started)
    slowest = torch.tensor(median(seconds[1:]), dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)
