"""What carries a model's exchange: a process group of its own, and the transport over it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sparsync.collectives.agreement import agree
from sparsync.transports.base import Communicator, run
from sparsync.transports.connect import connect_group
from sparsync.transports.torch import TorchCommunicator

__all__ = ["Wires", "own_group"]


class Wires(NamedTuple):
    """What carries the bytes: see ``connect_group``."""

    transport: str
    timeout: float
    curve_keys: Path | str | None

    def connect(self, group: dist.ProcessGroup) -> Communicator:
        """Connect, once all ranks want the same: else one would wait where nobody listens."""
        wanted = {"transport": self.transport, "encryption": self.curve_keys is not None}
        run(agree(TorchCommunicator(group, timeout=self.timeout), wanted))
        return connect_group(
            group,
            transport=self.transport,
            timeout=self.timeout,
            curve_keys=self.curve_keys,
        )


def own_group(model: DistributedDataParallel, timeout: float) -> dist.ProcessGroup:
    """Make a gloo group of the model's ranks: the engine's traffic never meets DDP's own."""
    ranks = dist.get_process_group_ranks(model.process_group)
    group = dist.new_group(
        ranks,
        backend="gloo",
        timeout=timedelta(seconds=timeout),
        use_local_synchronization=len(ranks) < dist.get_world_size(),
    )
    assert isinstance(group, dist.ProcessGroup)
    return group
