"""Find sites by measurement.  A site is a group of ranks with fast links; between sites, links are slow.

The resulting grid is used like a mesh (nodes, ranks of a node).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final

import torch

from sparsync.cost.wording import format_bytes, format_seconds
from sparsync.errors import ConfigurationError
from sparsync.options import Options
from sparsync.transports.agree import agree
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import run
from sparsync.transports.ledger import Raw
from sparsync.transports.process_group import Groups

__all__ = ["PairTimes", "measured_sites", "sites_of", "time_pairs"]

PairTimes = Mapping[tuple[int, int], float]
"""Seconds that a message takes between two ranks, (lower, higher); the mean of both directions."""

# the smallest ratio that separates two kinds of links; noise of +-30 % alone gives 1.3 / 0.7 = 1.9
_GAP: Final = 3.0
_SHORTEST: Final = 5e-4  # seconds; shorter times depend more on busy cores than on links
_FEWEST: Final = 4  # ranks, i.e. two sites of two ranks
# bytes of the smallest message, factor from size to size, bytes of the largest message
_SMALLEST, _FACTOR, _LARGEST = 1 << 10, 4, 1 << 18
# round-trips to a rank; the fastest counts, and an additional one before them warms up
_TRIPS: Final = 3
_SECONDS: Final = 5.0  # a larger size is started only if it will probably end within this time
_PHASE: Final = "sites"
_CONTROL: Final = Raw("control")
_INSTEAD: Final = "give a mesh (nodes, ranks of a node), or omit hierarchy="


def sites_of(seconds: PairTimes, ranks: Sequence[int], nbytes: int) -> list[list[int]]:
    """Group ranks into sites by the largest gap between times; times within a site lie below the gap.

    Args:
        seconds: the time of every pair, by positions in ``ranks``.
        ranks: the ranks to return, ascending.
        nbytes: the length of the messages, for errors.

    Returns:
        The ranks of each site, ascending; the site of the first rank comes first.

    Raises:
        ConfigurationError: all links are about equally fast, a rank is near two ranks that are far from
            each other, or sites have unequal sizes.

    Example:
        >>> pairs = [(a, b) for b in range(4) for a in range(b)]
        >>> seconds = {(a, b): 0.002 if b == a + 2 else 0.04 for a, b in pairs}
        >>> sites_of(seconds, [4, 5, 6, 7], nbytes=1 << 18)
        [[4, 6], [5, 7]]
    """
    times = sorted(max(took, _SHORTEST) for took in seconds.values())
    gap, limit = max(((slow / fast, fast) for fast, slow in pairwise(times)), default=(1.0, 0.0))
    if gap < _GAP:
        between = " to ".join(format_seconds(end(seconds.values())) for end in (min, max))
        raise ConfigurationError(
            f"hierarchy='links' found no sites: the links are alike, {between} for "
            f"{format_bytes(nbytes)}, without a gap of {_GAP:g} x above {format_seconds(_SHORTEST)}; "
            + _INSTEAD
        )
    # Sites are well defined only if nearness is transitive: two ranks near a third one must be near each
    # other.
    near = [{place} for place in range(len(ranks))]
    for (a, b), took in seconds.items():
        if took <= limit:
            near[a].add(b)
            near[b].add(a)
    for place, its in enumerate(near):
        for a in sorted(its):
            if beyond := near[a] - its:
                one, middle, other = ranks[place], ranks[a], ranks[min(beyond)]
                raise ConfigurationError(
                    f"hierarchy='links' found no sites: rank {middle} is near ranks {one} and {other}, "
                    f"which are far from each other; {_INSTEAD}"
                )
    sites = [[ranks[a] for a in sorted(its)] for place, its in enumerate(near) if min(its) == place]
    if len({len(site) for site in sites}) > 1:
        raise ConfigurationError(
            f"hierarchy='links' found sites of unequal sizes, {sites}; start as many ranks in each, "
            + _INSTEAD
        )
    return sites


async def time_pairs(comm: Communicator) -> tuple[dict[tuple[int, int], float], int]:
    """Time a round-trip to every other rank; this call is collective.

    Ranks take turns in pairs.  (``measure_links`` times the rounds of a collective instead.  There, a
    message may wait for a receiver that is busy with a slow link, so its time depends on other links.)
    Message sizes grow while time permits.

    Returns:
        Half of the fastest round-trip of every pair, and the bytes of its messages; equal on all ranks.

    Cost: ``P - 1`` turns of 4 round-trips for each of 5 sizes, or fewer sizes if they would take
    more than 5 seconds.
    """
    ranks, started = comm.world_size, comm.now
    nbytes, spent, took = _SMALLEST, 0.0, 0.0
    while True:
        mine = [0.0] * ranks
        for peer in _peers(comm.rank, ranks):
            mine[peer] = await _trip(comm, peer, nbytes) / 2
        mine.append(comm.now - started)
        numbers = torch.tensor(mine, dtype=torch.float64, device="cpu")
        everyone = [row.tolist() for row in await comm.allgather(numbers, _PHASE)]
        # the longest time of any rank decides, so all ranks stop after the same size
        before, spent = spent, max(row[-1] for row in everyone)
        took = spent - before
        if nbytes >= _LARGEST or spent + took > _SECONDS:
            break
        nbytes *= _FACTOR
    return {(a, b): everyone[a][b] for b in range(ranks) for a in range(b)}, nbytes


def _peers(rank: int, ranks: int) -> Iterator[int]:
    """Yield every other rank once, so that in each turn all ranks are paired.

    This is a round-robin tournament.  The number of ranks is made even; the last rank stays fixed, and
    the others rotate.
    """
    # a dummy makes an odd number of ranks even; the rank that is paired with it is idle
    last = ranks - 1 + ranks % 2
    for turn in range(last):
        peer = (turn - rank) % last
        if rank == last:
            peer = turn * (last + 1) // 2 % last  # the peer with 2 peer = turn (modulo last)
        elif peer == rank:
            peer = last
        if peer < ranks:
            yield peer


async def _trip(comm: Communicator, peer: int, nbytes: int) -> float:
    """Time several round trips to a rank; return the seconds of the fastest."""
    # the payload has random bytes, because a compressing tunnel would look fast with zeros
    payload, trips = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cpu"), []
    for _ in range(_TRIPS + 1):
        start = comm.now
        # Both sides post the receive first, so that a message never waits for it.  The lower rank sends
        # first, and both measure a whole round-trip.
        receiving = comm.irecv(peer, nbytes, _PHASE, _CONTROL)
        if comm.rank < peer:
            await comm.isend(payload, peer, _PHASE, _CONTROL)
            await receiving
        else:
            await receiving
            await comm.isend(payload, peer, _PHASE, _CONTROL)
        trips.append(comm.now - start)
    return min(trips[1:])


def measured_sites(options: Options, ranks: Sequence[int], groups: Groups) -> list[list[int]]:
    """Time the links between these global ranks, over their own transport, and group them by site.

    This is collective; all ranks get the same result.

    Raises:
        ConfigurationError: no sites were found (see ``sites_of``); raised on all ranks.
        PeerError: the ranks use different transports.
    """
    if len(ranks) < _FEWEST:
        raise ConfigurationError(
            f"hierarchy='links' needs {_FEWEST} ranks or more, two sites of two, and there are "
            f"{len(ranks)}; omit hierarchy="
        )
    ranks = sorted(ranks)  # a group's ranks ascend, and times are keyed by positions in the group
    with options.connect(groups.make(ranks)) as comm:
        seconds, nbytes = run(time_pairs(comm))
        sites = sites_of(seconds, ranks, nbytes)
        # All ranks compute the sites from the same numbers, but the results are compared anyway: ranks
        # that disagreed would build different groups, and wait for each other until the timeout.
        run(agree(comm, {"the sites that hierarchy='links' found": sites}))
        if comm.rank == 0:
            logging.getLogger("sparsync").info("hierarchy='links' found the sites %s", sites)
    return sites
