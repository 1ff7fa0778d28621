"""``attach(ddp, optimizer, "auto")`` without SGD: dense gradients or updates, by time to a loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sparsync.cost.calibrate import calibrate
from sparsync.cost.training import LossPlan, plan_loss
from sparsync.gradients.ddp import check_ddp
from sparsync.options import Transport
from sparsync.presets import candidates
from sparsync.transports.agree import agree
from sparsync.transports.driver import run
from sparsync.transports.process_group import Groups, TorchCommunicator, connect_group

__all__ = ["dense_or_updates"]


def dense_or_updates(
    model: DistributedDataParallel,
    optimizers: Sequence[torch.optim.Optimizer],
    transport: Transport,
) -> LossPlan:
    """Measure the group for a few seconds; return the plan, whose choice is "dense" or "updates".

    It is the same on all ranks, which all call this.  The seconds of a backward pass are not known yet:
    nothing of a dense exchange counts as hidden.

    Raises:
        ConfigurationError: no DDP, or one that cannot be attached; links too slow to be measured.
        PeerError: ranks disagree on what is asked for.
    """
    check_ddp(model)
    muon = any("Muon" in type(one).__name__ for one in optimizers)
    size = sum(p.numel() for p in model.module.parameters() if p.requires_grad)
    groups = Groups(model.process_group, **transport.waits)
    try:
        group = groups.make(dist.get_process_group_ranks(model.process_group))
        asked = {
            "the choice by time to a loss": ["muon" if muon else "adamw", size, transport.name]
        }
        run(agree(TorchCommunicator(group, timeout=transport.timeout), asked))
        comm = connect_group(
            group, transport=transport.name, **transport.waits, **transport.sockets
        )
        try:
            machine = run(calibrate(comm)).machine
        finally:
            comm.close()
    finally:
        groups.close()
    return plan_loss(
        size,
        dist.get_world_size(model.process_group),
        machine,
        candidates(),
        optimizer="muon" if muon else "adamw",
        methods=("dense", "updates"),
    )
