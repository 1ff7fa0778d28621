"""WAGMA, Figures 4, 7 and 10 and the control of section 5.2: throughput in virtual time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from types import MappingProxyType

from sparsync.reproduce.base import Artifact, Comparison, Outcome, Panel, Row, Settings, Stated
from sparsync.reproduce.wagma_throughput import (
    ALPHA,
    BETA,
    ROWS,
    SETTINGS,
    TARGETS,
    VARIANTS,
    Scheme,
    Setting,
    Target,
    ideal_seconds,
    step_seconds,
)

__all__ = ["CONTROL", "FIGURE_10", "FIGURE_4", "FIGURE_7"]

_SCHEMES: Mapping[str, Scheme] = MappingProxyType({**ROWS, **VARIANTS})
_LOCAL, _SGP_2, _SGP_4 = "local SGD, H = 1", "SGP, 2 neighbours", "SGP, 4 neighbours"
_FASTER = 1.02  # throughput over another's from which it counts (ours)
_SPREAD = 1.07  # fastest over slowest where nobody is late (1.61 over 1.51)
_WITHOUT_GLOBAL = ("dpsgd", "sgp", "adpsgd", "eager-solo", "eager-majority")
_LONG_STEPS, _MOST_RANKS = 60, 256  # delays spread by a hop per step; above, fewer steps
_MANY_STEPS = 24
_PERIODS = 4  # of schemes with a global average, on few ranks

_WHY: Mapping[str, str] = MappingProxyType(
    {
        "D-PSGD": "a rank waits for neighbours alone: delays of distant ranks pass at the same time",
        "SGP": "a rank waits for neighbours alone: delays of distant ranks pass at the same time",
        "eager-SGD": "late ranks need not catch up with a global average; the paper's lost more",
        "AD-PSGD": "it never waits for the network here; the paper's could not hide its messages",
        "WAGMA, S = P": "our groups of all ranks wait for nobody, either",
    }
)
_DIFFERS = (
    "Simulated: 8,192 elements in the model's place on links slower by as much; computation and beta "
    "are solved from section 5.2's rates without delays. Fewer steps than in "
    "benchmarks/averaging-throughput.md; of schemes whose ranks all wait on every step one is simulated, "
    "and their longest computation taken for the others."
)


@dataclass(frozen=True)
class _Figure:
    """What is run for one figure.

    Attributes:
        key: of ``SETTINGS``.
        section: of the paper.
        ranks: world sizes, and that of a quick run.
        rows: schemes.
        ahead: which schemes are faster than WAGMA on the most ranks, as the paper says.
        more: what else differs.
    """

    key: str
    section: str
    ranks: tuple[int, ...]
    quick: int
    rows: tuple[str, ...]
    ahead: Stated
    more: str = ""


def _all_wait(scheme: Scheme) -> bool:
    """Whether every rank waits for all others on every step."""
    return scheme.barrier == 1 or scheme.name == "allreduce" or scheme.options.get("period") == 1


def _steps(scheme: Scheme, setting: Setting, ranks: int, *, quick: bool) -> int:
    if quick:
        return setting.period
    if scheme.name in _WITHOUT_GLOBAL and not scheme.barrier:
        return _LONG_STEPS if ranks <= _MOST_RANKS else _MANY_STEPS
    return setting.period * max(1, min(_PERIODS, 2 * 64 // ranks))


def _seconds(scheme: Scheme, setting: Setting, ranks: int, settings: Settings) -> float:
    """Return the seconds of a step, of schemes that all wait from one that is simulated."""
    steps, seed = _steps(scheme, setting, ranks, quick=settings.quick), settings.seed
    if not _all_wait(scheme):
        return step_seconds(setting, scheme, ranks, steps=steps, seed=seed)
    longest = [
        max(setting.work(step, rank, ranks, seed) for rank in range(ranks)) for step in range(steps)
    ]
    exchange = step_seconds(setting, scheme, ranks, steps=1, seed=seed) - longest[0]
    return fmean(longest) + exchange


def _rates(
    figure: _Figure, targets: list[Target], settings: Settings
) -> dict[int, dict[str, float]]:
    """Return steps per second by ranks and row, and the ideal ones."""
    setting, everywhere = SETTINGS[figure.key], settings.pick(figure.ranks, (figure.quick,))
    cases = [
        (ranks, row)
        for ranks in everywhere
        for row in dict.fromkeys(
            (*figure.rows, *(row for t in targets if t.ranks == ranks for row in t.rows))
        )
    ]
    rates: dict[int, dict[str, float]] = {}
    for ranks, row in settings.track(cases):
        if ranks not in rates:
            ideal = ideal_seconds(setting, ranks, steps=_LONG_STEPS, seed=settings.seed)
            rates[ranks] = {"ideal": 1 / ideal}
        rates[ranks][row] = 1 / _seconds(_SCHEMES[row], setting, ranks, settings)
    return rates


def _run(figure: _Figure, settings: Settings) -> Outcome:
    targets = [target for target in TARGETS if target.figure == figure.key]
    rates = _rates(figure, targets, settings)
    comparisons = [_beside(t, figure.section, rates[t.ranks]) for t in targets if t.ranks in rates]
    comparisons.append(_ahead(figure, rates[max(rates)]))
    rows: list[Row] = [
        {
            "scheme": row,
            "P": ranks,
            "steps per second": rate,
            "of the ideal": rate / found["ideal"],
            "WAGMA over it": found["WAGMA"] / rate,
        }
        for ranks, found in rates.items()
        for row, rate in found.items()
    ]
    curves = {
        row: [(float(ranks), found[row] / found["ideal"]) for ranks, found in rates.items()]
        for row in figure.rows
    }
    setting = SETTINGS[figure.key]
    return Outcome(
        rows,
        comparisons,
        _network(setting),
        f"{_DIFFERS} {figure.more}".strip(),
        [Panel(setting.title, "ranks P", "throughput, over the ideal", curves, log="x", level=1.0)],
    )


def _network(setting: Setting) -> Row:
    return {
        "parameters": setting.parameters,
        "tau": setting.period,
        "beta, ns per byte": 1e9 * BETA,
        "alpha, us": 1e6 * ALPHA,
    }


def _beside(target: Target, section: str, rates: Mapping[str, float]) -> Comparison:
    """Put WAGMA's throughput over another's beside the paper's."""
    row, *others = target.rows
    ratio = rates["WAGMA"] / rates[row]
    ours = "; ".join(
        [f"{ratio:.2f} x"]
        + [f"{rates['WAGMA'] / rates[o]:.2f} x ({o.removeprefix(row + ', ')})" for o in others]
    )
    same = ratio >= _FASTER
    why = next((why for name, why in _WHY.items() if row.startswith(name)), "")
    stated = Stated(
        f"WAGMA over {row}, {target.ranks} ranks",
        f"{target.ratio:.2f} x",
        section,
        (target.ratio,),
    )
    return stated.beside(ours, same, why if ratio < 0.9 * target.ratio else "")


def _ahead(figure: _Figure, rates: Mapping[str, float]) -> Comparison:
    """Say which schemes are faster than WAGMA."""
    faster = [row for row in figure.rows if rates[row] > _FASTER * rates["WAGMA"]]
    same = faster == ["AD-PSGD"]
    return figure.ahead.beside("; ".join(faster) or "none", same, "" if same else _WHY["SGP"])


def _control(settings: Settings) -> Outcome:
    setting, ranks = SETTINGS["control"], settings.pick(64, 8)
    paper = {
        _LOCAL: 1.52,
        "WAGMA": 1.55,
        "AD-PSGD": 1.61,
        "D-PSGD": 1.57,
        _SGP_2: 1.51,
    }
    rates = {
        row: 1 / _seconds(_SCHEMES[row], setting, ranks, settings) for row in settings.track(paper)
    }
    spread, own = max(rates.values()) / min(rates.values()), rates["WAGMA"] / rates[_LOCAL]
    near, close = spread <= _SPREAD, 1 / _SPREAD <= own <= _SPREAD
    comparisons = [
        Stated("fastest over slowest", "1.07 x", "section 5.2", (_SPREAD,)).beside(
            f"{spread:.3f} x", near, "" if near else "another number of ranks: messages cost more"
        ),
        Stated("WAGMA over local SGD", "1.02 x", "section 5.2", (1.02,)).beside(
            f"{own:.3f} x",
            close,
            "" if close else "groups cost more than one allreduce here",
        ),
    ]
    rows: list[Row] = [
        {"scheme": row, "P": ranks, "steps per second": rate, "paper": paper[row]}
        for row, rate in rates.items()
    ]
    bars = {
        "ours": list(rates.items()),
        "paper": list(paper.items()),
    }
    panel = Panel("nobody late", "scheme", "steps per second", bars, kind="bars")
    more = "Local SGD's and AD-PSGD's rates are the paper's by construction."
    return Outcome(rows, comparisons, _network(setting), f"{_DIFFERS} {more}", [panel])


_ONLY_ADPSGD = "the only algorithm with higher throughput is AD-PSGD"
_FIGURE_4 = _Figure(
    "fig4",
    "section 5.2",
    (4, 16, 64, 256),
    4,
    ("WAGMA", "AD-PSGD", _SGP_2, "D-PSGD", _LOCAL, "Allreduce-SGD"),
    Stated("faster than WAGMA, 256 ranks", _ONLY_ADPSGD, "section 5.2"),
    "Eager-SGD is compared on 64 ranks alone.",
)
_FIGURE_7 = _Figure(
    "fig7",
    "section 5.3",
    (4, 16, 64),
    4,
    ("WAGMA", "AD-PSGD", "SGP, 1 neighbour", _SGP_2, "D-PSGD", _LOCAL, "Allreduce-SGD"),
    Stated("faster than WAGMA, 64 ranks", "AD-PSGD, and no other variant", "section 5.3"),
    "Computation, 0.27 s of a mean batch, is ours; lengths are of lines of Python's own source.",
)
_FIGURE_10 = _Figure(
    "fig10",
    "section 5.4",
    (16, 64, 256, 1024),
    16,
    ("WAGMA", "AD-PSGD", _SGP_4, "D-PSGD", _LOCAL),
    Stated("faster than WAGMA, 1,024 ranks", "only AD-PSGD is", "section 5.4"),
    "The heavy tail is all of a step's computation; from 128 ranks on WAGMA runs for one period.",
)

FIGURE_4 = Artifact(
    "wagma-fig4",
    "WAGMA",
    "throughput of ResNet-50 with two late ranks",
    "WAGMA is faster than all but AD-PSGD, by more on more ranks",
    2.5,
    partial(_run, _FIGURE_4),
)
CONTROL = Artifact(
    "wagma-control",
    "WAGMA",
    "throughput of ResNet-50 when nobody is late",
    "without delays no scheme is much faster than another",
    0.5,
    _control,
)
FIGURE_7 = Artifact(
    "wagma-fig7",
    "WAGMA",
    "throughput of a Transformer on sentences of unequal lengths",
    "WAGMA is fastest on 16 ranks, and second to AD-PSGD on 64",
    1.0,
    partial(_run, _FIGURE_7),
)
FIGURE_10 = Artifact(
    "wagma-fig10",
    "WAGMA",
    "throughput of reinforcement learning, whose steps have a heavy tail",
    "WAGMA is twice as fast as all but AD-PSGD on 1,024 ranks",
    3.0,
    partial(_run, _FIGURE_10),
)
