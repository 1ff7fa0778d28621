"""Process groups that carry one model's exchange alone, so that its messages meet no others."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from sparsync.errors import DeadlineError, PeerError
from sparsync.transports.driver import run
from sparsync.transports.process_group import TorchCommunicator

__all__ = ["Groups"]


@final
class Groups:
    """Makes process groups among the ranks that attach a model, and ends them.

    Args:
        world: the ranks that call everything here together; None: all.
        timeout: seconds that any wait may take.

    Raises:
        DeadlineError: from the constructor: names the ranks that have not come here in time.
    """

    def __init__(self, world: dist.ProcessGroup | None, timeout: float) -> None:
        self.world, self.timeout = world, timeout
        self._all = dist.get_world_size(world) == dist.get_world_size()
        self._made: list[dist.ProcessGroup] = []
        self._meet()

    def make(self, ranks: Sequence[int], backend: str | None = "gloo") -> dist.ProcessGroup:
        """Return a group of this rank and others; ranks of the world call it for disjoint groups.

        Args:
            ranks: global ranks, this one among them.
            backend: None for that of the default group.

        Raises:
            PeerError: a rank of the group is gone.
        """
        own: Any = None
        if not self._all:
            own = self._connect(ranks, backend, use_local_synchronization=True)
        else:
            for members in sorted({tuple(theirs) for theirs in self.gathered(list(ranks))}):
                group = self._connect(members, backend)
                if dist.get_rank() in members:
                    own = group
        assert isinstance(own, dist.ProcessGroup)
        self._made.append(own)
        return own

    def gathered(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of every rank of the world, at most one per rank, in the order of ranks."""
        comm = TorchCommunicator(self.world, timeout=self.timeout)
        mine = torch.full((dist.get_world_size() + 1,), -1)
        mine[: len(numbers) + 1] = torch.tensor([len(numbers), *numbers])
        everyone = [theirs.tolist() for theirs in run(comm.allgather(mine, "groups"))]
        return [theirs[1 : 1 + theirs[0]] for theirs in everyone]

    def close(self) -> None:
        """End the groups."""
        made, self._made = self._made, []
        for group in made:
            if not dist.is_initialized():
                continue
            names = distributed_c10d._world.pg_names
            name = names.get(group)
            dist.destroy_process_group(group)
            if not self._all and name is not None:
                # torch numbers such groups by how many there are: a name that came back would find the
                # old addresses in the store
                names[_Reserved()] = name  # type: ignore[index]

    def _meet(self) -> None:
        """Wait for all ranks, of which gloo would not say which are missing."""
        store = distributed_c10d._get_default_store()
        group = self.world or distributed_c10d._get_default_group()
        ranks, me = dist.get_process_group_ranks(group), dist.get_rank()
        if store is None or len(ranks) == 1:  # a group of MPI has none
            return
        store = distributed_c10d.PrefixStore(f"sparsync/attach/{group.group_name}", store)
        missing = [str(me)]
        try:
            meeting = store.add(f"meetings of {me}", 1)
            store.set(f"{meeting}/{me}", "here")
            missing = [str(rank) for rank in ranks]
            for rank in ranks:
                store.wait([f"{meeting}/{rank}"], timedelta(seconds=self.timeout))
        except RuntimeError as error:
            with suppress(RuntimeError):  # the store may be gone, with its host
                missing = [str(r) for r in ranks if not store.check([f"{meeting}/{r}"])]
            named = f"rank{'s' * (len(missing) > 1)} {', '.join(missing)}"
            raise DeadlineError(
                f"rank {me}: attach: no word from {named} within {self.timeout:g} s; all ranks of a "
                "model attach together. Are they alive? Raise the timeout if they are only slow"
            ) from error
        with suppress(RuntimeError):  # nobody waits at the last meeting any more
            store.delete_key(f"{meeting - 1}/{me}")

    def _connect(self, ranks: Sequence[int], backend: str | None, **options: Any) -> Any:
        """Return a group, or nothing of use on a rank that is not in it."""
        try:
            return dist.new_group(list(ranks), timedelta(seconds=self.timeout), backend, **options)
        except RuntimeError as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise PeerError(
                f"rank {dist.get_rank()}: attach: connecting ranks {list(ranks)} failed within "
                f"{self.timeout:g} s; a rank of them is gone, or cannot be reached ({reason})"
            ) from error


class _Reserved:
    """Holds the name of a group that has ended."""

    def shutdown(self) -> None:
        """Do nothing: torch calls this on every group."""
