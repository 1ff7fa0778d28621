"""Measure the virtual time of a reduction by number of nodes and by density (SparCML, Figure 3)."""

from __future__ import annotations

import torch

from sparsync.presets import resolve
from sparsync.sparse import SparseVector
from sparsync.transports.sim import Links, SimCommunicator, simulate
from sparsync_papers.reproduce import (
    ARIES,
    GIGE,
    Comparison,
    Outcome,
    Panel,
    Settings,
    Table,
    artifact,
)

_SIZE = 1 << 24  # N of both plots (Figure 3)
_DENSITY = 0.00781  # density in the plot over nodes (Figure 3)
_RANKS_OF_DENSITIES = 8  # ranks in the plot over density (Figure 3)
_SCALE = 64  # divides n, k and the bandwidth, so that the same times need less memory
_RANKS = (2, 4, 8, 16, 32, 64)
_DENSITIES = (0.0005, 0.002, 0.00781, 0.03, 0.12, 0.4)
_MOST = 4.0  # largest speedup over dense if the result is dense (2 / kappa, section 5.3.4)

_DAINT, _GREINA = "Daint", "Greina, GigE"
_NETWORKS = {_DAINT: ARIES, _GREINA: GIGE}
_ALGORITHMS = {
    "SSAR_Recursive_double": "recursive-doubling",
    "SSAR_Split_allgather": "split-allgather",
    "DSAR_Split_allgather": "dynamic",
    "ring, sparse": "ring",
    "ring, dense": "ring-dense",
}
_DOUBLE, _SPLIT, _DYNAMIC, _SPARSE_RING, _RING = _ALGORITHMS


def _seconds(algorithm: str, ranks: int, density: float, links: Links, settings: Settings) -> float:
    """Return the virtual seconds that one reduction of vectors with uniformly random positions takes."""
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


@artifact(
    "sparcml-fig3",
    "sparse reductions win by far while the result is sparse; then DSAR wins, by a constant factor",
    minutes=1.5,
)
def figure_3(settings: Settings) -> Outcome:
    """Reduction time over nodes and over density."""
    nodes, densities = settings.pick((_RANKS, _DENSITIES), ((2, 4), (0.01, 0.4)))
    few = settings.pick(_RANKS_OF_DENSITIES, 4)
    cases = [("nodes", name, p, _DENSITY) for name in _NETWORKS for p in nodes]
    cases += [("density", name, few, d) for name in _NETWORKS for d in densities]
    rows = Table()
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
    panels = []
    for network, over, x, label, fixed in (
        (_DAINT, "nodes", "P", "nodes P", f"d = {100 * _DENSITY:g} %"),
        (_GREINA, "density", "density, %", "density, %", f"P = {few}"),
    ):
        series = rows.curves(x, "ms", "algorithm", {"over": over, "network": network})
        panels.append(Panel(f"{network}, {fixed}", label, "ms", series, log="xy"))
    return Outcome(
        rows,
        _compare(rows),
        {"N": _SIZE, "scale": settings.pick(_SCALE, 64 * _SCALE)},
        "The real collectives in virtual time (alpha-beta, single-ported, no time for reducing), on "
        "vectors 64 times smaller over links 64 times slower; no spread, since nothing varies.",
        panels,
    )


def _times(rows: Table, over: str, network: str) -> dict[str, list[float]]:
    """Return every algorithm's milliseconds, in ascending order of nodes or entries."""
    where = {"over": over, "network": network}
    return {
        name: [y for _, y in rows.points("P", "ms", {**where, "algorithm": name})]
        for name in _ALGORITHMS
    }


def _fastest(times: dict[str, list[float]], at: int) -> str:
    return min(times, key=lambda name: times[name][at])


def _compare(rows: Table) -> list[Comparison]:
    daint, greina = (_times(rows, "nodes", network) for network in _NETWORKS)
    denser, denser_greina = (_times(rows, "density", network) for network in _NETWORKS)
    rings = (_SPARSE_RING, _RING)
    ring_first, ring_last = (_fastest(daint, at) in rings for at in (0, -1))
    gains = [a / b for a, b in zip(daint[_RING], daint[_DYNAMIC], strict=True)]
    low = [a < b for a, b in zip(denser_greina[_SPLIT], denser_greina[_DYNAMIC], strict=True)]
    wider = []
    for times in (daint, denser):
        ratios = [a / b for a, b in zip(times[_DOUBLE], times[_SPLIT], strict=True)]
        wider.append(ratios[-1] / ratios[0])
    fastest = [_fastest(times, -1) for times in (daint, greina)]
    where = "section 8.1"
    return [
        Comparison(
            "rings on few and on many nodes, Daint",
            '"faster then any all other algorithms" on few, no speedup "at high number of nodes"',
            where,
            f"fastest on few: {'a ring' if ring_first else 'recursive doubling or split'}; on many: "
            f"{'a ring' if ring_last else 'another'}",
            ring_first and not ring_last,
            "reducing takes no time here, although a dense ring's sums are cheaper than sparse merges",
        ),
        Comparison(
            "DSAR over the dense ring, any number of nodes",
            '"improvement even at a relative large number of nodes, but only up to a constant '
            'factor" (4)',
            "sections 5.3.4 and 8.1",
            f"{min(gains):.1f} to {max(gains):.1f} times faster",
            1 < min(gains) <= max(gains) <= _MOST,
            "latency of P - 1 messages against the ring's 2 (P - 1)",
        ),
        Comparison(
            "SSAR_Split_allgather against DSAR, over density",
            '"dominates [...] as long as the number of non-zero indices is relatively low"',
            where,
            f"faster at {sum(low)} of {len(low)} densities, the lowest",
            low == sorted(low, reverse=True) and low[0] and not low[-1],
            "the order changes elsewhere",
        ),
        Comparison(
            "recursive doubling over split + allgather",
            '"larger, when increasing the number of nodes compared to increasing density"',
            where,
            f"the ratio grows {wider[0]:.1f} times over nodes, {wider[1]:.1f} times over density",
            wider[0] > wider[1],
            "supports of all densities overlap alike in this model",
        ),
        Comparison(
            "order of the algorithms on both networks",
            '"The relative ordering remains comparable"',
            where,
            f"fastest on most nodes: {' and '.join(fastest)}",
            fastest[0] == fastest[1],
            "latency and bandwidth have a different ratio",
        ),
    ]
