"""What carries a model's exchange: a process group of its own, and the transport over it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist

from sparsync.collectives.agreement import agree
from sparsync.transports.base import Communicator, run
from sparsync.transports.connect import connect_group
from sparsync.transports.torch import TorchCommunicator

__all__ = ["OwnGroups", "Wires"]


class Wires(NamedTuple):
    """What carries the bytes: see ``connect_group``."""

    transport: str
    timeout: float
    curve_keys: Path | str | None

    def connect(self, group: dist.ProcessGroup) -> Communicator:
        """Connect, once all ranks want the same: else one would wait where nobody listens."""
        wanted = {
            **_versions(),
            "transport": self.transport,
            "encryption": self.curve_keys is not None,
        }
        run(agree(TorchCommunicator(group, timeout=self.timeout), wanted))
        return connect_group(
            group,
            transport=self.transport,
            timeout=self.timeout,
            curve_keys=self.curve_keys,
        )


@final
class OwnGroups:
    """Process groups for the engine alone: its traffic meets no other's.

    Args:
        world: the ranks that call everything here together; None: all.
        timeout: seconds that any wait may take.
    """

    def __init__(self, world: dist.ProcessGroup | None, timeout: float) -> None:
        self.world, self.timeout = world, timeout
        self._all = dist.get_world_size(world) == dist.get_world_size()
        self._made: list[dist.ProcessGroup] = []

    def make(self, ranks: Sequence[int], backend: str | None = "gloo") -> dist.ProcessGroup:
        """Return a group of this rank and others; ranks of the world call it for disjoint groups.

        Args:
            ranks: global ranks, this one among them.
            backend: None for that of the default group.
        """
        timeout = timedelta(seconds=self.timeout)
        own: Any = None
        if not self._all:
            # not kept, so never ended: its name, and its addresses in the store, would come back
            own = dist.new_group(list(ranks), timeout, backend, use_local_synchronization=True)
            assert isinstance(own, dist.ProcessGroup)
            return own
        for members in sorted({tuple(theirs) for theirs in self.gathered(list(ranks))}):
            group = dist.new_group(list(members), timeout, backend)
            if dist.get_rank() in members:
                own = group
        assert isinstance(own, dist.ProcessGroup)
        self._made.append(own)
        return own

    def gathered(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return what every rank of the world says, in the order of ranks: no more numbers than ranks."""
        comm = TorchCommunicator(self.world, timeout=self.timeout)
        mine = torch.full((dist.get_world_size() + 1,), -1)
        mine[: len(numbers) + 1] = torch.tensor([len(numbers), *numbers])
        everyone = [theirs.tolist() for theirs in run(comm.allgather(mine, "groups"))]
        return [theirs[1 : 1 + theirs[0]] for theirs in everyone]

    def close(self) -> None:
        """End the groups."""
        made, self._made = self._made, []
        for group in made:
            if dist.is_initialized():
                dist.destroy_process_group(group)


def _versions() -> dict[str, object]:
    """Return what all ranks must have: first of all, since others may not even compare the same."""
    try:
        own = version("sparsync")
    except PackageNotFoundError:  # from a folder on the path, without installation
        own = "unknown"
    return {"the version of sparsync": own, "the version of torch": torch.__version__}
