"""The network interfaces of this machine, and the ones that ``GLOO_SOCKET_IFNAME`` selects.

The variable may hold comma-separated names and addresses.  Like ``NCCL_SOCKET_IFNAME``, it may also hold
prefixes ("eth"), exact names ("=eth0") and exclusions ("^lo,docker0").  gloo itself accepts only names.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Final, final

from sparsync.errors import ConfigurationError

__all__ = [
    "VARIABLE",
    "Interface",
    "address_to",
    "described",
    "family_of",
    "is_loopback",
    "is_unspecified",
    "listening_on",
    "own_interfaces",
    "selected",
    "usual_address",
]

VARIABLE: Final = "GLOO_SOCKET_IFNAME"
_UP, _LOOPBACK = 0x1, 0x8  # net/if.h, on Linux and macOS
_V4, _V6 = 4, 8  # offsets of the address in sockaddr_in and sockaddr_in6
# addresses for documentation (RFC 5737, RFC 3849), which no machine has: the default route leads there
_ELSEWHERE: Final = ("192.0.2.1", "2001:db8::1")


@final
@dataclass(frozen=True)
class Interface:
    """A network interface that is up.

    Args:
        name: the name shown by ``ip link``.
        addresses: IPv4 addresses first, then IPv6 addresses; link-local ones last, with ``%name``.
    """

    name: str
    addresses: tuple[str, ...] = ()

    @property
    def loopback(self) -> bool:
        """Whether this is a loopback interface, which no other machine can reach."""
        return bool(self.addresses) and is_loopback(self.addresses[0])

    @property
    def far_addresses(self) -> tuple[str, ...]:
        """The addresses at which other machines can reach this one; none for a loopback interface."""
        return () if self.loopback else self.addresses

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.addresses) or 'no address'})"


@final
class _Ifaddrs(ctypes.Structure):
    """An element of the list that ``getifaddrs`` returns."""

    _fields_ = (
        ("next", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("flags", ctypes.c_uint),
        ("address", ctypes.c_void_p),
        ("netmask", ctypes.c_void_p),
        ("destination", ctypes.c_void_p),
        ("data", ctypes.c_void_p),
    )


def own_interfaces() -> list[Interface]:
    """Return the interfaces that are up, in the system's order."""
    found: dict[str, list[str]] = {}
    libc = ctypes.CDLL(None)  # Python only lists names (``socket.if_nameindex``)
    first = ctypes.c_void_p()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        return [Interface(name) for _, name in socket.if_nameindex()]
    try:
        entry = first.value
        while entry:
            one = _Ifaddrs.from_address(entry)
            if one.flags & _UP:
                name = one.name.decode(errors="replace")
                addresses = found.setdefault(name, [])
                address = _address_at(one.address, name) if one.address else None
                addresses += [address] if address is not None else []
            entry = one.next
    finally:
        libc.freeifaddrs(first)
    return [Interface(name, tuple(sorted(texts, key=_order))) for name, texts in found.items()]


def _address_at(place: int, name: str) -> str | None:
    """Return the text of a ``sockaddr``; None if it is not an IP address."""
    head = ctypes.string_at(place, 2)
    # on Linux the family has 16 bits; on BSD, length and family have 8 bits each
    family = head[1] if sys.platform == "darwin" else int.from_bytes(head, sys.byteorder)
    if family == socket.AF_INET:
        return socket.inet_ntop(family, ctypes.string_at(place + _V4, 4))
    if family == socket.AF_INET6:
        text = socket.inet_ntop(family, ctypes.string_at(place + _V6, 16))
        return f"{text}%{name}" if ip_address(text).is_link_local else text
    return None


def _order(text: str) -> tuple[bool, bool]:
    return ":" in text, "%" in text


def family_of(address: str) -> str:
    """Return "IPv4" or "IPv6".

    Example:
        >>> family_of("10.0.0.1"), family_of("fe80::1%eth0")
        ('IPv4', 'IPv6')
    """
    return "IPv6" if ":" in address else "IPv4"


def is_loopback(address: str) -> bool:
    """Return whether a text is a loopback address; False for a name.

    Example:
        >>> is_loopback("127.0.1.1"), is_loopback("::1"), is_loopback("10.0.0.1"), is_loopback("eth0")
        (True, True, False, False)
    """
    try:
        return ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return False


def is_unspecified(address: str) -> bool:
    """Return whether a text is an address that stands for all interfaces; False for a name.

    Example:
        >>> is_unspecified("0.0.0.0"), is_unspecified("0::0"), is_unspecified("[::ffff:0.0.0.0]")
        (True, True, True)
    """
    try:
        number = ip_address(address.strip("[]").partition("%")[0])
    except ValueError:
        return False
    return (getattr(number, "ipv4_mapped", None) or number).is_unspecified


def described(present: Sequence[Interface]) -> str:
    """Return the interfaces as text for an error."""
    return ", ".join(map(str, present)) or "none"


def selected(value: str, present: Sequence[Interface]) -> list[Interface]:
    """Return the interfaces that a value of the variable selects, in the order of its parts.

    Args:
        value: the value of the variable, not empty.
        present: the machine's interfaces.

    Raises:
        ConfigurationError: the value selects no interface, or a part of it matches none; the
            message names the variable and the existing interfaces.

    Example:
        >>> cards = [Interface("lo", ("127.0.0.1",)), Interface("eth0", ("10.0.0.1", "fd00::1"))]
        >>> [[one.name for one in selected(text, cards)] for text in ("^lo,docker0", "eth", "[fd00::1]")]
        [['eth0'], ['eth0'], ['eth0']]
    """
    excludes = value.startswith("^")
    parts = [part.strip() for part in value.removeprefix("^").split(",") if part.strip()]
    found, wrong = list[Interface](), ""
    if excludes:
        # an excluded interface need not exist on this machine; loopback is never taken here, even if
        # every other interface is excluded
        left = [one for one in present if not any(_matches(part, one) for part in parts)]
        found = [one for one in left if one.addresses and not one.loopback]
    for part in () if excludes else parts:
        matched = [one for one in present if _matches(part, one)]
        # of several matches, keep those with an address; keep a single match anyway, as the user named it
        found += [one for one in matched if one.addresses] if len(matched) > 1 else matched
        wrong = wrong or ("" if matched else part)
    if not found or wrong:
        what = "leaves no interface" if excludes else f"'{wrong or value}' is not an interface"
        raise ConfigurationError(
            f"{VARIABLE} is '{value}', and {what} of {socket.gethostname()}; give one of "
            f"{described(present)}"
        )
    return list(dict.fromkeys(found))


def _matches(part: str, one: Interface) -> bool:
    """Return whether a part of the variable matches an interface by name, prefix, or address."""
    if part.startswith("="):
        return one.name == part[1:]
    bare = part.strip("[]")
    with suppress(ValueError):
        wanted = ip_address(bare.partition("%")[0])
        return any(ip_address(text.partition("%")[0]) == wanted for text in one.addresses)
    # as in NCCL, "eth" means eth0 and eth1; but eth1 does not mean eth10
    return one.name == part or (not part[-1:].isdigit() and bool(_numbered(part, one.name)))


def _numbered(prefix: str, name: str) -> re.Match[str] | None:
    return re.fullmatch(rf"{re.escape(prefix)}\d.*", name)


def address_to(host: str) -> str | None:
    """Return this machine's address on the route to a host; None if the host or a route is missing."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # a UDP connect sends nothing, it only looks up the route
            return str(probe.getsockname()[0])
    except OSError:
        return None


def usual_address(present: Sequence[Interface]) -> str | None:
    """Return an address at which other machines can probably reach this one, or None.

    This is the address on the default route if there is one, otherwise the first address.
    """
    reachable = [one for one in present if one.addresses and not one.loopback]
    known = {text for one in reachable for text in one.addresses}
    ways = [address_to(host) for host in _ELSEWHERE]
    return next(
        (way for way in ways if way in known), reachable[0].addresses[0] if reachable else None
    )


@contextmanager
def listening_on(names: str | None) -> Iterator[None]:
    """Make gloo's new groups listen on these interfaces; with None, gloo chooses.

    gloo reads the variable when a group is created; ``new_group`` has no argument for it (torch 2.13).
    """
    before = os.environ.get(VARIABLE)
    if names is not None:
        os.environ[VARIABLE] = names
    try:
        yield
    finally:
        if names is not None:
            _restore(before)


def _restore(before: Any) -> None:
    if before is None:
        os.environ.pop(VARIABLE, None)
    else:
        os.environ[VARIABLE] = before
