"""Reproduce tables and figures of the papers: ``sparsync reproduce NAME``.

::

    Artifact.run(Settings) --> Outcome(rows, comparisons, settings, differs, panels)
                                  |
        report: console, CSV, JSON, PNG, and one page of all artifacts

To add an artifact, decorate a function with ``artifact`` and list its module in ``catalogue``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeVar

from sparsync.errors import ConfigurationError
from sparsync.transports.sim import Links

T = TypeVar("T")

Cell = str | int | float | bool | None
Row = Mapping[str, Cell]
Points = Sequence[tuple[float | str, float]]

# networks that the papers name without stating their speed, so these numbers are assumed
ARIES = Links(alpha=1.5e-6, beta=1e-10)  # assumed: a supercomputer's MPI, 10 GB/s
GIGE = Links(alpha=50e-6, beta=8e-9)  # assumed: 1 Gbit/s

_PAPERS = MappingProxyType(
    {"oktopk": "Ok-Topk", "redsync": "RedSync", "sparcml": "SparCML", "wagma": "WAGMA"}
)


def _nothing(total: int) -> None:
    """Do not show progress."""


@dataclass(frozen=True)
class Settings:
    """The settings of an artifact's run."""

    seed: int = 0  # seed of models, data and inputs
    quick: bool = False  # scaled down to run in seconds, to test the code rather than the paper
    steps: int | None = None  # steps of each training run; None: the artifact's default
    seeds: int | None = None  # number of seeds, counted from ``seed``; None: the artifact's default
    # called after each piece of work, with the total number of pieces
    advance: Callable[[int], None] = _nothing

    def pick(self, whole: T, quick: T) -> T:
        """Return the first argument, or the second in a quick run.

        Example:
            >>> Settings(quick=True).pick((8, 16, 32), (4,))
            (4,)
        """
        return quick if self.quick else whole

    def steps_or(self, whole: int, quick: int) -> int:
        """Return the requested number of steps, or the result of ``pick`` if none is requested."""
        return self.steps or self.pick(whole, quick)

    def seeds_or(self, whole: int) -> range:
        """Return the seeds to run: the requested number; by default ``whole``, or one in a quick run.

        Example:
            >>> Settings(seed=5, seeds=2).seeds_or(4), Settings(quick=True).seeds_or(4)
            (range(5, 7), range(0, 1))
        """
        return range(self.seed, self.seed + (self.seeds or self.pick(whole, 1)))

    def track(self, pieces: Iterable[T]) -> Iterator[T]:
        """Yield the pieces of work, and report progress after each."""
        pieces = list(pieces)
        for piece in pieces:
            yield piece
            self.advance(len(pieces))


@dataclass(frozen=True)
class Comparison:
    """A number that a paper's text states, and the number that this run gave for it."""

    what: str  # the quantity
    says: str  # the paper's statement, in words or numbers
    where: str  # the paper's section, figure or table
    ours: str  # this run's number with its unit
    same: bool  # whether this run's number supports the paper's conclusion
    otherwise: str = ""  # the reason, if it does not support the conclusion
    remark: str = ""  # a remark to show if it supports the conclusion

    def __post_init__(self) -> None:
        if not self.same and not self.otherwise:
            raise ConfigurationError(f"{self.what}: the conclusion differs; say why")

    @property
    def why(self) -> str:
        """The reason why the conclusion is not supported, or the remark if it is supported."""
        return self.remark if self.same else self.otherwise


@dataclass(frozen=True)
class Panel:
    """The data of a plot with curves, grouped bars or stacked bars, for ``drawing``."""

    title: str  # title above the plot
    x: str  # label of the x axis; for bars, the meaning of the groups
    y: str  # label of the y axis, with the unit
    # name -> points ``(x, y)`` of a curve, or ``(group, height)`` of bars
    series: Mapping[str, Points]
    kind: Literal["curves", "bars", "stacks"] = "curves"  # kind of plot
    log: Literal["", "x", "y", "xy"] = ""  # the logarithmic axes
    level: float | None = None  # height of a thin horizontal line; None for no line


@dataclass(frozen=True)
class Outcome:
    """The result of a run."""

    rows: Sequence[Row]  # the measured numbers; all rows have the same keys
    comparisons: Sequence[Comparison]  # comparisons with the paper's figures
    settings: Mapping[str, Cell]  # this run's settings by name
    differs: str  # differences from the paper, in a sentence or two
    panels: Sequence[Panel] = ()  # plots, drawn next to each other


Run = Callable[[Settings], Outcome]


@dataclass(frozen=True)
class Artifact:
    """A reproduced table or figure of a paper."""

    name: str  # its name for ``sparsync reproduce``; begins with the paper's short name
    title: str  # the content of the table or figure
    conclusion: str  # the authors' conclusion, which the run tests
    minutes: float  # approximate duration of a run on two cores
    run: Run  # the function that reproduces it
    own_progress: bool = False  # whether ``run`` itself shows progress
    # default number of steps of each training (see ``Settings.steps``); 0: ``--steps`` does not apply
    steps: int = 0
    repeats: bool = False  # whether it runs with several seeds (see ``Settings.seeds``)

    @property
    def paper(self) -> str:
        """The paper's name."""
        return _PAPERS[self.name.split("-")[0]]


def artifact(
    name: str,
    conclusion: str,
    *,
    minutes: float,
    own_progress: bool = False,
    steps: int = 0,
    repeats: bool = False,
) -> Callable[[Run], Artifact]:
    """Make an artifact from the function that reproduces it; the function's docstring is the title.

    Example:
        >>> @artifact("oktopk-half", "a half is 0.5", minutes=0.1)
        ... def half(settings):
        ...     "Halves."
        ...     found = Comparison("half of 1", "0.5", "section 1", "0.5", same=True)
        ...     return Outcome([{"half": 0.5}], [found], {}, "nothing")
        >>> half.paper, half.title, half.run(Settings()).rows
        ('Ok-Topk', 'halves', [{'half': 0.5}])
    """

    def make(run: Run) -> Artifact:
        title = (run.__doc__ or "").removesuffix(".")
        title = title[:1].lower() + title[1:]
        return Artifact(name, title, conclusion, minutes, run, own_progress, steps, repeats)

    return make


@dataclass(frozen=True)
class Unavailable:
    """A table or figure that is not reproduced."""

    what: str  # the table or figure
    paper: str  # the paper's short name
    reason: str  # the reason, in a sentence


class Table(list[Row]):
    """Rows of results whose columns can be read as lists and curves.

    Example:
        >>> table = Table([{"P": 2, "s": 0.5, "of": "a"}, {"P": 2, "s": 0.7, "of": "b"}])
        >>> table.column("s"), table.points("P", "s", {"of": "b"})
        ([0.5, 0.7], [(2.0, 0.7)])
        >>> table.curves("P", "s", by="of")
        {'a': [(2.0, 0.5)], 'b': [(2.0, 0.7)]}
    """

    def where(self, cells: Row) -> Table:
        """Return the rows whose cells include ``cells``."""
        return Table(row for row in self if all(row[key] == v for key, v in cells.items()))

    def column(self, key: str) -> list[float]:
        """Return the numbers of a column."""
        values = [row[key] for row in self]
        assert all(isinstance(value, int | float) for value in values), f"{key}: {values}"
        return [float(value or 0) for value in values]

    def points(self, x: str, y: str, where: Row | None = None) -> list[tuple[float, float]]:
        """Return pairs ``(x, y)`` from two columns of the rows whose cells include ``where``."""
        rows = self.where(where or {})
        return list(zip(rows.column(x), rows.column(y), strict=True))

    def curves(
        self, x: str, y: str, by: str, where: Row | None = None
    ) -> dict[str, list[tuple[float, float]]]:
        """Return a curve for each value of the column ``by``, in the order of the rows."""
        rows = self.where(where or {})
        names = dict.fromkeys(row[by] for row in rows)
        return {str(name): rows.points(x, y, {by: name}) for name in names}


def joined(values: Iterable[float], form: str = ".2f") -> str:
    """Join formatted numbers for a sentence.

    Example:
        >>> joined([0.5, 2])
        '0.50 and 2.00'
    """
    return " and ".join(f"{value:{form}}" for value in values)
