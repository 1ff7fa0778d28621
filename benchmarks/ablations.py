"""Ok-Topk's optimisations, one switched off at a time: simulated seconds of one exchange.

python benchmarks/ablations.py        (writes benchmarks/ablations.md; about half a minute)
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from sparsync import simulate
from sparsync.published.oktopk import OkTopk
from sparsync.selection import Exact
from sparsync.transports.sim import Links

RANKS = (8, 16, 32)
K = 8192
SIZE = 32 * K
LINKS = Links(alpha=50e-6, beta=8e-9)  # 1 Gbit/s
RATE = "1 Gbit/s, 50 us"


def spread(rank: int, world_size: int) -> torch.Tensor:
    """Return normal values everywhere."""
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(rank))


def clustered(rank: int, world_size: int) -> torch.Tensor:
    """Return normal values in the first n / P elements, zeros elsewhere: one even region holds all."""
    values = torch.zeros(SIZE)
    width = max(SIZE // world_size, K)
    values[:width] = spread(rank, world_size)[:width]
    return values


def one_holds_all(rank: int, world_size: int) -> torch.Tensor:
    """Return disjoint supports in matching regions, rank 0's values the largest."""
    values = torch.zeros(SIZE)
    start, stop = (SIZE * r // world_size for r in (rank, rank + 1))
    values[start:stop] = spread(rank, world_size)[start:stop] * (100 if rank == 0 else 1)
    return values


ROWS = {
    "destination rotation (window 4)": (spread, {"rotate": False}),
    "balanced regions": (clustered, {"balanced_split": False}),
    "balancing before the allgatherv": (one_holds_all, {"balance": False}),
}


def seconds(make, world_size: int, **options) -> float:
    """Return the virtual seconds of an exchange after the first, which agrees on regions."""
    collectives = [OkTopk(**options) for _ in range(world_size)]
    vectors = [Exact().select(make(rank, world_size), K, 0) for rank in range(world_size)]

    def run(step: int) -> float:
        async def program(comm):
            return await collectives[comm.rank].reduce(comm, vectors[comm.rank], K, step)

        return simulate(program, world_size, links=LINKS).seconds

    run(0)
    return run(1)


def main() -> None:
    """Measure and write the table."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    lines = [
        "# Ok-Topk without one of its optimisations, over Ok-Topk",
        "",
        f"Simulated seconds of one exchange ({RATE}, n = {SIZE:,}, k = {K:,}); > 1: the optimisation "
        "pays.",
        "",
        "| switched off | " + " | ".join(f"P = {p}" for p in RANKS) + " |",
        "|---|" + "---:|" * len(RANKS),
    ]
    for name, (make, off) in ROWS.items():
        ratios = [seconds(make, p, **off) / seconds(make, p) for p in RANKS]
        lines.append(f"| {name} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")
    (Path(__file__).parent / "ablations.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
