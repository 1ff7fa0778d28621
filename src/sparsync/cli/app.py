"""The command line: ``sparsync train | bench | linear | lab | doctor | ...``.

A command's module is imported only when the command is called, so that ``sparsync --help`` is fast.
Other packages add commands through entry points in the group ``sparsync.commands``.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Annotated, Any, cast

import typer
from rich.console import Console

from sparsync import __version__
from sparsync.cli.values import INSTALL_PAPERS, checked, out_of_memory
from sparsync.console import say
from sparsync.errors import ConfigurationError, SparsyncError, require
from sparsync.transports.launchers import detect

__all__ = ["COMMANDS", "exit_code", "main", "make_app"]

# command name -> (module in this package, one line of help)
COMMANDS: MappingProxyType[str, tuple[str, str]] = MappingProxyType(
    {
        "train": ("train.command", "Train data-parallel: a small model, or a paper's."),
        "bench": ("bench.command", "Measure collectives: time, volume, and correctness."),
        "linear": ("linear.command", "Train a linear model on sparse data, data-parallel."),
        "lab": ("lab_script.command", "Run any script, unchanged, behind real slow links."),
        "doctor": ("doctor.command", "Measure the links of a job, and check its software."),
        "plan": ("plan", "Predict the fastest collective, and where dense is faster."),
        "simulate": ("simulate.command", "Simulate training steps on virtual ranks."),
        "keys": ("keys", "Make one certificate per rank, for encrypted exchanges."),
    }
)
_GROUP = "sparsync.commands"
# The commands of sparsync-papers are known here, so that an error can name the package if it is missing.
# The commands of all other packages are listed with their package's summary, because importing them
# would make --help slow.
_OF_PAPERS = MappingProxyType(
    {
        "reproduce": "Reproduce the papers' tables and figures; --list shows them.",
        "time-to-loss": "Predict which training method first reaches dense's loss.",
    }
)

# click's UsageError, from which all usage errors derive.  Newer versions of typer contain their own copy
# of click, so the class must come from typer.
_UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__bases__[0])


def make_app(wanted: str | None = None) -> typer.Typer:
    """Build the command line; if one command is ``wanted``, only its module is imported."""
    app = typer.Typer(
        name="sparsync",
        help="Data-parallel training on networks too slow for dense allreduce.",
        add_completion=False,
        rich_markup_mode=None,  # rich's panels truncate option names at 80 columns
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    points = sorted(entry_points(group=_GROUP), key=lambda point: point.name)
    require(
        wanted not in _OF_PAPERS or any(point.name == wanted for point in points),
        f"sparsync {wanted} is in the package sparsync-papers, which is not installed: "
        f"{INSTALL_PAPERS}",
    )
    for name, (module, line) in COMMANDS.items():
        if wanted in (name, None):
            app.command(name)(checked(importlib.import_module(f"sparsync.cli.{module}").command))
        else:
            app.command(name, help=line)(_nothing)
    for point in points:
        if wanted in (point.name, None):
            app.command(point.name)(checked(point.load()))
        else:
            package: Any = point.dist.metadata if point.dist else {}
            line = _OF_PAPERS.get(point.name, package.get("Summary"))
            app.command(point.name, help=line)(_nothing)
    return app


def _nothing() -> None:
    """Stand in for a command that was not called."""


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; exit with 0, 1 (a rank failed), 2 (bad input) or 130 (interrupted)."""
    arguments = sys.argv[1:] or ["--help"]
    # otherwise the interpreter collects garbage at its exit, among all that torch has imported: 0.3 s
    atexit.register(gc.freeze)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed before Python started, e.g. by ``>&-``
            # ``open`` reuses the lowest free descriptor, i.e. the closed one.  Ranks inherit and
            # duplicate it, so it must be open.
            file = os.open(os.devnull, os.O_WRONLY)
            os.set_inheritable(file, True)
            stream = os.fdopen(file, "w")
            setattr(sys, name, stream)
        if isinstance(stream, io.TextIOWrapper):
            # an ASCII terminal, or a file name that is not valid text, must not abort a run
            stream.reconfigure(errors="backslashreplace")
    code = exit_code(lambda: _run(arguments))
    with suppress(OSError, ValueError):  # the terminal may have been closed
        # progress bars hide the cursor, and a killed process may have left it hidden
        Console(stderr=True).show_cursor()
    sys.exit(code)


def _run(arguments: list[str]) -> object:
    try:
        returned = make_app(arguments[0])(arguments, standalone_mode=False)
        # flush now, because an error at interpreter exit would give neither a message nor an exit code
        sys.stdout.flush()
    except OSError:
        # discard the rest of the buffer, because flushing it at interpreter exit would fail again
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise
    return returned


def exit_code(run: Callable[[], object]) -> int:
    """Call ``run`` and return the exit code; if it fails, print one line."""
    try:
        returned = run()
    except (ConfigurationError, _UsageError) as error:
        if _speaks():  # all ranks of a launcher got the same arguments, so one message is enough
            _complain(error.format_message() if isinstance(error, _UsageError) else str(error))
        return 2
    except (SparsyncError, OSError) as error:
        _complain(str(error))
        return 1
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        _complain("out of memory; give smaller sizes, or fewer ranks")
        return 1
    return returned if isinstance(returned, int) else 0


def _speaks() -> bool:
    """Return whether this process should print: its rank is 0 or unknown, or it is the only process."""
    with suppress(ConfigurationError):
        here = detect()
        return here is None or here.rank == 0
    return True


def _complain(message: str) -> None:
    say(message, "error")
