"""The command ``sparsync bench``: collectives, kernels or selectors, side by side."""

from __future__ import annotations

import json as json_module
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import torch.distributed as dist
import typer
from rich.console import Console

from sparsync.bench.inputs import INPUTS
from sparsync.bench.kernels import bench_kernels
from sparsync.bench.kernels import table as kernel_table
from sparsync.bench.launch import launch, launched, launched_ranks, leads
from sparsync.bench.measure import Measured, measure_simulated
from sparsync.bench.network import parse_network
from sparsync.bench.picture import check_plot_path
from sparsync.bench.plan import check_verify
from sparsync.bench.processes import Team
from sparsync.bench.progress import progress
from sparsync.bench.report import check_writable
from sparsync.bench.rows import Row, Wire, entry, summarize
from sparsync.bench.rows_table import tables
from sparsync.bench.selectors import bench_selectors
from sparsync.bench.selectors_report import tables as selector_tables
from sparsync.bench.selectors_report import write_plot
from sparsync.bench.selectors_settings import (
    DEFAULT_SIZES,
    SELECTOR_INPUTS,
    SelectorSettings,
    parse_sizes,
)
from sparsync.bench.settings import BenchSettings
from sparsync.bench.shaped import privileged, shaped
from sparsync.errors import ConfigurationError
from sparsync.presets import PRESETS

__all__ = ["BenchSettings", "bench", "command"]

T = TypeVar("T")

# the options: types and help; the defaults stand in the signature of ``command``
_Collectives = Annotated[str, typer.Option(help=f"With commas: {', '.join(sorted(PRESETS))}.")]
_Ranks = Annotated[int | None, typer.Option(help="World size. [default: 8, or the launcher's]")]
_Size = Annotated[str, typer.Option(help="Elements of the vector; several, with commas.")]
_Density = Annotated[
    str | None,
    typer.Option(
        help="k / n in (0, 1]; several, with commas (one of --selectors).",
        show_default="0.01; --selectors: 0.001",
    ),
]
_Steps = Annotated[
    int | None,
    typer.Option(help="Steps that are timed.", show_default="20; real ranks: 3 to 20, by speed"),
]
_Warmup = Annotated[
    int | None,
    typer.Option(
        help="Steps before: not timed, but their volume counts.",
        show_default="5; real ranks: 1 to 5, by speed",
    ),
]
_Input = Annotated[
    str,
    typer.Option(
        help=f"Kind of gradient: {', '.join(INPUTS)}; of --selectors: {', '.join(SELECTOR_INPUTS)}."
    ),
]
_Seed = Annotated[int, typer.Option(help="Of the gradients.")]
_Transport = Annotated[
    str | None,
    typer.Option(
        help="sim: virtual ranks and clock; torch: local processes over gloo; zmq: over ZeroMQ; "
        "mpi: over MPI, by mpiexec; auto: the library's default of these. The row dense is gloo's "
        "native allreduce in all; over mpi it is MPI's.",
        show_default="sim; with --lab auto",
    ),
]
_Network = Annotated[str, typer.Option(help="What sim simulates: bandwidth,latency.")]
_Lab = Annotated[
    str | None,
    typer.Option(help="Put every rank behind a real link of this rate, as 1gbit (Linux)."),
]
_CurveKeys = Annotated[
    Path | None, typer.Option(help="Folder of keys: zmq encrypts and refuses unknown ranks.")
]
_Verify = Annotated[
    str,
    typer.Option(
        help="What is verified in full (the sum and the law): every step; its ends, first and last; "
        "digest, none: ranks' totals are compared, as on all steps. auto: every step of small "
        "vectors, the ends for large ones."
    ),
]
_Timeout = Annotated[float, typer.Option(help="Seconds that a rank waits for another.")]
_Kernels = Annotated[
    bool, typer.Option("--kernels", help="Measure the local kernels instead, one by one.")
]
_Selectors = Annotated[
    bool,
    typer.Option("--selectors", help="Measure the selectors instead, over sizes of residuals."),
]
_Sizes = Annotated[str, typer.Option(help="Of --selectors: bytes of the residual, with commas.")]
_Device = Annotated[str, typer.Option(help="Of --kernels and --selectors: cpu or cuda.")]
_Json = Annotated[Path | None, typer.Option(help="Write the rows here.")]
_Plot = Annotated[Path | None, typer.Option(help="Of --selectors: draw time over size (.png).")]


def command(
    collectives: _Collectives = "dense,allgather,oktopk,budgeted,halving",
    ranks: _Ranks = None,
    size: _Size = "1000000",
    density: _Density = None,
    steps: _Steps = None,
    warmup: _Warmup = None,
    input: _Input = "uniform",
    seed: _Seed = 0,
    transport: _Transport = None,
    network: _Network = "1gbit,50us",
    lab: _Lab = None,
    curve_keys: _CurveKeys = None,
    verify: _Verify = "auto",
    timeout: _Timeout = 300.0,
    kernels: _Kernels = False,
    selectors: _Selectors = False,
    sizes: _Sizes = DEFAULT_SIZES,
    device: _Device = "cpu",
    json: _Json = None,
    plot: _Plot = None,
) -> None:
    """Measure collectives: time, volume against its bound, and correctness, on every step.

    Each step feeds a fresh gradient to a whole reducer with error feedback: selection, exchange and
    commit.  "sim" charges communication alone.  Ends with 1 if a result is wrong.
    """
    if selectors:
        given = SelectorSettings(parse_sizes(sizes), _one_density(density), input, device, seed)
        _end(_show_selectors(given, json, plot))
        return
    if plot is not None:
        raise ConfigurationError("--plot draws what --selectors measures; add --selectors")
    settings = BenchSettings(
        collectives=tuple(name.strip() for name in collectives.split(",")),
        ranks=launched_ranks(BenchSettings.ranks) if ranks is None else ranks,
        sizes=tuple(int(n) for n in _numbers("size", size, int)),
        densities=tuple(_numbers("density", density or "0.01", float)),
        steps=steps,
        warmup=warmup,
        input=input,
        seed=seed,
        transport=transport,
        links=parse_network(network),
        lab=lab,
        curve_keys=curve_keys,
        verify=check_verify(verify),
        timeout=timeout,
    )
    if json is not None and leads():
        check_writable(json)
    _end(_show_kernels(settings, device, json) if kernels else _show_rows(settings, json))


def _end(right: bool) -> None:
    """End with 1 if a result is wrong."""
    if not right:
        raise typer.Exit(1)


def _show_rows(settings: BenchSettings, json: Path | None) -> bool:
    """Measure and report the collectives; tell whether all results are right."""
    privileged(settings.lab)
    rows = bench(settings)
    if rows is None:
        return True
    Console().print(tables(rows))
    _write(json, [entry(row, rows) for row in rows])
    return all(row.correct for row in rows)


def _show_kernels(settings: BenchSettings, device: str, json: Path | None) -> bool:
    """Measure and report the kernels; tell whether all agree with their specification."""
    rows = []
    for size in settings.sizes:
        for density in settings.densities:
            group = bench_kernels(device, size, density, seed=settings.seed)
            Console().print(kernel_table(group))
            rows += group
    _write(json, [asdict(row) for row in rows])
    return all(row.equal for row in rows)


def _show_selectors(settings: SelectorSettings, json: Path | None, plot: Path | None) -> bool:
    """Measure and report the selectors; tell whether the exact ones selected the k largest."""
    if json is not None:
        check_writable(json)
    if plot is not None:
        check_plot_path(plot)
    rows = bench_selectors(settings)
    Console().print(selector_tables(rows))
    if plot is not None:
        write_plot(rows, plot)
    _write(json, [asdict(row) for row in rows])
    return all(row.correct for row in rows)


def _one_density(text: str | None) -> float:
    """Return the density of --selectors."""
    density, *more = _numbers("density", text or str(SelectorSettings.density), float)
    if more:
        raise ConfigurationError(f"density is {text!r}; --selectors takes one, as 0.001")
    return density


def _write(path: Path | None, entries: list[dict[str, Any]]) -> None:
    if path is not None:
        path.write_text(json_module.dumps(entries, indent=1, allow_nan=False) + "\n", "utf-8")


def bench(settings: BenchSettings) -> list[Row] | None:
    """Measure everything; None on the other ranks of a launcher.

    Example:
        >>> settings = BenchSettings(("oktopk",), ranks=4, sizes=(4000,), steps=2, warmup=0)
        >>> [row] = bench(settings)
        >>> row.k, row.entries_min, row.wrong, row.correct
        (40, 1.0, 0, True)
    """
    wire: Wire | None = None
    if settings.simulated:
        if launched():
            raise ConfigurationError("--transport sim needs no launcher; start it as one process")
        measured = _on_one_thread(lambda: _simulate_all(settings))
    else:
        with shaped(settings.lab, settings.ranks) as network:
            wire = network.wire
            measured = launch(
                _measure_all,
                settings.ranks,
                settings,
                timeout=settings.timeout,
                mpi=settings.carrier == "mpi",
                **network.options,
            )
    if measured is None:
        return None
    return [summarize(c, m, wire) for c, m in zip(settings.cases(), measured, strict=True)]


def _simulate_all(settings: BenchSettings) -> list[Measured]:
    """Measure every case on virtual ranks."""
    pace, rows = settings.pace(), []
    steps, warmup = pace.timed([]), pace.warmup or 0
    with progress(shown=True) as row:
        for case in settings.cases():
            with row(f"{case.name}, n = {case.size:,}, density {case.density:g}") as advance:
                rows.append(measure_simulated(case, steps, warmup, settings.verify, advance))
    return rows


def _measure_all(settings: BenchSettings) -> list[Measured]:
    """Measure every case on this rank of a process group."""
    team = Team(
        settings.ranks,
        max(settings.sizes),
        settings.connection(),
        settings.verify,
        in_lab=settings.lab is not None,
    )
    rows = []
    with progress(shown=dist.get_rank() == 0) as row:
        for case in settings.cases():
            with row(f"{case.name}, n = {case.size:,}, density {case.density:g}") as advance:
                rows.append(team.measure(case, settings.pace(), advance))
    return rows


def _on_one_thread(function: Callable[[], T]) -> T:
    """Call ``function``: virtual ranks take turns, and more threads wait long where cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return function()
    finally:
        torch.set_num_threads(threads)


def _numbers(name: str, text: str, convert: Callable[[str], float]) -> list[float]:
    """Read a list with commas."""
    try:
        return [convert(part.strip()) for part in text.split(",")]
    except ValueError as error:
        kind = "whole numbers" if convert is int else "numbers"
        raise ConfigurationError(f"{name} is {text!r}; give {kind}, with commas between") from error
