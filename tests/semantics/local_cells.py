"""LocalUpdates, update space and averaging, where no common training tells: each function is a proof."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import sparsync
from sparsync.averaging import LocalSgd

from .cases import Words
from .ddp_cells import Normed, here, refused
from .training import (
    RATE,
    SPARSE,
    STEPS,
    added,
    assert_close,
    assert_equal_on_all_ranks,
    everywhere,
    gradients,
    mean_square,
    network,
    sgd,
    weights,
)


def local(net: nn.Module) -> Any:
    return sparsync.LocalUpdates(net, "allgather", density=SPARSE)


def update_space(net: nn.Module) -> Any:
    return sparsync.UpdateSpaceSGD(net, lr=RATE, algorithm="allgather", density=SPARSE)


def local_scaler() -> None:
    """Every rank has a scale of its own; one that skips its step hands on an update of zero."""
    _own_scalers(local)


def averaging_scaler() -> None:
    """As with LocalUpdates: its model of before is averaged."""
    _own_scalers(lambda net: LocalSgd(net, period=1))


def _own_scalers(make: Any) -> None:
    net = network()
    averager, optimizer = make(net), sgd(net.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        optimizer.zero_grad()
        loss, before = mean_square(net, step, here()), weights(net)
        broken = step == 2 and here() == 1
        scaler.scale(loss * float("inf") if broken else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        moved = any(not torch.equal(w, before[n]) for n, w in weights(net).items())
        assert moved == (not broken)
        mean = everywhere(weights(net))
        averager.step()
        assert_close(everywhere(weights(net)), mean, 1e-5, "the mean of all ranks' weights")
    assert scaler.get_scale() == (512.0 if here() == 1 else 1024.0)
    averager.finish()
    assert_equal_on_all_ranks(weights(net))
    assert all(bool(w.isfinite().all()) for w in weights(net).values())


def update_space_takes_no_scaler() -> None:
    """A rank that skipped alone would leave the others waiting; switched off, it is welcome."""
    net = network()
    optimizer = update_space(net)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(mean_square(net, 0, here())).backward()
    with refused("takes no GradScaler", "bfloat16"):
        scaler.step(optimizer)
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
    assert_equal_on_all_ranks(weights(net))


def update_space_refuses_coo() -> None:
    net = Words()
    optimizer = update_space(net)
    mean_square(net, 0, here()).backward()
    with refused("'words.weight' is sparse", "sparse=False"):
        optimizer.step()


def local_momenta_lose_nothing() -> None:
    """AdamW in update space: replicas are equal, and weights move."""
    net = network()
    optimizer = sparsync.UpdateSpaceAdamW(net, 0.01, "allgather", density=SPARSE)
    start = weights(net)
    for step in range(STEPS):
        optimizer.zero_grad()
        mean_square(net, step, here()).backward()
        optimizer.step()
    assert_equal_on_all_ranks(weights(net))
    assert any(not torch.equal(w, start[n]) for n, w in weights(net).items())


def local_refuses_changed_models() -> None:
    _changed_models_are_refused(local)


def update_space_refuses_changed_models() -> None:
    _changed_models_are_refused(update_space)


def _changed_models_are_refused(make: Any) -> None:
    """What trains but would never be exchanged is named, before the step."""
    net: Any = network()
    net[0].weight.requires_grad_(False)
    stepper = make(net)
    net[0].weight.requires_grad_(True)
    with refused("'0.weight' trains now"):
        stepper.step()
    net = network()
    stepper = make(net)
    net[3] = nn.Linear(30, 5)
    with refused("'3.weight' trains now"):
        stepper.step()


def frozen_later() -> None:
    """Freezing after the start: what waits for a frozen parameter is still delivered to it."""
    for make in (local, update_space):
        net: Any = network()
        stepper = make(net)
        optimizer = sgd(net.parameters()) if make is local else stepper
        for step in range(STEPS):
            optimizer.zero_grad()
            mean_square(net, step, here()).backward()
            if step == 1:
                net[0].requires_grad_(False)
            optimizer.step()
            if make is local:
                stepper.step()
        if make is local:
            stepper.finish()
        assert_equal_on_all_ranks(weights(net))


def local_complex_is_refused() -> None:
    _complex_is_refused(local)


def update_space_complex_is_refused() -> None:
    _complex_is_refused(update_space)


def _complex_is_refused(make: Any) -> None:
    net = network()
    net.turn = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with refused("'turn' is torch.complex64"):
        make(net)


def local_buffers_stay() -> None:
    _buffers_stay(local)


def update_space_buffers_stay() -> None:
    _buffers_stay(update_space)


def _buffers_stay(make: Any) -> None:
    """BatchNorm's statistics are this rank's: parameters are equal in the end, buffers are not."""
    net = Normed()
    stepper = make(net)
    optimizer = sgd(net.parameters()) if make is local else stepper
    alone = Normed()
    for step in range(STEPS):
        optimizer.zero_grad()
        mean_square(net, step, here()).backward()
        mean_square(alone, step, here())  # statistics of the inputs do not depend on the weights
        optimizer.step()
        if make is local:
            stepper.step()
    if make is local:
        stepper.finish()
    assert_equal_on_all_ranks(weights(net))
    assert_close(
        {"mean": net.norm.running_mean.double()},
        {"mean": alone.norm.running_mean.double()},
        1e-6,
        "this rank's statistics",
    )


def two_backward_passes_add() -> None:
    """A kept graph, gone through twice: gradients are local, and add up as ever."""
    net, once = network(), network()
    loss = mean_square(net, 0, here())
    loss.backward(retain_graph=True)
    loss.backward()
    mean_square(once, 0, here()).backward()
    assert_close(gradients(net), added((2.0, gradients(once))), 1e-6, "twice")


def local_ema() -> None:
    """EMA of the shared weights is equal on all ranks; of a rank's own ones it is its own."""
    net = network()
    averager, optimizer = local(net), sgd(net.parameters())
    ema = torch.optim.swa_utils.AveragedModel(net)
    own = torch.optim.swa_utils.AveragedModel(net)
    for step in range(STEPS):
        optimizer.zero_grad()
        mean_square(net, step, here()).backward()
        optimizer.step()
        averager.step()
        own.update_parameters(net)
        with averager.shared():
            ema.update_parameters(net)
    assert_equal_on_all_ranks(weights(ema))
    try:
        assert_equal_on_all_ranks(weights(own))
    except AssertionError:
        return
    raise AssertionError("own weights were expected to differ")


def update_space_ema() -> None:
    net = network()
    optimizer = update_space(net)
    ema = torch.optim.swa_utils.AveragedModel(net)
    for step in range(STEPS):
        optimizer.zero_grad()
        mean_square(net, step, here()).backward()
        optimizer.step()
        ema.update_parameters(net)
    assert_equal_on_all_ranks(weights(ema))


def averaging_ema() -> None:
    """With a period of 1 models are equal behind every step; EMA taken there is, too."""
    net = network()
    averager, optimizer = LocalSgd(net, period=1), sgd(net.parameters())
    ema = torch.optim.swa_utils.AveragedModel(net)
    for step in range(STEPS):
        optimizer.zero_grad()
        mean_square(net, step, here()).backward()
        optimizer.step()
        averager.step()
        ema.update_parameters(net)
    assert_equal_on_all_ranks(weights(ema))


def graphs_of_gradients_are_local() -> None:
    """A gradient penalty by ``create_graph``: what it adds is what it adds in one process."""
    net = network()
    mean_square(net, 0, here()).backward(create_graph=True)
    penalty = sum(p.grad.square().sum() for p in net.parameters() if p.grad is not None)
    found = torch.autograd.grad(penalty, list(net.parameters()))
    net.zero_grad()  # breaks the cycle of a gradient and its graph
    assert all(bool(g.isfinite().all()) for g in found)
    assert any(bool(g.any()) for g in found)
