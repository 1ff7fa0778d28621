"""The checks of ``sparsync doctor`` on TCP over far links, each with a command that fixes the problem."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from sparsync.cli.doctor.checks import Check, equal
from sparsync.cli.doctor.machine_facts import Facts, some
from sparsync.cost.calibrate import Calibration
from sparsync.cost.wording import format_bytes, format_seconds

__all__ = ["bytes_in_flight", "check_far", "round_trip", "window"]

# Links whose round trip takes at least this many seconds count as far: after a pause, TCP needs a few
# round trips to regain its rate.
_FAR: Final = 0.01
# The fraction of a window that may be in flight without a warning.  The kernel charges 2.3 KB for a
# packet of 1.5 KB, so a window that is 0.63 full may already be the limit.
_FULL: Final = 0.5
# The ratio of the suggested window to the bytes in flight: a factor of 2 for the kernel's packet charge,
# and another 2 for a higher rate.
_SPARE: Final = 4
_MIB: Final = 1 << 20
_SHRINKING: Final = ("reno", "cubic")
# The bytes that TCP sends in one burst if windows are kept through a pause, and the length of a link's
# queue, in seconds.  Bytes that do not fit into the queue are lost, and that costs more than a slow
# start.
_BURST, _QUEUE = 1_000_000, 0.1
# after a pause of this many seconds plus a round trip, TCP forgets the rate that it had reached
_TIMEOUT: Final = 0.2


def check_far(found: Calibration, everyone: Sequence[Facts]) -> Iterator[Check]:
    """Check the kernels' TCP settings against the links, unless all ranks share a network stack."""
    if not found.links or len({facts.network for facts in everyone}) == 1:
        return
    yield from _differing(everyone)
    yield from _narrow(bytes_in_flight(found), everyone)
    if (rtt := round_trip(found)) <= _FAR:
        return
    slow = [r for r, f in enumerate(everyone) if f.tcp.get("tcp_slow_start_after_idle", (0,))[0]]
    if slow and found.machine.beta * _BURST <= _QUEUE:
        pause, far = format_seconds(rtt + _TIMEOUT), format_seconds(rtt)
        yield Check(
            "note",
            f"after a pause of {pause}, TCP of {some(slow)} returns to slow start, which costs "
            f"each exchange after a long computation several round trips of {far}",
            "sysctl -w net.ipv4.tcp_slow_start_after_idle=0",
        )
    if shrinking := [rank for rank, f in enumerate(everyone) if f.congestion in _SHRINKING]:
        control = everyone[shrinking[0]].congestion
        yield Check(
            "note",
            f"TCP of {some(shrinking)} shrinks its window at a packet loss ({control}): slow links "
            "drop packets "
            "in exchanges with several ranks, which then take up to twice as long",
            "modprobe tcp_bbr; sysctl -w net.ipv4.tcp_congestion_control=bbr (then measure again)",
        )


def round_trip(found: Calibration) -> float:
    """Return the seconds that an empty message and its answer take between the most distant ranks.

    This is twice the latency fitted to all links, or the sum of a pair's two latencies if that is
    larger.  Either value may be too small.  The fit is too small if only some links are far, because
    their share of a round varies.  A pair's latencies may be too small because of clock errors.

    Example:
        >>> from sparsync.cost.links import Link
        >>> from sparsync.cost.machine import Machine
        >>> links = Link(0, 1, 0.03, 8e-9), Link(1, 0, 0.05, 8e-9)
        >>> round_trip(Calibration(Machine(alpha=0.03), {}, links))
        0.08
    """
    there = {(link.source, link.dest): link.alpha for link in found.links}
    # with many ranks, not every link is measured in both directions
    pairs = (alpha + there.get((dest, source), alpha) for (source, dest), alpha in there.items())
    return max(2 * found.machine.alpha, *pairs)


def bytes_in_flight(found: Calibration) -> float:
    """Return the bytes that fill the links: their rate (the lower end of its interval) times the RTT."""
    _, slowest = found.intervals["beta"]
    return round_trip(found) / slowest if slowest > 0 else 0.0


def window(facts: Facts) -> float | None:
    """Return the bytes that this rank's kernel allows in flight per TCP connection, if known.

    Part of the receive buffer cannot be used as window, depending on ``tcp_adv_win_scale``.

    Example:
        >>> from sparsync.cli.doctor.machine_facts import local_facts
        >>> from dataclasses import replace
        >>> tcp = {"tcp_wmem": (4096, 16384, 4 << 20), "tcp_rmem": (4096, 131072, 6 << 20)}
        >>> int(window(replace(local_facts("zmq"), tcp=tcp))) >> 20
        3
    """
    if not {"tcp_wmem", "tcp_rmem"} <= facts.tcp.keys():
        return None
    return min(facts.tcp["tcp_wmem"][-1], facts.tcp["tcp_rmem"][-1] * _share(facts))


def _share(facts: Facts) -> float:
    """Return the fraction of a receive buffer used as window; see the kernel's ``tcp_win_from_space``."""
    (scale,) = facts.tcp.get("tcp_adv_win_scale", (1,))
    return 1 - 0.5**scale if scale > 0 else 2.0**scale


def _narrow(needed: float, everyone: Sequence[Facts]) -> Iterator[Check]:
    """Report ranks whose buffers limit the rate, and suggest larger ones."""
    windows = {rank: w for rank, f in enumerate(everyone) if (w := window(f)) is not None}
    narrow = [rank for rank, its in windows.items() if needed > _FULL * its]
    if not narrow:
        return
    first = everyone[narrow[0]]
    send, receive = (
        max(-int(-_SPARE * needed / share // _MIB) * _MIB, first.tcp[name][-1])
        for name, share in (("tcp_wmem", 1.0), ("tcp_rmem", _share(first)))
    )
    command = " ".join(
        f'net.ipv4.{name}="{" ".join(map(str, first.tcp[name][:-1]))} {most}"'
        for name, most in (("tcp_wmem", send), ("tcp_rmem", receive))
    )
    yield Check(
        "note",
        f"the links hold {format_bytes(needed)} in flight (rate x round trip), but TCP of "
        f"{some(narrow)} allows at most {format_bytes(windows[narrow[0]])}, which may limit the "
        "rate",
        f"sysctl -w {command} (then measure again)",
    )


def _differing(everyone: Sequence[Facts]) -> Iterator[Check]:
    """Report kernel settings that are not equal on all ranks."""
    for name in dict.fromkeys(name for facts in everyone for name in facts.tcp):
        values = [" ".join(map(str, facts.tcp.get(name, ("unknown",)))) for facts in everyone]
        advice = "set the same on all ranks: the slowest sets the pace"
        found = equal(f"net.ipv4.{name}", values, "note", advice)
        if found.level != "ok":
            yield found
