"""Rendezvous: ranks without connections exchange a few bytes, or learn which ranks are missing."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)

from sparsync.errors import ConfigurationError, DeadlineError, PeerError, first_line
from sparsync.transports.agree import tell
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import run

__all__ = [
    "check_ports",
    "choose_interface",
    "convene",
    "host_of_rank_0",
    "meet",
    "place_of_gloo",
    "store_of",
    "way_to",
]

_PREFIX: Final = "sparsync/meetings"
_CARD_BYTES: Final = 256  # of a card sent over a communicator, e.g. a host name
_WRONG: Final = "cannot take part"  # key of a card that gives the reason
_COMPLAINT: Final = 180  # characters of the reason, over a communicator
_BYE: Final = 20.0  # seconds that a rank unable to take part waits for the others


def store_of(group: dist.ProcessGroup | None) -> Store:
    """Return the store of a process group; None stands for the default group."""
    group = group or dist.distributed_c10d._get_default_group()
    return dist.distributed_c10d._get_process_group_store(group)


def meet(
    store: Store | Communicator,
    rank: int,
    world_size: int,
    card: str,
    timeout: float,
    phase: str = "rendezvous",
) -> list[str]:
    """Return every rank's card, in rank order; the n-th calls of all ranks with a store are one meeting.

    A card is a text shown to the other ranks; ``phase`` is named in errors.  Rank 0, which may serve the
    store, returns once all ranks have read the cards.  Over a communicator of these ranks, a card has at
    most 256 bytes.

    Raises:
        DeadlineError: names the ranks still missing after ``timeout`` seconds.
        PeerError: the store does not answer.
    """
    if isinstance(store, Communicator):
        return run(tell(store, card, _CARD_BYTES, phase))
    deadline = time.monotonic() + timeout
    where = f"rank {rank}, phase '{phase}'"

    def wait(keys: Sequence[str]) -> None:
        for peer, key in enumerate(keys):
            left = max(deadline - time.monotonic(), 0.001)
            try:
                store.wait([key], timedelta(seconds=left))
            except RuntimeError as error:
                # blame the ranks that never came, if any; otherwise those that came, gave up and withdrew
                # their cards
                later = range(peer, len(keys))
                missing = [p for p in later if not _has(store, f"{keys[p]} arrived")]
                missing = missing or [p for p in later if not _has(store, keys[p])]
                raise DeadlineError(
                    f"{where}: no word from rank{'s' * (len(missing) > 1)} "
                    f"{', '.join(map(str, missing))} within {timeout:g} s; are they alive, and do "
                    "they use the same store? Raise the timeout if they are only slow"
                ) from error

    # each rank counts its own meetings, so no rank needs to know when another started one
    counter = f"{_PREFIX}/of {rank}"
    try:
        meeting = store.add(counter, 1)
        keys = [f"{_PREFIX}/{meeting}/{r}" for r in range(world_size)]
        store.set(f"{keys[rank]} arrived", "1")  # not deleted when the card is withdrawn
        store.set(keys[rank], card)
        try:
            wait(keys)
        except DeadlineError:
            # The count is restored, so a second attempt joins the same meeting.  A complaint is not
            # withdrawn, for ranks that arrive later
            with suppress(RuntimeError):
                if _WRONG not in card:
                    store.delete_key(keys[rank])
                store.add(counter, -1)
            raise
        cards = [store.get(key).decode(errors="replace") for key in keys]
        read = [f"{key} read" for key in keys]
        store.set(read[rank], "1")
    except DeadlineError:
        raise
    except RuntimeError as error:
        raise PeerError(
            f"{where}: the store does not answer, and the process that serves it may be gone "
            f"({first_line(error)})"
        ) from error
    if rank == 0:  # otherwise the store could end with this process before the others have read it
        wait(read)
    return cards


def convene(
    store: Store | Communicator,
    rank: int,
    world_size: int,
    ready: Callable[[], dict[str, Any]],
    timeout: float,
    phase: str = "rendezvous",
) -> list[dict[str, Any]]:
    """Return the results of ``ready`` on all ranks, in rank order; if one fails, all learn why.

    A rank on which it fails waits for the others only as long as they may need to arrive and learn of it.

    Raises:
        ConfigurationError: ``ready`` raised it on this rank.
        PeerError: it failed on another rank, or that rank runs another version.
        DeadlineError: as in ``meet``.
    """
    wrong: ConfigurationError | None = None
    try:
        card = json.dumps(ready())
    except ConfigurationError as error:
        wrong = error
        card = json.dumps({_WRONG: str(error)})
        # a communicator truncates a card at 256 bytes, and truncated JSON cannot be read
        if isinstance(store, Communicator):
            card = json.dumps({_WRONG: str(error).encode("ascii", "replace").decode()[:_COMPLAINT]})
    try:
        raw = meet(store, rank, world_size, card, min(timeout, _BYE) if wrong else timeout, phase)
    except (DeadlineError, PeerError):
        # this rank's own error is the cause, so it takes precedence over missing ranks
        if wrong is not None:
            raise wrong from None
        raise
    if wrong is not None:
        raise wrong
    cards = list[dict[str, Any]]()
    for peer, text in enumerate(raw):
        try:
            cards.append(dict(json.loads(text)))
        except (ValueError, TypeError) as error:
            raise PeerError(
                f"rank {peer} left {text[:32]!r}... instead of an address; all ranks need the same "
                "version of sparsync"
            ) from error
        if _WRONG in cards[-1]:
            raise PeerError(
                f"rank {rank}, phase '{phase}': rank {peer} cannot take part: {cards[-1][_WRONG]}"
            )
    return cards


def _has(store: Store, key: str) -> bool:
    with suppress(RuntimeError):
        return bool(store.check([key]))
    return False


# ---- where ranks reach each other ------------------------------------------------------------------


def choose_interface(interface: str | None, meeting: Store | str) -> str:
    """Return the interface to bind.

    It is the given one; or the one configured for gloo (``GLOO_SOCKET_IFNAME``); or the address on the
    route to the host of the store, of the default process group's store, or of rank 0.

    Args:
        interface: as given on this rank; None: it must be found.
        meeting: where the ranks meet: a store, or, over a communicator, the name of rank 0's host.
            Finding that is collective (``host_of_rank_0``), even for ranks that do not need it.
    """
    # a port on all interfaces would be exposed to networks unrelated to the job
    if interface in ("*", "0.0.0.0", "::", ""):
        raise ConfigurationError(
            f"interface is '{interface}', which is all of them; name the one that ranks use"
        )
    interface = interface or os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return interface
    host = None if isinstance(meeting, str) else _host_of(meeting)
    if host is None and dist.is_initialized():
        host = _host_of(store_of(None))
    host = host or os.environ.get("MASTER_ADDR")
    if host is None and isinstance(meeting, str):
        host = meeting
    if host is None:
        raise ConfigurationError(
            "interface is not given, and no rendezvous host tells which one to use; give the IP address "
            "or the name of the interface that leads to the other ranks, as in interface='eth0'"
        )
    return way_to(host)


def place_of_gloo() -> str:
    """Return where gloo listens: on ``GLOO_SOCKET_IFNAME``, or on the address of this host's name.

    Raises:
        ConfigurationError: there is no such interface.
    """
    host = socket.gethostname()
    named = os.environ.get("GLOO_SOCKET_IFNAME", "")
    present = [name for _, name in socket.if_nameindex()]
    missing = [name for name in named.split(",") if named and name not in present]
    if missing:
        raise ConfigurationError(
            f"GLOO_SOCKET_IFNAME is '{named}', and {host} has no interface '{missing[0]}'; give one of "
            f"{', '.join(present)}"
        )
    if named:
        return f"{named} of {host}"
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return f"{host}, which does not know its own address"  # torch falls back to loopback


def way_to(host: str) -> str:
    """Return this machine's address on the route to a host."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # a UDP connect sends nothing, it only looks up the route
            own = str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigurationError(
            f"there is no way to the rendezvous host '{host}' ({error}); give interface="
        ) from error
    # hosts files also map a host's own name to 127.0.1.1; all ranks of a machine need the same address
    return "127.0.0.1" if own.startswith("127.") else own


def check_ports(port_range: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return a range of ports as integers; refuse an invalid one."""
    if port_range is None:
        return None
    try:
        first, last = (int(port) for port in port_range)
    except (TypeError, ValueError):
        first, last = 0, 0
    if not 0 < first <= last < 2**16:
        raise ConfigurationError(
            f"port_range is {port_range!r}; give the first and the last port, as (29600, 29631)"
        )
    return first, last


def _host_of(store: Store) -> str | None:
    """Return the host that serves a store; None if the store does not reveal it."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, HashStore):
        return "127.0.0.1"  # in the memory of one process, so all its ranks are on this machine
    return str(store.host) if isinstance(store, TCPStore) else None


def host_of_rank_0(comm: Communicator) -> str:
    """Return the name of rank 0's host, or the loopback address if all ranks share that host."""
    names = run(tell(comm, socket.gethostname(), _CARD_BYTES, "hosts"))
    return "127.0.0.1" if len(set(names)) == 1 else names[0]
