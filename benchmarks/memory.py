"""Peak memory of a training process: DDP with ``attach`` relative to plain DDP.

    python benchmarks/memory.py        (Linux; 5 minutes; writes benchmarks/memory.md)

Each figure comes from fresh processes.  They first train a tiny model, which pays for imports, threads
and sockets, then a large one.  The figure is the kernel's peak (VmHWM), minus the memory in use between
the two.

glibc raises its threshold for asking the kernel for memory to the size of the last freed block; from then
on, gradients and temporaries share a heap with holes in it.  ``mallopt`` fixes the threshold, so the peak
is the memory that the program asked for.  Both cases are measured.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync.cli.launch import launch

RANKS = (2, 4)
CASES = {
    "budgeted": ("budgeted", {}),
    "halving": ("halving", {}),
    "oktopk": ("oktopk", {}),
    "budgeted, dense warm-up steps": (
        "budgeted",
        {"compression": sparsync.Compression(warmup_steps=9)},
    ),
}
FIXED = 1 << 20  # bytes
MALLOC = {"glibc's default": None, "fixed": FIXED}
M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
WIDTH, LAYERS = 2048, 5  # 21 M parameters
TINY = 64
DENSITY = 0.01
STEPS = 5  # DDP rebuilds its buckets in the second
WORD_BYTES = 4
MIB = 1 << 20


def status_bytes(field: str) -> int:
    """Return VmRSS (now) or VmHWM (peak) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in /proc/self/status; run on Linux")


def elements(width: int) -> int:
    """Return the model's number of elements."""
    return LAYERS * width * (width + 1)


def train(width: int, algorithm: str | None, options: dict, attached: dict) -> None:
    """Train a model of large linear layers for a few steps, then drop it."""
    torch.manual_seed(0)
    layers = [
        layer for _ in range(LAYERS) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())
    ]
    ddp = DistributedDataParallel(torch.nn.Sequential(*layers), **options)
    sync = None
    if algorithm is not None:
        sync = sparsync.attach(
            ddp,
            algorithm=algorithm,
            density=DENSITY,
            transport=sparsync.Transport(timeout=60),
            **attached,
        )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        ddp(torch.randn(4, width, generator=generator)).pow(2).mean().backward()
        optimizer.step()
    if sync is not None:
        sync.close()


def peak(algorithm: str | None, options: dict, attached: dict, malloc: int | None) -> int:
    """Return the peak bytes that the large model took, the maximum over ranks."""
    # an environment variable would have no effect: the parent of the forked ranks has already read it
    if malloc is not None and ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, malloc) != 1:
        raise OSError(f"mallopt(M_MMAP_THRESHOLD, {malloc}) failed; run with glibc")
    train(TINY, algorithm, options, attached)
    before = status_bytes("VmRSS")
    train(WIDTH, algorithm, options, attached)
    most = torch.tensor(status_bytes("VmHWM") - before)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


def measure(
    world_size: int, algorithm: str | None, options: dict, attached: dict, malloc: int | None
) -> int:
    """Return ``peak`` of fresh processes; algorithm None is plain DDP."""
    return launch(peak, world_size, algorithm, options, attached, malloc, timeout=60.0)


def row(world_size: int, view: bool, malloc: str, case: str, extra: int, plain: int) -> str:
    """Return one row of the table; the rest is the memory taken in addition to the residual."""
    residual = elements(WIDTH) * WORD_BYTES
    rest = (extra - residual) / (WORD_BYTES * elements(WIDTH) * (DENSITY + 1 / world_size))
    return (
        f"| {world_size} | {'yes' if view else 'no'} | {malloc} | {case} | {extra / residual:.2f} "
        f"| {rest:+.2f} | {(plain + extra) / plain:.2f} | {plain / MIB:.0f} | {extra / MIB:.0f} |"
    )


def main() -> None:
    """Measure and write the table."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    n = elements(WIDTH)
    lines = [
        "# Peak memory relative to plain DDP",
        "",
        f"`python benchmarks/memory.py` on {os.cpu_count()} cores, {platform.machine()}, torch "
        f"{torch.__version__}; n = {n:,} float32 ({n * WORD_BYTES / MIB:.0f} MiB), k = {DENSITY:.0%}, "
        f"SGD, {STEPS} steps; maximum over ranks.",
        "",
        "| P | bucket view | malloc | algorithm | over DDP / residual | rest / 4 (k + n / P) bytes "
        "| peak / DDP's | DDP, MiB | over DDP, MiB |",
        "|---:|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for world_size in RANKS:
        for view in (False, True):
            options = {"gradient_as_bucket_view": view}
            for name, malloc in MALLOC.items():
                plain = measure(world_size, None, options, {}, malloc)
                for case, (algorithm, attached) in CASES.items():
                    extra = measure(world_size, algorithm, options, attached, malloc) - plain
                    lines.append(row(world_size, view, name, case, extra, plain))
                    print(lines[-1], flush=True)
    (Path(__file__).parent / "memory.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
