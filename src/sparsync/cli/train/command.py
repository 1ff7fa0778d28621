"""The command ``sparsync train``: train a small model data-parallel, once per algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from typer import Option

from sparsync.averaging.schemes import SCHEMES
from sparsync.cli.flags import Json, Plot, takes
from sparsync.cli.launch import leads
from sparsync.cli.named_algorithms import OPTIONS_HELP
from sparsync.cli.output import check_outputs, write_json
from sparsync.cli.train.exchanges import HOOKS, check_algorithms, check_elastic, labels_of
from sparsync.cli.train.rank import BeforeStep, train_rank
from sparsync.cli.train.report import comparison, write_plot
from sparsync.cli.train.results import TrainResult, with_target
from sparsync.cli.train.settings import ELASTIC_TIMEOUT, TrainSettings
from sparsync.cli.values import Only
from sparsync.errors import ConfigurationError, require
from sparsync.presets import PRESETS
from sparsync.transports.launchers import detect

__all__ = ["command", "train"]


def train(
    settings: TrainSettings, algorithms: Sequence[str], before_step: BeforeStep | None = None
) -> list[TrainResult] | None:
    """Train on local processes, or on the ranks of a launcher; see ``train_rank``.

    Returns:
        One result per algorithm; under a launcher, None on every rank but 0.

    Raises:
        ConfigurationError: an algorithm is unknown, or ``settings.ranks`` is not the launcher's number
            of processes.
        RankError: a rank failed, and the other ranks were stopped.
    """
    checked = check_algorithms(settings, algorithms)
    results: list[TrainResult] | None = settings.connection().start(
        train_rank, settings.ranks, settings, checked, before_step
    )
    return None if results is None else with_target(results, settings.target_step)


@takes(TrainSettings)
def command(
    algorithm: Annotated[
        str,
        Option(
            help=f"One of {', '.join(PRESETS)}; PyTorch's own hooks {', '.join(HOOKS)}; or of the "
            f"schemes that average models, {', '.join(SCHEMES)}; or several, with commas, to compare. "
            f"{OPTIONS_HELP}"
        ),
    ] = "budgeted",
    *,
    elastic: Annotated[
        bool,
        Option(
            "--elastic",
            help="Let ranks come and go: first train without faults, then with those of --kill.",
        ),
    ] = False,
    kill: Annotated[
        str,
        Only(("elastic",), "none"),
        Option(help="With --elastic: random:SECONDS, the mean time between kills; or none."),
    ] = "none",
    json: Json = None,
    plot: Plot = None,
    **fields: Any,
) -> None:
    """Train data-parallel: a small model on data that every machine has, or a paper's model on --data.

    Starts local processes, or runs in the processes of a launcher (torchrun, mpiexec, srun).  "dense"
    is plain DDP.
    """
    require(
        not elastic or detect() is None,
        "--elastic starts its own ranks; start it as one process, without a launcher",
    )
    if elastic and fields["timeout"] is None:
        fields["timeout"] = ELASTIC_TIMEOUT
    settings = TrainSettings(**fields)
    if leads():
        check_outputs(json, plot)
    settings.connection().prepare()
    if elastic:
        _elastic(settings, algorithm, kill, json, plot)
        return
    results = train(settings, labels_of(algorithm))
    if results is None:
        return
    write_json(json, results if len(results) > 1 else results[0])
    if plot is not None:
        write_plot(results, plot)
    Console().print(comparison(results), highlight=False)


def _elastic(
    settings: TrainSettings, algorithm: str, kill: str, json: Any, plot: Path | None
) -> None:
    """Run the command with ``--elastic``, i.e. train while ranks are killed."""
    label, *others = labels_of(algorithm)
    require(not others, f"--elastic trains by one algorithm, not {algorithm!r}; name one")
    check_elastic(settings, label)
    if find_spec("torchft") is None:
        raise ConfigurationError("--elastic needs torchft: pip install 'sparsync[elastic]'")
    from sparsync.cli.train.elastic import table, train_elastic, write_elastic_plot

    result = train_elastic(settings, label, kill)
    write_json(json, result)
    if plot is not None:
        write_elastic_plot(result, plot)
    Console().print(table(result), highlight=False)
