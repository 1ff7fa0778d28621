"""Meet through a store: ranks exchange a few bytes, or learn who is missing, without a connection."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Final, final

import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)

from sparsync.errors import DeadlineError, PeerError

__all__ = ["RollCall", "gather", "host_of", "store_of"]

_PREFIX: Final = "sparsync/meetings"
_PATIENCE: Final = 1.0  # seconds between one rank's failure and the word of the others
_LOOK: Final = 0.02  # seconds between looks


def store_of(group: dist.ProcessGroup | None) -> Store:
    """Return a process group's store; None for the default group's."""
    group = group or dist.distributed_c10d._get_default_group()
    return dist.distributed_c10d._get_process_group_store(group)


def host_of(store: Store) -> str | None:
    """Return the host that serves a store, as far as it tells."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, HashStore):
        return "127.0.0.1"  # it lives in one process
    return str(store.host) if isinstance(store, TCPStore) else None


def gather(store: Store, rank: int, world_size: int, card: bytes, timeout: float) -> list[bytes]:
    """Return every rank's card, in rank order; every rank's n-th meeting in a store is the same one.

    Rank 0, which may serve the store, returns when all have read.

    Raises:
        DeadlineError: names the ranks that are missing after ``timeout`` seconds.
        PeerError: the store does not answer.
    """
    deadline = time.monotonic() + timeout
    counter = f"{_PREFIX}/of {rank}"
    try:
        meeting = store.add(counter, 1)
        keys = [f"{_PREFIX}/{meeting}/{r}" for r in range(world_size)]
        store.set(f"{keys[rank]} arrived", "1")  # stays when the card is withdrawn
        store.set(keys[rank], card.decode())
        try:
            _wait(store, keys, rank, "address", deadline, timeout)
        except DeadlineError:
            with suppress(RuntimeError):  # the next attempt is this meeting again
                store.delete_key(keys[rank])
                store.add(counter, -1)
            raise
        cards = [store.get(key) for key in keys]
        done = [f"{key} read" for key in keys]
        store.set(done[rank], "1")
    except DeadlineError:
        raise
    except RuntimeError as error:
        raise PeerError(
            f"rank {rank}, phase 'rendezvous': the store does not answer, and the process that serves "
            f"it may be gone ({str(error).splitlines()[0]})"
        ) from error
    if rank == 0:
        _wait(store, done, rank, "word about reading the addresses", deadline, timeout)
    return cards


def _wait(
    store: Store, keys: Sequence[str], rank: int, what: str, deadline: float, timeout: float
) -> None:
    for peer, key in enumerate(keys):
        left = max(deadline - time.monotonic(), 0.001)
        try:
            store.wait([key], timedelta(seconds=left))
        except RuntimeError as error:
            later = range(peer, len(keys))
            missing = [p for p in later if not _has(store, f"{keys[p]} arrived")]
            missing = missing or [p for p in later if not _has(store, keys[p])]
            raise DeadlineError(
                f"rank {rank}, phase 'rendezvous': no {what} from ranks "
                f"{', '.join(map(str, missing))} within {timeout:g} s; are they alive, "
                "and do they use the same store?"
            ) from error


def _has(store: Store, key: str) -> bool:
    try:
        return bool(store.check([key]))
    except RuntimeError:
        return False


@final
class RollCall:
    """Finds out who is missing when a native collective has failed, which gloo does not say.

    Ranks whose exchange has failed say so in the group's store; who is dead or stuck does not.

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
        """Say so, too, and name those that have not said it a second later."""
        missing = set(range(self._world_size))

        def call(store: Store) -> None:
            store.set(str(self._rank), "failed")
            until = time.monotonic() + _PATIENCE
            while missing and time.monotonic() < until:
                missing.difference_update([r for r in missing if store.check([str(r)])])
                time.sleep(_LOOK)

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
                action(PrefixStore("sparsync/failed", store_of(self._group)))

        thread = threading.Thread(target=ask, name="sparsync-roll-call", daemon=True)
        thread.start()
        thread.join(2 * _PATIENCE)
