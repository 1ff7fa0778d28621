"""Rendezvous: unconnected ranks exchange a few bytes, or get an error that names missing ranks."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)

from sparsync.errors import ConfigurationError, DeadlineError, PeerError, first_line, require
from sparsync.transports.agree import tell
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import run
from sparsync.transports.interfaces import (
    VARIABLE,
    Interface,
    address_to,
    described,
    family_of,
    is_loopback,
    is_unspecified,
    listening_on,
    own_interfaces,
    selected,
    usual_address,
)

__all__ = [
    "GlooPlace",
    "check_one_interface",
    "check_places",
    "check_ports",
    "check_sockets",
    "choose_interface",
    "convene",
    "host_of_rank_0",
    "machine",
    "meet",
    "network",
    "store_of",
    "way_to",
]

_PREFIX: Final = "sparsync/meetings"
_CARD_BYTES: Final = 512  # limit on a card sent over a communicator, e.g. a host name
_WRONG: Final = "cannot take part"  # key in a card for the reason why a rank cannot take part
_COMPLAINT: Final = 180  # limit on the characters of this reason if sent over a communicator
_BYE: Final = 20.0  # seconds for which a rank that cannot take part waits for the other ranks


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
    """Exchange cards: return every rank's card, in rank order; this is collective.

    A card is a text that all other ranks receive.  In a store, the n-th calls of all ranks belong
    together.  Rank 0, which may serve the store, returns once all ranks have read the cards.  Over a
    communicator of these ranks, a card has at most 512 bytes.  Errors name ``phase``.

    Raises:
        DeadlineError: names the ranks still missing after ``timeout`` seconds.
        PeerError: the store does not answer.
    """
    if isinstance(store, Communicator):
        return run(tell(store, card, _CARD_BYTES, phase))
    deadline = time.monotonic() + timeout
    where = f"rank {rank}, phase '{phase}'"

    arrivals = list[str]()

    def wait(keys: Sequence[str], *signs: Sequence[str]) -> None:
        """Wait for all keys; on failure, name the ranks that lack the first sign, or else a later one."""
        for peer, key in enumerate(keys):
            left = max(deadline - time.monotonic(), 0.001)
            try:
                store.wait([key], timedelta(seconds=left))
            except RuntimeError as error:
                lacking = (
                    [p for p in range(peer, len(keys)) if not _has(store, s[p])] for s in signs
                )
                missing = next(filter(None, lacking), [peer])
                raise DeadlineError(
                    f"{where}: no word from rank{'s' * (len(missing) > 1)} "
                    f"{', '.join(map(str, missing))} within {timeout:g} s; {advice()}"
                ) from error

    def advice() -> str:
        for peer, key in enumerate(arrivals):
            if _has(store, key) and (size := store.get(key).decode()) != str(world_size):
                return (
                    f"rank {peer} is one of {size} ranks, this rank one of {world_size}: give all ranks "
                    "the same world_size"
                )
        return (
            "are they alive, and do they use the same store, which no earlier job has used? Raise the "
            "timeout if they are only slow"
        )

    # each rank counts its own calls, so ranks need not agree on the number of a rendezvous
    counter = f"{_PREFIX}/of {rank}"
    try:
        meeting = store.add(counter, 1)
        keys = [f"{_PREFIX}/{meeting}/{r}" for r in range(world_size)]
        arrivals += [f"{key} arrived" for key in keys]
        store.set(arrivals[rank], str(world_size))  # not deleted when the card is withdrawn
        store.set(keys[rank], card)
        try:
            wait(keys, arrivals, keys)  # name ranks that never came before ranks that gave up
        except DeadlineError:
            # Restore the count, so that a second attempt joins the same rendezvous.  A card that says
            # why a rank cannot take part stays in place, for ranks that arrive later.
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
    if rank == 0:  # the store may end with this process, so wait until the other ranks have read it
        wait(read, read)
    return cards


def convene(
    store: Store | Communicator,
    rank: int,
    world_size: int,
    ready: Callable[[], dict[str, Any]],
    timeout: float,
    phase: str = "rendezvous",
) -> list[dict[str, Any]]:
    """Return all ranks' results of ``ready``, in rank order; if it fails on one, all ranks learn why.

    A rank on which ``ready`` fails waits only as long as the others may need to arrive and read the
    reason.

    Raises:
        ConfigurationError: ``ready`` raised it on this rank.
        PeerError: ``ready`` failed on another rank, or another rank runs a different version.
        DeadlineError: as in ``meet``.
    """
    wrong: ConfigurationError | None = None
    try:
        card = json.dumps(ready())
    except ConfigurationError as error:
        wrong = error
        card = json.dumps({_WRONG: str(error)})
        # shorten the reason: a communicator cuts cards off at 512 bytes, and incomplete JSON cannot be
        # parsed
        if isinstance(store, Communicator):
            card = json.dumps({_WRONG: str(error).encode("ascii", "replace").decode()[:_COMPLAINT]})
    try:
        raw = meet(store, rank, world_size, card, min(timeout, _BYE) if wrong else timeout, phase)
    except (DeadlineError, PeerError):
        # this rank's own error takes precedence, because it may be the reason why others are missing
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

    A given interface is used unchanged.  Otherwise, the choice depends on the route to a host: the
    store's host, the host of the default process group's store, or rank 0's host.  If
    ``GLOO_SOCKET_IFNAME`` is set, the result is an address of an interface that it selects: the address
    on that route if one is, otherwise the first.  If the variable is not set, the result is this
    machine's address on that route.  If the store has no host, as a ``FileStore``, the result is the
    address of this machine's own name, where gloo listens.

    Args:
        interface: the interface given on this rank; None to find one.
        meeting: the store in which the ranks rendezvous or, if they do so over a communicator, the name
            of rank 0's host.  ``host_of_rank_0``, which returns it, is collective: all ranks must call
            it, even ranks that do not need the name.
    """
    if interface is not None:
        check_one_interface(interface, interface)
        return interface
    host = None if isinstance(meeting, str) else _host_of(meeting)
    if host is None and dist.is_initialized():
        host = _host_of(store_of(None))
    host = host or os.environ.get("MASTER_ADDR")
    if host is None and isinstance(meeting, str):
        host = meeting
    if value := os.environ.get(VARIABLE):
        return _address_of(value, host)
    if host is None:
        host = socket.gethostname()
        if address_to(host) is None:  # this machine does not know its own name
            return usual_address(own_interfaces()) or "127.0.0.1"
    return way_to(host)


def check_one_interface(interface: str, host: str) -> None:
    """Refuse an interface whose address, ``host``, stands for all interfaces."""
    # a port that is bound on all interfaces is exposed to networks that the job does not use
    require(
        host not in ("", "*") and not is_unspecified(host),
        f"interface is '{interface}', which means all of them; name the one that ranks use",
    )


def _address_of(value: str, host: str | None) -> str:
    """Return an address that ``GLOO_SOCKET_IFNAME`` selects, preferably on the route to ``host``."""
    present = own_interfaces()
    addresses = [text for one in selected(value, present) for text in one.addresses]
    if not addresses:
        raise ConfigurationError(
            f"{VARIABLE} is '{value}', which has no address; give one of {described(present)}"
        )
    way = address_to(host) if host is not None and len(addresses) > 1 else None
    return way if way in addresses else addresses[0]


@dataclass(frozen=True)
class GlooPlace:
    """The interfaces and addresses at which gloo listens on this machine.

    Attributes:
        at: the interface and address, for messages.
        near: whether the address is loopback, which no other machine can reach.
        names: the value to which ``GLOO_SOCKET_IFNAME`` must be set for gloo; None to leave it unchanged.
        far: if the variable is not set, an interface that other machines can reach; otherwise empty.
        present: the machine's interfaces, for messages.
        network: a text shared by the ranks that reach each other over loopback (see ``network`` below).
        own: the address on each interface on which gloo listens by default.
        beyond: the address on ``far``, or an empty text.
    """

    at: str
    near: bool
    names: str | None
    far: str
    present: str
    network: str
    own: tuple[str, ...]
    beyond: str

    @staticmethod
    def here() -> GlooPlace:
        """Return the ``GlooPlace`` of this machine.

        Raises:
            ConfigurationError: ``GLOO_SOCKET_IFNAME`` selects no interface, or one without an address.
        """
        host, present = socket.gethostname(), own_interfaces()
        told = described(present)
        if value := os.environ.get(VARIABLE):
            found = selected(value, present)
            for bare in (one.name for one in found if not one.addresses):
                raise ConfigurationError(
                    f"{VARIABLE} is '{value}', and {bare} has no address; give one of {told}"
                )
            names, near = ",".join(one.name for one in found), all(one.loopback for one in found)
            others = None if names == value else names
            own = tuple(one.addresses[0] for one in found)
            return GlooPlace(f"{names} of {host}", near, others, "", told, network(), own, "")
        usual = usual_address(present)
        way = next((one for one in present if usual in one.addresses), Interface(""))
        at, address = _address_of_name(host)
        near = is_loopback(address)
        beyond = way.addresses[0] if way.addresses else ""
        return GlooPlace(at, near, None, way.name, told, network(), (address,), beyond)

    @staticmethod
    def of(card: Mapping[str, Any]) -> GlooPlace:
        """Return the place of another rank, which has sent it as ``dataclasses.asdict``."""
        return GlooPlace(**{**card, "own": tuple(card["own"])})

    def _avoids(self, several: bool) -> bool:
        return several and self.near and bool(self.far)

    def listening(self, *, several: bool) -> AbstractContextManager[None]:
        """Return a context in which gloo listens here; with ``several`` networks, not on loopback.

        A hosts file such as Debian's may map the machine's own name to 127.0.1.1, an address at which
        ranks on other networks cannot reach it.
        """
        return listening_on(self.far if self._avoids(several) else self.names)

    def addresses(self, *, several: bool) -> tuple[str, ...]:
        """Return the addresses on which gloo listens within ``listening``, one per interface."""
        return (self.beyond,) if self._avoids(several) else self.own

    def check_reachable(self, rank: int) -> None:
        """Refuse a place on loopback; called if ranks are on several networks.

        Raises:
            ConfigurationError: the message names the variable and the existing interfaces.
        """
        if self.near and not self.far:
            raise ConfigurationError(
                f"rank {rank} would listen at {self.at}, where ranks of other machines cannot reach it; "
                f"set {VARIABLE} there to one of {self.present}"
            )


def check_places(places: Mapping[int, GlooPlace]) -> bool:
    """Return whether the ranks are on several networks; refuse places that gloo cannot connect.

    Without this check, gloo would wait for the group's timeout, or fail with an error that names neither
    the variable nor the interfaces.

    Args:
        places: all ranks' places, by rank; equal on all ranks, so either all of them raise or none does.

    Raises:
        ConfigurationError: a rank listens on loopback or on another rank's address, or ranks listen on
            addresses of different families or in different numbers.  The message names the variable
            and the interfaces.
    """
    several = len({place.network for place in places.values()}) > 1
    for rank, place in places.items() if several else ():
        place.check_reachable(rank)
    first, owners = min(places), dict[str, int]()
    families = {
        rank: [family_of(text) for text in place.addresses(several=several)]
        for rank, place in places.items()
    }
    for rank, place in places.items():
        if families[rank] != families[first]:
            # gloo connects all ranks' first interfaces with each other, then their second ones, and so on
            alike = len(families[rank]) == len(families[first])
            limit = "addresses of one family only" if alike else "equal numbers of interfaces only"
            raise ConfigurationError(
                f"rank {first} would listen at {_shown(places[first], several)}, rank {rank} at "
                f"{_shown(place, several)}, and gloo connects {limit}; set "
                f"{VARIABLE} for rank {rank} to one of {place.present}, or for rank {first} to one of "
                f"{places[first].present}"
            )
        for text in place.addresses(several=several):
            other = owners.setdefault(text, rank)
            if places[other].network != place.network:
                raise ConfigurationError(
                    f"ranks {other} and {rank} would both listen at {text}, each on a network of its "
                    f"own, where the other cannot reach it; set {VARIABLE} for rank {rank} to one of "
                    f"{place.present}, and likewise for rank {other}"
                )
    return several


def _shown(place: GlooPlace, several: bool) -> str:
    addresses = place.addresses(several=several)
    families = " and ".join(dict.fromkeys(family_of(text) for text in addresses))
    return f"{', '.join(addresses)} ({families})"


def _address_of_name(host: str) -> tuple[str, str]:
    """Return a text for messages, and the address on which gloo listens by default.

    This is the first address of the machine's own name that can be bound, or else loopback.
    """
    addresses = list[str]()
    with suppress(OSError):
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        addresses = [str(one[4][0]) for one in found]
    for address in addresses:
        family = socket.AF_INET6 if family_of(address) == "IPv6" else socket.AF_INET
        with suppress(OSError), socket.socket(family) as probe:
            probe.bind((address, 0))
            return address, address
    what = f"{addresses[0]}, which is not here" if addresses else "unknown"
    return f"127.0.0.1 (the address of its name {host} is {what})", "127.0.0.1"


def machine() -> str:
    """Return a text shared by all ranks on a machine, even in different containers: its boot id."""
    boot = Path("/proc/sys/kernel/random/boot_id")  # on Linux
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def network() -> str:
    """Return a text shared by the ranks that reach each other over loopback.

    On Linux, these are the ranks on one machine and in one network namespace; a container usually has a
    separate one.
    """
    here = Path("/proc/thread-self/ns/net")
    namespace = here.stat().st_ino if here.exists() else 0
    return hashlib.sha256(f"{machine()} {namespace}".encode()).hexdigest()[:12]


def way_to(host: str) -> str:
    """Return this machine's address on the route to a host."""
    own = address_to(host)
    if own is None:
        raise ConfigurationError(
            f"there is no route to the rendezvous host '{host}'; give interface=, or set "
            f"{VARIABLE} to one "
            f"of {described(own_interfaces())}"
        )
    if not is_loopback(own):
        return own
    # A hosts file may map a host's own name to 127.0.1.1, an address at which ranks on other machines
    # cannot reach this rank.  So use loopback only if all ranks are on this machine.
    numbers = [os.environ.get(name) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")]
    alone = (
        host == "localhost" or is_loopback(host) or (None not in numbers and len({*numbers}) == 1)
    )
    near = "::1" if ":" in own else "127.0.0.1"
    return near if alone else usual_address(own_interfaces()) or near


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


def check_sockets(sockets: Mapping[str, Any]) -> None:
    """Refuse settings for zmq's sockets that would be wrong on any machine."""
    check_ports(sockets.get("port_range"))
    if sockets.get("advertise") is not None:
        _check_advertised(sockets["advertise"])
    # refuse an empty text, e.g. from an unset variable, because the job would train unencrypted
    require(
        sockets.get("curve_keys") != "",
        "curve_keys is ''; give the folder that holds the keys, or None to train without encryption",
    )


def _check_advertised(advertise: object) -> None:
    """Refuse a text that is neither a host name nor an IP address; it would fail much later."""
    host = advertise.strip("[]") if isinstance(advertise, str) else ""
    # a single colon would precede a port; an IPv6 address has at least two
    fits = re.fullmatch(r"[^\s\[\]/:]+", host) or (host.count(":") > 1 and _is_address(host))
    require(
        bool(fits) and not is_unspecified(host),
        f"advertise is {advertise!r}; give the host name or the IP address, without a port, at which the "
        "other ranks reach this one",
    )


def _is_address(text: str) -> bool:
    with suppress(ValueError):
        return bool(ip_address(text))
    return False


def _host_of(store: Store) -> str | None:
    """Return the host that serves a store, or None if the store does not reveal it."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, HashStore):
        return "127.0.0.1"  # the store is in one process's memory, so all ranks are on this machine
    return str(store.host) if isinstance(store, TCPStore) else None


def host_of_rank_0(comm: Communicator) -> str:
    """Return the name of rank 0's host, or the loopback address if all ranks share that host."""
    names = run(tell(comm, socket.gethostname(), _CARD_BYTES, "hosts"))
    return "127.0.0.1" if len(set(names)) == 1 else names[0]
