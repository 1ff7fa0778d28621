"""Measure the time of an exchange with Ok-Topk's optimisations switched off one by one.

    python benchmarks/ablations.py [--lab 1gbit]     (writes benchmarks/ablations.md; about 5 minutes)

All optimisations are measured on virtual ranks. Rotation and bucketing (section 3.1.1, Figure 2)
are measured separately and together. Bucketing is also measured on eight processes, over loopback
and, with --lab, over shaped links (Linux, root).
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

from sparsync import simulate
from sparsync.cli.bench.inputs import Draw, gradient
from sparsync.cli.launch import StartLine
from sparsync.cli.network_choice import Connection
from sparsync.published.oktopk import OkTopk
from sparsync.published.oktopk.regions import Writer, split_reduce
from sparsync.selection import Exact
from sparsync.sparse import even_boundaries
from sparsync.transports.driver import run
from sparsync.transports.sim import Links
from sparsync.wire import Coo

RANKS = (8, 16, 32)
K = 8192
SIZE = 32 * K
LINKS = Links(alpha=50e-6, beta=8e-9)  # 1 Gbit/s
RATE = "1 Gbit/s, 50 us"


def spread(rank: int, world_size: int) -> torch.Tensor:
    """Return normal values everywhere."""
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(rank))


def clustered(rank: int, world_size: int) -> torch.Tensor:
    """Return normal values in the first n / P elements, i.e. in a single region, and zeros elsewhere."""
    values = torch.zeros(SIZE)
    width = max(SIZE // world_size, K)
    values[:width] = spread(rank, world_size)[:width]
    return values


def one_holds_all(rank: int, world_size: int) -> torch.Tensor:
    """Return normal values in the rank's own region and zeros elsewhere; rank 0 has the largest."""
    values = torch.zeros(SIZE)
    start, stop = (SIZE * r // world_size for r in (rank, rank + 1))
    values[start:stop] = spread(rank, world_size)[start:stop] * (100 if rank == 0 else 1)
    return values


ROWS = {
    "destination rotation": (spread, {"rotate": False}),
    "balanced regions": (clustered, {"balanced_split": False}),
    "balancing before the allgatherv": (one_holds_all, {"balance": False}),
}


def seconds(make, world_size: int, *, gamma: float = 0.0, **options) -> float:
    """Return the virtual seconds of the second exchange; the first one also agrees on the regions."""
    collectives = [OkTopk(**options) for _ in range(world_size)]
    vectors = [Exact().select(make(rank, world_size), K, 0) for rank in range(world_size)]
    links = Links(LINKS.alpha, LINKS.beta, gamma)

    def one(step: int) -> float:
        async def program(comm):
            return await collectives[comm.rank].reduce(comm, vectors[comm.rank], K, step)

        return simulate(program, world_size, links=links).seconds

    one(0)
    return one(1)


def optimisations() -> list[str]:
    """Return the table of optimisations, each switched off separately."""
    lines = [
        f"Simulated seconds of one exchange ({RATE}, n = {SIZE:,}, k = {K:,}); > 1: the optimisation "
        "pays.",
        "",
        "| switched off | " + " | ".join(f"P = {p}" for p in RANKS) + " |",
        "|---|" + "---:|" * len(RANKS),
    ]
    for name, (make, off) in ROWS.items():
        ratios = [seconds(make, p, **off) / seconds(make, p) for p in RANKS]
        lines.append(f"| {name} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")
    return lines


# ---- rotation and bucketing (section 3.1.1, Figure 2) -----------------------------------------------

SCHEDULES = {
    "none": {"rotate": False, "buckets": 1},
    "rotation": {"rotate": True, "buckets": 1},
    "bucketing": {"rotate": False, "buckets": 2},
    "both": {"rotate": True, "buckets": 2},
}
FIGURE_2_RANKS = (16, 64)
GAMMAS = (0.0, 0.3e-9, 2e-9)  # seconds per reduced byte: 0; as in C++; about six times as much
KINDS = ("uniform", "overlapping")


def split_seconds(make, world_size: int, *, gamma: float, **options) -> float:
    """Return the virtual seconds of split-and-reduce alone, over even regions."""
    vectors = [Exact().select(make(rank, world_size), K, 0) for rank in range(world_size)]
    boundaries = even_boundaries(SIZE, world_size)

    async def program(comm):
        mine = vectors[comm.rank]
        await split_reduce(comm, mine, boundaries, Writer(Coo(), comm, mine), most=K, **options)

    links = Links(LINKS.alpha, LINKS.beta, gamma)
    return simulate(program, world_size, links=links).seconds


def simulated_schedules() -> list[str]:
    """Return the tables of rotation and bucketing on virtual ranks."""
    cells = [(p, gamma) for p in FIGURE_2_RANKS for gamma in GAMMAS]
    heads = [f"P = {p}, {1e9 * gamma:g} ns" for p, gamma in cells]
    lines = [
        f"Simulated milliseconds ({RATE}, n = {SIZE:,}, k = {K:,}), over nanoseconds per byte that",
        "is reduced: 0; 0.3, as in C++ here; 2. The sum of the first bucket is read again, and charged",
        "again, with the second.",
    ]
    for what, measure in (("split and reduce", split_seconds), ("exchange", seconds)):
        for kind in KINDS:

            def make(rank: int, world_size: int, kind: str = kind) -> torch.Tensor:
                return gradient(kind, Draw(SIZE, world_size, rank, 0, 0))

            lines += ["", f"| {what}, {kind} supports | " + " | ".join(heads) + " |"]
            lines.append("|---|" + "---:|" * len(heads))
            for name, options in SCHEDULES.items():
                times = [1e3 * measure(make, p, gamma=gamma, **options) for p, gamma in cells]
                lines.append(f"| {name} | " + " | ".join(f"{t:.3f}" for t in times) + " |")
    return lines


# ---- bucketing on real ranks ------------------------------------------------------------------------

REAL_RANKS = 8
REAL_SIZES = (1_000_000, 14_728_266)  # the second is VGG-16 on CIFAR-10
DENSITY = 0.01
ROUNDS, WARM_UP = 60, 3
BUCKETS = {"without": 1, "with": 2}


def exchange_times(connection: Connection, size: int) -> dict[str, list[float]]:
    """Return the milliseconds of exchanges with and without bucketing, which alternate."""
    rank, k, line = dist.get_rank(), round(DENSITY * size), StartLine(dist.new_group())
    mine = Exact().select(gradient("uniform", Draw(size, REAL_RANKS, rank, 0, 0)), k, 0)
    collectives = {name: OkTopk(buckets=buckets) for name, buckets in BUCKETS.items()}
    times: dict[str, list[float]] = {name: [] for name in BUCKETS}
    with connection.open("oktopk") as comm:
        for step in range(WARM_UP + ROUNDS):
            for name in random.Random(step).sample(sorted(BUCKETS), len(BUCKETS)):
                start = line.wait()
                run(collectives[name].reduce(comm, mine, k, step))
                ends = torch.tensor([start, time.perf_counter()], dtype=torch.float64)
                dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=line.group)
                if step >= WARM_UP:
                    times[name].append(1e3 * float(ends[1] - ends[0]))
    return times


def real_bucketing(rate: str | None) -> list[str]:
    """Return the table of bucketing on processes."""
    lines = [
        f"{REAL_RANKS} processes on {os.cpu_count()} cores, {platform.machine()}, torch "
        f"{torch.__version__};",
        f"uniform supports, density {DENSITY:.0%}. Medians of {ROUNDS} exchanges of each,",
        "which take turns; the ratio is the median of pairs, with its quartiles; < 1: bucketing pays.",
        "",
        "| links | transport | k | without, ms | with, ms | with / without |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for lab in (None, rate) if rate else (None,):
        for transport in ("zmq", "torch"):
            connection = Connection(transport, lab=lab)
            for size in REAL_SIZES:
                times = connection.start(exchange_times, REAL_RANKS, connection, size)
                without, bucketed = times["without"], times["with"]
                ratios = [b / a for a, b in zip(without, bucketed, strict=True)]
                low, middle, high = statistics.quantiles(ratios, n=4)
                cells = (
                    lab or "loopback",
                    transport,
                    f"{round(DENSITY * size):,}",
                    f"{statistics.median(without):.1f}",
                    f"{statistics.median(bucketed):.1f}",
                    f"{middle:.2f} ({low:.2f} to {high:.2f})",
                )
                lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Measure and write the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lab", metavar="RATE", help="real ranks on shaped links as well: 1gbit")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".md"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    parts = {
        "# Ok-Topk without one of its optimisations, relative to Ok-Topk": optimisations,
        "## Rotation and bucketing": simulated_schedules,
        "## Bucketing on real ranks": lambda: real_bucketing(arguments.lab),
    }
    text = []
    for title, measure in parts.items():
        text += [title, "", *measure(), ""]
        print("\n".join(text))
    arguments.output.write_text("\n".join(text[:-1]) + "\n")


if __name__ == "__main__":
    main()
