"""Ranks that have batches left when others are done: each function is the proof of a cell."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import sparsync
from sparsync import Correction
from sparsync.averaging import LocalSgd

from .ddp_cells import attached, here, refused
from .training import (
    RATE,
    SPARSE,
    Named,
    added,
    assert_close,
    assert_equal_on_all_ranks,
    everywhere,
    gradients,
    mean_square,
    network,
    residuals,
    sgd,
    weights,
)

BATCHES = (2, 6)  # of rank 0 and 1


def alone(model: Any, step: int) -> Named:
    """Return this rank's gradients at a model's weights; zeros once it is done."""
    twin: Any = network()
    twin.load_state_dict(model.state_dict())
    if step < BATCHES[here()]:
        mean_square(twin, step, here()).backward()
    return gradients(twin)


def join_delivers_what_is_left() -> None:
    """A rank that is done gives zero gradients, and its residual goes on: the law, over all steps.

    Averages are over all ranks; in the end all have the last rank's weights.
    """
    for options in ({}, {"bucket_cap_mb": 0.001}, {"find_unused_parameters": True}):
        ddp, sync = attached(network(), SPARSE, ddp=options)
        optimizer, ranks = sgd(ddp.parameters()), dist.get_world_size()
        came = applied = added((0.0, weights(ddp.module)))
        norms = []
        with ddp.join():
            for step in range(BATCHES[here()]):
                came = added((1.0, came), (1.0, alone(ddp.module, step)))
                optimizer.zero_grad()
                mean_square(ddp, step, here()).backward()
                applied = added((1.0, applied), (1.0, gradients(ddp.module)))
                optimizer.step()
                norms.append(sync.stats()["residual_norm"][0])
        state = sync.state_dict()
        assert state["step"] == max(BATCHES)
        left = residuals(state, came)
        if here() == 0:
            applied = added((0.0, applied))  # the other one saw all averages
        total = added((ranks, everywhere(applied)), (1.0, everywhere(left)))
        assert_close(everywhere(came), total, 1e-4, "the law")
        assert_equal_on_all_ranks(weights(ddp.module))
        ddp.zero_grad()  # training goes on: another epoch
        mean_square(ddp, 9, here()).backward()
        assert_equal_on_all_ranks(gradients(ddp.module))
        if here() == 0:  # its residual has shrunk since its last batch, and was saved
            assert 0 < sum(float(v.square().sum()) for v in left.values()) < norms[-1] ** 2
        sync.close()


def join_at_density_1_is_ddp() -> None:
    """With everything exchanged, ``join()`` ends where plain DDP's does."""
    ends = []
    for hooked in (True, False):
        if hooked:
            ddp, sync = attached(network())
        else:
            ddp, sync = torch.nn.parallel.DistributedDataParallel(network()), None
        optimizer = sgd(ddp.parameters())
        with ddp.join():
            for step in range(BATCHES[here()]):
                optimizer.zero_grad()
                mean_square(ddp, step, here()).backward()
                optimizer.step()
        ends.append(weights(ddp.module))
        if sync is not None:
            sync.close()
    assert_close(*ends, 1e-6, "against plain DDP")


def join_refuses_overflow_on_all() -> None:
    """A NaN while a rank is done raises on all ranks, on that one out of ``join()``."""
    ddp, sync = attached(network())
    with refused("NaN or Inf", error=sparsync.NonFiniteGradientError), ddp.join():
        for step in range(BATCHES[here()]):
            loss = mean_square(ddp, step, here())
            (loss * float("nan") if step == 4 else loss).backward()
            ddp.zero_grad()
    assert sync.stats()["skipped_steps"] == 1
    sync.close()


def join_refuses_what_it_cannot_do() -> None:
    for options, correction, words in (
        ({"divide_by_initial_world_size": False}, None, "divides by the ranks that are not done"),
        ({}, Correction(weight_decay=0.1), "give weight_decay to the optimizer"),
    ):
        ddp, sync = attached(network(), correction=correction)
        with refused(words), ddp.join(**options):
            mean_square(ddp, 0, here()).backward()
        sync.close()


def a_rank_that_is_done_goes_on_stepping() -> None:
    """Without DDP: it trains no more, but calls ``step()`` as often as the others."""
    net = network()
    local, optimizer = (
        sparsync.LocalUpdates(net, "allgather", density=SPARSE),
        sgd(net.parameters()),
    )
    for step in range(max(BATCHES)):
        if step < BATCHES[here()]:
            optimizer.zero_grad()
            mean_square(net, step, here()).backward()
            optimizer.step()
        before = everywhere(weights(net))
        local.step()
        assert_close(everywhere(weights(net)), before, 1e-5, "the mean of all ranks' weights")
    local.finish()
    assert_equal_on_all_ranks(weights(net))


def a_done_rank_delivers_updates() -> None:
    """Update space: without gradients, what is exchanged is the residual."""
    net, ranks = network(), dist.get_world_size()
    optimizer = sparsync.UpdateSpaceSGD(net, lr=RATE, algorithm="allgather", density=SPARSE)
    start, came = weights(net), added((0.0, weights(net)))
    for step in range(max(BATCHES)):
        came = added((1.0, came), (RATE, alone(net, step)))
        optimizer.zero_grad()
        if step < BATCHES[here()]:
            mean_square(net, step, here()).backward()
        optimizer.step()
    left = everywhere(residuals(optimizer.state_dict()["sparsync"], came))
    total = added((ranks, start), (-ranks, weights(net)), (1.0, left))
    assert_close(everywhere(came), total, 1e-5, "the law")
    assert_equal_on_all_ranks(weights(net))


def a_done_rank_follows_the_average() -> None:
    net = network()
    averager, optimizer = LocalSgd(net, period=2), sgd(net.parameters())
    for step in range(max(BATCHES)):
        if step < BATCHES[here()]:
            optimizer.zero_grad()
            mean_square(net, step, here()).backward()
            optimizer.step()
        before = everywhere(weights(net))
        averager.step()
        assert_close(everywhere(weights(net)), before, 1e-5, "the mean of all ranks' weights")
    averager.finish()
    assert_equal_on_all_ranks(weights(net))
