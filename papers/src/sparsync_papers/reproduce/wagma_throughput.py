"""Measure throughput in virtual time (WAGMA, Figures 4, 7 and 10, and the control of section 5.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean

import torch

from sparsync.averaging.averager import Averager
from sparsync.averaging.schemes import SCHEMES
from sparsync.cli.workloads.delays import Delay
from sparsync.published.baselines.gossip import Exponential, exchange
from sparsync.transports.sim import Links, SimCommunicator, simulate
from sparsync_papers.reproduce import Comparison, Outcome, Panel, Row, Settings, Table, artifact
from sparsync_papers.workloads.length_buckets import LinesWorkload

# Section 5.2 states these steps per second for 64 ranks without delays.  AD-PSGD hides its
# communication, so its step is pure computation; local SGD's step includes an allreduce of
# 2 n (P - 1) / P elements.
_LOCAL_RATE, _ADPSGD_RATE = 1.52, 1.61
_RESNET, _TRANSFORMER, _NAVIGATION = 25_559_081, 61_362_176, 8_476_421  # parameters (5.2 to 5.4)
COMPUTE = 1 / _ADPSGD_RATE  # seconds per step of ResNet-50
BETA = (1 / _LOCAL_RATE - COMPUTE) / (2 * 4 * _RESNET * 63 / 64)  # seconds per byte
ALPHA = 2e-6  # seconds per message, for a hop of such a network (assumed)
# seconds that a mean batch takes (assumed): 2,700 tokens (of at most 8,192) at 10,000 per second
TRANSFORMER_COMPUTE = 0.27
LATE = Delay("random", 2, 0.32)  # section 5.2
TAIL = Delay("heavytail", 1.7, 43.5)  # section 5.4
# elements of the simulated vector; beta is scaled, so that exchanging it takes as long as the model
SIZE = 8192

_FASTER = 1.02  # smallest ratio of throughputs that counts as faster
_SPREAD = 1.07  # fastest / slowest scheme if no rank is late (1.61 / 1.51)
# For schemes without a global average, enough steps are needed for delays to spread, one hop per step.
# With more than ``_MOST_RANKS`` ranks, ``_MANY_STEPS`` steps are simulated.
_LONG_STEPS, _MOST_RANKS = 60, 256
_MANY_STEPS = 24
_PERIODS = 4  # periods to simulate for schemes with a global average; fewer with many ranks

Work = Callable[[int, int, int, int], float]  # step, rank, world_size, seed -> seconds


@dataclass(frozen=True)
class Setting:
    """A figure's model and ranks, and the costs of each step."""

    title: str  # title of its plot
    parameters: int  # parameters of the paper's model, which messages carry
    ranks: tuple[int, ...]  # world sizes
    period: int  # steps between WAGMA's global averages, tau
    work: Work  # seconds that a rank computes at a step

    def links(self, size: int) -> Links:
        """Return links on which ``size`` elements take as long as the parameters of the paper's model."""
        return Links(ALPHA, BETA * self.parameters / size)


@dataclass(frozen=True)
class Scheme:
    """A scheme with its options, in which "P" and "tau" stand for the setting's values.

    Example:
        >>> wagma = Scheme("wagma", {"group_size": "P"}).make(SETTINGS["fig4"], 16)
        >>> wagma.group_size, wagma.sync_period
        (16, 10)
    """

    name: str  # name in ``SCHEMES``
    options: Mapping[str, int | str | bool] = field(default_factory=dict)  # options of the scheme
    barrier: int | str = 0  # steps between barriers added to the scheme; 0: none

    def make(self, setting: Setting, ranks: int) -> Averager:
        """Make a rank's averager."""
        options = {name: _number(value, setting, ranks) for name, value in self.options.items()}
        return SCHEMES[self.name](**options)

    @property
    def all_wait(self) -> bool:
        """Whether every rank waits for all other ranks on every step."""
        return self.barrier == 1 or self.name == "allreduce" or self.options.get("period") == 1


def _number(value: int | str, setting: Setting, ranks: int) -> int | str:
    return {"P": ranks, "tau": setting.period}.get(str(value), value)


def _delayed(compute: float, step: int, rank: int, world_size: int, seed: int) -> float:
    """Return the computation time in seconds, with 320 ms added for two of the ranks on every step."""
    return compute + LATE.seconds(step, rank, world_size, seed)


def translated(lines: LinesWorkload, step: int, rank: int, world_size: int, seed: int) -> float:
    """Return the seconds that a translator's batch takes, in proportion to its bucket's length."""
    return TRANSFORMER_COMPUTE * lines.relative_cost(seed=seed, step=step, rank=rank)


SETTINGS: Mapping[str, Setting] = {
    "fig4": Setting(
        "Figure 4: ResNet-50, two random ranks 320 ms late",
        _RESNET,
        (4, 8, 16, 32, 64, 128, 256),
        10,
        partial(_delayed, COMPUTE),
    ),
    "control": Setting(
        "Control: ResNet-50, nobody late", _RESNET, (64,), 10, lambda *place: COMPUTE
    ),
    "half": Setting(
        "Half the batch: ResNet-50, two random ranks 320 ms late",
        _RESNET,
        (64,),
        10,
        partial(_delayed, COMPUTE / 2),
    ),
    "fig7": Setting(
        "Figure 7: Transformer, lines in length buckets",
        _TRANSFORMER,
        (4, 8, 16, 32, 64),
        8,
        partial(translated, LinesWorkload()),
    ),
    "fig10": Setting(
        "Figure 10: navigation, heavy tail from 1.7 to 43.5 s",
        _NAVIGATION,
        (16, 32, 64, 128, 256, 512, 1024),
        8,
        TAIL.seconds,
    ),
}

ROWS: Mapping[str, Scheme] = {
    "WAGMA": Scheme("wagma", {"sync_period": "tau"}),
    "AD-PSGD": Scheme("adpsgd"),
    "eager-SGD, solo": Scheme("eager-solo"),
    "eager-SGD, majority": Scheme("eager-majority"),
    "SGP, 1 neighbour": Scheme("sgp", {"neighbours": 1}),
    "SGP, 2 neighbours": Scheme("sgp", {"neighbours": 2}),
    "SGP, 4 neighbours": Scheme("sgp", {"neighbours": 4}),
    "D-PSGD": Scheme("dpsgd"),
    "local SGD, H = 1": Scheme("local", {"period": 1}),
    "Allreduce-SGD": Scheme("allreduce"),
    "local SGD, H = tau": Scheme("local", {"period": "tau"}),
}

_WHOLE = {"sync_period": "tau", "group_size": "P"}
_LOCAL, _SGP_2, _SGP_4 = "local SGD, H = 1", "SGP, 2 neighbours", "SGP, 4 neighbours"
_MEETS, _EAGER_MEETS = ", barrier every step", "eager-SGD, majority, barrier every tau steps"
_S_P, _S_P_WAITS = "WAGMA, S = P", "WAGMA, S = P, waits for its group"
# variants that the paper may have used, simulated only at one or two world sizes
VARIANTS: Mapping[str, Scheme] = {
    _S_P: Scheme("wagma", _WHOLE),
    _S_P_WAITS: Scheme("wagma", {**_WHOLE, "grouping": "synchronous"}),
    _EAGER_MEETS: Scheme("eager-majority", barrier="tau"),
    f"D-PSGD{_MEETS}": Scheme("dpsgd", barrier=1),
    f"{_SGP_2}{_MEETS}": Scheme("sgp", {"neighbours": 2}, barrier=1),
    f"{_SGP_4}{_MEETS}": Scheme("sgp", {"neighbours": 4}, barrier=1),
}


@dataclass(frozen=True)
class Target:
    """The ratio of WAGMA's throughput to the throughput of another scheme, as stated in the paper."""

    figure: str  # a key of ``SETTINGS``
    ranks: int  # P
    ratio: float  # ratio of throughputs
    rows: tuple[str, ...]  # the other scheme, then variants of it that the paper may have run


TARGETS = (
    Target("fig4", 64, 1.25, (_LOCAL,)),
    Target("fig4", 64, 1.25, (_SGP_2, f"{_SGP_2}{_MEETS}")),
    Target("fig4", 64, 1.26, ("Allreduce-SGD",)),
    Target("fig4", 64, 1.23, ("D-PSGD", f"D-PSGD{_MEETS}")),
    Target("fig4", 64, 1.13, ("eager-SGD, majority", "eager-SGD, solo", _EAGER_MEETS)),
    Target("fig4", 64, 1.24, (_S_P, _S_P_WAITS)),
    Target("fig4", 256, 1.37, (_LOCAL,)),
    Target("half", 64, 1.45, (_SGP_2,)),
    Target("half", 64, 1.54, (_LOCAL,)),
    Target("half", 64, 1.63, ("Allreduce-SGD",)),
    Target("fig7", 16, 1.39, (_LOCAL,)),
    Target("fig7", 16, 1.48, (_SGP_2, f"{_SGP_2}{_MEETS}")),
    Target("fig7", 16, 1.10, ("AD-PSGD",)),
    Target("fig7", 16, 1.28, (_S_P, _S_P_WAITS)),
    Target("fig10", 1024, 2.33, (_LOCAL,)),
    Target("fig10", 1024, 1.88, ("D-PSGD", f"D-PSGD{_MEETS}")),
    Target("fig10", 1024, 2.10, (_SGP_4, f"{_SGP_4}{_MEETS}")),
)

_NEIGHBOURS = "a rank waits only for its neighbours, so delays of distant ranks overlap"
_WHY = {
    "D-PSGD": _NEIGHBOURS,
    "SGP": _NEIGHBOURS,
    "eager-SGD": "late ranks need not catch up with a global average; the paper's lost more",
    "AD-PSGD": "here AD-PSGD never waits for the network; the paper's could not hide its messages",
    "WAGMA, S = P": "here groups of all ranks do not wait either",
}
_DIFFERS = (
    "Simulated: 8,192 elements in the model's place on proportionally slower links; computation and beta "
    "are solved from section 5.2's rates without delays. Fewer steps than in "
    "benchmarks/averaging-throughput.md; of the schemes whose ranks all wait on every step only one is "
    "simulated; the others use the longest computation of each step."
)


async def _wait_for_all(comm: SimCommunicator) -> None:
    """Wait in log2 P hops like ``comm.barrier``, but with fewer simulated operations."""
    for hop in range((comm.world_size - 1).bit_length()):
        await exchange(comm, Exponential(), torch.zeros(1, dtype=torch.uint8), hop, "barrier")


def step_seconds(
    setting: Setting, scheme: Scheme, ranks: int, *, steps: int, seed: int = 0
) -> float:
    """Return the duration of a step in virtual seconds, averaged over steps and ranks.

    With a synchronous scheme, all ranks end together. With an asynchronous scheme, ranks end at
    different times, so the result is the mean over ranks. In a longer run, the differences between
    ranks would matter less.
    """
    every = int(_number(scheme.barrier, setting, ranks))

    async def program(comm: SimCommunicator) -> float:
        averager, vector = scheme.make(setting, ranks), torch.zeros(SIZE)
        await averager.begin(comm, vector, 0)
        for step in range(steps):
            await comm.compute(setting.work(step, comm.rank, ranks, seed))
            vector = await averager.average(comm, vector, step)
            if every and (step + 1) % every == 0:
                await _wait_for_all(comm)
        return comm.now

    return fmean(simulate(program, ranks, links=setting.links(SIZE)).results) / steps


def ideal_seconds(setting: Setting, ranks: int, *, steps: int, seed: int = 0) -> float:
    """Return the mean duration, in seconds, of a step that consists only of computation."""
    return fmean(
        setting.work(step, rank, ranks, seed) for step in range(steps) for rank in range(ranks)
    )


def _steps(scheme: Scheme, setting: Setting, ranks: int, *, quick: bool) -> int:
    if quick:
        return setting.period
    global_average = scheme.name in ("wagma", "local", "allreduce") or scheme.barrier
    if not global_average:
        return _LONG_STEPS if ranks <= _MOST_RANKS else _MANY_STEPS
    return setting.period * max(1, min(_PERIODS, 2 * 64 // ranks))


def estimated_seconds(scheme: Scheme, setting: Setting, ranks: int, settings: Settings) -> float:
    """Return the duration of a step in seconds, simulated unless a cheaper estimate suffices.

    An estimate suffices if all ranks wait for each other on every step. It is the longest computation,
    averaged over steps, plus one simulated exchange.
    """
    steps, seed = _steps(scheme, setting, ranks, quick=settings.quick), settings.seed
    if not scheme.all_wait:
        return step_seconds(setting, scheme, ranks, steps=steps, seed=seed)
    longest = [
        max(setting.work(step, rank, ranks, seed) for rank in range(ranks)) for step in range(steps)
    ]
    exchange = step_seconds(setting, scheme, ranks, steps=1, seed=seed) - longest[0]
    return fmean(longest) + exchange


def _rate(row: str, setting: Setting, ranks: int, settings: Settings) -> float:
    """Return the steps per second of one row in the figures."""
    return 1 / estimated_seconds({**ROWS, **VARIANTS}[row], setting, ranks, settings)


def _outcome(
    settings: Settings,
    key: str,
    ranks: tuple[int, ...],
    rows: tuple[str, ...],
    where: str,
    only: str,
    more: str,
) -> Outcome:
    """Simulate the schemes of ``rows`` for all ``ranks``, and further schemes that ``TARGETS`` need."""
    setting, targets = SETTINGS[key], [target for target in TARGETS if target.figure == key]
    cases = []
    for p in settings.pick(ranks, ranks[:1]):
        stated = (row for t in targets if t.ranks == p for row in t.rows)
        cases += [(p, row) for row in dict.fromkeys((*rows, *stated))]
    rates = {
        p: {"ideal": 1 / ideal_seconds(setting, p, steps=_LONG_STEPS, seed=settings.seed)}
        for p, _ in cases
    }
    for p, row in settings.track(cases):
        rates[p][row] = _rate(row, setting, p, settings)
    comparisons = [_compare(t, where, rates[t.ranks]) for t in targets if t.ranks in rates]
    last = rates[max(rates)]
    faster = [row for row in rows if last[row] > _FASTER * last["WAGMA"]]
    what, ours = f"faster than WAGMA, {max(ranks):,} ranks", "; ".join(faster) or "none"
    alone = faster == ["AD-PSGD"]
    comparisons.append(Comparison(what, only, where, ours, alone, _NEIGHBOURS))
    table = Table(
        {
            "scheme": row,
            "P": p,
            "steps per second": rate,
            "of the ideal": rate / found["ideal"],
            "WAGMA over it": found["WAGMA"] / rate,
        }
        for p, found in rates.items()
        for row, rate in found.items()
    )
    curves = table.curves("P", "of the ideal", "scheme")
    shown, y = {row: curves[row] for row in rows}, "throughput, over the ideal"
    return Outcome(
        table,
        comparisons,
        _network(setting),
        f"{_DIFFERS} {more}",
        [Panel(setting.title, "ranks P", y, shown, log="x", level=1.0)],
    )


def _network(setting: Setting) -> Row:
    return {
        "parameters": setting.parameters,
        "tau": setting.period,
        "beta, ns per byte": 1e9 * BETA,
        "alpha, us": 1e6 * ALPHA,
    }


def _compare(target: Target, section: str, rates: Mapping[str, float]) -> Comparison:
    """Compare the ratio of two throughputs, WAGMA's and another scheme's, with the paper's ratio."""
    row, *others = target.rows
    ratio = rates["WAGMA"] / rates[row]
    found = [f"{ratio:.2f} x"]
    found += [f"{rates['WAGMA'] / rates[o]:.2f} x ({o.removeprefix(row + ', ')})" for o in others]
    why = next((why for name, why in _WHY.items() if row.startswith(name)), "")
    remark = why if ratio < 0.9 * target.ratio else ""
    what = f"WAGMA over {row}, {target.ranks} ranks"
    says, ours, why = f"{target.ratio:.2f} x", "; ".join(found), why or "another network"
    return Comparison(what, says, section, ours, ratio >= _FASTER, why, remark)


@artifact(
    "wagma-fig4", "WAGMA is faster than all but AD-PSGD, and more so on more ranks", minutes=2.5
)
def figure_4(settings: Settings) -> Outcome:
    """Throughput of ResNet-50 with two late ranks."""
    return _outcome(
        settings,
        "fig4",
        (4, 16, 64, 256),
        ("WAGMA", "AD-PSGD", _SGP_2, "D-PSGD", _LOCAL, "Allreduce-SGD"),
        "section 5.2",
        "the only algorithm with higher throughput is AD-PSGD",
        "Eager-SGD is compared on 64 ranks alone.",
    )


@artifact("wagma-control", "without delays no scheme is much faster than another", minutes=0.5)
def control(settings: Settings) -> Outcome:
    """Throughput of ResNet-50 when nobody is late."""
    setting, ranks = SETTINGS["control"], settings.pick(64, 8)
    paper = {_LOCAL: 1.52, "WAGMA": 1.55, "AD-PSGD": 1.61, "D-PSGD": 1.57, _SGP_2: 1.51}
    rates = {row: _rate(row, setting, ranks, settings) for row in settings.track(paper)}
    spread, own = max(rates.values()) / min(rates.values()), rates["WAGMA"] / rates[_LOCAL]
    comparisons = [
        Comparison(
            "fastest over slowest",
            "1.07 x",
            "section 5.2",
            f"{spread:.3f} x",
            spread <= _SPREAD,
            "with another number of ranks messages cost more",
        ),
        Comparison(
            "WAGMA over local SGD",
            "1.02 x",
            "section 5.2",
            f"{own:.3f} x",
            1 / _SPREAD <= own <= _SPREAD,
            "groups cost more than one allreduce here",
        ),
    ]
    rows: list[Row] = [
        {"scheme": row, "P": ranks, "steps per second": rate, "paper": paper[row]}
        for row, rate in rates.items()
    ]
    bars = {"ours": list(rates.items()), "paper": list(paper.items())}
    panel = Panel("nobody late", "scheme", "steps per second", bars, kind="bars")
    more = "Local SGD's and AD-PSGD's rates are the paper's by construction."
    return Outcome(rows, comparisons, _network(setting), f"{_DIFFERS} {more}", [panel])


@artifact("wagma-fig7", "WAGMA is fastest on 16 ranks, and second to AD-PSGD on 64", minutes=1.0)
def figure_7(settings: Settings) -> Outcome:
    """Throughput of a Transformer on sentences of unequal lengths."""
    return _outcome(
        settings,
        "fig7",
        (4, 16, 64),
        ("WAGMA", "AD-PSGD", "SGP, 1 neighbour", _SGP_2, "D-PSGD", _LOCAL, "Allreduce-SGD"),
        "section 5.3",
        "only AD-PSGD",
        "Computation, 0.27 s of a mean batch, is assumed; lengths are of lines of Python's own source.",
    )


@artifact("wagma-fig10", "WAGMA is twice as fast as all but AD-PSGD on 1,024 ranks", minutes=3.0)
def figure_10(settings: Settings) -> Outcome:
    """Throughput of reinforcement learning, whose steps have a heavy tail."""
    return _outcome(
        settings,
        "fig10",
        (16, 64, 256, 1024),
        ("WAGMA", "AD-PSGD", _SGP_4, "D-PSGD", _LOCAL),
        "section 5.4",
        "only AD-PSGD is",
        "A step's computation consists of the heavy tail alone; from 128 ranks on WAGMA runs for one "
        "period.",
    )
