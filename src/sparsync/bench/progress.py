"""Progress of a bench or a training: bars on standard error, where that is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

__all__ = ["RowBar", "loss_progress", "progress"]


@contextmanager
def progress(*, shown: bool) -> Iterator[Callable[[str], RowBar]]:
    """Show a bar per row on stderr, if that is a terminal; yields what opens a row."""
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not shown or not console.is_terminal,
    ) as bar:
        yield lambda text: RowBar(bar, text)


class RowBar:
    """One row's bar; called with the number of steps, None while that is open."""

    def __init__(self, bar: Progress, text: str) -> None:
        self.bar, self.task = bar, bar.add_task(text, total=None)

    def __enter__(self) -> RowBar:
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop_task(self.task)

    def __call__(self, total: int | None) -> None:
        """Count a step."""
        self.bar.update(self.task, advance=1, total=total)


def loss_progress(*, shown: bool) -> Progress:
    """Make the bars of trainings, which show the loss, on stderr, if that is a terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
        disable=not shown or not console.is_terminal,
    )
