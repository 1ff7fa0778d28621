"""The command ``sparsync bench``: compare collectives, kernels or selectors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch.distributed as dist
import typer
from rich.console import Console, RenderableType
from typer import Option

from sparsync.algorithm import check_density
from sparsync.cli.bench.inputs import INPUTS, input_named
from sparsync.cli.bench.kernels import KernelRow, bench_kernels, kernel_table
from sparsync.cli.bench.measure import VERIFY, Measured, Pace, measure_simulated, verified_in_full
from sparsync.cli.bench.processes import Team
from sparsync.cli.bench.rows import Row, entry, summarize, tables
from sparsync.cli.bench.selection_time import (
    DEFAULT_SIZES,
    SELECTOR_INPUTS,
    SelectorRow,
    SelectorSettings,
    bench_selectors,
    parse_sizes,
    selector_tables,
    write_plot,
)
from sparsync.cli.bench.verified_row import Case
from sparsync.cli.flags import (
    CurveKeys,
    Json,
    Lab,
    Network,
    Plot,
    Timeout,
    TransportOrSim,
    numbers,
    option,
    ranks_option,
    takes,
)
from sparsync.cli.launch import launched_ranks, leads, on_one_thread
from sparsync.cli.named_algorithms import OPTIONS_HELP, algorithm_of, labels, named
from sparsync.cli.network_choice import USUAL_NETWORK, Connection, parse_network
from sparsync.cli.output import check_outputs, progress, write_json
from sparsync.cli.values import (
    Elements,
    Only,
    Ranks,
    Seed,
    Steps,
    Warmup,
    check,
    check_fields,
    check_memory,
    within,
)
from sparsync.errors import ConfigurationError, require
from sparsync.presets import PRESETS
from sparsync.transports.sim import Links

__all__ = ["BenchSettings", "bench", "command"]


@dataclass(frozen=True)
class BenchSettings:
    """The settings of a bench of collectives; fields with a help text are command-line options."""

    collectives: tuple[str, ...] = ("dense", "allgather", "oktopk")  # names, possibly with options
    ranks: Annotated[Ranks, ranks_option(8)] = 8
    sizes: tuple[int, ...] = (1_000_000,)
    densities: tuple[float, ...] = (0.01,)
    steps: Annotated[Steps | None, option("Timed steps.", "20; real ranks: 3 to 20, by speed")] = (
        None
    )
    warmup: Annotated[
        Warmup | None,
        option(
            "Steps before the timed ones; their volume counts.", "5; real ranks: 1 to 5, by speed"
        ),
    ] = None
    input: Annotated[
        str,
        option(
            f"Kind of gradient: {', '.join(INPUTS)}; with --selectors: "
            f"{', '.join(SELECTOR_INPUTS)}."
        ),
    ] = "uniform"
    seed: Annotated[Seed, option("Of the gradients.")] = 0
    transport: TransportOrSim = None
    links: Links = field(default_factory=Links)
    timeout: Timeout = 300.0
    lab: Lab = None
    curve_keys: CurveKeys = None
    verify: Annotated[
        str,
        option(
            "Steps to verify in full (the sum and the law). every: all; ends: the first and the "
            "last; digest: none, only ranks' totals are compared, as on all steps; auto: all for "
            "small vectors, the ends for large ones."
        ),
    ] = "auto"

    def __post_init__(self) -> None:
        for name in self.collectives:
            algorithm_of(name)
        check_fields(self)
        within("size", self.sizes, Elements)
        largest = max(self.sizes)
        check_memory(
            f"gradients and residuals of {self.ranks} ranks, {largest:,} elements each,",
            2 * 4 * largest * self.ranks,
            "give a smaller --size, or fewer --ranks",
        )
        for density in self.densities:
            check_density(density)
        input_named(self.input)
        check("verify", self.verify, self.verify in VERIFY, ", ".join(VERIFY))
        self.connection()

    def connection(self) -> Connection:
        """Return how the ranks are connected."""
        return Connection(self.transport, self.timeout, self.curve_keys, self.lab, simulates=True)

    def pace(self) -> Pace:
        """Return the pace of a row; a short run suffices for virtual times, which repeat exactly."""
        if not self.connection().simulated:
            return Pace(self.steps, self.warmup)
        return Pace(self.steps or 20, 5 if self.warmup is None else self.warmup)

    def cases(self) -> list[Case]:
        """Return one case per row; all collectives of one size and density are adjacent."""
        return [
            Case(name, self.ranks, size, density, self.input, self.seed, self.links)
            for size in self.sizes
            for density in self.densities
            for name in [named(one, PRESETS).label for one in self.collectives]
        ]


@takes(BenchSettings)
def command(
    collectives: Annotated[
        str, option(f"With commas: {', '.join(sorted(PRESETS))}. {OPTIONS_HELP}")
    ] = "dense,allgather,oktopk,budgeted,halving",
    size: Annotated[
        str, option("Elements of the vector; several separated by commas.")
    ] = "1000000",
    density: Annotated[
        str | None,
        option(
            "k / n in (0, 1]; several separated by commas (only one with --selectors).",
            "0.01; --selectors: 0.001",
        ),
    ] = None,
    network: Network = USUAL_NETWORK,
    *,
    kernels: Annotated[
        bool, Option("--kernels", help="Measure the local kernels instead, one by one.")
    ] = False,
    selectors: Annotated[
        bool, Option("--selectors", help="Measure the selectors instead, over sizes of residuals.")
    ] = False,
    sizes: Annotated[
        str,
        Only(("selectors",), DEFAULT_SIZES),
        option("With --selectors: bytes of the residual, separated by commas."),
    ] = DEFAULT_SIZES,
    device: Annotated[
        str,
        Only(("kernels", "selectors"), "cpu"),
        option("With --kernels and --selectors: cpu or cuda."),
    ] = "cpu",
    json: Json = None,
    plot: Plot = None,
    **fields: Any,
) -> None:
    """Measure the time of collectives, their volume against its bound, and every step's correctness.

    Each step feeds a fresh gradient to a whole reducer with error feedback: selection, exchange and
    commit. With "sim", only communication takes time. The row "dense" is gloo's native allreduce, or
    MPI's allreduce with "mpi". The exit code is 1 if a result is wrong.
    """
    require(not (kernels and selectors), "--kernels and --selectors; choose one of them")
    if kernels or selectors:
        _refuse_ignored(
            "--selectors" if selectors else "--kernels",
            {
                "network": network,
                **({"collectives": collectives, "size": size} if selectors else {}),
            },
            fields,
        )
    if plot is not None and not selectors:
        raise ConfigurationError("--plot draws the results of --selectors; add --selectors")
    rows: Sequence[Row | KernelRow | SelectorRow]
    shown: list[RenderableType]
    if selectors:
        part, *more = numbers("density", density or "0.001", float)
        if more:
            raise ConfigurationError(f"density is {density!r}; --selectors takes one, e.g. 0.001")
        wanted = SelectorSettings(parse_sizes(sizes), part, fields["input"], device, fields["seed"])
        check_outputs(json, plot)
        rows = found = bench_selectors(wanted)
        shown = [selector_tables(found)]
        if plot is not None:
            write_plot(found, plot)
        entries: Sequence[Any] = rows
    else:
        settings = BenchSettings(
            collectives=labels(collectives, PRESETS),
            sizes=tuple(dict.fromkeys(numbers("size", size, int))),
            densities=tuple(dict.fromkeys(numbers("density", density or "0.01", float))),
            links=parse_network(network),
            **fields,
        )
        settings.connection().refuse_network(network)
        if leads():
            check_outputs(json)
        if kernels:
            groups = [
                bench_kernels(device, n, part, seed=settings.seed)
                for n in settings.sizes
                for part in settings.densities
            ]
            rows = entries = [row for group in groups for row in group]
            shown = [kernel_table(group) for group in groups]
        else:
            settings.connection().prepare()
            measured = bench(settings)
            if measured is None:
                return
            rows, shown = measured, [tables(measured)]
            entries = [entry(row, measured) for row in measured]
    Console().print(*shown, sep="\n", highlight=False)
    write_json(json, entries)
    if not all(row.correct for row in rows):
        raise typer.Exit(1)


def _refuse_ignored(kind: str, own: dict[str, Any], given: dict[str, Any]) -> None:
    """If kernels or selectors are measured, refuse options that apply only to collectives."""
    parameters = inspect.signature(command).parameters
    usual = {"ranks": launched_ranks(8)}
    used = ("input", "seed") if kind == "--selectors" else ("seed",)
    for name, value in {**own, **given}.items():
        if name not in used and value != usual.get(name, parameters[name].default):
            raise ConfigurationError(f"{kind} has no --{name.replace('_', '-')}; leave it out")


def bench(settings: BenchSettings) -> list[Row] | None:
    """Measure and return all rows; under a launcher, only rank 0 returns them, other ranks return None.

    Example:
        >>> settings = BenchSettings(("oktopk",), ranks=4, sizes=(4000,), steps=2, warmup=0)
        >>> [row] = bench(settings)
        >>> row.k, row.entries_min, row.wrong, row.correct
        (40, 1.0, 0, True)
    """
    connection = settings.connection()
    if connection.simulated:
        connection.prepare()
        with on_one_thread():
            measured = _measure_all(settings, measure_simulated)
    else:
        measured = connection.start(_measure_on_rank, settings.ranks, settings)
    if measured is None:
        return None
    rate = connection.bits_per_second
    return [
        summarize(c, m, rate, settings.lab) for c, m in zip(settings.cases(), measured, strict=True)
    ]


def _measure_on_rank(settings: BenchSettings) -> list[Measured]:
    """Measure every case on this rank of a process group."""
    team = Team(settings.connection())
    return _measure_all(settings, team.measure, shown=dist.get_rank() == 0)


def _measure_all(
    settings: BenchSettings, measure: Callable[..., Measured], *, shown: bool = True
) -> list[Measured]:
    rows, pace = [], settings.pace()
    with progress(shown=shown) as row:
        for case in settings.cases():
            verified = verified_in_full(settings.verify, case.size, case.ranks)
            with row(f"{case.name}, n = {case.size:,}, density {case.density:g}") as advance:
                rows.append(measure(case, pace, verified, advance))
    return rows
