"""The command ``sparsync bench``: time, volume and correctness of collectives, side by side."""

from __future__ import annotations

import json as json_module
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, TypeVar

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sparsync.bench.inputs import INPUTS, input_named
from sparsync.bench.launch import launch, launched
from sparsync.bench.measure import Case, Outcome, measure_processes, measure_simulated
from sparsync.bench.network import parse_network
from sparsync.bench.report import check_writable
from sparsync.bench.rows import Row, summarize, tables
from sparsync.errors import ConfigurationError
from sparsync.presets import PRESETS, check_density, resolve
from sparsync.transports.base import check_timeout
from sparsync.transports.sim import Links

__all__ = ["BenchSettings", "bench", "command"]

T = TypeVar("T")

# the options: types and help; the defaults stand in the signature of ``command``
_Collectives = Annotated[str, typer.Option(help=f"With commas: {', '.join(sorted(PRESETS))}.")]
_Ranks = Annotated[int | None, typer.Option(help="World size. [default: 8, or the launcher's]")]
_Size = Annotated[str, typer.Option(help="Elements of the vector; several, with commas.")]
_Density = Annotated[str, typer.Option(help="k / n in (0, 1]; several, with commas.")]
_Steps = Annotated[int, typer.Option(help="Steps that are timed.")]
_Warmup = Annotated[int, typer.Option(help="Steps before: not timed, but their volume counts.")]
_Input = Annotated[str, typer.Option(help=f"Kind of gradient: {', '.join(INPUTS)}.")]
_Seed = Annotated[int, typer.Option(help="Of the gradients.")]
_Transport = Annotated[
    str, typer.Option(help="sim: virtual ranks and clock; torch: local processes over gloo.")
]
_Network = Annotated[str, typer.Option(help="What sim simulates: bandwidth,latency.")]
_Timeout = Annotated[float, typer.Option(help="Seconds that a rank waits for another (torch).")]
_Json = Annotated[Path | None, typer.Option(help="Write the rows here.")]


@dataclass(frozen=True)
class BenchSettings:
    """What is measured: every collective at every size and density.

    Attributes:
        collectives: names of presets.
        ranks: world size P.
        sizes: numbers of elements n.
        densities: k / n asked for.
        steps: timed steps.
        warmup: steps before them; their volume and correctness count, their time does not.
        input: kind of gradient; "uniform" has the least overlap, hence the most fill-in.
        seed: of the gradients.
        transport: "sim" (virtual clock: communication alone) or "torch" (wall clock: everything).
        links: the simulated network.
        timeout: seconds that a process waits for another.
    """

    collectives: tuple[str, ...] = ("dense", "allgather", "oktopk")
    ranks: int = 8
    sizes: tuple[int, ...] = (1_000_000,)
    densities: tuple[float, ...] = (0.01,)
    steps: int = 20
    warmup: int = 5
    input: str = "uniform"
    seed: int = 0
    transport: str = "sim"
    links: Links = field(default_factory=Links)
    timeout: float = 300.0

    def __post_init__(self) -> None:
        for name in self.collectives:
            resolve(name)
        for name in ("ranks", "steps"):
            _at_least(1, name, getattr(self, name))
        for size in self.sizes:
            _at_least(1, "size", size)
        _at_least(0, "warmup", self.warmup)
        for density in self.densities:
            check_density(density)
        input_named(self.input)
        if self.transport not in ("sim", "torch"):
            raise ConfigurationError(f"unknown transport {self.transport!r}; choose sim or torch")
        check_timeout(self.timeout)

    def cases(self) -> list[Case]:
        """Return one case per row, collectives side by side."""
        return [
            Case(name, self.ranks, size, density, self.input, self.seed, self.links)
            for size in self.sizes
            for density in self.densities
            for name in self.collectives
        ]


def command(
    collectives: _Collectives = "dense,allgather,oktopk",
    ranks: _Ranks = None,
    size: _Size = "1000000",
    density: _Density = "0.01",
    steps: _Steps = 20,
    warmup: _Warmup = 5,
    input: _Input = "uniform",
    seed: _Seed = 0,
    transport: _Transport = "sim",
    network: _Network = "1gbit,50us",
    timeout: _Timeout = 300.0,
    json: _Json = None,
) -> None:
    """Measure collectives: time, volume against its bound, and correctness, on every step.

    Each step feeds a fresh gradient to a whole reducer with error feedback: selection, exchange and
    commit.  "sim" charges communication alone.  Ends with 1 if a result is wrong.
    """
    if ranks is None:
        ranks = int(os.environ["WORLD_SIZE"]) if launched() else BenchSettings.ranks
    settings = BenchSettings(
        collectives=tuple(name.strip() for name in collectives.split(",")),
        ranks=ranks,
        sizes=tuple(int(n) for n in _numbers("size", size, int)),
        densities=tuple(_numbers("density", density, float)),
        steps=steps,
        warmup=warmup,
        input=input,
        seed=seed,
        transport=transport,
        links=parse_network(network),
        timeout=timeout,
    )
    if json is not None and os.environ.get("RANK", "0") == "0":
        check_writable(json)
    rows = bench(settings)
    if rows is None:
        return
    Console().print(tables(rows))
    if json is not None:
        json.write_text(json_module.dumps([asdict(r) for r in rows], indent=1) + "\n", "utf-8")
    if not all(row.correct for row in rows):
        raise typer.Exit(1)


def bench(settings: BenchSettings) -> list[Row] | None:
    """Measure everything; None on the other ranks of a launcher.

    Example:
        >>> settings = BenchSettings(("oktopk",), ranks=4, sizes=(4000,), steps=2, warmup=0)
        >>> [row] = bench(settings)
        >>> row.k, row.entries_min, row.wrong, row.correct
        (40, 1.0, 0, True)
    """
    if settings.transport == "torch":
        measured = launch(_measure_all, settings.ranks, settings, timeout=settings.timeout)
    elif launched():
        raise ConfigurationError("--transport sim needs no launcher; start it as one process")
    else:
        measured = _on_one_thread(lambda: _measure_all(settings))
    if measured is None:
        return None
    return [
        summarize(case, settings.transport, outcomes, settings.warmup)
        for case, outcomes in zip(settings.cases(), measured, strict=True)
    ]


def _measure_all(settings: BenchSettings) -> list[list[Outcome]]:
    """Measure every case, here or on every rank of a process group; outcomes on rank 0 alone."""
    cases, steps = settings.cases(), settings.warmup + settings.steps
    real = settings.transport == "torch"
    aside = dist.new_group() if real else None
    measured = []
    with _progress(len(cases) * steps, shown=not real or dist.get_rank() == 0) as advance:
        for case in cases:
            if aside is None:
                stream: Iterator[Outcome | None] = measure_simulated(case, steps)
            else:
                stream = measure_processes(case, steps, aside, settings.timeout)
            outcomes = []
            for outcome in stream:
                advance(f"{case.collective}, n = {case.size:,}, density {case.density:g}")
                if outcome is not None:
                    outcomes.append(outcome)
            measured.append(outcomes)
    return measured


def _on_one_thread(function: Callable[[], T]) -> T:
    """Call ``function``: virtual ranks take turns, and more threads wait long where cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return function()
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _progress(total: int, *, shown: bool) -> Iterator[Callable[[str], None]]:
    """Show a bar on stderr, if that is a terminal; yields what is to be called after every step."""
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not shown or not console.is_terminal,
    ) as bar:
        task = bar.add_task("", total=total)
        yield lambda text: bar.update(task, advance=1, description=text)


def _numbers(name: str, text: str, convert: Callable[[str], float]) -> list[float]:
    """Read a list with commas."""
    try:
        return [convert(part.strip()) for part in text.split(",")]
    except ValueError as error:
        kind = "whole numbers" if convert is int else "numbers"
        raise ConfigurationError(f"{name} is {text!r}; give {kind}, with commas between") from error


def _at_least(least: int, name: str, value: int) -> None:
    if value < least:
        raise ConfigurationError(f"{name} is {value}; give at least {least}")
