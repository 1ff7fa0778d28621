"""Links of the lab, and how they are described as text."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, final

from sparsync.errors import ConfigurationError, require

__all__ = ["MOST_RANKS", "Link", "describe_links", "parse_links", "parse_rate"]

MOST_RANKS = 1000  # in a lab: Linux's bridge has 1,024 ports
_BITS_PER_SECOND = MappingProxyType({"kbit": 10**3, "mbit": 10**6, "gbit": 10**9})
_SLOWEST, _FASTEST = 100_000, 100_000_000_000  # bits per second; see ``parse_rate``
_SECONDS = MappingProxyType({"us": 1e-6, "ms": 1e-3, "s": 1.0})
_LONGEST = 10.0  # largest RTT in seconds
_OWN = "write RANK=RATE[,RTT[,LOSS[,JITTER]]], e.g. 3=10mbit,80ms"


@final
@dataclass(frozen=True)
class Link:
    """A rank's link to the middle of the network.

    The RTT, jitter and loss between two ranks are the means of their links' values.  For example, two
    links of 80 ms give an RTT of 80 ms; a link of 80 ms and one without delay give 40 ms.

    Args:
        up: bits per second that the rank may send, Ethernet headers included.
        down: bits per second that it may receive.
        rtt: seconds to the other rank and back, without queueing for the link.
        jitter: seconds by which an RTT varies in either direction; packets keep their order.
        loss: probability that a packet is lost on its way to the other rank.
    """

    up: int
    down: int
    rtt: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        for rate in (self.up, self.down):
            least = f"give {_SLOWEST} to {_FASTEST}, as 100mbit"
            require(_SLOWEST <= rate <= _FASTEST, f"a rate of {rate} bits per second; {least}")
        at_most = f"give at most {_LONGEST:g} s"
        require(0 <= self.rtt <= _LONGEST, f"an RTT of {self.rtt:g} s; {at_most}")
        no_more = f"give at most the RTT, {self.rtt:g} s"
        require(0 <= self.jitter <= self.rtt, f"a jitter of {self.jitter:g} s; {no_more}")
        require(0 <= self.loss < 1, f"a loss of {self.loss:.0%}; give less than 100%")

    @property
    def one_wire(self) -> tuple[float, float, float]:
        """Return delay, jitter and loss of one wire; a path has two wires, a round trip four."""
        return self.rtt / 4, self.jitter / 4, 1 - (1 - self.loss) ** 0.5

    @property
    def is_far(self) -> bool:
        """Whether the link delays or loses packets, rather than only limiting the rate."""
        return self.rtt > 0 or self.loss > 0


def parse_rate(text: str) -> int:
    """Parse the rate of a link: a number and kbit, mbit or gbit (powers of ten, per second).

    Below 100 kbit/s, the bucket of ``tbf`` would hide seconds of wire time; above 100 Gbit/s, no single
    machine keeps up.

    Example:
        >>> parse_rate("100mbit"), parse_rate("1.5 Gbit/s")
        (100000000, 1500000000)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]bit)(?:/s)?", text.strip().lower())
    if match is None:
        raise ConfigurationError(
            f"rate {text!r} is not a number and kbit, mbit or gbit; write it like 100mbit or 1.5gbit"
        )
    rate = round(float(match[1]) * _BITS_PER_SECOND[match[2]])
    if not _SLOWEST <= rate <= _FASTEST:
        raise ConfigurationError(
            f"rate {text!r} is {rate} bits per second; give {_SLOWEST} to {_FASTEST}, as 100mbit"
        )
    return rate


def parse_links(text: str, ranks: int) -> tuple[Link, ...]:
    """Parse the links of all ranks.

    Args:
        text: ``RATE[,RTT[,LOSS[,JITTER]]]`` for all ranks, where RATE may be UP:DOWN.  Links of single
            ranks may follow, each written as a semicolon, ``RANK=`` and the same form; values omitted
            there are taken from the common link.
        ranks: number of ranks P.

    Example:
        >>> parse_links("100mbit,20ms;1=5mbit:10mbit,80ms,0.5%", 2)[1]
        Link(up=5000000, down=10000000, rtt=0.08, jitter=0.0, loss=0.005)
    """
    common, *own = text.split(";")
    links = [_parse_link(common, None)] * ranks
    for part in own:
        name, _, link = part.partition("=")
        rank = int(name) if re.fullmatch(r"\s*\d+\s*", name) else ranks
        most = f"{_OWN}, of rank 0 to {ranks - 1}"
        require(rank < ranks, f"link {part!r} belongs to none of {ranks} ranks; {most}")
        links[rank] = _parse_link(link, links[rank])
    return tuple(links)


def describe_links(
    lab: str | None,
    up: str | None,
    down: str | None,
    rtt: str | None,
    loss: str | None,
    jitter: str | None,
    link: list[str] | None,
) -> str | None:
    """Return these options as a text for ``parse_links``, or None if no option is given.

    Example:
        >>> describe_links("100mbit", None, "1gbit", "20ms", None, None, ["3=10mbit"])
        '100mbit:1gbit,20ms;3=10mbit'
    """
    if not any((up, down, rtt, loss, jitter, link)):
        return lab
    up, down = up or lab, down or lab
    if up is None or down is None:
        raise ConfigurationError("these links have no rate; add --lab 100mbit, or --up and --down")
    for rate in (up, down):
        parse_rate(rate)  # refuses a value of --lab that already includes delays
    parts = [up if up == down else f"{up}:{down}", rtt or "0ms", loss or "0%", jitter or "0ms"]
    while parts[-1] in ("0ms", "0%"):
        parts.pop()
    return ";".join([",".join(parts), *(link or ())])


def _parse_link(text: str, common: Link | None) -> Link:
    rates, *parts = text.split(",")
    up, _, down = rates.partition(":")
    first = parse_rate(up)
    link = replace(common or Link(first, first), up=first, down=parse_rate(down) if down else first)
    require(len(parts) <= 3, f"link {text!r} has {len(parts) + 1} parts; {_OWN[11:]}")
    kinds = (("rtt", _SECONDS, "20ms"), ("loss", {"%": 0.01}, "0.1%"), ("jitter", _SECONDS, "2ms"))
    given: dict[str, Any] = {}
    for part, (name, units, like) in zip(parts, kinds, strict=False):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%|[a-z]+)", part.strip().lower())
        if match is None or match[2] not in units:
            raise ConfigurationError(
                f"link {text!r}: cannot read {part!r}; write the {name} like {like}"
            )
        given[name] = float(match[1]) * units[match[2]]
    return replace(link, **given)
