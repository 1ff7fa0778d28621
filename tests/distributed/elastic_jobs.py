"""A replica of the tests of elastic training: a small model, SGD or AdamW, clipping, a schedule."""

import os
import signal
import time

import torch

import sparsync
from sparsync.cli.lab import local_address
from sparsync.elastic import catch_up, make_manager
from sparsync.feedback.facts import weights_digest
from sparsync.updates import OuterStep
from sparsync.updates.family import OUTER_SETTINGS

STEPS = 4000  # of which tests use as many as they need


def shared_by_all(sync):
    """Return the weights that all ranks share, and the noise that their steps are corrected for."""
    noise = sync._weights.noise
    return [
        sync.outer.memory["shared"],
        *([] if noise is None else [noise.state_dict()["squares"]]),
    ]


def train(pipe, number, lighthouse, until, timeout, seed, seat, outer, late, errors, options):
    """Train to step ``until.value``; tell of every step what was applied.

    With ``outer`` settings updates are exchanged by an ``OuterStep`` of these.  A ``late`` replica begins
    to fetch a copy once it has taken the last step, however slow the machine is.  Its stderr goes to a
    file, ``errors``.  ``options`` are more of the manager, and: ``carries`` the scheduler; ``handles``
    SIGTERM by itself, set after attach, with exit code 7; the ``density``.
    """
    carries, handles = options.pop("carries", True), options.pop("handles", False)
    density = options.pop("density", 0.1)
    at_once = catch_up.fetch

    def fetch_late(source, timeout, since, stop):
        while not stop() and sync.steps < until.value:
            time.sleep(0.01)
        return at_once(source, timeout, since, stop)

    if late:
        catch_up.fetch = fetch_late
    torch.set_num_threads(1)
    if seat is not None:
        seat.enter()
    # torchft's servers write lines at every step: not to the terminal
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    own = local_address() or "127.0.0.1"
    manager = make_manager(
        1, lighthouse=lighthouse, name=str(number), timeout=timeout, interface=own, **options
    )
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 40), torch.nn.Tanh(), torch.nn.Linear(40, 1, bias=False)
    )
    if outer is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    if outer is None:
        sync = sparsync.attach(model, optimizer, density=density, elastic=manager)
    else:
        settings = {**OUTER_SETTINGS["updates"], **outer}
        sync = sparsync.attach(model, optimizer, OuterStep(**settings), elastic=manager)
    if carries:
        sync.carry(scheduler=scheduler)
    if handles:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
    data = torch.Generator().manual_seed(number)
    while sync.steps < until.value and not sync.left:
        optimizer.zero_grad()
        inputs = torch.randn(8, 20, generator=data)
        step = sync.steps
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True).tanh())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if sync.steps > step:
            _, contributors, counts = sync.last_step
            rate = optimizer.param_groups[0]["lr"]
            weights = model.parameters() if outer is None else shared_by_all(sync)
            same = carries and not sync.attendance.members.behind
            now = (weights_digest(weights), rate) if same else None
            pipe.send((time.time(), sync.steps, contributors, counts, now))
        time.sleep(0.01)
    sync.finish()
    end = {"weights": weights_digest(model.parameters()), "loss": loss.item()}
    pipe.send({**sync.stats()["elastic"], **end})
    sync.close()  # the others have its last word then
    os._exit(0)
