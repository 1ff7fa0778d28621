"""Train a model on every rank, and average the models every few steps.

    python examples/average_models.py                                  # one rank
    torchrun --nproc-per-node 4 examples/average_models.py --period 8

The ranks learn the same function, each from its own samples.  With ``--checkpoint FOLDER``, the state is
saved at the end, and a second run with more ``--steps`` continues from there, bit for bit.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sparsync.averaging import LocalSgd
from sparsync.transports.launchers import destroy_process_group, detect, init_process_group


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train by averaging models.")
    parser.add_argument("--steps", type=int, default=200, help="local steps in total")
    parser.add_argument("--period", type=int, default=4, help="local steps between averages")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate")
    parser.add_argument("--checkpoint", type=Path, help="folder, one file per rank")
    return parser.parse_args()


def train(options: argparse.Namespace, rank: int, world_size: int) -> None:
    """Train and print a summary."""
    torch.manual_seed(0)  # the averager checks that models are equal at the start
    model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    averager = LocalSgd(model, period=options.period)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "averager": averager}
    file = options.checkpoint and options.checkpoint / f"rank{rank}.pt"
    if file and file.exists():
        saved = torch.load(file, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    losses = []
    with averager:  # makes the replicas equal at the end
        while averager.steps < options.steps:
            generator = torch.Generator().manual_seed(averager.steps * world_size + rank)
            x = torch.randn(64, 8, generator=generator)
            loss = nn.functional.mse_loss(model(x), x[:, :4].sin().sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            averager.step()  # the only new line
            losses.append(loss.item())
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save({name: part.state_dict() for name, part in parts.items()}, file)
    mine = torch.cat([tensor.double().reshape(-1) for tensor in model.state_dict().values()])
    everyone = [torch.empty_like(mine) for _ in range(world_size)]
    if world_size > 1:
        dist.all_gather(everyone, mine)
    equal = world_size == 1 or all(torch.equal(theirs, mine) for theirs in everyone)
    if rank == 0 and losses:
        ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
        progress = f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, replicas equal: {equal}"
        print(f"{ranks}, {options.steps} steps: {progress}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)  # a small model; several ranks share this machine
    if detect() is None:
        train(arguments(), 0, 1)
    else:
        here = init_process_group("gloo")
        train(arguments(), here.rank, here.world_size)
        destroy_process_group()
