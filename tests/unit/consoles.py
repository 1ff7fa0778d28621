"""What a report looks like in a terminal."""

from rich.console import Console


def shown(*reports, width=80):
    console = Console(width=width)
    with console.capture() as captured:
        console.print(*reports, highlight=False)
    return captured.get()
