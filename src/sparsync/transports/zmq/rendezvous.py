"""Rendezvous: ranks learn each other's addresses, through a store or through another communicator."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from sparsync.errors import ConfigurationError, DeadlineError, PeerError
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import run
from sparsync.transports.store import host_of, store_of

__all__ = [
    "Card",
    "Exchange",
    "choose_interface",
    "group_route",
    "meet",
    "open_store",
    "through",
]

CARD_BYTES: Final = 256  # fixed, so that an allgather of equal shapes carries it
Exchange = Callable[[bytes], list[bytes]]  # from this rank's card to all ranks', in rank order


@dataclass(frozen=True)
class Card:
    """The facts that a rank tells the others about itself."""

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


def meet(exchange: Exchange, card: Card) -> tuple[int, list[str]]:
    """Return the job's number, drawn by rank 0, and all endpoints; check that the ranks fit together.

    Raises:
        ConfigurationError: some encrypt and some do not, limits differ, or some rank is bound to
            the loopback interface, which others cannot reach.
    """
    mine = Card(card.endpoint, card.encrypted, card.max_message, secrets.randbits(63))
    cards = [Card.parse(raw, r) for r, raw in enumerate(exchange(mine.pack()))]
    for name in ("encrypted", "max_message"):
        _check_equal(name, [getattr(c, name) for c in cards], "give all ranks the same")
    local = [c.endpoint.startswith(("tcp://127.", "tcp://[::1]")) for c in cards]
    addresses = ", ".join(f"rank {r} {c.endpoint}" for r, c in enumerate(cards))
    reach = ["loopback" if each else "reachable" for each in local]
    _check_equal("interface", reach, f"give all ranks interface= ({addresses})")
    return cards[0].job, [c.endpoint for c in cards]


def _check_equal(what: str, values: Sequence[object], remedy: str) -> None:
    others = [r for r, value in enumerate(values) if value != values[0]]
    if others:
        raise ConfigurationError(
            f"{what} differs: rank 0 has {values[0]}, ranks {', '.join(map(str, others))} have "
            f"{values[others[0]]}; {remedy}"
        )


def through(comm: Communicator) -> Exchange:
    """Exchange cards through another communicator."""

    def exchange(card: bytes) -> list[bytes]:
        mine = torch.frombuffer(bytearray(card), dtype=torch.uint8)
        cards = run(comm.allgather(mine, "zmq addresses"))
        return [bytes(c.tolist()) for c in cards]

    return exchange


def open_store(
    store: Store | None, address: str | None, rank: int, timeout: float
) -> tuple[Store, str | None]:
    """Return the given store, or serve (rank 0) or join one at ``address``; and where it is."""
    if (store is None) == (address is None):
        raise ConfigurationError(
            "give either store= (a torch.distributed store) or address='host:port', not "
            + ("both" if store is not None else "neither")
        )
    if store is not None:
        return store, host_of(store)
    assert address is not None
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigurationError(
            f"address is '{address}'; give host:port of rank 0, as in 10.0.0.1:29400"
        )
    listener = None
    try:
        if rank == 0:
            # torch would listen on all interfaces; this socket listens on the named one
            family = socket.getaddrinfo(host, 1, type=socket.SOCK_STREAM)[0][0]
            listener = socket.create_server((host, int(port)), family=family).detach()
        store = TCPStore(
            host,
            int(port),
            is_master=rank == 0,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            master_listen_fd=listener,
        )
        return store, host
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
        host = host_of(store_of(None))
    return interface, host or os.environ.get("MASTER_ADDR")
