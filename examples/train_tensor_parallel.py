"""Tensor parallelism in every replica, and a sparse exchange between the replicas of each shard.

    torchrun --nproc-per-node 4 examples/train_tensor_parallel.py --tensor 2

The model learns to predict the bytes of this file one by one, so nothing is downloaded.
Place tensor-parallel ranks on the fastest links, replicas on the slow ones.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import sparsync
from sparsync.transports.launchers import destroy_process_group, init_process_group


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small model, divided, with sparsync.")
    parser.add_argument("--tensor", type=int, default=2, help="ranks that share every matrix")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--density", type=float, default=0.05, help="of the gradient, in (0, 1]")
    parser.add_argument("--algorithm", default="budgeted", help="a preset of sparsync")
    parser.add_argument("--context", type=int, default=8, help="bytes from which one is predicted")
    parser.add_argument("--batch-size", type=int, default=32, help="windows per replica and step")
    parser.add_argument("--lr", type=float, default=0.2, help="learning rate")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a rank waits")
    return parser.parse_args()


def make_model(context: int, mesh: DeviceMesh) -> nn.Module:
    """Build a model that predicts a byte, with its matrices divided over the tensor-parallel ranks."""
    torch.manual_seed(0)  # the same weights on all replicas, because nobody sends them
    model = nn.Sequential(
        nn.Embedding(256, 16), nn.Flatten(), nn.LayerNorm(16 * context),
        nn.Linear(16 * context, 128), nn.Tanh(), nn.Linear(128, 256),
    )  # fmt: skip
    # the embedding and the norm stay whole on every rank
    return parallelize_module(model, mesh["tp"], {"3": ColwiseParallel(), "5": RowwiseParallel()})


def batches(context: int, batch_size: int, replica: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield random windows and the byte after each window; the ranks of a replica draw the same."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    windows = text.unfold(0, context + 1, 1)
    generator = torch.Generator().manual_seed(1 + replica)
    while True:
        chosen = windows[torch.randint(len(windows), (batch_size,), generator=generator)]
        yield chosen[:, :context], chosen[:, context]


def mean(value: Tensor) -> float:
    """Average over ranks."""
    value = value.detach().double()
    dist.all_reduce(value)
    return float(value) / dist.get_world_size()


def same_on_all_ranks(model: nn.Module) -> bool:
    """Join the shards, and compare bit for bit."""
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    flat = torch.cat([parameter.detach().flatten() for parameter in whole])
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    return all(torch.equal(theirs, flat) for theirs in everyone)


def train(options: argparse.Namespace, rank: int, world_size: int) -> None:
    """Train and print a summary."""
    shape = (world_size // options.tensor, options.tensor)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    model = make_model(options.context, mesh)
    sync = sparsync.attach(  # the only new line
        model,
        algorithm=options.algorithm,
        density=options.density,
        replicate=mesh["dp"],
        transport=sparsync.Transport(timeout=options.timeout),
    )
    # foreach mixes plain tensors and DTensors in one call, which torch refuses
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, foreach=False)
    data = batches(options.context, options.batch_size, mesh["dp"].get_local_rank())
    losses = []
    for step in range(options.steps):
        windows, following = next(data)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(windows), following)
        loss.backward()
        optimizer.step()
        losses.append(mean(loss))
        if rank == 0 and step % 20 == 0:
            print(f"step {step}: loss {losses[-1]:.3f}", flush=True)
    equal, sent = same_on_all_ranks(model), sync.stats()["bytes_sent_per_exchange_max"]
    if rank == 0:
        print(
            f"{shape[0]} replicas x {options.tensor} tensor-parallel ranks, {options.steps} steps: "
            f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, at most {sent:,} bytes sent to other replicas "
            f"per rank and step, replicas equal: {equal}",
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
