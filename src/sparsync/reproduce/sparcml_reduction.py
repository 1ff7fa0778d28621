"""SparCML, Figure 3: reduction time over the number of nodes and over density, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import torch

from sparsync.presets import resolve
from sparsync.reproduce.base import (
    Artifact,
    Comparison,
    Outcome,
    Panel,
    Row,
    Settings,
    Stated,
    points,
)
from sparsync.sparse import SparseVector
from sparsync.transports.sim import Links, SimCommunicator, simulate

__all__ = ["FIGURE_3"]

_SIZE = 1 << 24  # N of both plots (Figure 3)
_DENSITY = 0.00781  # of the plot over nodes (Figure 3)
_RANKS_OF_DENSITIES = 8  # of the plot over density (Figure 3)
_SCALE = 64  # n, k and the bandwidth are divided by it: the same seconds, in less memory
_RANKS = (2, 4, 8, 16, 32, 64)
_DENSITIES = (0.0005, 0.002, 0.00781, 0.03, 0.12, 0.4)
_MOST = 4.0  # times over dense, when the result is dense (2 / kappa, section 5.3.4)

_NETWORKS = MappingProxyType(
    {
        "Daint": Links(alpha=1.5e-6, beta=1e-10),  # ours: MPI on Aries, 10 GB/s
        "Greina, GigE": Links(alpha=50e-6, beta=8e-9),  # ours: 1 Gbit/s
    }
)
_ALGORITHMS = MappingProxyType(
    {
        "SSAR_Recursive_double": "recursive-doubling",
        "SSAR_Split_allgather": "split-allgather",
        "DSAR_Split_allgather": "dynamic",
        "ring, sparse": "ring",
        "ring, dense": "ring-dense",
    }
)
_DOUBLE, _SPLIT, _DYNAMIC, _SPARSE_RING, _RING = _ALGORITHMS

_RING_FIRST = Stated(
    "rings on few and on many nodes, Daint",
    '"faster then any all other algorithms" on few, no speedup "at high number of nodes"',
    "section 8.1",
)
_CONSTANT = Stated(
    "DSAR over the dense ring, any number of nodes",
    '"improvement even at a relative large number of nodes, but only up to a constant factor" (4)',
    "sections 5.3.4 and 8.1",
    (_MOST,),
)
_LOW = Stated(
    "SSAR_Split_allgather against DSAR, over density",
    '"dominates [...] as long as the number of non-zero indices is relatively low"',
    "section 8.1",
)
_WIDER = Stated(
    "recursive doubling over split + allgather",
    '"larger, when increasing the number of nodes compared to increasing density"',
    "section 8.1",
)
_ORDER = Stated(
    "order of the algorithms on both networks",
    '"The relative ordering remains comparable"',
    "section 8.1",
)


def _seconds(algorithm: str, ranks: int, density: float, links: Links, settings: Settings) -> float:
    """Return the virtual seconds of one reduction of uniformly random supports."""
    scale = settings.pick(_SCALE, 64 * _SCALE)
    size = _SIZE // scale
    k = max(round(density * size), 1)
    slower = Links(links.alpha, links.beta * scale)

    async def program(comm: SimCommunicator) -> None:
        generator = torch.Generator().manual_seed(settings.seed * ranks + comm.rank)
        indices = torch.rand(size, generator=generator).topk(k).indices.sort().values
        mine = SparseVector(indices, torch.ones(k), size)
        await resolve(algorithm).make_collective().reduce(comm, mine, k, step=0)

    return simulate(program, ranks, links=slower).seconds


def _run(settings: Settings) -> Outcome:
    nodes, densities = settings.pick((_RANKS, _DENSITIES), ((2, 4), (0.01, 0.4)))
    few = settings.pick(_RANKS_OF_DENSITIES, 4)
    cases = [("nodes", name, p, _DENSITY) for name in _NETWORKS for p in nodes]
    cases += [("density", name, few, d) for name in _NETWORKS for d in densities]
    rows: list[Row] = []
    for over, network, ranks, density in settings.track(cases):
        for title, preset in _ALGORITHMS.items():
            seconds = _seconds(preset, ranks, density, _NETWORKS[network], settings)
            rows.append(
                {
                    "over": over,
                    "network": network,
                    "algorithm": title,
                    "P": ranks,
                    "density, %": 100 * density,
                    "ms": 1e3 * seconds,
                }
            )
    panels = [
        Panel(
            f"{network}, {settings_of}",
            x if x != "P" else "nodes P",
            "ms",
            {
                title: points(rows, x, "ms", {"over": over, "network": network, "algorithm": title})
                for title in _ALGORITHMS
            },
            log="xy",
        )
        for network, over, x, settings_of in (
            ("Daint", "nodes", "P", f"d = {100 * _DENSITY:g} %"),
            ("Greina, GigE", "density", "density, %", f"P = {few}"),
        )
    ]
    return Outcome(
        rows,
        _compare(rows),
        {"N": _SIZE, "scale": settings.pick(_SCALE, 64 * _SCALE)},
        "The real collectives in virtual time (alpha-beta, single-ported, no time for reducing), on "
        "vectors 64 times smaller over links 64 times slower; no spread, since nothing varies.",
        panels,
    )


def _curve(rows: Sequence[Row], over: str, network: str, algorithm: str) -> list[float]:
    of = {"over": over, "network": network, "algorithm": algorithm}
    return [y for _, y in points(rows, "P", "ms", of)]


def _ratio_growth(rows: Sequence[Row], over: str) -> float:
    """Return by how much recursive doubling over split + allgather grows, first to last."""
    double, halves = (_curve(rows, over, "Daint", name) for name in (_DOUBLE, _SPLIT))
    return (double[-1] / halves[-1]) / (double[0] / halves[0])


def _fastest(rows: Sequence[Row], network: str) -> str:
    """Return the algorithm that is fastest on most nodes."""
    return min(_ALGORITHMS, key=lambda title: _curve(rows, "nodes", network, title)[-1])


def _compare(rows: Sequence[Row]) -> list[Comparison]:
    daint = {title: _curve(rows, "nodes", "Daint", title) for title in _ALGORITHMS}
    first, last = ([times[at] for times in daint.values()] for at in (0, -1))
    rings = [list(_ALGORITHMS).index(name) for name in (_SPARSE_RING, _RING)]
    ring_first = min(first) in [first[i] for i in rings]
    ring_last = min(last) in [last[i] for i in rings]
    gains = [a / b for a, b in zip(daint[_RING], daint[_DYNAMIC], strict=True)]
    split, dsar = (_curve(rows, "density", "Greina, GigE", name) for name in (_SPLIT, _DYNAMIC))
    wins = [a < b for a, b in zip(split, dsar, strict=True)]
    wider = [_ratio_growth(rows, over) for over in ("nodes", "density")]
    first_of = [_fastest(rows, network) for network in _NETWORKS]
    same_ring, bounded = ring_first and not ring_last, 1 < min(gains) <= max(gains) <= _MOST
    crossing = wins == sorted(wins, reverse=True) and wins[0] and not wins[-1]
    return [
        _RING_FIRST.beside(
            f"fastest on few: {'a ring' if ring_first else 'recursive doubling or split'}; on many: "
            f"{'a ring' if ring_last else 'another'}",
            same_ring,
            ""
            if same_ring
            else "reducing takes no time here: a dense ring adds cheaply what a sparse sum must merge",
        ),
        _CONSTANT.beside(
            f"{min(gains):.1f} to {max(gains):.1f} times faster",
            bounded,
            "" if bounded else "latency of P - 1 messages against the ring's 2 (P - 1)",
        ),
        _LOW.beside(
            f"faster at {sum(wins)} of {len(wins)} densities, the lowest",
            crossing,
            "" if crossing else "the order changes elsewhere",
        ),
        _WIDER.beside(
            f"the ratio grows {wider[0]:.1f} times over nodes, {wider[1]:.1f} times over density",
            wider[0] > wider[1],
            "" if wider[0] > wider[1] else "supports of all densities overlap alike in this model",
        ),
        _ORDER.beside(
            f"fastest on most nodes: {' and '.join(first_of)}",
            first_of[0] == first_of[1],
            "" if first_of[0] == first_of[1] else "latency and bandwidth are in another proportion",
        ),
    ]


FIGURE_3 = Artifact(
    "sparcml-fig3",
    "SparCML",
    "reduction time over nodes and over density",
    "sparse reductions win by far while the result is sparse; then DSAR wins, by a constant factor",
    1.5,
    _run,
)
