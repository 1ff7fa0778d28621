"""The output of the commands: tables that fit the terminal, JSON, number formats, progress."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, TypeAlias, final

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from sparsync.errors import ConfigurationError

__all__ = [
    "Bar",
    "Columns",
    "check_outputs",
    "drawing",
    "format_ms",
    "format_ratio",
    "progress",
    "to_json",
    "write_json",
]

_LINE_EVERY = 30.0  # seconds between two lines of progress on a stream that is not a terminal


# ---- tables -----------------------------------------------------------------------------------------


@final
class Columns:
    """A table whose column heads wrap only at spaces.

    If it is wider than the terminal, it is split into several tables, one below the other.  Each of them
    repeats the first column.

    Args:
        heads: heads of the columns; the first column is left-aligned, the others are right-aligned.
        rows: cells.
        title: shown above the table.
    """

    def __init__(
        self, heads: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None
    ) -> None:
        self.heads, self.rows, self.title = list(heads), [list(row) for row in rows], title

    @staticmethod
    def of(rows: Sequence[Mapping[str, str]], title: str | None = None) -> Columns:
        """Make a table from rows, each a mapping from head to cell; omit columns with only "-"."""
        heads = [head for head in rows[0] if any(row[head] != "-" for row in rows)]
        return Columns(heads, [[row[head] for head in heads] for row in rows], title)

    @staticmethod
    def by_ranks(
        first: str, cells: Mapping[tuple[str, int], str], title: str | None = None
    ) -> Columns:
        """Make a table with a row per name and a column per world size.

        Example:
            >>> table = Columns.by_ranks("scheme", {("a", 2): "1 s", ("a", 4): "2 s", ("b", 4): "3 s"})
            >>> table.heads, table.rows
            (['scheme', 'P = 2', 'P = 4'], [['a', '1 s', '2 s'], ['b', '-', '3 s']])
        """
        names = dict.fromkeys(name for name, _ in cells)
        ranks = dict.fromkeys(p for _, p in cells)
        rows = [[name, *(cells.get((name, p), "-") for p in ranks)] for name in names]
        return Columns([first, *(f"P = {p:,}" for p in ranks)], rows, title)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield one table, or several if the terminal is too narrow for all columns."""
        if self.title is not None:
            yield Text(self.title)
        columns = [
            (head, [" ", *cells]) for head, *cells in zip(self.heads, *self.rows, strict=True)
        ]
        widths = [max(map(len, [head, *cells])) for head, cells in columns]
        if sum(widths) + len(widths) - 1 > options.max_width:
            widths = [max(map(len, [*head.split(), *cells])) for head, cells in columns]
        left = list(range(1, len(widths)))
        while left:
            room, shown = options.max_width - widths[0], [0]
            while left and (len(shown) == 1 or room > widths[left[0]]):
                room -= widths[left[0]] + 1
                shown.append(left.pop(0))
            table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
            for column in shown:
                table.add_column(
                    Text(self.heads[column]),
                    justify="right" if column else "left",
                    vertical="bottom",
                    width=widths[column],
                )
            for row in self.rows:
                table.add_row(*(Text(row[column]) for column in shown))
            yield table


# ---- numbers ----------------------------------------------------------------------------------------


def format_ratio(ratio: float | None) -> str:
    """Format a ratio with three digits; None becomes "-".

    Example:
        >>> format_ratio(None), format_ratio(0.96666), format_ratio(52.04), format_ratio(1234.5)
        ('-', '0.967', '52', '1,234')
    """
    if ratio is None:
        return "-"
    return f"{ratio:,.0f}" if ratio >= 999.5 else f"{ratio:.3g}"


def format_ms(seconds: float | None) -> str:
    """Format seconds as milliseconds, like ``format_ratio``."""
    return format_ratio(None if seconds is None else 1e3 * seconds)


# ---- files ------------------------------------------------------------------------------------------


def check_outputs(json: Path | None = None, plot: Path | None = None) -> None:
    """Check, before any work begins, that the output files can be written; make their folders.

    Raises:
        ConfigurationError: a file cannot be written, or a picture cannot be drawn.
    """
    if plot is not None and plot.suffix not in (".png", ".pdf", ".svg"):
        raise ConfigurationError(f"cannot draw '{plot}'; give a name that ends in .png, .pdf, .svg")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError("--plot needs matplotlib: pip install sparsync[report]")
    for path in (path for path in (json, plot) if path is not None):
        if str(path) == "-":
            raise ConfigurationError(
                "'-' is not a file, and standard output has the table; name a file"
            )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _try_to_write(path)
        except OSError as error:
            raise ConfigurationError(
                f"cannot write to '{path}' ({error.strerror}); name a file in a writable folder"
            ) from error


def _try_to_write(path: Path) -> None:
    """Check that a file can be opened for writing, and leave it as it was."""
    existed = path.exists()
    # opening a pipe without a reader would block
    file = os.open(
        path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NONBLOCK", 0), 0o666
    )
    try:
        if stat.S_ISCHR(os.fstat(file).st_mode):
            os.write(file, b"\n")  # a device reports errors only on writing
    finally:
        os.close(file)
        if not existed:
            path.unlink()


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Add the file's name to the error of a failed write; the error for a full disk does not name it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def to_json(content: Any) -> str:
    """Convert dataclasses and plain values to JSON; NaN and infinities become null.

    Example:
        >>> print(to_json([float("nan"), 1]), end="")
        [
         null,
         1
        ]
    """
    return json.dumps(_plain(content), indent=1, allow_nan=False) + "\n"


def write_json(path: Path | None, content: Any) -> None:
    """Write ``to_json`` to a file, if one is given."""
    if path is not None:
        with _named(path):
            path.write_text(to_json(content), encoding="utf-8")


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def drawing(path: Path, size: tuple[float, float], title: str, panels: int = 1) -> Iterator[Any]:
    """Yield matplotlib axes for a picture of this size in inches; save the picture at the end.

    For several panels, yield a list of axes, side by side with a shared y axis.
    """
    from matplotlib.figure import Figure  # the object interface needs no display or global state

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    yield axes[0] if panels == 1 else list(axes)
    figure.suptitle(title, fontsize="medium")
    with _named(path):
        figure.savefig(path, dpi=150)


# ---- progress ---------------------------------------------------------------------------------------


Bar: TypeAlias = Callable[..., None]
"""Counts one of ``total`` steps (None while unknown), and shows a ``note``, e.g. the loss."""


@contextmanager
def progress(
    *, shown: bool = True, keep: bool = False
) -> Iterator[Callable[[str], AbstractContextManager[Bar]]]:
    """Show progress bars on standard error, one per row; yield the function that opens a row.

    Args:
        shown: whether this process reports for all ranks.
        keep: whether the bars stay on the terminal at the end.

    If standard error is not a terminal, each row prints a line every half minute; with ``keep``, it also
    prints a line at its end.
    """
    console = Console(stderr=True)
    bar = Progress(
        *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()),
        TextColumn("{task.fields[note]}"),
        console=console,
        transient=not keep,
        disable=not shown or not console.is_terminal,
    )

    @contextmanager
    def row(text: str) -> Iterator[Bar]:
        started = said = time.perf_counter()
        task = bar.add_task(text, total=None, note="")
        printed = shown and not console.is_terminal

        def advance(total: int | None = None, note: str = "") -> None:
            nonlocal said
            bar.update(task, advance=1, total=total, note=note)
            now = time.perf_counter()
            if printed and now - said >= _LINE_EVERY:
                said, state = now, bar.tasks[task]
                whole = " done" if state.total is None else f" of {state.total:.0f}"
                done = f"{state.completed:.0f}{whole}{note and ', '}{note}"
                console.print(f"{text}: {done} after {now - started:.0f} s", soft_wrap=True)

        yield advance
        bar.stop_task(task)
        if keep and printed:
            seconds, note = time.perf_counter() - started, bar.tasks[task].fields["note"]
            console.print(f"{text}: {note} after {seconds:.1f} s", soft_wrap=True)

    with bar:
        yield row
