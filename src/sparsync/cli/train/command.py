"""The command ``sparsync train``: train a small model data-parallel, once per algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from rich.console import Console
from typer import Option

from sparsync.averaging.schemes import SCHEMES
from sparsync.cli.launch import leads
from sparsync.cli.options import Json, Plot, names, takes
from sparsync.cli.output import check_outputs, write_json
from sparsync.cli.train.exchanges import HOOKS, check_algorithms
from sparsync.cli.train.rank import BeforeStep, train_rank
from sparsync.cli.train.report import comparison, write_plot
from sparsync.cli.train.results import TrainResult, with_target
from sparsync.cli.train.settings import TrainSettings
from sparsync.presets import presets

__all__ = ["command", "train"]


def train(
    settings: TrainSettings, algorithms: Sequence[str], before_step: BeforeStep | None = None
) -> list[TrainResult] | None:
    """Train on local processes, or inside a launcher's ranks; see ``train_rank``.

    Returns:
        One result per algorithm; None on the other ranks of a launcher.

    Raises:
        ConfigurationError: an unknown algorithm, or a launcher with another number of processes.
        RankError: a rank failed; the others were ended.
    """
    check_algorithms(settings, algorithms)
    results: list[TrainResult] | None = settings.connection().start(
        train_rank, settings.ranks, settings, tuple(algorithms), before_step
    )
    return None if results is None else with_target(results, settings.target_step)


@takes(TrainSettings)
def command(
    algorithm: Annotated[
        str,
        Option(
            help=f"One of {', '.join(presets())}; PyTorch's own hooks {', '.join(HOOKS)}; or of the "
            f"schemes that average models, {', '.join(SCHEMES)}; or several, with commas, to compare."
        ),
    ] = "budgeted",
    *,
    json: Json = None,
    plot: Plot = None,
    **fields: Any,
) -> None:
    """Train data-parallel: a small model on data that every machine has, or a paper's on --data.

    Starts local processes, or runs inside those of a launcher (torchrun, mpiexec, srun).  "dense" is
    plain DDP.
    """
    settings = TrainSettings(**fields)
    if leads():
        check_outputs(json, plot)
    settings.connection().prepare()
    results = train(settings, names(algorithm))
    if results is None:
        return
    write_json(json, results if len(results) > 1 else results[0])
    if plot is not None:
        write_plot(results, plot)
    Console().print(comparison(results), highlight=False)
