"""A rank that averages models, as a process of its own."""

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from sparsync.averaging import Wagma
from sparsync.transports.connect import connect_group

STEPS = 30


def train(rank: int, world_size: int, store_file: str, transport: str, dies: int) -> None:
    """Train; rank ``dies`` kills itself at step 7; the others say whom they left out."""
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
    for step in range(STEPS):
        if rank == dies and step == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        with torch.no_grad():
            model.weight += rank
        averager.step()
    averager.finish()
    out = [entry[0] for entry in averager.left_out]
    sys.stdout.write(f"{averager.steps} {out} {model.weight.sum().item():.6f}\n")
    sys.stdout.flush()
    time.sleep(2.0)  # the others' last messages are under way
    os._exit(0)  # the group has a dead member: nothing is taken down


if __name__ == "__main__":
    train(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]))
