"""The command line: ``sparsync train | bench | linear | doctor | plan | simulate | reproduce | keys``.

Each command lives in ``sparsync.bench``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, cast

import typer

from sparsync import __version__
from sparsync.bench import collectives, doctor, keys, linear, plan_command, simulate, train
from sparsync.bench.launch import leads
from sparsync.errors import ConfigurationError, SparsyncError
from sparsync.reproduce.command import command as reproduce

__all__ = ["app", "exit_code", "main"]

app = typer.Typer(
    name="sparsync",
    help="Data-parallel training on networks too slow for dense allreduce.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("train")(train.command)
app.command("bench")(collectives.command)
app.command("linear")(linear.command)
app.command("doctor")(doctor.command)
app.command("plan")(plan_command.command)
app.command("simulate")(simulate.command)
app.command("reproduce")(reproduce)
app.command("keys")(keys.command)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass


# the base of all usage errors is click's UsageError, which newer versions of typer bring themselves
_UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__bases__[0])


def main() -> None:
    """Run the command line; the process ends with 0, 1 (a rank failed), 2 (bad input) or 130."""
    arguments = sys.argv[1:] or ["--help"]
    sys.exit(exit_code(lambda: app(arguments, standalone_mode=False)))


def exit_code(run: Callable[[], object]) -> int:
    """Call ``run``; say in one line what went wrong, and return the exit code."""
    try:
        returned = run()
    except (ConfigurationError, _UsageError) as error:
        if leads():  # all ranks of a launcher got the same arguments
            _complain(error.format_message() if isinstance(error, _UsageError) else str(error))
        return 2
    except (SparsyncError, OSError) as error:
        _complain(str(error))
        return 1
    except (KeyboardInterrupt, typer.Abort):
        return 130
    return returned if isinstance(returned, int) else 0


def _complain(message: str) -> None:
    sys.stderr.write(f"error: {message}\n")
