"""The command ``sparsync lab``: run any script with every rank behind a slow link."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any

from rich.console import Console
from typer import Argument, Option

from sparsync.cli.flags import Json, Plot, option, takes
from sparsync.cli.lab_links import MOST_RANKS, parse_links
from sparsync.cli.lab_script.rank_variables import check_script
from sparsync.cli.lab_script.ranks import run_script
from sparsync.cli.lab_script.report import comparison, per_rank, write_plot
from sparsync.cli.network_choice import Connection
from sparsync.cli.output import check_outputs, write_json
from sparsync.cli.values import Bounds, Seconds, check_fields
from sparsync.errors import ConfigurationError
from sparsync.options import DISABLE

__all__ = ["LabSettings", "command"]

LabRanks = Annotated[int, Bounds(1, MOST_RANKS - 1)]  # --elastic needs one more link


@dataclass(frozen=True)
class LabSettings:
    """Settings of a script's ranks; fields with a help text are options of the command."""

    ranks: Annotated[LabRanks, option("Number of ranks: processes, each with its own link.")] = 2
    grace: Annotated[
        Seconds, option("Seconds for the other ranks to end by themselves after one has failed.")
    ] = 20.0

    def __post_init__(self) -> None:
        check_fields(self)


@takes(LabSettings)
def command(
    lab: Annotated[
        str,
        Argument(
            metavar="RATE[,RTT[,LOSS[,JITTER]]]",
            help="Rate, and RTT, of every rank's link, e.g. 100mbit or 100mbit,20ms (docs/lab.md).",
        ),
    ],
    script: Annotated[
        list[str],
        Argument(metavar="-- COMMAND...", help="What every rank runs, e.g. -- python train.py"),
    ],
    *,
    compare: Annotated[
        bool,
        Option(
            "--compare", help=f"Run it twice: with {DISABLE}=1, which is plain DDP, and without."
        ),
    ] = False,
    elastic: Annotated[
        bool,
        Option(
            "--elastic",
            help="Ranks may come and go: also start torchft's lighthouse, and let the other ranks "
            "run when one ends.",
        ),
    ] = False,
    json: Json = None,
    plot: Plot = None,
    **fields: Any,
) -> int:
    """Run any script, unchanged, with every rank behind a real slow link of this machine (Linux).

    Each rank is a process in its own network namespace, with the environment variables that torchrun
    sets. Its output lines are prefixed with [RANK]. At the end, the command prints the seconds, and the
    bytes that every rank sent and received, as counted by the kernel. The exit code is 0, or the exit
    code of the first rank that failed.
    """
    settings = LabSettings(**fields)
    parse_links(lab, settings.ranks)
    words = check_script(script, settings.ranks, os.environ)
    check_outputs(json, plot)
    if elastic and find_spec("torchft") is None:
        raise ConfigurationError("--elastic needs torchft: pip install 'sparsync[elastic]'")
    Connection("torch", lab=lab).prepare()
    runs = (
        [("dense", {DISABLE: "1"}), ("attached", {DISABLE: "0"})] if compare else [("script", {})]
    )
    results = []
    for name, variables in runs:
        options: dict[str, Any] = {"run": name, "variables": variables, "grace": settings.grace}
        results.append(run_script(words, settings.ranks, lab, elastic=elastic, **options))
        if results[-1].exit_code:
            break
    write_json(json, results if compare else results[0])
    whole = len(results) == len(runs)
    if plot is not None and whole:
        write_plot(results, plot)
    shown = comparison(*results) if compare and whole else per_rank(results[-1])
    Console().print(shown, highlight=False)
    return results[-1].exit_code
