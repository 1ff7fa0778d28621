"""Elastic training: when a rank dies, the others continue from the last checkpoint; no gradient is lost.

On four machines, the first of which is HOST; training continues as long as three are left:

    torchrun --nnodes 3:4 --nproc-per-node 1 --max-restarts 3
      --rdzv-backend c10d --rdzv-endpoint HOST:29400 --rdzv-id job examples/elastic.py --folder DIR

All machines must see the folder DIR.  ``--crash 25`` kills the last of four ranks at step 25.
"""

import argparse
import os
import signal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync.handle import Handle

INPUTS, OUTPUTS = 64, 8


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small model that survives its ranks.")
    parser.add_argument("--folder", required=True, help="for checkpoints; all ranks see it")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--batch-size", type=int, default=96, help="samples per step, of all ranks")
    parser.add_argument("--density", type=float, default=0.05, help="of the gradient, in (0, 1]")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds a rank waits")
    parser.add_argument("--crash", type=int, help="step at which the last of four ranks dies")
    return parser.parse_args()


def make_model() -> nn.Module:
    """Build the model; its weights are loaded from the checkpoint when the job restarts."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, 128), nn.Tanh(), nn.Linear(128, OUTPUTS))


def batch(step: int, size: int) -> tuple[Tensor, Tensor]:
    """Return this rank's share of a step's samples; all shares together do not depend on the ranks."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(size, INPUTS, generator=generator)
    targets = (3 * inputs[:, :OUTPUTS]).sin()
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    return inputs[mine], targets[mine]


def waiting(sync: Handle) -> float:
    """Return the sum of the residuals, i.e. the undelivered gradients, over ranks and elements."""
    values = [r.value.double().sum() for r in sync.reducer.residuals if r.value is not None]
    total = torch.stack(values).sum() if values else torch.zeros((), dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def mean(value: Tensor) -> float:
    """Average over ranks."""
    value = value.detach().double()
    dist.all_reduce(value)
    return float(value) / dist.get_world_size()


def crash() -> None:
    """Die as a machine does: without notice, together with the agent that would restart this rank."""
    os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def train(options: argparse.Namespace) -> None:
    """Train from the last checkpoint, or from the beginning, to the end."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(make_model())
    sync = sparsync.attach(
        model, density=options.density, transport=sparsync.Transport(timeout=options.timeout)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    saved = {"model": model.module, "optimizer": optimizer}
    first = 0
    try:
        first = sparsync.load(sync, options.folder, **saved)["step"]
        if rank == 0:
            print(
                f"{world_size} ranks go on at step {first}, {waiting(sync):.9g} waits", flush=True
            )
        else:
            waiting(sync)
    except (
        sparsync.errors.NoCheckpointError
    ):  # an unreadable checkpoint ends the job instead of being overwritten
        if rank == 0:
            print(f"{world_size} ranks begin", flush=True)
    for step in range(first, options.steps):
        if step == options.crash and world_size == 4 and rank == 3:
            crash()
        inputs, targets = batch(step, options.batch_size)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        if (step + 1) % options.save_every == 0:
            sparsync.save(sync, options.folder, step=step + 1, **saved)
            now, left = mean(loss), waiting(sync)
            if rank == 0:
                print(f"step {step + 1}: loss {now:.4f}, {left:.9g} waits", flush=True)
    sync.close()
    if rank == 0:
        print(f"{world_size} ranks are done after {options.steps} steps", flush=True)


def main() -> None:
    """Join the ranks that are available, train, and leave."""
    options = arguments()
    torch.set_num_threads(1)  # a small model; several ranks may share this machine
    dist.init_process_group("gloo")
    train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
