"""How ranks learn each other's addresses: through a store, or through another communicator."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Final, final

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)

from sparsync.errors import ConfigurationError, DeadlineError, PeerError
from sparsync.transports.base import Communicator, run

__all__ = [
    "Card",
    "Meeting",
    "Over",
    "ThroughStore",
    "choose_interface",
    "exchange",
    "group_route",
    "meet",
]

CARD_BYTES: Final = 256  # fixed, so that an allgather of equal shapes carries it
PREFIX: Final = "sparsync/zmq"


@dataclass(frozen=True)
class Card:
    """What a rank tells the others about itself."""

    endpoint: str
    encrypted: bool
    max_message: int
    job: int = 0  # rank 0's counts

    def pack(self) -> bytes:
        """Write it in ``CARD_BYTES`` bytes."""
        return json.dumps(asdict(self)).encode().ljust(CARD_BYTES)

    @classmethod
    def parse(cls, raw: bytes, rank: int) -> Card:
        """Read the card of ``rank``."""
        try:
            return cls(**json.loads(raw))
        except (ValueError, TypeError) as error:
            raise PeerError(
                f"rank {rank} left {raw[:32]!r}... instead of an address; all ranks need the same "
                "version of sparsync"
            ) from error


class Meeting(ABC):
    """A way to exchange one card per rank, once."""

    @abstractmethod
    def allgather(self, card: bytes, rank: int, world_size: int) -> list[bytes]:
        """Return all ranks' cards, in rank order."""


@final
class Over(Meeting):
    """Through another communicator."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def allgather(self, card: bytes, rank: int, world_size: int) -> list[bytes]:
        """Run an allgather of ``CARD_BYTES`` bytes."""
        mine = torch.frombuffer(bytearray(card), dtype=torch.uint8)
        cards = run(self.comm.allgather(mine, "zmq addresses"))
        return [bytes(c.tolist()) for c in cards]


@final
class ThroughStore(Meeting):
    """Through a ``torch.distributed`` store; every rank's n-th meeting there is the same one."""

    def __init__(self, store: Store, host: str | None, timeout: float) -> None:
        self.store, self.host, self.timeout = store, host, timeout

    def allgather(self, card: bytes, rank: int, world_size: int) -> list[bytes]:
        """Leave a card, wait for all, and let the store go only when all have read."""
        deadline = time.monotonic() + self.timeout
        number = self.store.add(f"{PREFIX}/meetings of {rank}", 1)
        keys = [f"{PREFIX}/{number}/{r}" for r in range(world_size)]
        self.store.set(keys[rank], card.decode())
        self._wait(keys, rank, "address", deadline)
        cards = [self.store.get(key) for key in keys]
        done = [f"{key}/done" for key in keys]
        self.store.set(done[rank], "1")
        if rank == 0:  # it may be the one that serves
            self._wait(done, rank, "word that it has read the addresses", deadline)
        return cards

    def _wait(self, keys: Sequence[str], rank: int, what: str, deadline: float) -> None:
        for peer, key in enumerate(keys):
            left = max(deadline - time.monotonic(), 0.001)
            try:
                self.store.wait([key], timedelta(seconds=left))
            except RuntimeError as error:
                missing = [p for p in range(peer, len(keys)) if not self._has(keys[p])]
                raise DeadlineError(
                    f"rank {rank}, phase 'rendezvous': no {what} from ranks "
                    f"{', '.join(map(str, missing))} within {self.timeout:g} s; are they alive, "
                    "and do they use the same store?"
                ) from error

    def _has(self, key: str) -> bool:
        try:
            return bool(self.store.check([key]))
        except RuntimeError:
            return False


def meet(
    store: Store | None, address: str | None, rank: int, world_size: int, timeout: float
) -> ThroughStore:
    """Take the given store, or serve (rank 0) or join one at ``address``."""
    if (store is None) == (address is None):
        raise ConfigurationError(
            "give either store= (a torch.distributed store) or address='host:port', not "
            + ("both" if store is not None else "neither")
        )
    if store is not None:
        return ThroughStore(store, _host_of(store), timeout)
    assert address is not None
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigurationError(
            f"address is '{address}'; give host:port of rank 0, as in 10.0.0.1:29400"
        )
    wait = timedelta(seconds=timeout)
    try:
        if rank == 0:
            # torch would listen on all interfaces; this socket listens on the named one
            listener = socket.create_server((host, int(port)), family=_family(host))
            store = TCPStore(
                host,
                int(port),
                is_master=True,
                timeout=wait,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        else:
            store = TCPStore(host, int(port), is_master=False, timeout=wait)
    except (OSError, RuntimeError) as error:
        first = str(error).splitlines()[0]
        if rank == 0:
            raise ConfigurationError(
                f"rank 0 cannot serve the rendezvous at {address} ({first}); name a free port and "
                "an address of its own machine"
            ) from error
        raise DeadlineError(
            f"rank {rank}, phase 'rendezvous': rank 0 does not answer at {address} within "
            f"{timeout:g} s ({first})"
        ) from error
    return ThroughStore(store, host, timeout)


def exchange(meeting: Meeting, rank: int, world_size: int, card: Card) -> tuple[int, list[Card]]:
    """Return the job's number, drawn by rank 0, and all ranks' cards; check that they fit together.

    Raises:
        ConfigurationError: some encrypt and some do not, limits differ, or some rank is bound to
            the loopback interface, which others cannot reach.
    """
    mine = Card(card.endpoint, card.encrypted, card.max_message, secrets.randbits(63))
    raws = meeting.allgather(mine.pack(), rank, world_size)
    cards = [Card.parse(raw, r) for r, raw in enumerate(raws)]
    for name in ("encrypted", "max_message"):
        _agree(name, [getattr(c, name) for c in cards], "give all ranks the same")
    loopback = ["loopback" if _is_loopback(c.endpoint) else "reachable" for c in cards]
    addresses = ", ".join(f"rank {r} {c.endpoint}" for r, c in enumerate(cards))
    _agree("interface", loopback, f"give all ranks interface= ({addresses})")
    return cards[0].job, cards


def _agree(what: str, values: Sequence[object], remedy: str) -> None:
    others = [r for r, value in enumerate(values) if value != values[0]]
    if others:
        raise ConfigurationError(
            f"{what} differs: rank 0 has {values[0]}, ranks {', '.join(map(str, others))} have "
            f"{values[others[0]]}; {remedy}"
        )


def choose_interface(interface: str | None, host: str | None) -> str:
    """Return the interface to bind: the given one, or the address that leads to ``host``.

    Example:
        >>> choose_interface(None, "localhost"), choose_interface("eth1", None)
        ('127.0.0.1', 'eth1')
    """
    if interface in ("*", "0.0.0.0", "::", ""):
        raise ConfigurationError(
            f"interface is '{interface}', which is all of them; name the one that ranks use"
        )
    if interface is not None:
        return interface
    if host is None:
        raise ConfigurationError(
            "interface is not given, and there is no host that would tell; give the IP address or "
            "the name of the interface that leads to the other ranks, as in interface='eth0'"
        )
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing: it only asks for the route
            own = str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigurationError(
            f"there is no way to the rendezvous host '{host}' ({error}); give interface="
        ) from error
    return "127.0.0.1" if own.startswith("127.") else own


def group_route() -> tuple[str | None, str | None]:
    """Return ``(interface, host)`` that are known without being told.

    The interface is the one that gloo was told to use; the host is where the default process
    group's store is, or where launchers say that rank 0 is.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0] or None
    host = None
    if dist.is_initialized():
        host = _host_of(dist.distributed_c10d._get_default_store())
    return interface, host or os.environ.get("MASTER_ADDR")


def _host_of(store: Store) -> str | None:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, HashStore):
        return "127.0.0.1"  # it lives in one process
    return str(store.host) if isinstance(store, TCPStore) else None


def _family(host: str) -> socket.AddressFamily:
    return socket.AddressFamily(socket.getaddrinfo(host, 1, type=socket.SOCK_STREAM)[0][0])


def _is_loopback(endpoint: str) -> bool:
    return endpoint.startswith(("tcp://127.", "tcp://[::1]"))
