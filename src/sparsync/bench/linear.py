"""The command ``sparsync linear``: logistic regression and linear SVMs on sparse data, in parallel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from rich.console import Console

from sparsync.bench.launch import launch, launched, launched_ranks, leads
from sparsync.bench.linear_report import LinearResult, tables, with_ratios, write_results
from sparsync.bench.linear_settings import TRIGRAMS, LinearSettings
from sparsync.bench.network import parse_network
from sparsync.bench.report import check_writable
from sparsync.bench.shaped import privileged, shaped
from sparsync.errors import ConfigurationError

__all__ = ["command", "train_linear"]

T = TypeVar("T")

_Data = Annotated[
    str,
    typer.Option(
        help=f"An svmlight file (also .gz, .bz2), or {TRIGRAMS}: those of Python's own library."
    ),
]
_Model = Annotated[str, typer.Option(help="logistic or svm.")]
_Solver = Annotated[
    str, typer.Option(help="sgd, or scd: block coordinate descent (logistic only).")
]
_Exchange = Annotated[
    str | None,
    typer.Option(
        help="A lossless collective, as allgather, split-allgather, recursive-doubling, ring, "
        "dynamic, sparcml-auto, dense.",
        show_default="split-allgather; for scd allgather",
    ),
]
_Compare = Annotated[
    str | None,
    typer.Option(
        help="Repeat the training with these exchanges, with commas; ratios are to dense."
    ),
]
_Ranks = Annotated[
    int | None, typer.Option(help="Local processes.", show_default="4, or the launcher's")
]
_Transport = Annotated[
    str | None,
    typer.Option(
        help="sim: virtual ranks and clock; torch (gloo), zmq, mpi; auto: the library's default.",
        show_default="sim; with --lab auto",
    ),
]
_Network = Annotated[str, typer.Option(help="What sim simulates: bandwidth,latency.")]
_Lab = Annotated[
    str | None,
    typer.Option(help="Put every rank behind a real link of this rate, as 1gbit (Linux)."),
]
_Epochs = Annotated[int, typer.Option(help="Passes over the rows; with scd over the coordinates.")]
_Steps = Annotated[
    int | None, typer.Option(help="Most steps of an epoch.", show_default="a whole pass")
]
_Batch = Annotated[int, typer.Option(help="Rows per rank and step of sgd.")]
_Coordinates = Annotated[int, typer.Option(help="Per rank and step of scd.")]
_Lr = Annotated[
    float | None,
    typer.Option(help="First learning rate of sgd.", show_default="1 / a bound of the curvature"),
]
_Schedule = Annotated[
    str, typer.Option(help="Of the learning rate: constant, 1/t, 1/sqrt(t), step; t in epochs.")
]
_L1 = Annotated[float, typer.Option(help="L1 penalty; makes weights exactly zero.")]
_L2 = Annotated[float, typer.Option(help="L2 penalty.")]
_Aggregation = Annotated[
    str, typer.Option(help="sync, or async: steps go on while gradients are under way.")
]
_Staleness = Annotated[
    int | None,
    typer.Option(help="async: gradients are applied so many steps late.", show_default="1"),
]
_Threads = Annotated[int, typer.Option(help="Per rank.")]
_Dimensions = Annotated[
    int | None,
    typer.Option(help="Columns.", show_default="the file's; 3,231,961 for trigrams"),
]
_Rows = Annotated[int | None, typer.Option(help="So many trigram samples.", show_default="all")]
_Positive = Annotated[
    str | None,
    typer.Option(
        help="What is +1: labels of the file, with commas; a package of the trigrams.",
        show_default="the larger of two labels; the largest package",
    ),
]
_Cache = Annotated[
    Path | None, typer.Option(help="Folder for the parsed data.", show_default="beside the file")
]
_HeldOutEvery = Annotated[
    int, typer.Option(help="Of so many rows one is held out, for the accuracy; 0: none.")
]
_Seed = Annotated[int, typer.Option(help="Of the order of rows or coordinates.")]
_Timeout = Annotated[float, typer.Option(help="Seconds that a rank waits for another.")]
_Json = Annotated[Path | None, typer.Option(help="Write what was measured here.")]


def command(
    data: _Data = TRIGRAMS,
    model: _Model = "logistic",
    solver: _Solver = "sgd",
    exchange: _Exchange = None,
    compare: _Compare = None,
    ranks: _Ranks = None,
    transport: _Transport = None,
    network: _Network = "1gbit,50us",
    lab: _Lab = None,
    epochs: _Epochs = 5,
    steps: _Steps = None,
    batch: _Batch = 1000,
    coordinates: _Coordinates = 100,
    lr: _Lr = None,
    schedule: _Schedule = "constant",
    l1: _L1 = 0.0,
    l2: _L2 = 0.0,
    aggregation: _Aggregation = "sync",
    staleness: _Staleness = None,
    threads: _Threads = 1,
    dimensions: _Dimensions = None,
    rows: _Rows = None,
    positive: _Positive = None,
    cache: _Cache = None,
    held_out_every: _HeldOutEvery = 10,
    seed: _Seed = 0,
    timeout: _Timeout = 300.0,
    json: _Json = None,
) -> None:
    """Train a linear model on sparse data, data-parallel, by a lossless sparse exchange.

    What travels is as sparse as the data are; nothing is dropped, so the losses are those of the
    dense exchange (--compare dense).  Starts local ranks, or runs inside a launcher's.
    """
    _show(**locals())  # most options are fields of the settings by the same name


def _show(
    *,
    solver: str,
    exchange: str | None,
    compare: str | None,
    ranks: int | None,
    network: str,
    batch: int,
    aggregation: str,
    staleness: int | None,
    json: Path | None,
    **fields: Any,
) -> None:
    """Train and report; files are tried before any work begins."""
    if exchange is None:
        exchange = "allgather" if solver == "scd" else "split-allgather"
    names = [name.strip() for name in f"{exchange},{compare or ''}".split(",") if name.strip()]
    settings = LinearSettings(
        solver=solver,
        exchanges=tuple(dict.fromkeys(names)),
        ranks=launched_ranks(LinearSettings.ranks) if ranks is None else ranks,
        links=parse_network(network),
        batch_size=batch,
        staleness=_checked_staleness(aggregation, staleness),
        **fields,
    )
    if json is not None and leads():
        check_writable(json)
    privileged(settings.lab)
    try:
        results = train_linear(settings)
    finally:  # an interrupted rank 0 may have left its progress bar without showing the cursor again
        Console(stderr=True).show_cursor()
    if results is None:
        return
    if json is not None:
        write_results(results, json)
    Console().print(tables(results))
    if not all(result.replicas_equal for result in results):
        raise typer.Exit(1)


def train_linear(settings: LinearSettings) -> list[LinearResult] | None:
    """Train once per exchange; None on the other ranks of a launcher.

    Example:
        >>> settings = LinearSettings(
        ...     ranks=2, rows=200, dimensions=5_000, epochs=2, exchanges=("ring", "dense")
        ... )
        >>> ring, dense = train_linear(settings)
        >>> ring.objective[2] < ring.objective[0], ring.objective_difference < 1e-5
        (True, True)
    """
    from sparsync.bench.linear_rank import simulate_all, train_all  # SciPy: only where it is used

    if settings.simulated:
        if launched():
            raise ConfigurationError("--transport sim needs no launcher; start it as one process")
        return with_ratios(_on_one_thread(lambda: simulate_all(settings)))
    with shaped(settings.lab, settings.ranks) as made:
        results: list[LinearResult] | None = launch(
            train_all,
            settings.ranks,
            settings,
            timeout=settings.timeout,
            mpi=settings.carrier == "mpi",
            **made.options,
        )
    return None if results is None else with_ratios(results)


def _checked_staleness(aggregation: str, staleness: int | None) -> int:
    """Return the number of steps: 0 if synchronous."""
    if aggregation not in ("sync", "async"):
        raise ConfigurationError(f"unknown aggregation {aggregation!r}; choose sync or async")
    if aggregation == "sync" and staleness:
        raise ConfigurationError(
            f"staleness is {staleness} with --aggregation sync; choose async, or leave it away"
        )
    return 0 if aggregation == "sync" else 1 if staleness is None else staleness


def _on_one_thread(function: Callable[[], T]) -> T:
    """Call ``function``: virtual ranks take turns; more threads of torch would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return function()
    finally:
        torch.set_num_threads(threads)
