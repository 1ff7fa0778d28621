"""Train data-parallel in one process: P gradients of one model, exchanged by P real reducers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import final

import torch
from torch import Tensor, nn

from sparsync.algorithm import Algorithm
from sparsync.cli.workloads.digits import DigitsWorkload, SmallVgg
from sparsync.cli.workloads.stdlib_text import BytesWorkload, LstmWorkload
from sparsync.cli.workloads.workload import Draw, Evaluation, Workload
from sparsync.feedback.correction import Correction
from sparsync.feedback.reducer import Reducer
from sparsync.feedback.schedule import Warmup
from sparsync.presets import preset
from sparsync.sparse import Vector
from sparsync.transports.sim import SimCommunicator, simulate
from sparsync.units import output_parameters, plan_units
from sparsync_papers.reproduce import Panel, Settings

RANKS = 4  # number of ranks (a choice made here)
_MOMENTUM = 0.9  # momentum of all recipes (RedSync, SparCML and Ok-Topk train with it)
_RAMP = 15  # the learning rate rises over 1 / 15 of the steps (a choice made here)

Choice = Callable[[str, Tensor], bool]  # chooses parameters by name and value


@dataclass(frozen=True)
class Recipe:
    """A model and the settings with which SGD with momentum trains it."""

    name: str  # name in tables
    workload: Workload  # data and loss
    make_model: Callable[[int], nn.Module]  # makes the model from a seed
    lr: float  # learning rate for dense, which all algorithms use
    batch_size: int  # samples per rank and step
    clip: float | None = None  # largest norm of the averaged gradient; None: no limit
    nesterov: bool = False  # whether to use Nesterov momentum

    def score(self, evaluation: Evaluation) -> float:
        """Return the accuracy of a classifier, or the loss of any other model."""
        return evaluation.accuracy if self.workload.classifies else evaluation.loss


def digits_recipe(batch_size: int = 16, hidden: int = 256) -> Recipe:
    """Return a small VGG for digits with 50,730 parameters; a step takes 2 ms on half a core."""

    def make(seed: int) -> nn.Module:
        return SmallVgg(channels=((8, 16), (32, 32)), hidden=hidden, seed=seed)

    return Recipe("small VGG, digits", DigitsWorkload(), make, lr=0.1, batch_size=batch_size)


def text_recipe(batch_size: int = 8) -> Recipe:
    """Return a transformer of 133,760 parameters on Python's own source text."""
    workload = BytesWorkload(context=32, width=64, layers=2)
    return Recipe("transformer, text", workload, workload.make_model, 0.1, batch_size)


def lstm_recipe(batch_size: int = 4) -> Recipe:
    """Return an LSTM of 177,920 parameters on Python's own source text."""
    workload = LstmWorkload(context=32, width=96)
    return Recipe("LSTM, text", workload, workload.make_model, 4.0, batch_size, clip=0.25)


@dataclass(frozen=True)
class Trained:
    """The result of a complete training run."""

    losses: list[float]  # loss of each step, mean over ranks
    evaluation: Evaluation  # evaluation on held-out data
    bytes_sent: float  # bytes per step (mean over steps) of the rank that sent most
    # points ``(step, held-out accuracy or loss)``, if recorded
    curve: list[tuple[float, float]]

    @staticmethod
    def mean(runs: Sequence[Trained]) -> Trained:
        """Return the mean of equally long runs."""
        return Trained(
            [fmean(losses) for losses in zip(*(run.losses for run in runs), strict=True)],
            Evaluation.total(run.evaluation for run in runs),  # all runs have equally many targets
            fmean(run.bytes_sent for run in runs),
            [
                (points[0][0], fmean(value for _, value in points))
                for points in zip(*(run.curve for run in runs), strict=True)
            ],
        )


@final
class SimulatedTraining:
    """A training run whose steps can be inspected between ``gradients`` and ``apply``.

    All replicas are equal at every step, so one model represents them.

    Attributes:
        model: the model after the last step.
        losses: the loss of each step, averaged over ranks.
        bytes_sent: the bytes of each step, on the rank that sent the most.
    """

    def __init__(
        self,
        recipe: Recipe,
        algorithm: Algorithm,
        *,
        ranks: int,
        density: float,  # k / n of every unit
        steps: int,  # steps of the whole training; the learning rate rises in the first fifteenth
        whole: int = 0,  # steps at the start that exchange all entries (RedSync's warm-up)
        decay: bool = False,  # whether the rate then falls linearly, to 0 after the last step
        seed: int = 0,  # seed of weights and data
        # parameters that are exchanged sparsely; None: the algorithm's own choice
        compress: Choice | None = None,
        model: nn.Module | None = None,  # model to continue with; None: a new one
    ) -> None:
        self.recipe, self.ranks, self.steps, self.seed = recipe, ranks, steps, seed
        self.model = recipe.make_model(seed) if model is None else model
        self.parameters = dict(self.model.named_parameters())
        output = output_parameters(self.model) if algorithm.output else ()
        self.units = plan_units(
            self.parameters.items(), algorithm.unit_bytes, compress or algorithm.compress, output
        )
        corrects = preset(algorithm.name).corrects
        correction = (
            Correction(momentum=_MOMENTUM, nesterov=recipe.nesterov, clip=recipe.clip)
            if corrects
            else None
        )

        async def make(comm: SimCommunicator) -> Reducer:
            return Reducer(
                comm, self.units, algorithm, density, Warmup(whole), correction=correction
            )

        self.reducers = simulate(make, ranks).results
        self.clip = None if corrects else recipe.clip
        self.lr = recipe.lr if algorithm.average else recipe.lr / ranks  # a sum is P times the mean
        self.ramp, self.decay = max(steps // _RAMP, 1), decay
        self.optimizer = torch.optim.SGD(
            self.model.parameters(),
            lr=self.lr,
            momentum=0.0 if corrects else _MOMENTUM,
            nesterov=recipe.nesterov and not corrects,
        )
        self.losses: list[float] = []
        self.bytes_sent: list[int] = []

    def gradients(self) -> list[list[Tensor]]:
        """Return every rank's flat gradients, one per unit, at the present weights."""
        losses, gradients = [], []
        for rank in range(self.ranks):
            draw = Draw(self.seed, len(self.losses), rank, self.ranks, self.recipe.batch_size)
            inputs, targets = self.recipe.workload.batch(draw)
            self.optimizer.zero_grad()
            loss = self.recipe.workload.loss(self.model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
            gradients.append([self._flat(slot.name for slot in u.slots) for u in self.units])
        self.losses.append(fmean(losses))
        return gradients

    def accumulated(self, gradients: Sequence[Sequence[Tensor]], unit: int = 0) -> list[Tensor]:
        """Return the vector from which each rank selects in a unit: residual plus gradient."""
        kept = [reducer.residuals[unit].value for reducer in self.reducers]
        mine = [units[unit] for units in gradients]
        return [g.clone() if r is None else r + g for r, g in zip(kept, mine, strict=True)]

    def apply(self, gradients: Sequence[list[Tensor]]) -> list[Vector]:
        """Replace the gradients by their exchanged average and take a step; return the averages."""

        async def program(comm: SimCommunicator) -> list[Vector]:
            reducer = self.reducers[comm.rank]
            reducer.move_to(comm)
            return await reducer.reduce(gradients[comm.rank])

        simulation = simulate(program, self.ranks)
        self.bytes_sent.append(max(ledger.total().sent for ledger in simulation.ledgers))
        for unit, average in zip(self.units, gradients[0], strict=True):
            for slot in unit.slots:
                parameter = self.parameters[slot.name]
                part = average[slot.start : slot.start + slot.size]
                parameter.grad = part.view_as(parameter).clone()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * self._share(len(self.losses))
        self.optimizer.step()
        return simulation.results[0]

    def evaluate(self) -> Evaluation:
        """Evaluate on all held-out data."""
        return self.recipe.workload.evaluate(self.model)

    def run(self, *, evaluations: int = 0) -> Trained:
        """Train from the first step to the last."""
        every = max(self.steps // evaluations, 1) if evaluations else self.steps + 1
        curve = []
        for step in range(1, self.steps + 1):
            self.apply(self.gradients())
            if step % every == 0:
                curve.append((float(step), self.recipe.score(self.evaluate())))
        return Trained(self.losses, self.evaluate(), fmean(self.bytes_sent), curve)

    def _share(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1, as a share of the highest rate."""
        falling = (self.steps + 1 - step) / (self.steps + 1 - self.ramp) if self.decay else 1.0
        return min(step / self.ramp, falling)

    def _flat(self, names: Iterable[str]) -> Tensor:
        parameters = [self.parameters[name] for name in names]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        return torch.cat([grad.flatten() for grad in grads])


@dataclass(frozen=True)
class Way:
    """A method of training a model."""

    algorithm: Algorithm
    density: float = 1.0  # k / n of every unit
    # which parameters are exchanged sparsely; None for the algorithm's own choice
    compress: Choice | None = None
    warmup: float = 0.0  # fraction of the steps, at the start, that exchange all entries


def train_all(
    recipe: Recipe,
    ways: Mapping[str, Way],
    settings: Settings,
    steps: int,
    *,
    evaluations: int = 6,
    initial: Callable[[int], nn.Module] | None = None,
    trainings: int | None = None,
) -> dict[str, Trained]:
    """Train a model with each method on ``RANKS`` virtual ranks; return the means over all seeds.

    The learning rate falls, as in the three papers that train with these methods. ``initial`` maps a
    seed to the model from which training starts; with None, training starts from a new model. The
    progress bar needs ``trainings``, the artifact's number of training runs with one seed; with None,
    the artifact has only the runs of this call.
    """
    found: dict[str, list[Trained]] = {name: [] for name in ways}
    seeds = settings.seeds_or(1)
    for seed in seeds:
        start = None if initial is None else initial(seed)
        for name, way in ways.items():
            training = SimulatedTraining(
                recipe,
                way.algorithm,
                ranks=settings.pick(RANKS, 2),
                density=way.density,
                steps=steps,
                whole=round(way.warmup * steps),
                decay=True,
                seed=seed,
                compress=way.compress,
                model=copy.deepcopy(start),
            )
            found[name].append(training.run(evaluations=evaluations))
            settings.advance(len(seeds) * (len(ways) if trainings is None else trainings))
    return {name: Trained.mean(runs) for name, runs in found.items()}


def learning_curves(recipe: Recipe, found: dict[str, Trained]) -> Panel:
    """Plot the held-out accuracy or loss of several training runs over their steps."""
    value = "held-out accuracy" if recipe.workload.classifies else "held-out loss"
    return Panel(recipe.name, "step", value, {name: run.curve for name, run in found.items()})
