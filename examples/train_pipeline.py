"""A pipeline in every replica, and a sparse exchange between the replicas of each stage.

    torchrun --nproc-per-node 4 examples/train_pipeline.py --stages 2 --schedule 1f1b

A stage that has finished its last backward pass uses the pipeline's bubble: it exchanges while the other
stages still compute.
The model learns to predict the bytes of this file one by one.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import sparsync
from sparsync.transports.launchers import destroy_process_group, init_process_group

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small pipeline with sparsync.")
    parser.add_argument("--stages", type=int, default=2, help="stages, one per rank of a replica")
    parser.add_argument("--schedule", default="1f1b", choices=sorted(SCHEDULES))
    parser.add_argument("--microbatches", type=int, default=4, help="per step")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--density", type=float, default=0.05, help="of the gradient, in (0, 1]")
    parser.add_argument("--algorithm", default="budgeted", help="a preset of sparsync")
    parser.add_argument("--context", type=int, default=8, help="bytes from which one is predicted")
    parser.add_argument("--batch-size", type=int, default=32, help="windows per replica and step")
    parser.add_argument("--lr", type=float, default=0.2, help="learning rate")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a rank waits")
    return parser.parse_args()


def make_layers(context: int) -> list[nn.Module]:
    """Build a model that predicts a byte from the bytes before it."""
    torch.manual_seed(0)  # the same weights on all replicas, because nobody sends them
    hidden = [layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.Tanh())]
    first = [nn.Embedding(256, 16), nn.Flatten(), nn.Linear(16 * context, 128), nn.Tanh()]
    return [*first, *hidden, nn.Linear(128, 256)]


def part(layers: list[nn.Module], stage: int, stages: int) -> nn.Sequential:
    """Return the layers of one stage, under the names that they have in the whole model."""
    each = -(-len(layers) // stages)
    mine = nn.Sequential()
    for i in range(stage * each, min((stage + 1) * each, len(layers))):
        mine.add_module(f"layer{i}", layers[i])
    return mine


def batches(context: int, batch_size: int, replica: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield random windows and the byte after each window; every replica draws its own."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    windows = text.unfold(0, context + 1, 1)
    generator = torch.Generator().manual_seed(1 + replica)
    while True:
        chosen = windows[torch.randint(len(windows), (batch_size,), generator=generator)]
        yield chosen[:, :context], chosen[:, context]


def same_on_all_replicas(stage: nn.Module, mesh: DeviceMesh) -> bool:
    """Compare this stage with the same stage of the other replicas, bit for bit."""
    flat = torch.cat([parameter.detach().flatten() for parameter in stage.parameters()])
    everyone = [torch.empty_like(flat) for _ in range(mesh["dp"].size())]
    dist.all_gather(everyone, flat, group=mesh["dp"].get_group())
    return all(torch.equal(theirs, flat) for theirs in everyone)


def train(options: argparse.Namespace, world_size: int) -> None:
    """Train and print a summary."""
    shape = (world_size // options.stages, options.stages)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "pp"))
    replica, place = mesh["dp"].get_local_rank(), mesh["pp"].get_local_rank()
    layers = part(make_layers(options.context), place, options.stages)
    stage = PipelineStage(
        layers, place, options.stages, torch.device("cpu"), group=mesh["pp"].get_group()
    )
    schedule = SCHEDULES[options.schedule](
        stage, options.microbatches, loss_fn=nn.functional.cross_entropy
    )
    sync = sparsync.attach(
        layers,
        algorithm=options.algorithm,
        density=options.density,
        replicate=mesh["dp"],
        compression=sparsync.Compression(schedule=schedule),
        transport=sparsync.Transport(timeout=options.timeout),
    )
    optimizer = torch.optim.SGD(layers.parameters(), lr=options.lr, momentum=0.9)
    data, means = batches(options.context, options.batch_size, replica), []
    last = place == options.stages - 1
    for step in range(options.steps):
        windows, following = next(data)
        losses: list[Tensor] = []
        optimizer.zero_grad()
        inputs = (windows,) if place == 0 else ()
        schedule.step(*inputs, target=following if last else None, losses=losses)
        sync.step()  # from here on, the gradients are averages over the replicas
        optimizer.step()
        if last:
            means.append(float(torch.stack(losses).detach().mean()))
            if replica == 0 and step % 20 == 0:
                print(f"step {step}: loss {means[-1]:.3f}", flush=True)
    equal, sent = same_on_all_replicas(layers, mesh), sync.stats()["bytes_sent_per_exchange_max"]
    if last and replica == 0:
        print(
            f"{shape[0]} replicas x {options.stages} stages, {options.steps} steps: loss "
            f"{means[0]:.3f} -> {means[-1]:.3f}, at most {sent:,} bytes sent by a rank of this stage "
            f"to other replicas per step, replicas equal: {equal}",
            flush=True,
        )
    sync.close()


def main() -> None:
    """Join the other ranks, train, and leave."""
    options = arguments()
    torch.set_num_threads(1)  # a small model; several ranks share this machine
    here = init_process_group("gloo", timeout=options.timeout)
    try:
        train(options, here.world_size)
    finally:
        destroy_process_group()


if __name__ == "__main__":
    main()
