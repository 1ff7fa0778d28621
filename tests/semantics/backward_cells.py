"""Backward passes that `attach` refuses, and parameters that none of them uses: proofs of cells."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Ddp

import sparsync
from sparsync import Correction

from .cases import Branches
from .ddp_cells import attached, here, refused
from .training import (
    SPARSE,
    STEPS,
    TIMEOUT,
    added,
    assert_close,
    assert_equal_on_all_ranks,
    gradients,
    mean_square,
    network,
    weights,
)


def second_backward_is_refused() -> None:
    """Once exchanged, a gradient takes no more: of a kept graph, of an older forward pass."""
    ddp, sync = attached(network())
    loss = mean_square(ddp, 0, here())
    loss.backward(retain_graph=True)
    with refused("second backward pass", "no_sync()"):
        loss.backward()
    ddp.zero_grad()
    first, second = mean_square(ddp, 1, here()), mean_square(ddp, 2, here())
    first.backward()
    with refused("second backward pass", "Add the losses"):
        second.backward()
    ddp.zero_grad()
    with ddp.no_sync():  # whoever says that it is local may
        (0.0 * ddp.module(torch.ones(2, 20))).sum().backward()
    ddp.zero_grad()
    mean_square(ddp, 3, here()).backward()
    assert_equal_on_all_ranks(gradients(ddp))
    sync.close()


def corrected_gradients_count_once() -> None:
    """With momentum or decay in the correction, averages must not come in as gradients again."""
    for options in ({}, {"gradient_as_bucket_view": True}):
        ddp, sync = attached(network(), SPARSE, ddp=options, correction=Correction(momentum=0.9))
        for step in range(2):
            ddp.zero_grad(set_to_none=step == 0)
            with ddp.no_sync():
                mean_square(ddp, step, here()).backward()
            mean_square(ddp, step, here()).backward()
        with refused("still in the gradients", "no_sync()"):
            mean_square(ddp, 2, here()).backward()
        sync.close()


def graphs_of_gradients_are_refused() -> None:
    ddp, sync = attached(network())
    with refused("create_graph=True", "torch.autograd.grad"):
        mean_square(ddp, 0, here()).backward(create_graph=True)
    sync.close()


def complex_parameters_are_refused() -> None:
    net: Any = network()
    net.turn = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with refused("'turn' is torch.complex64", "view_as_real"):
        attached(net)


def python_reducer_is_refused() -> None:
    before = torch._dynamo.config.optimize_ddp
    try:
        torch._dynamo.config.optimize_ddp = "python_reducer"
        ddp = Ddp(network())
    finally:
        torch._dynamo.config.optimize_ddp = before
    with refused("python_reducer", "wrap again"):
        sparsync.attach(ddp, timeout=TIMEOUT)


def unused_ones_decay_in_a_static_graph() -> None:
    """What the correction delivers to a parameter that nobody uses reaches it."""
    ends = []
    for options in ({"static_graph": True}, {"find_unused_parameters": True}):
        ddp, sync = attached(Branches(), ddp=options, correction=Correction(weight_decay=0.5))
        for _ in range(STEPS):
            ddp.zero_grad()
            x = torch.ones(4, 20)
            ddp(x).pow(2).mean().backward()
        ends.append(gradients(ddp.module))
        sync.close()
    assert_close(*ends, 1e-6, "static_graph")
    decay = added((0.5, weights(Branches())))["never.weight"]
    assert torch.allclose(ends[0]["never.weight"], decay, atol=1e-6)
