"""Peak memory of a training process: DDP with ``attach`` over plain DDP.

    python benchmarks/memory.py        (Linux; 4 minutes; writes benchmarks/memory.md)

Each figure comes from fresh processes.  They train a tiny model first, which pays for imports, threads
and sockets, then a large one; what counts is the kernel's peak (VmHWM) less what was in use between.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync.bench.launch import launch

RANKS = (2, 4)
ALGORITHMS = ("budgeted", "halving", "oktopk")
WIDTH, LAYERS = 2048, 5  # 21 M parameters
TINY = 64
DENSITY = 0.01
STEPS = 5  # DDP makes its buckets anew in the second
WORD_BYTES = 4
MIB = 1 << 20


def status_bytes(field: str) -> int:
    """Return VmRSS (now) or VmHWM (peak) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in /proc/self/status; run on Linux")


def elements(width: int) -> int:
    """Return n of the model."""
    return LAYERS * width * (width + 1)


def train(width: int, algorithm: str | None, options: dict, attached: dict) -> None:
    """Train a model of large linear layers for a few steps, and forget it."""
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    ddp = DistributedDataParallel(torch.nn.Sequential(*layers), **options)
    sync = None
    if algorithm is not None:
        sync = sparsync.attach(ddp, algorithm, **{"density": DENSITY, "timeout": 60, **attached})
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        ddp(torch.randn(4, width, generator=generator)).pow(2).mean().backward()
        optimizer.step()
    if sync is not None:
        sync.close()


def peak(algorithm: str | None, options: dict, attached: dict) -> int:
    """Return the bytes that the large model took at the worst moment, the most of all ranks."""
    train(TINY, algorithm, options, attached)
    before = status_bytes("VmRSS")
    train(WIDTH, algorithm, options, attached)
    most = torch.tensor(status_bytes("VmHWM") - before)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


def measure(world_size: int, algorithm: str | None, options: dict, attached: dict) -> int:
    """Return ``peak`` of fresh processes; algorithm None is plain DDP."""
    return launch(peak, world_size, algorithm, options, attached, timeout=60.0)


def row(world_size: int, view: bool, algorithm: str, extra: int, plain: int) -> str:
    """Return one line of the table: the extra bytes, less the residual, per entry and element."""
    n = elements(WIDTH)
    rest = extra - n * WORD_BYTES
    share = rest / (WORD_BYTES * (DENSITY * n + n / world_size))
    return (
        f"| {world_size} | {'yes' if view else 'no'} | {algorithm} | {(plain + extra) / plain:.2f} "
        f"| {extra / (n * WORD_BYTES):.2f} | {share:+.2f} | {plain / MIB:.0f} | {extra / MIB:.0f} |"
    )


def main() -> None:
    """Measure and write the table."""
    n = elements(WIDTH)
    lines = [
        "# Peak memory over plain DDP",
        "",
        f"`python benchmarks/memory.py` on {os.cpu_count()} cores, {platform.machine()}, torch "
        f"{torch.__version__}; n = {n:,} float32, {DENSITY:.0%}, SGD, the most of all ranks.",
        "",
        "| P | gradient_as_bucket_view | algorithm | peak / DDP's | over DDP / residual (4 n bytes) "
        "| rest / 4 (k + n / P) bytes | DDP, MiB | over DDP, MiB |",
        "|---:|---|---|---:|---:|---:|---:|---:|",
    ]
    for world_size in RANKS:
        for view in (False, True):
            options = {"gradient_as_bucket_view": view}
            plain = measure(world_size, None, options, {})
            for algorithm in ALGORITHMS:
                extra = measure(world_size, algorithm, options, {}) - plain
                lines.append(row(world_size, view, algorithm, extra, plain))
                print(lines[-1], flush=True)
    lines += ["", f"The residual is {n * WORD_BYTES / MIB:.0f} MiB."]
    (Path(__file__).parent / "memory.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
