"""The frame of a reproduction: what a paper states, what is run here, and the two side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from sparsync.errors import ConfigurationError

__all__ = [
    "Artifact",
    "Cell",
    "Comparison",
    "Outcome",
    "Panel",
    "Row",
    "Settings",
    "Stated",
    "Unavailable",
    "number",
    "points",
]

T = TypeVar("T")

Cell = str | int | float | bool | None
Row = Mapping[str, Cell]


def _nothing(total: int | None) -> None:
    """Show no progress."""


@dataclass(frozen=True)
class Settings:
    """How an artifact is run.

    Attributes:
        seed: of models, data and inputs.
        quick: scaled down until it takes seconds: a test of the code, not of the paper.
        advance: called after every piece of work with the number of all pieces.
    """

    seed: int = 0
    quick: bool = False
    advance: Callable[[int | None], None] = _nothing

    def pick(self, whole: T, quick: T) -> T:
        """Return the first, or where it shall be quick the second.

        Example:
            >>> Settings(quick=True).pick((8, 16, 32), (4,))
            (4,)
        """
        return quick if self.quick else whole

    def track(self, pieces: Iterable[T]) -> Iterator[T]:
        """Yield the pieces, telling after each how many there are."""
        pieces = list(pieces)
        for piece in pieces:
            yield piece
            self.advance(len(pieces))


@dataclass(frozen=True)
class Stated:
    """One figure of a paper, read from its text: what only a plot shows is not known.

    Attributes:
        what: of which it is a figure.
        says: in the paper's words or numbers.
        where: section, figure or table.
        numbers: those to compare with, in the unit of ``says``.
    """

    what: str
    says: str
    where: str
    numbers: tuple[float, ...] = ()

    def beside(self, ours: str, same: bool, why: str = "") -> Comparison:
        """Put our figure beside it.

        Args:
            ours: the figure and its unit.
            same: it leads to the conclusion that the paper draws.
            why: where it does not, the reason; else what is worth knowing.
        """
        return Comparison(self, ours, same, why)


@dataclass(frozen=True)
class Comparison:
    """A paper's figure and ours; see ``Stated.beside``."""

    stated: Stated
    ours: str
    same: bool
    why: str = ""

    def __post_init__(self) -> None:
        if not self.same and not self.why:
            raise ConfigurationError(f"{self.stated.what}: the conclusion is another one; say why")


@dataclass(frozen=True)
class Panel:
    """One plot: curves, or bars in groups or stacks.  How it is drawn is the business of ``drawing``.

    Attributes:
        title: above it.
        x: label of the axis; of bars: what the groups are.
        y: label of the axis, with the unit.
        series: by name: points ``(x, y)`` of a curve; of bars, ``(group, height)``.
        kind: of plot.
        log: axes that are logarithmic: "", "x", "y" or "xy".
        level: height of a thin line across, None for none.
    """

    title: str
    x: str
    y: str
    series: Mapping[str, Sequence[tuple[float | str, float]]]
    kind: Literal["curves", "bars", "stacks"] = "curves"
    log: Literal["", "x", "y", "xy"] = ""
    level: float | None = None


@dataclass(frozen=True)
class Outcome:
    """What a run gave.

    Attributes:
        rows: the numbers, equal keys in all rows.
        comparisons: with the paper's figures.
        settings: of this run, by name.
        differs: what is not as in the paper, in a sentence or two.
        panels: plots, side by side.
    """

    rows: Sequence[Row]
    comparisons: Sequence[Comparison]
    settings: Mapping[str, Cell]
    differs: str
    panels: Sequence[Panel] = ()


@dataclass(frozen=True)
class Artifact:
    """A table or figure of a paper that is reproduced here.

    Attributes:
        name: as ``sparsync reproduce`` knows it.
        paper: its short name.
        title: what it shows.
        conclusion: of the paper's authors, which is what is compared.
        minutes: that a run takes on two cores, about.
        run: runs it.
        own_progress: what it runs shows its own progress.

    Example:
        >>> half = Stated("half of 1", "0.5", "section 1", (0.5,))
        >>> def run(settings):
        ...     return Outcome([{"half": 0.5}], [half.beside("0.5", same=True)], {}, "nothing")
        >>> Artifact("example", "none", "halves", "a half is 0.5", 0.1, run).run(Settings()).rows
        [{'half': 0.5}]
    """

    name: str
    paper: str
    title: str
    conclusion: str
    minutes: float
    run: Callable[[Settings], Outcome]
    own_progress: bool = False


@dataclass(frozen=True)
class Unavailable:
    """What is not reproduced, and why.

    Attributes:
        what: table or figure.
        paper: its short name.
        reason: in a sentence.
    """

    what: str
    paper: str
    reason: str


def number(row: Row, key: str) -> float:
    """Return a numeric cell."""
    value = row[key]
    assert isinstance(value, int | float), f"{key} is {value!r}"
    return float(value)


def points(
    rows: Iterable[Row], x: str, y: str, where: Row | None = None
) -> list[tuple[float, float]]:
    """Return two columns of the rows that have the cells of ``where``: a curve of a panel.

    Example:
        >>> rows = [{"P": 2, "s": 0.5, "of": "a"}, {"P": 2, "s": 0.7, "of": "b"}]
        >>> points(rows, "P", "s", {"of": "b"})
        [(2.0, 0.7)]
    """
    wanted = (where or {}).items()
    return [(number(r, x), number(r, y)) for r in rows if all(r[key] == v for key, v in wanted)]
