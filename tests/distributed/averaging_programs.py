"""A rank that averages models, as a process of its own."""

import os
import random
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from sparsync.averaging import Wagma
from sparsync.transports.connect import connect_group

STEPS, BREAKS_AT = 60, 7


def train(
    rank: int, world_size: int, store_file: str, transport: str, breaks: int, how: signal.Signals
) -> None:
    """Train; rank ``breaks`` sends itself a signal at step 7; all say whom they left out."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store_file, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    comm = connect_group(transport=transport, timeout=60.0)
    averager = Wagma(model, comm=comm, sync_period=5, deadline=2.0)
    done = 0
    while averager.steps < STEPS:
        if rank == breaks and averager.steps == BREAKS_AT:
            os.kill(os.getpid(), how)
        time.sleep(0.1)
        with torch.no_grad():
            model.weight += rank
        averager.step()
        done += 1
    averager.finish()
    out = [entry[0] for entry in averager.left_out]
    total = model.weight.sum().item()
    sys.stdout.write(f"{averager.steps} steps, left out {out}, {total:.6f}\n{done}\n")
    sys.stdout.flush()
    time.sleep(2.0)  # the others' last messages are under way
    os._exit(0)  # the group may have a dead member: nothing is taken down


def many_steps(steps: int) -> tuple[bool, int]:
    """Train beside random delays; return whether all ended equal, and how many steps they did."""
    rank, drawn = dist.get_rank(), random.Random(dist.get_rank())
    model = nn.Linear(8, 4)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    with Wagma(model, comm=connect_group(transport="torch", timeout=60.0)) as averager:
        for _ in range(steps):
            if drawn.random() < 0.05:
                time.sleep(drawn.choice([0.001, 0.01, 0.05]))
            with torch.no_grad():
                model.weight += rank
            averager.step()
        averager.finish()
        everyone = [torch.empty_like(model.weight) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, model.weight.detach())
        return all(torch.equal(everyone[0], other) for other in everyone), averager.steps


if __name__ == "__main__":
    train(
        int(sys.argv[1]),
        int(sys.argv[2]),
        sys.argv[3],
        sys.argv[4],
        int(sys.argv[5]),
        signal.Signals(int(sys.argv[6])),
    )
