"""A replica of the tests of elastic training: a small model, SGD with momentum, clipping, a schedule."""

import os
import time
from datetime import timedelta

import torch
import torchft
from torch.distributed import TCPStore

import sparsync
from sparsync.elastic import ElasticGroup
from sparsync.feedback.agreement import weights_digest

STEPS = 4000  # of which tests use as many as they need


def train(pipe, number, lighthouse, until, timeout, seed):
    """Train to step ``until.value``; tell of every step what was applied."""
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torchft's servers write lines at every step
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=ElasticGroup(interface="127.0.0.1", timeout=timeout),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        timeout=timedelta(seconds=timeout),
        quorum_timeout=timedelta(seconds=10),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=str(number),
        hostname="127.0.0.1",
        heartbeat_interval=timedelta(milliseconds=50),
        init_sync=False,
    )
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 40), torch.nn.Tanh(), torch.nn.Linear(40, 1, bias=False)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    sync = sparsync.attach(model, optimizer, density=0.1, elastic=manager)
    sync.carry(scheduler=scheduler)
    data = torch.Generator().manual_seed(number)
    while sync.steps < until.value and not sync.left:
        optimizer.zero_grad()
        inputs = torch.randn(8, 20, generator=data)
        step = sync.steps
        torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True).tanh()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if sync.steps > step:
            _, contributors, counts = sync.last_step
            rate = optimizer.param_groups[0]["lr"]
            now = (weights_digest(model.parameters()), rate) if not sync.members.behind else None
            pipe.send((time.time(), sync.steps, contributors, counts, now))
        time.sleep(0.01)
    sync.finish()
    pipe.send(sync.stats()["elastic"])
    os._exit(0)
