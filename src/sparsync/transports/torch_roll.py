"""Who is missing: gloo's native collectives fail without a word about the rank that made them fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, final

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

__all__ = ["RollCall"]

PATIENCE: Final = 1.0  # seconds between one rank's failure and the word of the others
LOOK: Final = 0.02  # seconds between looks


@final
class RollCall:
    """Ranks whose exchange has failed say so in the group's store; who is dead or stuck does not.

    A rank that is alive may be late with its word: those that are named hold the one that failed.

    Args:
        group: whose ranks are called; None for the default one.
        rank: this one.
        world_size: number of ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None, rank: int, world_size: int) -> None:
        self._group, self._rank, self._world_size = group, rank, world_size

    def answer(self) -> None:
        """Say that this rank has failed."""
        self._aside(lambda store: store.set(str(self._rank), "failed"))

    def missing(self) -> str:
        """Say so, too, and name those that have not said it ``PATIENCE`` later."""
        missing = set(range(self._world_size))

        def call(store: Store) -> None:
            store.set(str(self._rank), "failed")
            until = time.monotonic() + PATIENCE
            while missing and time.monotonic() < until:
                missing.difference_update([r for r in missing if store.check([str(r)])])
                time.sleep(LOOK)

        self._aside(call)
        if self._rank in missing:
            return "which rank is to blame is unknown: the store does not answer, whose host may be gone"
        if not missing:
            return "all ranks are there: a connection between them is lost, or too slow"
        return f"no word from rank{'s' * (len(missing) > 1)} {', '.join(map(str, sorted(missing)))}"

    def _aside(self, action: Callable[[Store], None]) -> None:
        """Ask the store on a thread that may be left behind: its host may be stuck, too."""

        def ask() -> None:
            with suppress(RuntimeError, KeyError, ValueError):  # lost, or the group was destroyed
                group = self._group or dist.distributed_c10d._get_default_group()
                store = dist.distributed_c10d._get_process_group_store(group)
                action(PrefixStore("sparsync/failed", store))

        thread = threading.Thread(target=ask, name="sparsync-roll-call", daemon=True)
        thread.start()
        thread.join(2 * PATIENCE)
