"""Measure the peak memory of a DDP training process with ``attach``, compared with plain DDP.

    python benchmarks/memory.py        (Linux; 5 minutes; writes benchmarks/memory.md)
    python benchmarks/memory.py --gpt  (14 GB, 12 minutes; writes benchmarks/memory_gpt.md)

The first command measures algorithms with SGD on linear layers with 21 M parameters. With
``--gpt``, the script measures the defaults of AdamW and SGD on a GPT with 124 M parameters, whole
and sharded by FSDP2.

Each figure comes from fresh processes. They first train a tiny model, so that the memory of imports,
threads and sockets is in use before they train a large one. The figure is the kernel's peak (VmHWM),
minus the memory in use between the two trainings.

glibc raises its mmap threshold to the size of the last freed block; from then on, gradients and
temporaries share a fragmented heap. If ``mallopt`` fixes the threshold, the peak is the memory that
the program requested. Both cases are measured.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync.cli.launch import launch

HERE = Path(__file__).parent
RANKS = (2, 4)
CASES: dict[str, dict[str, Any]] = {
    "budgeted": {"algorithm": "budgeted"},
    "halving": {"algorithm": "halving"},
    "oktopk": {"algorithm": "oktopk"},
    "budgeted, dense warm-up steps": {
        "algorithm": "budgeted",
        "compression": sparsync.Compression(warmup_steps=9),
    },
}
FIXED = 1 << 20  # bytes of the fixed mmap threshold
MALLOC = {"glibc's default": None, "fixed": FIXED}
M_MMAP_THRESHOLD = -3  # from glibc's malloc.h
WIDTH, LAYERS = 2048, 5  # 21 M parameters
GPT_WIDTH, GPT_LAYERS, VOCABULARY, TOKENS = 768, 12, 50257, 64
TINY = 64
SHARDS = 2  # ranks of a replica
DENSITY = 0.01
STEPS = 5  # more than one, because DDP rebuilds its buckets in the second step
WORD_BYTES = 4
MIB = 1 << 20


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-3),
    "SGD": partial(torch.optim.SGD, lr=0.1),
}


def status_bytes(field: str) -> int:
    """Return VmRSS (now) or VmHWM (peak) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in /proc/self/status; run on Linux")


def elements(width: int) -> int:
    """Return the number of elements in the linear layers."""
    return LAYERS * width * (width + 1)


def linear_layers(width: int) -> nn.Module:
    """Build large linear layers."""
    return nn.Sequential(
        *(layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU()))
    )


class Gpt(nn.Module):
    """A GPT-2 of torch's own layers, with 124 M parameters at a width of 768."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY if width > TINY else 1000, width)
        self.positions = nn.Parameter(torch.zeros(1024, width))
        layer = nn.TransformerEncoderLayer(width, width // 32, 4 * width, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(
            layer, GPT_LAYERS if width > TINY else 1, enable_nested_tensor=False
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits; the head is tied to the embedding."""
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.layers(x, mask, is_causal=True) @ self.embedding.weight.T


@dataclass(frozen=True)
class Case:
    """The training in a process; ``attached`` holds the arguments of ``attach``; None: plain DDP.

    With ``sharded``, every replica has SHARDS ranks, and FSDP2 replaces DDP.
    """

    model: Callable[[int], nn.Module] = linear_layers
    width: int = WIDTH
    optimizer: Callable[..., torch.optim.Optimizer] = OPTIMIZERS["SGD"]
    ddp: dict[str, Any] = field(default_factory=dict)
    attached: dict[str, Any] | None = None
    malloc: int | None = None
    sharded: bool = False


def step_of(model: nn.Module, generator: torch.Generator) -> Tensor:
    """Return a loss on little random data, so that activations take little memory."""
    inner = getattr(model, "module", model)
    if isinstance(inner, Gpt):
        most = inner.embedding.num_embeddings
        tokens = torch.randint(most, (1, TOKENS), generator=generator)
        return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    width = inner[0].in_features
    return model(torch.randn(4, width, generator=generator)).pow(2).mean()


def sharded(make: Callable[[int], nn.Module], width: int, mesh: DeviceMesh) -> nn.Module:
    """Shard a model layer by layer with FSDP2, so that no rank ever holds the whole model."""
    with torch.device("meta"):
        model = make(width)
    for layer in model.layers.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    for parameter in model.parameters():  # the same on all replicas, because the seed is
        assert isinstance(parameter, DTensor)
        nn.init.normal_(parameter.to_local(), std=0.02)
    return model


def train(width: int, case: Case) -> None:
    """Train a model for a few steps, and release it."""
    torch.manual_seed(0)
    given: dict[str, Any] = {"transport": sparsync.Transport(timeout=60)}
    if case.sharded:
        mesh = init_device_mesh(
            "cpu", (dist.get_world_size() // SHARDS, SHARDS), mesh_dim_names=("replicate", "shard")
        )
        # without sparsync, FSDP2 must also average over the replicas
        ddp = sharded(case.model, width, mesh if case.attached is None else mesh["shard"])
        given["replicate"] = mesh["replicate"]
    else:
        ddp = DistributedDataParallel(case.model(width), **case.ddp)
    optimizer = case.optimizer(ddp.parameters())
    sync = None
    if case.attached is not None:
        sync = sparsync.attach(ddp, optimizer, **given, **case.attached)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        step_of(ddp, generator).backward()
        optimizer.step()
    if sync is not None:
        sync.close()


def peak(case: Case) -> int:
    """Return the peak memory of the large model in bytes, the maximum over ranks."""
    # not an environment variable, because ranks are forked from a process that has already read it
    if case.malloc is not None and ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, case.malloc) != 1:
        raise OSError(f"mallopt(M_MMAP_THRESHOLD, {case.malloc}) failed; run with glibc")
    train(TINY, case)
    before = status_bytes("VmRSS")
    train(case.width, case)
    most = torch.tensor(status_bytes("VmHWM") - before)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


def measure(world_size: int, case: Case) -> int:
    """Return ``peak``, measured in fresh processes."""
    return launch(peak, world_size, case, timeout=600.0)


def row(world_size: int, view: bool, malloc: str, case: str, extra: int, plain: int) -> str:
    """Return one row of the table; "rest" is the memory beyond the residual."""
    residual = elements(WIDTH) * WORD_BYTES
    rest = (extra - residual) / (WORD_BYTES * elements(WIDTH) * (DENSITY + 1 / world_size))
    return (
        f"| {world_size} | {'yes' if view else 'no'} | {malloc} | {case} | {extra / residual:.2f} "
        f"| {rest:+.2f} | {(plain + extra) / plain:.2f} | {plain / MIB:.0f} | {extra / MIB:.0f} |"
    )


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--gpt", action="store_true", help="the defaults, on a GPT of 124 M parameters"
    )
    if parser.parse_args().gpt:
        defaults()
    else:
        algorithms()


def machine() -> str:
    """Return a description of the machine, for the head of a table."""
    return f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}"


def algorithms() -> None:
    """Measure algorithms on linear layers."""
    n = elements(WIDTH)
    lines = [
        "# Peak memory relative to plain DDP",
        "",
        f"`python benchmarks/memory.py` on {machine()}; n = {n:,} float32 "
        f"({n * WORD_BYTES / MIB:.0f} MiB), k = {DENSITY:.0%}, "
        f"SGD, {STEPS} steps, the most of all ranks.",
        "",
        "| P | bucket view | malloc | algorithm | over DDP / residual | rest / 4 (k + n / P) bytes "
        "| peak / DDP's | DDP, MiB | over DDP, MiB |",
        "|---:|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for world_size in RANKS:
        for view in (False, True):
            for name, malloc in MALLOC.items():
                plain = Case(ddp={"gradient_as_bucket_view": view}, malloc=malloc)
                least = measure(world_size, plain)
                for label, given in CASES.items():
                    attached = replace(plain, attached={"density": DENSITY, **given})
                    extra = measure(world_size, attached) - least
                    lines.append(row(world_size, view, name, label, extra, least))
                    print(lines[-1], flush=True)
    (HERE / "memory.md").write_text("\n".join(lines) + "\n")


def defaults() -> None:
    """Measure the defaults on a GPT."""
    with torch.device("meta"):
        n = sum(parameter.numel() for parameter in Gpt(GPT_WIDTH).parameters())
    lines = [
        "# Peak memory of the defaults",
        "",
        f"`python benchmarks/memory.py --gpt` on {machine()}; a GPT of {n:,} float32 parameters, "
        f"{STEPS} steps, the most of all ranks, in floats per parameter.  Plain DDP holds the weights, "
        "the gradients twice (its buckets) and the optimizer's state.",
        "",
        "| P | optimizer | malloc | plain DDP | attached | over plain DDP |",
        "|---:|---|---|---:|---:|---:|",
    ]
    lines += default_rows(n, 2, sharded=False)
    lines += [
        "",
        f"Sharded by FSDP2: {SHARDS} replicas of {SHARDS} ranks each, in floats per *local* parameter; "
        "plain FSDP2 averages over the replicas too.",
        "",
        "| P | optimizer | malloc | plain FSDP2 | attached | over plain FSDP2 |",
        "|---:|---|---|---:|---:|---:|",
    ]
    lines += default_rows(n, SHARDS * SHARDS, sharded=True)
    (HERE / "memory_gpt.md").write_text("\n".join(lines) + "\n")


def default_rows(n: int, world_size: int, *, sharded: bool) -> Iterator[str]:
    """Measure the defaults of both optimizers, in floats per parameter that a rank holds."""
    held = n // SHARDS if sharded else n
    for (optimizer, make), (name, malloc) in product(OPTIMIZERS.items(), MALLOC.items()):
        plain = Case(Gpt, GPT_WIDTH, make, malloc=malloc, sharded=sharded)
        least, most = (measure(world_size, one) for one in (plain, replace(plain, attached={})))
        shown = (f"{x / held / WORD_BYTES:.2f}" for x in (least, most, most - least))
        line = f"| {world_size} | {optimizer} | {name} | {' | '.join(shown)} |"
        print(line, flush=True)
        yield line


if __name__ == "__main__":
    main()
