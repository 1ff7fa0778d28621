"""FSDP2 inside every replica, and a sparse exchange between the replicas.

    torchrun --nproc-per-node 4 examples/train_fsdp.py --shards 2
    torchrun --nproc-per-node 4 examples/train_fsdp.py --shards 2 --ddp    # dense inside, whole models

The model learns to predict the bytes of this file one by one, so nothing is downloaded.
Place shards on the fast links, inside a machine, and replicas on the slow ones.
"""

import argparse
from collections.abc import Iterator
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
from sparsync.transports.launchers import destroy_process_group, init_process_group


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small model with FSDP2 and sparsync.")
    parser.add_argument("--shards", type=int, default=2, help="ranks that share one replica")
    parser.add_argument("--ddp", action="store_true", help="whole models: DDP, dense inside")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--density", type=float, default=0.05, help="of the gradient, in (0, 1]")
    parser.add_argument("--algorithm", default="budgeted", help="a preset of sparsync")
    parser.add_argument("--context", type=int, default=8, help="bytes from which one is predicted")
    parser.add_argument("--batch-size", type=int, default=32, help="windows per rank and step")
    parser.add_argument("--lr", type=float, default=0.2, help="learning rate")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a rank waits")
    return parser.parse_args()


def make_model(context: int) -> nn.Sequential:
    """Build a model that predicts a byte from the bytes before it."""
    torch.manual_seed(0)  # the same weights on all replicas, because FSDP2 does not send them
    return nn.Sequential(
        nn.Embedding(256, 16), nn.Flatten(), nn.Linear(16 * context, 128), nn.Tanh(),
        nn.Linear(128, 256),
    )  # fmt: skip


def batches(context: int, batch_size: int, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield random windows and the byte after each window; every rank draws its own."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    windows = text.unfold(0, context + 1, 1)
    generator = torch.Generator().manual_seed(1 + rank)
    while True:
        chosen = windows[torch.randint(len(windows), (batch_size,), generator=generator)]
        yield chosen[:, :context], chosen[:, context]


def parallel(options: argparse.Namespace, mesh: DeviceMesh) -> tuple[nn.Module, Any]:
    """Shard the model within the replica, and attach to exchange between the replicas."""
    model: nn.Module = make_model(options.context)
    settings: dict[str, Any] = {"algorithm": options.algorithm, "density": options.density}
    if options.ddp:
        model = DistributedDataParallel(model)
        transport = sparsync.Transport(timeout=options.timeout, hierarchy=mesh)
        return model, sparsync.attach(model, transport=transport, **settings)
    for layer in model.children():
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh["shard"])  # replicas are left to sparsync
    fully_shard(model, mesh=mesh["shard"])
    transport = sparsync.Transport(timeout=options.timeout)
    return model, sparsync.attach(
        model, replicate=mesh["replicate"], transport=transport, **settings
    )


def mean(value: Tensor) -> float:
    """Average over ranks."""
    value = value.detach().double()
    dist.all_reduce(value)
    return float(value) / dist.get_world_size()


def same_on_all_ranks(model: nn.Module) -> bool:
    """Join the shards, and compare the replicas bit for bit."""
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    flat = torch.cat([parameter.detach().flatten() for parameter in whole])
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    return all(torch.equal(theirs, flat) for theirs in everyone)


def train(options: argparse.Namespace, rank: int, world_size: int) -> None:
    """Train and print a summary."""
    replicas = world_size // options.shards
    mesh = init_device_mesh(
        "cpu", (replicas, options.shards), mesh_dim_names=("replicate", "shard")
    )
    model, sync = parallel(options, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    data = batches(options.context, options.batch_size, rank)
    losses = []
    for step in range(options.steps):
        windows, following = next(data)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(windows), following)
        loss.backward()  # a dense reduction over the shards, a sparse one between replicas
        optimizer.step()
        losses.append(mean(loss))
        if rank == 0 and step % 20 == 0:
            print(f"step {step}: loss {losses[-1]:.3f}", flush=True)
    equal, stats = same_on_all_ranks(model), sync.stats()
    if rank == 0:
        sent = stats["bytes_sent_per_exchange_max"]
        print(
            f"{replicas} replicas x {options.shards} shards, {options.steps} steps: loss "
            f"{losses[0]:.3f} -> {losses[-1]:.3f}, at most {sent:,} bytes sent to other replicas per "
            f"rank and step, replicas equal: {equal}",
            flush=True,
        )
    sync.close()


def main() -> None:
    """Join the other ranks, train, and leave."""
    options = arguments()
    torch.set_num_threads(1)  # a small model; several ranks share this machine
    here = init_process_group("gloo", timeout=options.timeout)
    try:
        train(options, here.rank, here.world_size)
    finally:
        destroy_process_group()


if __name__ == "__main__":
    main()
