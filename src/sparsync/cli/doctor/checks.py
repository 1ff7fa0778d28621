"""The checks of ``sparsync doctor``: lines with a verdict (ok, note or bad) and advice."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from sparsync.cli.doctor.machine_facts import Facts, some
from sparsync.cost.calibrate import Calibration

__all__ = ["Check", "check_facts", "check_links", "equal"]


@dataclass(frozen=True)
class Check:
    """One line of the page.

    "note" means that training works, but the fact costs time or may come as a surprise.  "bad" means
    that training goes wrong, or is much slower than it could be.
    """

    level: Literal["ok", "note", "bad"]
    what: str
    advice: str = ""


def check_facts(everyone: Sequence[Facts]) -> Iterator[Check]:
    """Check the software, placement and interfaces of all ranks, given in rank order."""
    mine = everyone[0]
    pace = "results are the same, but the slowest rank sets the pace"
    yield equal("torch", [f.torch for f in everyone], "bad", "install the same on all ranks")
    yield equal("Python", [f.python for f in everyone], "note", "use the same on all ranks")
    yield equal("native kernels", [f.kernels for f in everyone], "note", pace)
    version = tuple(int(part) for part in re.findall(r"\d+", mine.torch)[:2])
    if version < (2, 7):
        yield Check("bad", f"torch {mine.torch}", "install torch 2.7 or newer")
    if "torch.distributed gloo" not in mine.backends:
        yield Check("bad", "torch has no gloo", "install a torch with torch.distributed")
    slow = [rank for rank, facts in enumerate(everyone) if facts.kernels == "torch"]
    if slow:
        built = everyone[slow[0]].built
        do = "unset SPARSYNC_KERNELS" if built else "install a C++ compiler, then sparsync again"
        yield Check("note", f"{some(slow)} without native kernels: selection is slow", do)
    machines = Counter(facts.machine for facts in everyone)
    placed = [
        _threads(next(f for f in everyone if f.machine == machine), ranks)
        for machine, ranks in machines.items()
    ]
    yield from dict.fromkeys(placed)  # equal machines share a line
    runtimes = [rank for rank, facts in enumerate(everyone) if facts.openmp > 1]
    if runtimes:
        what = f"{everyone[runtimes[0]].openmp} OpenMP runtimes in {some(runtimes)}"
        yield Check("note", what, "their threads wait for each other: set OMP_NUM_THREADS=1")
    stuck = [rank for rank, facts in enumerate(everyone) if facts.loopback]
    if len(machines) > 1 and stuck:
        do = "set GLOO_SOCKET_IFNAME to the interface that reaches the others"
        yield Check("bad", f"gloo of {some(stuck)} listens on loopback", do)
    library, stacks = mine.mpi or "", len({facts.network for facts in everyone})
    if len(machines) > 1 and "Open MPI" in library:
        what = "Open MPI reached 53 to 56 % of a 1 Gbit/s Ethernet link in our measurements"
        yield Check("note", what, "compare with --transport zmq")
    if len(machines) == 1 and stacks > 1 and library and "Open MPI" not in library:
        what = "MPICH may bypass the network of containers through their shared memory"
        yield Check("note", what, "set MPIR_CVAR_NOLOCAL=1 to measure the network")
    if "torch.distributed nccl" not in mine.backends:
        what = "PyTorch's own PowerSGD hook can hang on gloo where a model has several buckets"
        yield Check("note", what, "give DDP a bucket_cap_mb that holds the model")


def equal(name: str, values: Sequence[str], level: Literal["note", "bad"], advice: str) -> Check:
    """Check a fact that should be the same on all ranks."""
    common, ranks = Counter(values).most_common(1)[0]
    if ranks == len(values):
        return Check("ok", f"{name} {common} on all ranks")
    other = next(rank for rank, value in enumerate(values) if value != common)
    return Check(level, f"{name} differs: {common}, but {values[other]} on rank {other}", advice)


def _threads(facts: Facts, ranks: int) -> Check:
    """Check whether a machine with this many ranks has enough cores for their threads."""
    where = f"{ranks} rank(s) with {facts.threads} thread(s) each on {facts.cores} core(s)"
    if ranks * facts.threads <= facts.cores:
        return Check("ok", where)
    if facts.threads > 1:
        do = f"set OMP_NUM_THREADS={max(facts.cores // ranks, 1)}"
        return Check("bad", f"{where} wait for each other", do)
    return Check(
        "note", where, "measured times include waits for a core; give each rank one of its own"
    )


def check_links(found: Calibration, walls: Sequence[float]) -> Iterator[Check]:
    """Check links and clocks; ``walls``: each rank's wall clock minus its monotonic clock, in seconds."""
    if not found.links:
        yield Check("note", "a single rank: there are no links to measure", "start more ranks")
        return
    if any(high > 2 * low for low, high in (found.intervals[x] for x in ("alpha", "beta"))):
        what = "latency or bandwidth could not be measured to within a factor of two"
        yield Check("note", what, "let nothing else run; or give more --seconds")
    else:
        yield from _slow(found) or [Check("ok", f"{len(found.links)} links alike")]
    aheads = [c.ahead + wall - walls[0] for c, wall in zip(found.clocks, walls, strict=True)]
    worst = max(range(len(aheads)), key=lambda rank: abs(aheads[rank]))
    if abs(aheads[worst]) - found.clocks[worst].uncertainty > 0.1:
        what = f"rank {worst}'s wall clock is {aheads[worst]:+.3g} s off rank 0's"
        yield Check("note", what, "logs will not line up: run an NTP client")
    else:
        apart, sure = abs(aheads[worst]), max(clock.uncertainty for clock in found.clocks)
        yield Check(
            "ok", f"wall clocks within {apart * 1e3:.3g} ms (measured to {sure * 1e3:.3g} ms)"
        )


def _slow(found: Calibration, *, most: int = 4) -> list[Check]:
    """Report the slow links, or a rank whose links are all slow in one direction."""
    slow, usual = found.slow_links(), median(link.beta for link in found.links)
    named: dict[str, float] = {}
    for link in slow:
        sends = {k for k in found.links if k.source == link.source} <= set(slow)
        receives = {k for k in found.links if k.dest == link.dest} <= set(slow)
        # one line for a rank whose links are all slow in one direction: its cable is the likely cause
        name = f"the link from rank {link.source} to rank {link.dest} is"
        if sends and len(found.links) > 2:
            name = f"sending from rank {link.source} is"
        elif receives and len(found.links) > 2:
            name = f"receiving at rank {link.dest} is"
        named[name] = max(named.get(name, 0.0), link.beta / usual)
    advice = "check its cable, its port, and other traffic on it; or measure again"
    checks = [
        Check("note", f"{name} {times:.1f} x slower than most", advice)
        for name, times in named.items()
    ]
    more = len(checks) - most
    return checks[:most] + [Check("note", f"{more} more links are slow")] * (more > 0)
