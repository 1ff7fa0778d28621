"""Training with schemes of averaging in virtual time: every rank has a model, late ones a stale one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from sparsync.reproduce.base import Settings
from sparsync.reproduce.training import Recipe
from sparsync.reproduce.wagma_throughput import Scheme, Setting
from sparsync.transports.sim import SimCommunicator, simulate

__all__ = ["Averaged", "MakeReplica", "TimedTraining", "average_models", "train_averaged"]

_MOMENTUM = 0.9  # of SGD (ours; the paper does not say)
_RAMP = 10  # the learning rate grows over this part of the steps (ours)
_LOOKS = 5  # points of a curve

# rank -> its model, and what does local step t on it
MakeReplica = Callable[[int], tuple[nn.Module, Callable[[int], None]]]


@dataclass(frozen=True)
class Averaged:
    """Models that were averaged while they trained.

    Attributes:
        final: parameters behind ``finish()``, `[parameters]`.
        seconds: virtual ones of a step, the mean over ranks.
        looks: virtual seconds, and the mean of all ranks' parameters after equal steps.
    """

    final: Tensor
    seconds: float
    looks: list[tuple[float, Tensor]]


def average_models(
    make_replica: MakeReplica,
    setting: Setting,
    scheme: Scheme,
    settings: Settings,
    *,
    ranks: int,
    steps: int,
    pieces: int,
) -> Averaged:
    """Train on virtual ranks: local steps, models and messages are real, time is not.

    Args:
        make_replica: equal models on all ranks.
        setting: computation, delays and network.
        scheme: what averages.
        settings: seed and progress.
        ranks: P.
        steps: of every rank.
        pieces: steps of the whole artifact, for the progress.
    """
    looked = {max(steps * look // _LOOKS, 1) for look in range(1, _LOOKS + 1)}
    sums: dict[int, Tensor] = {}
    times: dict[int, list[float]] = {step: [] for step in sorted(looked)}

    async def program(comm: SimCommunicator) -> tuple[Tensor, float]:
        model, descend = make_replica(comm.rank)
        vector, averager = _read(model), scheme.make(setting, ranks)
        await averager.begin(comm, vector, 0)
        for step in range(steps):
            await comm.compute(setting.work(step, comm.rank, ranks, settings.seed))
            descend(step)
            vector = await averager.average(comm, _read(model), step)
            _write_(model, vector)
            if step + 1 in times:
                sums[step + 1] = vector + sums.get(step + 1, torch.zeros(()))
                times[step + 1].append(comm.now)
            if comm.rank == 0:
                settings.advance(pieces)
        seconds = comm.now
        return await averager.conclude(comm, vector, steps), seconds

    size = _read(make_replica(0)[0]).numel()
    results = simulate(program, ranks, links=setting.links(size)).results
    return Averaged(
        results[0][0],
        fmean(seconds for _, seconds in results) / steps,
        [(fmean(times[step]), sums[step] / ranks) for step in times],
    )


@dataclass(frozen=True)
class TimedTraining:
    """What a training gave.

    Attributes:
        value: of the model behind ``finish()``: held-out accuracy in %, or loss.
        seconds: virtual ones of a step, the mean over ranks.
        curve: the same value of the mean of all models, over virtual seconds.
    """

    value: float
    seconds: float
    curve: list[tuple[float, float]]


def train_averaged(
    recipe: Recipe,
    setting: Setting,
    scheme: Scheme,
    settings: Settings,
    *,
    ranks: int,
    steps: int,
    pieces: int,
) -> TimedTraining:
    """Train a recipe's model with SGD and momentum; arguments as for ``average_models``."""

    def make_replica(rank: int) -> tuple[nn.Module, Callable[[int], None]]:
        model = recipe.make_model(settings.seed)
        optimizer = torch.optim.SGD(model.parameters(), recipe.lr, momentum=_MOMENTUM)

        def descend(step: int) -> None:
            inputs, targets = recipe.workload.batch(
                seed=settings.seed,
                step=step,
                rank=rank,
                world_size=ranks,
                batch_size=recipe.batch_size,
            )
            for group in optimizer.param_groups:
                group["lr"] = recipe.lr * min((step + 1) / max(steps // _RAMP, 1), 1.0)
            optimizer.zero_grad()
            recipe.workload.loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        return model, descend

    spare = recipe.make_model(settings.seed)

    def value(vector: Tensor) -> float:
        _write_(spare, vector)
        found = recipe.workload.evaluate(spare)
        return 100 * found.accuracy if recipe.workload.classifies else found.loss

    run = average_models(
        make_replica, setting, scheme, settings, ranks=ranks, steps=steps, pieces=pieces
    )
    curve = [(seconds, value(vector)) for seconds, vector in run.looks]
    return TimedTraining(value(run.final), run.seconds, curve)


def _read(model: nn.Module) -> Tensor:
    return parameters_to_vector(model.parameters()).detach()


def _write_(model: nn.Module, vector: Tensor) -> None:
    # a copy: parameters become views of it, and the averager may hold the vector for others
    vector_to_parameters(vector.clone(), model.parameters())
