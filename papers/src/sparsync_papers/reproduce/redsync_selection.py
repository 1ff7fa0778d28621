"""Measure the time to select 0.1 % of a residual of growing size (RedSync, Figure 3)."""

from __future__ import annotations

from dataclasses import asdict

from sparsync.cli.bench.selection_time import (
    SelectorRow,
    SelectorSettings,
    bench_selectors,
    format_size,
    parse_sizes,
)
from sparsync_papers.reproduce import Comparison, Outcome, Panel, Settings, artifact

_SIZES = "64KB,256KB,1MB,4MB,16MB,64MB"  # the figure covers 64 KB to 512 MB
_COMM_BANDWIDTH = 3.5e9  # bytes per second of the figure's "Comm."
_TOPK, _TRIMMED, _SEARCH = "torch.topk of |x|", "trimmed", "binary search, 1 of 5"


@artifact(
    "redsync-fig3",
    "trimmed top-k and threshold search are far faster than a direct top-k of large layers",
    minutes=1.0,
    own_progress=True,
)
def figure_3(settings: Settings) -> Outcome:
    """Time of four selection methods over the size of the residual."""
    sizes = parse_sizes(settings.pick(_SIZES, "64KB"))
    seconds = settings.pick(0.3, 0.01)
    rows = bench_selectors(SelectorSettings(sizes, seed=settings.seed, seconds=seconds))
    by_name: dict[str, list[SelectorRow]] = {}
    for row in rows:
        by_name.setdefault(row.selector, []).append(row)
    last = {name: found[-1] for name, found in by_name.items()}
    speedups = [last[name].speedup for name in (_TRIMMED, _SEARCH)]
    communication = 2 * max(sizes) / _COMM_BANDWIDTH  # seconds of an allreduce among many ranks
    slower = last[_TOPK].seconds / communication
    ratio = last[_TRIMMED].seconds / last[_SEARCH].seconds
    reads = by_name[_TOPK][0].seconds / by_name["one read, x.sum()"][0].seconds
    curves = {
        name: [(float(row.nbytes) / 1024, 1e3 * row.seconds) for row in by_name[name]]
        for name in (_TOPK, _TRIMMED, "binary search", _SEARCH, "exact, no sort of n")
    }
    curves["Comm., 3.5 GB/s"] = [(n / 1024, 2e3 * n / _COMM_BANDWIDTH) for n in sizes]
    largest, where = format_size(max(sizes)), "section 5.2"
    device = "one CPU thread against their GPU"
    comparisons = [
        Comparison(
            "trimmed top-k and threshold search against a direct top-k, large sizes",
            '"both methods we proposed can greatly reduce the selection time"',
            where,
            f"{speedups[0]:.1f} and {speedups[1]:.1f} times faster at {largest}",
            min(speedups) > 1,
            "small sizes only",
        ),
        Comparison(
            "top-k against synchronising the layer at 3.5 GB/s",
            '"even slightly higher than the synchronization time"',
            where,
            f"{slower:.1f} times as long at {largest}",
            slower > 1,
            device,
            device,
        ),
        Comparison(
            "trimmed top-k against threshold search",
            '"slightly worse than the binary-search-based method"',
            "section 5.4",
            f"{ratio:.1f} times as long",
            ratio > 1,
            "on this CPU counting costs as much as selecting",
        ),
        Comparison(
            "top-k of little data",
            '"not as efficient as they imagined" (below 32 KB)',
            where,
            f"{reads:.0f} reads of the data at {format_size(min(sizes))}",
            reads > 1,
            "it is as fast as a read",
        ),
    ]
    return Outcome(
        [asdict(row) for row in rows],
        comparisons,
        {"density, %": 0.1, "input": "uniform", "device": "cpu, one thread"},
        "A CPU thread and its caches, not a Titan X: radixSelect is torch.topk; up to 64 MB; 'exact, no "
        "sort of n' is this library's default and is not in the paper.",
        [Panel("selecting 0.1 % of a residual", "KB", "ms per call", curves, log="xy")],
    )
