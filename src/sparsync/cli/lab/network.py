"""The plan of a lab: names, addresses, sizes, and the commands that make them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from sparsync.errors import ConfigurationError

__all__ = ["BRIDGE", "INTERFACE", "Network", "default_burst", "parse_rate"]

BRIDGE = "bridge"
INTERFACE = "eth0"
"""The link's end inside a rank's namespace."""

_BITS_PER_SECOND = MappingProxyType({"kbit": 10**3, "mbit": 10**6, "gbit": 10**9})
_NUMBER_AND_UNIT = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)(?:/s)?")
_BITS_PER_BYTE = 8


def parse_rate(text: str, *, slowest: int = 100_000, fastest: int = 100_000_000_000) -> int:
    """Read the rate of a link.

    Args:
        text: a number and kbit, mbit or gbit (powers of ten, per second).
        slowest: bits per second; below, the bucket of ``tbf`` would hide seconds of the wire.
        fastest: bits per second; above, no single machine keeps up.

    Returns:
        Bits per second.

    Raises:
        ConfigurationError: it is no rate, or outside of what the lab can do.

    Example:
        >>> parse_rate("100mbit"), parse_rate("1.5 Gbit/s")
        (100000000, 1500000000)
    """
    match = _NUMBER_AND_UNIT.fullmatch(text.strip().lower())
    unit = _BITS_PER_SECOND.get(match.group(2)) if match else None
    if match is None or unit is None:
        raise ConfigurationError(
            f"rate {text!r} is not a number and kbit, mbit or gbit; write it like 100mbit or 1.5gbit"
        )
    rate = round(float(match.group(1)) * unit)
    if not slowest <= rate <= fastest:
        raise ConfigurationError(
            f"rate {text!r} is {rate} bits per second; give {slowest} to {fastest}, as 100mbit"
        )
    return rate


def default_burst(bits_per_second: int, *, lateness: float = 1e-3, smallest: int = 16_384) -> int:
    """Return the bucket of ``tbf`` in bytes: what may leave at once after a silence.

    Smaller hides less of the wire.  But the bucket must cover the lateness of timers and processes,
    or the rate is not reached: at 1 Gbit/s one stream got 72 % of it with 16 KB, 92 % with 32 KB, 99 %
    with 64 KB; dense allreduce on overloaded cores 80 % of its wire time with 64 KB, 90 % with 128 KB.

    Args:
        bits_per_second: the link's rate.
        lateness: seconds, measured on two busy cores as above.
        smallest: bytes; ten packets of 1500 bytes, the first window of a TCP connection.

    Example:
        >>> default_burst(1_000_000_000), default_burst(100_000_000)
        (125000, 16384)
    """
    return max(smallest, round(bits_per_second * lateness / _BITS_PER_BYTE))


@dataclass(frozen=True)
class Network:
    """P ranks, each on a link of its own to one bridge.

    Attributes:
        ranks: number of ranks P; at most 1,000 (a bridge has 1,024 ports).
        bits_per_second: rate of every link, in each direction, Ethernet headers included.
        burst_bytes: bucket of ``tbf``, each direction; 2 packets of 1500 bytes or more.
        send_buffer_seconds: of wire that a TCP connection may have under way.  Queues grow to it,
            and with 4 MB (Linux's own maximum) acknowledgements wait behind seconds of data.
        smallest_send_buffer: bytes, likewise; below, TCP stalls.
        congestion_control: of TCP; the one that every kernel allows in a namespace, whatever the host
            prefers.  Without loss it fills the link.

    Example:
        >>> network = Network(ranks=4, bits_per_second=10**9)
        >>> network.address(3), network.bridge_end(3), network.segment_bytes
        ('10.77.0.4', 'rank3', 31250)
    """

    ranks: int
    bits_per_second: int
    burst_bytes: int = 0
    send_buffer_seconds: float = 0.02
    smallest_send_buffer: int = 65_536
    congestion_control: str = "reno"

    def __post_init__(self) -> None:
        if not self.burst_bytes:
            object.__setattr__(self, "burst_bytes", default_burst(self.bits_per_second))
        _check("ranks", self.ranks, 1, 1000)
        _check("burst_bytes", self.burst_bytes, 3_028, 2**30)

    def address(self, rank: int) -> str:
        """Return a rank's IPv4 address: 10.77.0.1 and upwards, the same in every lab."""
        return f"10.77.{(rank + 1) >> 8}.{(rank + 1) & 255}"

    def bridge_end(self, rank: int) -> str:
        """Return the name of the link's end on the bridge."""
        return f"rank{rank}"

    @property
    def segment_bytes(self) -> int:
        """Largest packet handed to the link (GSO): a quarter of the bucket.

        One of 64 KB would empty the bucket at once and hold up the acknowledgements after it: both
        directions at a time then got 61 to 81 % of 1 Gbit/s each, and 99 % with 16 KB (burst 64 KB).
        """
        return min(max(self.burst_bytes // 4, 1_514), 65_536)

    @property
    def send_buffer_bytes(self) -> int:
        """Most bytes that a TCP connection may have under way."""
        wire = self.bits_per_second * self.send_buffer_seconds / _BITS_PER_BYTE
        return max(self.smallest_send_buffer, round(wire))

    @property
    def queue_bytes(self) -> int:
        """Room of a link's queue: for all that P ranks can have under way, so nothing is dropped.

        A program may ask for a larger buffer; 512 KB is what Linux gives at most.
        """
        return self.burst_bytes + 2 * self.ranks * max(self.send_buffer_bytes, 524_288)

    # ---- commands; each list runs in one namespace -----------------------------------------------

    def bridge_commands(self) -> list[str]:
        """Make the bridge.  ``addrgenmode none``: no IPv6, whose chatter would be counted."""
        return [
            f"ip link add {BRIDGE} type bridge mcast_snooping 0",
            f"ip link set {BRIDGE} addrgenmode none up",
        ]

    def link_commands(self, rank: int, namespace: str) -> list[str]:
        """Make a rank's link, next to the bridge; its other end appears in ``namespace`` (a path)."""
        end, size = self.bridge_end(rank), f"gso_max_size {self.segment_bytes}"
        pair = f"{end} {size} type veth peer name {INTERFACE} {size}"
        return [
            f"ip link add {pair} netns {namespace}",
            f"ip link set {end} addrgenmode none master {BRIDGE} up",
            self._shape(end),
        ]

    def rank_commands(self, rank: int) -> list[str]:
        """Bring a rank's end up, inside its namespace."""
        return [
            "ip link set lo up",
            f"ip link set {INTERFACE} addrgenmode none up",
            f"ip address add {self.address(rank)}/16 dev {INTERFACE}",
            self._shape(INTERFACE),
        ]

    def settings(self, path: str = "/proc/sys/net/ipv4/") -> dict[str, str]:
        """Return what to write into which file, inside each rank's namespace."""
        first = min(self.send_buffer_bytes, 16_384)
        return {
            f"{path}tcp_wmem": f"4096 {first} {self.send_buffer_bytes}",
            f"{path}tcp_congestion_control": self.congestion_control,
        }

    def _shape(self, interface: str) -> str:
        return (
            f"tc qdisc add dev {interface} root tbf rate {self.bits_per_second}bit "
            f"burst {self.burst_bytes} limit {self.queue_bytes}"
        )


def _check(name: str, number: Any, least: int, most: int) -> None:
    if not isinstance(number, int) or not least <= number <= most:
        raise ConfigurationError(
            f"lab: {name} is {number!r}; give a whole number from {least} to {most}"
        )
