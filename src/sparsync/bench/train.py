"""The command ``sparsync train``: train a byte-level transformer data-parallel, once per algorithm."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sparsync.bench.launch import launch, launched
from sparsync.bench.report import (
    TrainResult,
    check_plot_path,
    check_writable,
    comparison,
    write_json,
    write_plot,
)
from sparsync.bench.train_rank import BeforeStep, train_rank
from sparsync.bench.train_settings import TrainSettings
from sparsync.presets import PRESETS, resolve

__all__ = ["command", "train"]

# the options: types and help; the defaults stand in the signature of ``command``
_Algorithm = Annotated[
    str, typer.Option(help=f"One of {', '.join(PRESETS)}; or several, with commas, to compare.")
]
_Ranks = Annotated[
    int | None, typer.Option(help="Local processes.", show_default="4, or the launcher's")
]
_Steps = Annotated[int, typer.Option(help="Optimizer steps.")]
_Density = Annotated[float, typer.Option(help="Fraction of the gradient to exchange, in (0, 1].")]
_Seed = Annotated[int, typer.Option(help="Of the initial weights and of the data.")]
_Optimizer = Annotated[str, typer.Option(help="sgd or adam.")]
_Lr = Annotated[
    float | None,
    typer.Option(help="Learning rate.", show_default="0.1 for sgd, 0.001 for adam"),
]
_Momentum = Annotated[float, typer.Option(help="Of sgd.")]
_LrWarmupSteps = Annotated[
    int, typer.Option(help="First steps, over which the learning rate grows.")
]
_WarmupSteps = Annotated[int, typer.Option(help="First steps, which are exchanged dense.")]
_BatchSize = Annotated[int, typer.Option(help="Windows of 64 bytes per rank and step.")]
_Timeout = Annotated[float, typer.Option(help="Seconds that a rank waits for another.")]
_Json = Annotated[Path | None, typer.Option(help="Write what was measured here.")]
_Plot = Annotated[Path | None, typer.Option(help="Draw loss over steps and bytes here (.png).")]


def train(
    settings: TrainSettings, algorithms: Sequence[str], before_step: BeforeStep | None = None
) -> list[TrainResult] | None:
    """Train on local processes, or inside a launcher's ranks; see ``train_rank``.

    Args:
        settings: equal for all algorithms.
        algorithms: names of presets, run one after the other.
        before_step: called with (rank, step) on every rank; importable.

    Returns:
        One result per algorithm; None on the other ranks of a launcher.

    Raises:
        ConfigurationError: an unknown algorithm, or a launcher with another number of processes.
        RankError: a rank failed; the others were ended.
    """
    for name in algorithms:
        resolve(name)
    results: list[TrainResult] | None = launch(
        train_rank,
        settings.ranks,
        settings,
        tuple(algorithms),
        before_step,
        timeout=settings.timeout,
    )
    return results


def command(
    algorithm: _Algorithm = "oktopk",
    ranks: _Ranks = None,
    steps: _Steps = 300,
    density: _Density = 0.01,
    seed: _Seed = 0,
    optimizer: _Optimizer = "sgd",
    lr: _Lr = None,
    momentum: _Momentum = 0.9,
    lr_warmup_steps: _LrWarmupSteps = 20,
    warmup_steps: _WarmupSteps = 0,
    batch_size: _BatchSize = 8,
    timeout: _Timeout = 300.0,
    json: _Json = None,
    plot: _Plot = None,
) -> None:
    """Train a byte-level transformer on Python's own source text, data-parallel over gloo.

    Starts local processes, or runs inside those of a launcher (torchrun).  "dense" is plain DDP.
    """
    if ranks is None:
        ranks = int(os.environ["WORLD_SIZE"]) if launched() else 4
    settings = TrainSettings(
        ranks=ranks,
        steps=steps,
        density=density,
        seed=seed,
        optimizer=optimizer,
        lr=lr,
        momentum=momentum,
        lr_warmup_steps=lr_warmup_steps,
        warmup_steps=warmup_steps,
        batch_size=batch_size,
        timeout=timeout,
    )
    if os.environ.get("RANK", "0") == "0":
        if json is not None:
            check_writable(json)
        if plot is not None:
            check_plot_path(plot)
    try:
        results = train(settings, [name.strip() for name in algorithm.split(",")])
    finally:  # an interrupted rank 0 may have left its progress bar without showing the cursor again
        Console(stderr=True).show_cursor()
    if results is None:
        return
    if json is not None:
        write_json(results, json)
    if plot is not None:
        write_plot(results, plot)
    Console().print(comparison(results))
