"""Measure what this group's links and ranks take, on the group itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from sparsync.cost.fitting import Interval
from sparsync.cost.links import Clock, Link, MeasuredLinks, Probe, measure_links
from sparsync.cost.machine import Machine
from sparsync.cost.rehearsal import measure_turn
from sparsync.cost.work import Bench, measure_work
from sparsync.transports.communicator import Communicator, check_timeout

__all__ = ["Calibration", "calibrate"]

_REHEARSAL = 0.2  # of the time, for whole exchanges


@dataclass(frozen=True)
class Calibration:
    """A measured machine, and how sure it is; bit-identical on all ranks.

    Attributes:
        machine: what the planner takes.
        intervals: of each of its numbers, at 95 %; one rank has no alpha and beta.
        links: every direction between two ranks that was measured.
        clocks: of every rank against rank 0's.
        sizes: bytes of the messages that were sent.
    """

    machine: Machine
    intervals: dict[str, Interval]
    links: tuple[Link, ...] = ()
    clocks: tuple[Clock, ...] = ()
    sizes: tuple[int, ...] = field(default=())

    def slow_links(self, *, factor: float = 1.5) -> list[Link]:
        """Return the links that take this many times the median's seconds per byte, slowest first.

        Args:
            factor: between 1 and the 2 of a link that is half as fast.
        """
        if not self.links:
            return []
        limit = factor * median(link.beta for link in self.links)
        return sorted((k for k in self.links if k.beta > limit), key=lambda k: -k.beta)

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers, as JSON takes them."""
        return {
            "machine": self.machine.as_dict(),
            "intervals": {name: list(ends) for name, ends in self.intervals.items()},
            "links": [asdict(link) for link in self.links],
            "clocks": [asdict(clock) for clock in self.clocks],
            "sizes": list(self.sizes),
        }


async def calibrate(
    comm: Communicator,
    *,
    seconds: float = 3.0,
    clock: Callable[[], float] | None = None,
    probe: Probe = Probe(),  # noqa: B008 (frozen)
    bench: Bench = Bench(),  # noqa: B008 (frozen)
) -> Calibration:
    """Measure the links and the work of a group's ranks; all of them call it together.

    Alpha and beta are what a message takes where every rank sends and receives at once; they are
    fitted to medians over rounds of several sizes, as large as the time allows.  In the simulator
    they are those of its ``Links``, and work takes no time.  At last whole exchanges are rehearsed.

    Args:
        comm: the group, of any size, otherwise idle; the bytes are booked in its ledger.
        seconds: about how long it may take.
        clock: of this rank; None: ``comm.now``.
        probe: how the links are probed.
        bench: what is worked on.

    Returns:
        The same on all ranks.  One rank alone has no links: alpha and beta are ``Machine``'s own.

    Raises:
        ConfigurationError: the links are too slow for the time; says how long to give.

    Example:
        >>> from sparsync.transports.sim import Links, simulate
        >>> async def program(comm):
        ...     return await calibrate(comm, probe=Probe(largest=1 << 16))
        >>> machine = simulate(program, 3, links=Links(alpha=1e-4, beta=1e-8)).results[0].machine
        >>> round(machine.alpha * 1e6, 3), round(machine.beta * 1e9, 3), machine.select
        (100.0, 10.0, 0.0)
    """
    seconds, now = check_timeout(seconds), clock or (lambda: comm.now)
    found: MeasuredLinks | None = None
    if comm.world_size > 1:
        found = await measure_links(comm, seconds=seconds, clock=now, probe=probe)
    left = max(1 - probe.budget - _REHEARSAL, _REHEARSAL) * seconds
    paces = await measure_work(comm, seconds=left, clock=now, bench=bench)
    machine = replace(Machine(), **{name: pace.seconds for name, pace in paces.items()})
    intervals = {name: pace.interval for name, pace in paces.items()}
    if found is None:
        return Calibration(machine, intervals, clocks=(Clock(),))
    line = found.line
    machine = replace(machine, alpha=line.alpha, beta=line.beta)
    turn = await measure_turn(
        comm, machine, found.clocks, seconds=_REHEARSAL * seconds, clock=now, bench=bench
    )
    machine = replace(machine, turn=turn.seconds)
    ends = {"alpha": line.alpha_interval, "beta": line.beta_interval}
    intervals = {**ends, **intervals, "turn": turn.interval}
    return Calibration(machine, intervals, found.links, found.clocks, found.sizes)
