"""The command ``sparsync train``: train a small model data-parallel, once per algorithm."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sparsync.averaging.schemes import SCHEMES
from sparsync.bench.launch import launch, launched_ranks, leads
from sparsync.bench.picture import check_plot_path, write_plot
from sparsync.bench.report import TrainResult, check_writable, write_json
from sparsync.bench.shaped import privileged, shaped
from sparsync.bench.target import check_target_step, with_target
from sparsync.bench.train_hooks import HOOKS, check_algorithm
from sparsync.bench.train_rank import BeforeStep, train_rank
from sparsync.bench.train_schemes import check_schemes
from sparsync.bench.train_settings import TrainSettings
from sparsync.bench.train_table import comparison
from sparsync.integrations.attach import attach
from sparsync.presets import PRESETS
from sparsync.workloads import WORKLOADS

__all__ = ["command", "train"]

# the options: types and help; the defaults stand in the signature of ``command``
_Algorithm = Annotated[
    str,
    typer.Option(
        help=f"One of {', '.join(PRESETS)}; PyTorch's own hooks {', '.join(HOOKS)}; or of the schemes "
        f"that average models, {', '.join(SCHEMES)}; or several, with commas, to compare."
    ),
]
_Ranks = Annotated[
    int | None, typer.Option(help="Local processes.", show_default="4, or the launcher's")
]
_Steps = Annotated[int, typer.Option(help="Optimizer steps.")]
_Density = Annotated[float, typer.Option(help="Fraction of the gradient to exchange, in (0, 1].")]
_Seed = Annotated[int, typer.Option(help="Of the initial weights and of the data.")]
_Workload = Annotated[
    str,
    typer.Option(
        help=f"One of {', '.join(WORKLOADS)}. The first need no data: a transformer or an LSTM on "
        "Python's own source text, a CNN on scikit-learn's digits. The others are the papers'."
    ),
]
_Data = Annotated[
    Path | None,
    typer.Option(
        help="Folder that the papers' workloads read: see docs/data.md. Never downloaded."
    ),
]
_Optimizer = Annotated[str, typer.Option(help="sgd, adam or adamw; auto: the workload's.")]
_Lr = Annotated[
    float | None, typer.Option(help="Learning rate.", show_default="by workload and optimizer")
]
_Momentum = Annotated[float, typer.Option(help="Of sgd.")]
_Nesterov = Annotated[bool, typer.Option("--nesterov", help="Nesterov's momentum, of sgd.")]
_MomentumCorrection = Annotated[
    bool | None,
    typer.Option(
        help="Of sgd: momentum and decay before the exchange, not after.",
        show_default="as the algorithm is published",
    ),
]
_WeightDecay = Annotated[
    float | None,
    typer.Option(
        help="Of the optimizer; adamw's is decoupled.",
        show_default="0.01 for adamw, the workload's for sgd, else 0",
    ),
]
_Space = Annotated[
    str,
    typer.Option(
        help="What presets exchange: gradient, update or local (progress of the ranks' own weights); "
        "with adam also arrival, frozen, refreshed."
    ),
]
_Period = Annotated[
    int | None,
    typer.Option(
        help="Steps between exchanges of --space local, and of schemes that let ranks train alone.",
        show_default="by density, or the scheme's",
    ),
]
_GroupSize = Annotated[
    int | None, typer.Option(help="Ranks that average, of wagma.", show_default="near sqrt(ranks)")
]
_SyncPeriod = Annotated[
    int | None, typer.Option(help="Steps between global averages, of wagma.", show_default="10")
]
_Neighbours = Annotated[
    int | None, typer.Option(help="Ranks that a rank sends to per step, of sgp.", show_default="1")
]
_Deadline = Annotated[
    float | None,
    typer.Option(
        help="Seconds after which a rank that does not answer is left out, of wagma.",
        show_default="the scheme's",
    ),
]
_Buffers = Annotated[
    str, typer.Option(help="Of the model: schemes average them, or leave them local to the end.")
]
_Delay = Annotated[
    str,
    typer.Option(
        help="Ranks wait before steps: random:COUNT:SECONDS, persistent:RANK:SECONDS or "
        "heavytail:MIN:MAX."
    ),
]
_Clip = Annotated[
    float | None,
    typer.Option(
        help="Largest norm of the averaged gradient, of dense and PyTorch's hooks; 0: any.",
        show_default="0.25 for LSTMs of text, else 0",
    ),
]
_LrWarmupSteps = Annotated[
    int, typer.Option(help="First steps, over which the learning rate grows.")
]
_LrDecay = Annotated[
    bool, typer.Option("--lr-decay", help="Then it falls linearly, to 0 after the last step.")
]
_WarmupSteps = Annotated[int, typer.Option(help="First steps, which are exchanged dense.")]
_BatchSize = Annotated[
    int | None,
    typer.Option(
        help="Windows, images or other samples per rank and step.",
        show_default="32 for digits, 16 for lines, 8 for bytes and lstm; the papers'",
    ),
]
_Context = Annotated[
    int | None,
    typer.Option(
        help="Bytes, words or tokens per window.", show_default="64; lstm 32; lines 96; the papers'"
    ),
]
_Layers = Annotated[
    int | None,
    typer.Option(
        help="Blocks of the transformer: 12 width^2 parameters each; or layers of the LSTM.",
        show_default="4; lstm 2; the papers'",
    ),
]
_Width = Annotated[
    int | None,
    typer.Option(
        help="Of the transformer, a multiple of 32: 416 gives 8.6 M parameters; of the LSTM; or "
        "channels of a CNN's first stage.",
        show_default="160; lstm 224; the papers'",
    ),
]
_TargetStep = Annotated[
    int | None,
    typer.Option(
        help="Time to loss: how soon is the loss reached that dense has at this step? A run ends "
        "when it is there.",
        show_default="the last step of dense",
    ),
]
_Transport = Annotated[
    str,
    typer.Option(
        help="Of the sparse exchange: torch (gloo), zmq, mpi, or auto, the library's default. DDP "
        "and PyTorch's hooks use gloo.",
    ),
]
_Lab = Annotated[
    str | None,
    typer.Option(help="Put every rank behind a real link of this rate, as 100mbit (Linux)."),
]
_CurveKeys = Annotated[
    Path | None, typer.Option(help="Folder of keys: zmq encrypts and refuses unknown ranks.")
]
_Timeout = Annotated[float, typer.Option(help="Seconds that a rank waits for another.")]
_Json = Annotated[Path | None, typer.Option(help="Write what was measured here.")]
_Plot = Annotated[Path | None, typer.Option(help="Draw loss over seconds and bytes here (.png).")]

_DEFAULT = str(inspect.signature(attach).parameters["algorithm"].default)


def train(
    settings: TrainSettings, algorithms: Sequence[str], before_step: BeforeStep | None = None
) -> list[TrainResult] | None:
    """Train on local processes, or inside a launcher's ranks; see ``train_rank``.

    Args:
        settings: equal for all algorithms.
        algorithms: names of presets, schemes or PyTorch's hooks, run one after the other.
        before_step: called with (rank, step) on every rank; importable.

    Returns:
        One result per algorithm; None on the other ranks of a launcher.

    Raises:
        ConfigurationError: an unknown algorithm, or a launcher with another number of processes.
        RankError: a rank failed; the others were ended.
    """
    for name in algorithms:
        check_algorithm(name)
    check_schemes(settings, algorithms)
    check_target_step(settings.target_step, settings.steps, algorithms)
    with shaped(settings.lab, settings.ranks) as network:
        results: list[TrainResult] | None = launch(
            train_rank,
            settings.ranks,
            settings,
            tuple(algorithms),
            before_step,
            timeout=settings.timeout,
            mpi=settings.transport == "mpi",
            **network.options,
        )
    return None if results is None else with_target(results, settings.target_step)


def command(
    algorithm: _Algorithm = _DEFAULT,
    ranks: _Ranks = None,
    steps: _Steps = 300,
    density: _Density = 0.01,
    seed: _Seed = 0,
    workload: _Workload = "bytes",
    data: _Data = None,
    optimizer: _Optimizer = "auto",
    lr: _Lr = None,
    momentum: _Momentum = 0.9,
    nesterov: _Nesterov = False,
    momentum_correction: _MomentumCorrection = None,
    weight_decay: _WeightDecay = None,
    clip: _Clip = None,
    space: _Space = "gradient",
    period: _Period = None,
    group_size: _GroupSize = None,
    sync_period: _SyncPeriod = None,
    neighbours: _Neighbours = None,
    deadline: _Deadline = None,
    buffers: _Buffers = "average",
    delay: _Delay = "none",
    lr_warmup_steps: _LrWarmupSteps = 20,
    lr_decay: _LrDecay = False,
    warmup_steps: _WarmupSteps = 0,
    batch_size: _BatchSize = None,
    context: _Context = None,
    layers: _Layers = None,
    width: _Width = None,
    target_step: _TargetStep = None,
    transport: _Transport = "auto",
    lab: _Lab = None,
    curve_keys: _CurveKeys = None,
    timeout: _Timeout = 300.0,
    json: _Json = None,
    plot: _Plot = None,
) -> None:
    """Train data-parallel: a small model on data that every machine has, or a paper's on --data.

    Starts local processes, or runs inside those of a launcher (torchrun, mpiexec, srun).  "dense" is
    plain DDP.
    """
    if ranks is None:
        ranks = launched_ranks(4)
    given = locals()  # every field of the settings is an option of the same name
    settings = TrainSettings(**{field.name: given[field.name] for field in fields(TrainSettings)})
    _show(settings, [name.strip() for name in algorithm.split(",")], json, plot)


def _show(
    settings: TrainSettings, algorithms: Sequence[str], json: Path | None, plot: Path | None
) -> None:
    """Train and report; files are tried before any work begins."""
    if leads():
        if json is not None:
            check_writable(json)
        if plot is not None:
            check_plot_path(plot)
    privileged(settings.lab)
    try:
        results = train(settings, algorithms)
    finally:  # an interrupted rank 0 may have left its progress bar without showing the cursor again
        Console(stderr=True).show_cursor()
    if results is None:
        return
    if json is not None:
        write_json(results, json)
    if plot is not None:
        write_plot(results, plot)
    Console().print(comparison(results))
