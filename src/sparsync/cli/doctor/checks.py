"""Judgements of ``sparsync doctor``: lines that say ok, note or bad, and advice."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from sparsync.cli.doctor.facts import Facts
from sparsync.cost.calibrate import Calibration

__all__ = ["Check", "check_facts", "check_links"]


@dataclass(frozen=True)
class Check:
    """One line of the page.

    "note": it works, but costs something or may surprise; "bad": training goes wrong, or much slower
    than it could.
    """

    level: Literal["ok", "note", "bad"]
    what: str
    advice: str = ""


def check_facts(
    everyone: Sequence[Facts], *, oldest_torch: tuple[int, int] = (2, 7)
) -> list[Check]:
    """Judge the software and the placement of all ranks, given in rank order."""
    mine = everyone[0]
    checks = [
        _equal("torch", [f.torch for f in everyone], "bad", "install the same on all ranks"),
        _equal("Python", [f.python for f in everyone], "note", "use the same on all ranks"),
        _equal(
            "native kernels",
            [f.kernels for f in everyone],
            "note",
            "results are the same, but the slowest rank sets the pace",
        ),
    ]
    version = tuple(int(part) for part in re.findall(r"\d+", mine.torch)[:2])
    if version < oldest_torch:
        oldest = ".".join(map(str, oldest_torch))
        checks.append(Check("bad", f"torch {mine.torch}", f"install torch {oldest} or newer"))
    if "torch.distributed gloo" not in mine.backends:
        checks.append(Check("bad", "torch has no gloo", "install a torch with torch.distributed"))
    slow = [rank for rank, facts in enumerate(everyone) if facts.kernels == "torch"]
    if slow:
        do = "install a C++ compiler, then sparsync again"
        if everyone[slow[0]].built:
            do = "unset SPARSYNC_KERNELS"
        checks.append(Check("note", f"{_some(slow)} without native kernels: selection is slow", do))
    return [*checks, *_placement(everyone), *_network(everyone), *_hooks(mine)]


def _equal(name: str, values: Sequence[str], level: Literal["note", "bad"], advice: str) -> Check:
    """Judge a fact that should be the same on all ranks."""
    counts = Counter(values)
    if len(counts) == 1:
        return Check("ok", f"{name} {values[0]} on all ranks")
    common = counts.most_common(1)[0][0]
    other = next(rank for rank, value in enumerate(values) if value != common)
    what = f"{name} differs: {common}, but {values[other]} on rank {other}"
    return Check(level, what, advice)


def _placement(everyone: Sequence[Facts]) -> list[Check]:
    """Judge threads and cores."""
    checks = []
    for machine, ranks in Counter(facts.machine for facts in everyone).items():
        facts = next(f for f in everyone if f.machine == machine)
        where = f"{ranks} rank(s) with {facts.threads} thread(s) each on {facts.cores} core(s)"
        if ranks * facts.threads <= facts.cores:
            checks.append(Check("ok", where))
        elif facts.threads > 1:
            threads = max(facts.cores // ranks, 1)
            checks.append(
                Check("bad", f"{where} wait for each other", f"set OMP_NUM_THREADS={threads}")
            )
        else:
            do = "the measurements are of a machine this crowded; give each rank a core"
            checks.append(Check("note", where, do))
    if len(checks) > 1 and len(set(checks)) < len(checks):
        checks = list(dict.fromkeys(checks))  # equal machines need one line
    runtimes = [rank for rank, facts in enumerate(everyone) if facts.openmp > 1]
    if runtimes:
        what = f"{everyone[runtimes[0]].openmp} OpenMP runtimes in {_some(runtimes)}"
        checks.append(
            Check("note", what, "their threads wait for each other: set OMP_NUM_THREADS=1")
        )
    return checks


def _network(everyone: Sequence[Facts]) -> list[Check]:
    """Judge the interfaces and MPI libraries."""
    machines = len({facts.machine for facts in everyone})
    stacks = len({facts.network for facts in everyone})
    checks = []
    stuck = [rank for rank, facts in enumerate(everyone) if facts.loopback]
    if machines > 1 and stuck:
        do = "set GLOO_SOCKET_IFNAME to the interface that reaches the others"
        checks.append(Check("bad", f"gloo of {_some(stuck)} listens on loopback", do))
    library = everyone[0].mpi or ""
    if machines > 1 and "Open MPI" in library:
        what = "Open MPI reached 53 to 56 % of a 1 Gbit/s Ethernet link in our measurements"
        checks.append(Check("note", what, "compare with --transport zmq"))
    if machines == 1 and stacks > 1 and library and "Open MPI" not in library:
        what = "MPICH may pass containers' network by, through the memory that they share"
        checks.append(Check("note", what, "set MPIR_CVAR_NOLOCAL=1 to measure the network"))
    return checks


def _hooks(mine: Facts) -> list[Check]:
    """Note a known pitfall of PyTorch's hooks, which no measurement shows."""
    if "torch.distributed nccl" in mine.backends:
        return []
    what = "PyTorch's own PowerSGD hook can hang on gloo where a model has several buckets"
    return [Check("note", what, "give DDP a bucket_cap_mb that holds the model")]


def check_links(found: Calibration, walls: Sequence[float]) -> list[Check]:
    """Judge the links and the clocks; ``walls``: seconds that wall clocks are ahead of steady ones."""
    if not found.links:
        return [Check("note", "one rank alone: no links to measure", "start it with more")]
    if any(high > 2 * low for low, high in (found.intervals[x] for x in ("alpha", "beta"))):
        what = "latency or bandwidth are not known to a factor of two"
        checks = [Check("note", what, "let nothing else run; or give more --seconds")]
    else:
        checks = _slow(found) or [Check("ok", f"{len(found.links)} links alike")]
    aheads = [c.ahead + wall - walls[0] for c, wall in zip(found.clocks, walls, strict=True)]
    worst = max(range(len(aheads)), key=lambda rank: abs(aheads[rank]))
    sure = max(clock.uncertainty for clock in found.clocks)
    apart = (
        f"wall clocks within {abs(aheads[worst]) * 1e3:.2g} ms (measured to {sure * 1e3:.2g} ms)"
    )
    if abs(aheads[worst]) - found.clocks[worst].uncertainty > 0.1:
        what = f"rank {worst}'s wall clock is {aheads[worst]:+.3g} s off rank 0's"
        return [*checks, Check("note", what, "logs will not line up: run an NTP client")]
    return [*checks, Check("ok", apart)]


def _slow(found: Calibration, *, most: int = 4) -> list[Check]:
    """Name the slow links, or the rank whose links are all slow in one direction."""
    slow, usual = found.slow_links(), median(link.beta for link in found.links)
    named: dict[str, float] = {}
    for link in slow:
        sends = {k for k in found.links if k.source == link.source} <= set(slow)
        receives = {k for k in found.links if k.dest == link.dest} <= set(slow)
        name = f"the link from rank {link.source} to rank {link.dest} is"
        if sends and len(found.links) > 2:
            name = f"all that rank {link.source} sends is"
        elif receives and len(found.links) > 2:
            name = f"all that rank {link.dest} receives is"
        named[name] = max(named.get(name, 0.0), link.beta / usual)
    advice = "check its cable, its port and who else uses it; or measure again"
    checks = [
        Check("note", f"{name} {times:.1f} x slower than most", advice)
        for name, times in named.items()
    ]
    more = len(checks) - most
    return checks[:most] + [Check("note", f"{more} more links are slow")] * (more > 0)


def _some(ranks: Sequence[int], *, most: int = 6) -> str:
    """Write a few ranks."""
    more = ", ..." if len(ranks) > most else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:most]))}{more}"
