"""Choose dense gradients or updates by seconds per step, for ``attach(ddp, adamw, "auto")``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sparsync.cost.calibrate import calibrate
from sparsync.cost.machine import Machine
from sparsync.cost.planner import predict, seconds_of_updates
from sparsync.cost.wording import format_seconds
from sparsync.gradients.ddp import check_ddp
from sparsync.options import Transport
from sparsync.presets import resolve
from sparsync.transports.agree import agree
from sparsync.transports.driver import run
from sparsync.transports.process_group import Groups, TorchCommunicator, connect_group
from sparsync.updates import OuterStep

__all__ = ["Choice", "by_seconds", "measured_choice"]

# Updates must take less than this fraction of the dense exchange's seconds, because predictions may be
# off by 10 %. When in doubt, dense gradients are better: they leave every training step unchanged.
_CLEARLY = 0.9
_UNKNOWN = (
    "the number of steps to a given loss differs between the two and is not known here (sparsync "
    "time-to-loss, "
    "of the package sparsync-papers, is a study of it)"
)


@dataclass(frozen=True)
class Choice:
    """The chosen exchange, the same on all ranks."""

    exchange: Literal["gradients", "updates"]
    why: str  # how many seconds each exchange takes, and what these numbers leave out


def by_seconds(outer: OuterStep, size: int, world_size: int, machine: Machine) -> Choice:
    """Choose the exchange with fewer seconds per step; updates must save at least 10 %.

    The duration of a backward pass is unknown before the first step, so the dense exchange is assumed not
    to overlap with it.  The choice depends only on the arguments, so ranks with the same ``machine`` make
    the same choice.

    Args:
        outer: the settings for exchanging updates; all elements are assumed to be sent.
        size: number of trained elements.
        world_size: number of ranks.
        machine: the measured constants of the group.

    Example:
        >>> from sparsync.updates.family import OUTER_SETTINGS
        >>> outer = OuterStep(**OUTER_SETTINGS["updates"])
        >>> by_seconds(outer, 10**7, 4, Machine(beta=8e-8)).why.split(";")[0]
        'updates every 2 steps take about 241 ms per step, dense gradients 4.81 s'
        >>> by_seconds(outer, 10**7, 4, Machine(beta=8e-11)).exchange
        'gradients'
    """
    dense = predict(
        resolve("dense"), size=size, k=size, world_size=world_size, machine=machine
    ).seconds
    updates = seconds_of_updates(
        outer.chosen, outer.first_period, size=size, world_size=world_size, machine=machine
    )
    period = outer.first_period
    often = "updates on every step" if period == 1 else f"updates every {period} steps"
    named = {
        "updates": (often, format_seconds(updates)),
        "gradients": ("dense gradients", format_seconds(dense)),
    }
    exchange: Literal["gradients", "updates"] = "gradients"
    other: Literal["gradients", "updates"] = "updates"
    if updates < _CLEARLY * dense:
        exchange, other = other, exchange
    (first, its), (second, others) = named[exchange], named[other]
    return Choice(exchange, f"{first} take about {its} per step, {second} {others}; {_UNKNOWN}")


def measured_choice(
    model: DistributedDataParallel, outer: OuterStep, transport: Transport
) -> Choice:
    """Measure the group for a few seconds, then choose; all ranks must call this.

    Raises:
        ConfigurationError: the model is not a DDP module or cannot be attached, or the links are too slow
            to measure.
        PeerError: ranks were given different arguments.
    """
    check_ddp(model)
    size = sum(p.numel() for p in model.module.parameters() if p.requires_grad)
    groups = Groups(model.process_group, **transport.waits)
    try:
        group = groups.make(dist.get_process_group_ranks(model.process_group))
        asked = [
            size,
            f"{outer.chosen.name} {outer.chosen.options}",
            outer.first_period,
            transport.name,
        ]
        told = {"the choice of dense gradients or updates": asked}
        run(agree(TorchCommunicator(group, timeout=transport.timeout), told))
        comm = connect_group(
            group, transport=transport.name, **transport.waits, **transport.sockets
        )
        try:
            machine = run(calibrate(comm)).machine
        finally:
            comm.close()
    finally:
        groups.close()
    return by_seconds(outer, size, dist.get_world_size(model.process_group), machine)
