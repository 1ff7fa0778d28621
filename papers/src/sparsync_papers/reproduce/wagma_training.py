"""Train small models over virtual time (WAGMA, Figures 5, 8 and 11, and its ablations).

Each rank has its own model, which is stale on late ranks. Steps and messages are real; time is
virtual.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, pstdev

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from sparsync.cli.workloads.digits import DigitsWorkload
from sparsync.cli.workloads.workload import Draw
from sparsync.transports.sim import SimCommunicator, simulate
from sparsync_papers.reproduce import Comparison, Outcome, Panel, Row, Settings, Table, artifact
from sparsync_papers.reproduce.one_process import Recipe
from sparsync_papers.reproduce.wagma_throughput import ROWS, SETTINGS, Scheme, Setting, translated
from sparsync_papers.workloads.folders import seeded
from sparsync_papers.workloads.length_buckets import LinesWorkload
from sparsync_papers.workloads.ppo import Ppo

_MOMENTUM = 0.9  # momentum of SGD (not stated in the paper)
_RAMP = 10  # the learning rate rises over a tenth of the steps
_LOOKS = 5  # points of a curve
_RANKS, _STEPS = 64, 240  # section 5.2; the number of steps is a choice made here
_TRANSLATED_RANKS, _TRANSLATED_STEPS = 16, 300  # section 5.3; the steps are a choice made here
_SEEDS = 3  # several, because seeds differ by more than schemes and parts of WAGMA do
_POINT = 1.0  # smallest difference in accuracy that counts, in % (three or four of 359 images)
_LEVEL = 0.01  # largest relative difference in loss that does not count

_WAGMA, _ALLREDUCE, _LOCAL, _ADPSGD = "WAGMA", "Allreduce-SGD", "local SGD, H = 1", "AD-PSGD"
_SGP_1, _SGP_2, _SGP_4 = (f"SGP, {n} neighbour{'s' * (n > 1)}" for n in (1, 2, 4))
_SHORT = "so short a training run tolerates slower mixing; the paper's long ones do not"
_STALE = "most updates of a short run are recent, and averaging with stale models undoes some"
_OWN = (
    "The paper does not say which model it scores. Here each rank's own model is scored, on one step of "
    "the last period, and together the ranks show all of its steps: during training, a rank has no other "
    "model. The mean of all models hides how far apart they are, and is in a column of its own."
)
_AVOIDS = "here a rank waits only for its neighbours, so delays of distant ranks overlap"

# returns a rank's model, and a function that trains this model for one step, given its number
MakeReplica = Callable[[int], tuple[nn.Module, Callable[[int], None]]]
_Curve = list[tuple[float, float]]


@dataclass(frozen=True)
class Averaged:
    """The result of a training run with averaged models."""

    final: Tensor  # parameters after ``finish()``, `[parameters]`
    # the parameters of each rank's own model, recorded at one step of the last period; different ranks
    # record at different steps, so that all steps of the period are represented
    own: list[Tensor]
    seconds: float  # virtual seconds per step, mean over ranks
    # points ``(virtual seconds, parameters of all ranks' own models)``, equally spaced in steps
    looks: list[tuple[float, list[Tensor]]]


def average_models(
    make_replica: MakeReplica,
    setting: Setting,
    scheme: Scheme,
    seed: int,
    *,
    ranks: int,
    steps: int,
) -> Averaged:
    """Train and average models on virtual ranks."""
    looked = {max(steps * look // _LOOKS, 1) for look in range(1, _LOOKS + 1)}
    last = max(steps - setting.period, 0)  # the step at which the last period begins
    own: dict[int, Tensor] = {}
    looks: dict[int, list[tuple[float, Tensor]]] = {step: [] for step in sorted(looked)}

    async def program(comm: SimCommunicator) -> tuple[Tensor, float]:
        model, descend = make_replica(comm.rank)
        vector, averager = _read(model), scheme.make(setting, ranks)
        await averager.begin(comm, vector, 0)
        for step in range(steps):
            await comm.compute(setting.work(step, comm.rank, ranks, seed))
            descend(step)
            vector = await averager.average(comm, _read(model), step)
            _write_(model, vector)
            if step == last + comm.rank % (steps - last):
                own[comm.rank] = vector.clone()
            if step + 1 in looks:
                looks[step + 1].append((comm.now, vector.clone()))
        seconds = comm.now
        return await averager.conclude(comm, vector, steps), seconds

    size = _read(make_replica(0)[0]).numel()
    results = simulate(program, ranks, links=setting.links(size)).results
    return Averaged(
        results[0][0],
        [own[rank] for rank in range(ranks)],
        fmean(seconds for _, seconds in results) / steps,
        [
            (fmean(seconds for seconds, _ in found), [vector for _, vector in found])
            for found in looks.values()
        ],
    )


def _read(model: nn.Module) -> Tensor:
    return parameters_to_vector(model.parameters()).detach()


def _write_(model: nn.Module, vector: Tensor) -> None:
    # copy the vector: parameters become views of it, but the averager may send it to others later
    vector_to_parameters(vector.clone(), model.parameters())


@dataclass(frozen=True)
class _Timed:
    """The result of a training run over virtual time."""

    value: float  # score, i.e. held-out accuracy in % or loss; mean over the ranks' own models
    final: float  # score of the model after ``finish()``
    seconds: float  # virtual seconds per step, mean over ranks
    curve: _Curve  # scores of the ranks' own models over virtual seconds
    loss: float  # held-out loss, mean over the ranks' own models
    final_loss: float  # held-out loss of the model after ``finish()``

    @staticmethod
    def mean(runs: Sequence[_Timed]) -> _Timed:
        """Return the mean of equally long runs."""
        names = ("value", "final", "seconds", "loss", "final_loss")
        means = {name: fmean(getattr(run, name) for run in runs) for name in names}
        return _Timed(curve=_mean_curve([run.curve for run in runs]), **means)


def _mean_curve(curves: Sequence[_Curve]) -> _Curve:
    """Average the x and y values of curves with equally many points."""
    return [
        (fmean(x for x, _ in points), fmean(y for _, y in points))
        for points in zip(*curves, strict=True)
    ]


def _train(
    recipe: Recipe, setting: Setting, scheme: Scheme, seed: int, *, ranks: int, steps: int
) -> _Timed:
    """Train a recipe's model with SGD and momentum on virtual ranks."""

    def make_replica(rank: int) -> tuple[nn.Module, Callable[[int], None]]:
        model = recipe.make_model(seed)
        optimizer = torch.optim.SGD(model.parameters(), recipe.lr, momentum=_MOMENTUM)

        def descend(step: int) -> None:
            draw = Draw(seed, step, rank, ranks, recipe.batch_size)
            inputs, targets = recipe.workload.batch(draw)
            for group in optimizer.param_groups:
                group["lr"] = recipe.lr * min((step + 1) / max(steps // _RAMP, 1), 1.0)
            optimizer.zero_grad()
            recipe.workload.loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        return model, descend

    spare = recipe.make_model(seed)

    def measured(vector: Tensor) -> tuple[float, float]:
        """Return a model's score and loss."""
        _write_(spare, vector)
        found = recipe.workload.evaluate(spare)
        score = recipe.score(found)
        return 100 * score if recipe.workload.classifies else score, found.loss

    run = average_models(make_replica, setting, scheme, seed, ranks=ranks, steps=steps)
    values, losses = zip(*map(measured, run.own), strict=True)
    final, final_loss = measured(run.final)
    curve = [(at, fmean(measured(vector)[0] for vector in look)) for at, look in run.looks]
    return _Timed(fmean(values), final, run.seconds, curve, fmean(losses), final_loss)


def _outcome(
    settings: Settings,
    recipe: Recipe,
    setting: Setting,
    section: str,
    *,
    ranks: int,
    steps: int,
    paper: Mapping[str, float | None],  # scheme -> its score in the paper; None: not stated
    slower: Mapping[str, float],  # scheme -> its time / WAGMA's time in the paper
    # compares the schemes' scores: first of the ranks' own models, then of the final averages
    compare: Callable[[Mapping[str, float], Mapping[str, float]], list[Comparison]],
    more: str,
) -> Outcome:
    """Train one model with several schemes; compare scores, and the times for equally many steps."""
    seeds = settings.seeds_or(_SEEDS)
    found = {
        name: _Timed.mean(
            [_train(recipe, setting, ROWS[name], seed, ranks=ranks, steps=steps) for seed in seeds]
        )
        for name in settings.track(paper)
    }
    times = {name: run.seconds / found[_WAGMA].seconds for name, run in found.items()}
    comparisons = compare(
        {name: run.value for name, run in found.items()},
        {name: run.final for name, run in found.items()},
    )
    for name, ratio in slower.items():
        what, ours, same = (
            f"time of {name} over WAGMA's",
            f"{times[name]:.2f} x",
            times[name] >= 1.02,
        )
        remark = _AVOIDS if "SGP" in name else ""
        comparisons.append(Comparison(what, f"{ratio} x", section, ours, same, _AVOIDS, remark))
    accuracy = recipe.workload.classifies
    value = "held-out accuracy, %" if accuracy else "held-out loss"
    score = "top-1 accuracy there, %" if accuracy else "BLEU there"
    rows: list[Row] = [
        {
            "scheme": name,
            value: run.value,
            "of the mean of all": run.final,
            score: paper[name],
            "virtual ms per step": 1e3 * run.seconds,
            "WAGMA's speed over it": times[name],
        }
        for name, run in found.items()
    ]
    used: Row = {
        "ranks": ranks,
        "steps": steps,
        "seeds": len(seeds),
        "tau": setting.period,
        "lr": recipe.lr,
        "batch per rank": recipe.batch_size,
    }
    differs = (
        f"{recipe.name.capitalize()}; {ranks} virtual ranks, {steps} steps; training is "
        f"real, time is simulated with the paper's model on the wire. {_OWN} {more}"
    )
    series = {name: run.curve for name, run in found.items()}
    panel = Panel(recipe.name, "virtual seconds", f"{value}, ranks' own models", series)
    return Outcome(rows, comparisons, used, differs, [panel])


def _perceptron_recipe() -> Recipe:
    """Return a recipe whose model is small enough for 64 ranks, with 256 images per step in total."""

    def make_model(seed: int) -> nn.Module:
        return seeded(_perceptron, seed)

    return Recipe("perceptron, digits", DigitsWorkload(), make_model, lr=0.2, batch_size=4)


def _lines_recipe(lines: LinesWorkload) -> Recipe:
    return Recipe("transformer, lines", lines, lines.make_model, lr=0.3, batch_size=4)


def _perceptron() -> nn.Module:
    layers = (nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    return nn.Sequential(*layers)


@artifact(
    "wagma-fig5",
    "WAGMA is as accurate as Allreduce-SGD in less time; gossip is less accurate",
    minutes=6.0,
    steps=_STEPS,
    repeats=True,
)
def figure_5(settings: Settings) -> Outcome:
    """Accuracy over time with two late ranks, small."""
    section = "section 5.2"

    def compare(values: Mapping[str, float], means: Mapping[str, float]) -> list[Comparison]:
        def over(names: Sequence[str], of: str) -> tuple[list[float], str]:
            points, meant = ([its[name] - its[of] for name in names] for its in (values, means))
            ours, theirs = (", ".join(f"{x:+.1f}" for x in found) for found in (points, meant))
            return points, f"{ours} points; of the mean of all models {theirs}"

        what, says = "top-1 accuracy, WAGMA - Allreduce-SGD", "75.3 - 75.9 %"
        more, ours = over([_WAGMA], _ALLREDUCE)
        found = [Comparison(what, says, section, ours, more[0] >= -_POINT, _STALE)]
        for of, says, names in (
            ("SGP - WAGMA", "74.8 - 75.3 %", [_SGP_2]),
            ("D-PSGD and AD-PSGD", "much lower", ["D-PSGD", _ADPSGD]),
        ):
            less, ours = over(names, _WAGMA)
            what, same = f"top-1 accuracy, {of}", max(less) < -_POINT
            found.append(Comparison(what, says, section, ours, same, _SHORT))
        return found

    return _outcome(
        settings,
        _perceptron_recipe(),
        SETTINGS["half"],
        section,
        ranks=settings.pick(_RANKS, 4),
        steps=settings.steps_or(_STEPS, 10),
        paper={_ALLREDUCE: 75.9, _WAGMA: 75.3, _SGP_2: 74.8, "D-PSGD": None, _ADPSGD: None},
        slower={_SGP_2: 1.45, _ALLREDUCE: 1.63},
        compare=compare,
        more="Local SGD with H = 1 (75.6 %, 1.54 x) averages as Allreduce-SGD does here.",
    )


@artifact(
    "wagma-fig8",
    "WAGMA reaches the best score in the shortest time",
    minutes=8.0,
    steps=_TRANSLATED_STEPS,
    repeats=True,
)
def figure_8(settings: Settings) -> Outcome:
    """Training on lines of unequal lengths over time, small."""
    lines, section = LinesWorkload(context=48, width=64, layers=1), "section 5.3"
    best = 26.12
    paper = {_LOCAL: 25.98, _SGP_2: 26.01, _SGP_1: 25.75, "D-PSGD": 25.69, _ADPSGD: 25.21}

    def compare(values: Mapping[str, float], means: Mapping[str, float]) -> list[Comparison]:
        found = []
        for name, score in paper.items():
            over, meant = (its[name] / its[_WAGMA] - 1 for its in (values, means))
            same = over > _LEVEL if score < best - 0.2 else over >= -_LEVEL
            what, says = f"BLEU, {name} and WAGMA", f"{score} and {best}"
            ours = f"loss {100 * over:+.1f} %; of the mean of all models {100 * meant:+.1f} %"
            found.append(Comparison(what, says, section, ours, same, _STALE))
        return found

    return _outcome(
        settings,
        _lines_recipe(lines),
        replace(SETTINGS["fig7"], work=partial(translated, lines)),
        section,
        ranks=settings.pick(_TRANSLATED_RANKS, 4),
        steps=settings.steps_or(_TRANSLATED_STEPS, 8),
        paper={_WAGMA: best, **paper},
        slower={_SGP_2: 1.48, _LOCAL: 1.39},
        compare=compare,
        more="Held-out loss of Python's source stands for BLEU; scores within 0.2 in the paper count as "
        "equal here if losses are within 1 %.",
    )


@dataclass(frozen=True)
class _Ablation:
    """WAGMA without one of its parts, or with a group size other than its own."""

    section: str  # the paper's section
    what: str  # name in the table
    scheme: Scheme
    score: str  # the paper's top-1 accuracy or BLEU; "" for WAGMA itself, which comes first
    worse: bool = True  # whether the paper finds it worse than WAGMA; False: no better


def _wagma(**options: int | bool) -> Scheme:
    return Scheme("wagma", {"sync_period": "tau", **options})


_ABLATIONS = (
    _Ablation("section 5.2", "WAGMA, S = 8", _wagma(group_size=8), ""),
    _Ablation(
        "section 5.2",
        "no group collectives",
        Scheme("local", {"period": "tau"}),
        "75.3 to 68.5 % top-1",
    ),
    _Ablation(
        "section 5.2",
        "fixed groups",
        _wagma(group_size=8, dynamic=False),
        "75.3 to 72.2 % top-1",
    ),
    _Ablation("section 5.2", "S = P = 64", _wagma(group_size=64), "does not increase", worse=False),
    _Ablation("section 5.2", "S = 4", _wagma(group_size=4), "75.3 to 72.8 % top-1"),
    _Ablation("section 5.3", "WAGMA, S = 4", _wagma(group_size=4), ""),
    _Ablation(
        "section 5.3", "fixed groups", _wagma(group_size=4, dynamic=False), "BLEU 26.12 to 24.79"
    ),
    _Ablation("section 5.3", "S = P = 16", _wagma(group_size=16), "does not improve", worse=False),
    _Ablation("section 5.3", "S = 2", _wagma(group_size=2), "BLEU 26.12 to 24.53"),
)

_ABLATED_STEPS = 120  # steps of each model, a choice made here


def _ablated(
    settings: Settings, section: str, ranks: int, steps: int, seeds: Sequence[int]
) -> dict[str, list[_Timed]]:
    """Train WAGMA and a section's ablations, all with the same seeds."""
    if section == "section 5.2":
        recipe, setting = _perceptron_recipe(), SETTINGS["half"]
    else:
        lines = LinesWorkload(context=48, width=64, layers=1)
        recipe = _lines_recipe(lines)
        setting = replace(SETTINGS["fig7"], work=partial(translated, lines))
    found: dict[str, list[_Timed]] = {}
    for one in _ABLATIONS:
        if one.section == section:
            size = one.scheme.options.get("group_size")
            fits = {} if size is None else {"group_size": min(int(size), ranks)}  # in a quick run
            scheme = replace(one.scheme, options={**one.scheme.options, **fits})
            found[one.what] = [
                _train(recipe, setting, scheme, seed, ranks=ranks, steps=steps) for seed in seeds
            ]
            settings.advance(len(_ABLATIONS))
    return found


def _compare_ablated(one: _Ablation, over: Sequence[float], runs: str) -> Comparison:
    """Compare an ablation with the paper; its losses are relative to WAGMA's loss for the same seed."""
    mean = fmean(over)
    ours = f"loss {100 * mean:+.2f} ± {100 * pstdev(over):.2f} %; {runs}"
    if one.worse:
        same, why = min(over) > 0, _SHORT
        ours += f"; worse in {sum(x > 0 for x in over)} of {len(over)}"
    else:
        same, why = mean >= -_LEVEL, "fresh models of all ranks help a short training most"
    return Comparison(f"{one.what}, against WAGMA", one.score, one.section, ours, same, why)


@artifact(
    "wagma-ablations",
    "group collectives, dynamic groups and S = sqrt(P) each contribute; larger groups do not",
    minutes=8.0,
    steps=_ABLATED_STEPS,
    repeats=True,
)
def ablations(settings: Settings) -> Outcome:
    """Ablations of WAGMA: without parts of it, and with other group sizes, small (5.2 and 5.3)."""
    steps = settings.steps_or(_ABLATED_STEPS, 8)
    seeds = settings.seeds_or(_SEEDS)
    rows, comparisons = Table(), []
    sections = {"section 5.2": settings.pick(_RANKS, 8), "section 5.3": settings.pick(16, 4)}
    for section, ranks in sections.items():
        found = _ablated(settings, section, ranks, steps, seeds)
        base = next(iter(found.values()))
        for one in (one for one in _ABLATIONS if one.section == section):
            runs = found[one.what]
            pairs = list(zip(runs, base, strict=True))
            over = [run.loss / wagma.loss - 1 for run, wagma in pairs]
            meant = [run.final_loss / wagma.final_loss - 1 for run, wagma in pairs]
            if one.score:
                comparisons.append(_compare_ablated(one, over, f"P = {ranks}"))
            rows.append(
                {
                    "section": section.removeprefix("section "),
                    "scheme": one.what,
                    "held-out loss": fmean(run.loss for run in runs),
                    "over WAGMA, %": 100 * fmean(over),
                    "deviation, %": 100 * pstdev(over),
                    "mean of all, over WAGMA's, %": 100 * fmean(meant),
                    "paper": one.score or "-",
                    "virtual ms per step": 1e3 * fmean(run.seconds for run in runs),
                }
            )
    bars = {
        section: [
            (str(row["scheme"]), float(row["over WAGMA, %"] or 0))
            for row in rows.where({"section": section.removeprefix("section ")})
        ]
        for section in sections
    }
    panels = [
        Panel(section, "scheme", "held-out loss over WAGMA, %", {"ours": points}, kind="bars")
        for section, points in bars.items()
    ]
    used: Row = {"steps": steps, "seeds": len(seeds), "tau": "10 and 8"}
    differs = (
        "Section 5.2: a perceptron on digits, 64 ranks, two random ones late by 320 ms on every step, "
        "4 images per rank. Section 5.3: a small transformer on lines of Python's source, 16 ranks. "
        "Training is real, time is simulated with the paper's model on the wire. Losses are compared "
        f"seed by seed, because parts contribute less than seeds differ. {_OWN} The throughput of S = P "
        "is in wagma-fig4 and wagma-fig7; benchmarks/averaging-ablations.md trains a transformer "
        "on 64 ranks."
    )
    return Outcome(rows, comparisons, used, differs, panels)


_RL_RANKS, _ITERATIONS, _RUNS = 8, 32, 4  # four runs as in section 5.4
_EPISODES, _EPOCHS = 1, 4  # per iteration; few, so that a step is fast
_WINDOW = 4  # number of iterations whose returns are averaged into one point of the curve


def _play(scheme: Scheme, seed: int, ranks: int, iterations: int) -> _Curve:
    """Train with PPO; return the mean episode return over all ranks as a curve over virtual time."""
    task = Ppo(episodes=_EPISODES, epochs=_EPOCHS)
    returns: list[list[float]] = [[] for _ in range(iterations)]

    def make_replica(rank: int) -> tuple[nn.Module, Callable[[int], None]]:
        model = task.make_model(seed)
        optimizer = torch.optim.Adam(model.parameters(), task.lr)

        def learn(step: int) -> None:
            experience = task.collect(model, seed=seed, iteration=step, rank=rank)
            task.update_(model, optimizer, experience, seed=seed, iteration=step, rank=rank)
            returns[step] += experience.returns

        return model, learn

    setting = SETTINGS["fig10"]
    run = average_models(make_replica, setting, scheme, seed, ranks=ranks, steps=iterations)
    return [
        (run.seconds * last, fmean(x for window in returns[last - _WINDOW : last] for x in window))
        for last in range(_WINDOW, iterations + 1, _WINDOW)
    ]


def _reached(curve: Sequence[tuple[float, float]], seconds: float) -> float:
    """Return a curve's value at a time: its last point up to then, or else its first point."""
    return max((point for point in curve if point[0] <= seconds), default=curve[0])[1]


@artifact(
    "wagma-fig11",
    "WAGMA scores highest; AD-PSGD does not learn",
    minutes=2.0,
    steps=_ITERATIONS,
    repeats=True,
)
def figure_11(settings: Settings) -> Outcome:
    """Return of reinforcement learning over time, small (needs Gymnasium)."""
    ranks, names = settings.pick(_RL_RANKS, 2), (_WAGMA, _LOCAL, _SGP_4, _ADPSGD)
    # each point of the curve averages this many iterations, so there must be at least as many
    iterations = max(settings.steps_or(_ITERATIONS, _WINDOW), _WINDOW)
    seeds = settings.seeds_or(_RUNS)
    curves = {
        name: [_play(ROWS[name], seed, ranks, iterations) for seed in seeds]
        for name in settings.track(names)
    }
    # compare the values at the time when WAGMA's run ends; by then, faster schemes have completed more
    # iterations
    end = fmean(curve[-1][0] for curve in curves[_WAGMA])
    rows = Table()
    at, last, means = {}, {}, {}
    for name, found in curves.items():
        reached = [_reached(curve, end * 1.001) for curve in found]
        at[name], last[name] = fmean(reached), fmean(curve[-1][1] for curve in found)
        rows.append(
            {
                "scheme": name,
                "return at WAGMA's end": at[name],
                "deviation": pstdev(reached),
                "return after all iterations": last[name],
                "virtual seconds per iteration": fmean(c[-1][0] for c in found) / iterations,
            }
        )
        means[name] = _mean_curve(found)
    comparisons = [
        Comparison(
            "score over local SGD and SGP after 10 hours",
            "the highest",
            "section 5.4",
            f"{at[_WAGMA]:.0f} over {at[_LOCAL]:.0f} and {at[_SGP_4]:.0f} when WAGMA ends",
            at[_WAGMA] >= max(at[_LOCAL], at[_SGP_4]),
            "runs differ by more than schemes, and 8 ranks mix quickly",
        ),
        Comparison(
            "AD-PSGD's score",
            "lowest: 0.051 of 0.922",
            "section 5.4",
            f"{last[_ADPSGD]:.0f}, WAGMA {last[_WAGMA]:.0f} after equal iterations",
            last[_ADPSGD] < last[_WAGMA] / 2,
            "pairwise averages of 8 ranks and a small model keep up",
        ),
    ]
    return Outcome(
        rows,
        comparisons,
        {"ranks": ranks, "steps": iterations, "seeds": len(seeds), "tau": SETTINGS["fig10"].period},
        "CartPole with two small perceptrons instead of navigation in Habitat with ResNet-18 and LSTMs: "
        "returns, not SPL; the heavy tail of wagma-fig10 gives the time of an iteration; "
        f"{iterations} iterations instead of 10 hours.",
        [Panel("CartPole", "virtual seconds", "return, mean of all ranks' episodes", means)],
    )
