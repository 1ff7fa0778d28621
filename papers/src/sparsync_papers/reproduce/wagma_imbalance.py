"""Measure the imbalance of step times (WAGMA, Figure 6)."""

from __future__ import annotations

import time
from statistics import fmean, pstdev

import numpy as np

from sparsync_papers.reproduce import Comparison, Outcome, Panel, Settings, Table, artifact
from sparsync_papers.workloads.length_buckets import LinesWorkload

_BATCHES, _BATCH_SIZE, _REPEATS = 2000, 16, 5
_VARIES = 0.2  # a standard deviation above this share of the mean counts as "high variance"


def _seconds_by_length(workload: LinesWorkload, settings: Settings) -> dict[int, float]:
    """Time forward and backward for a batch of each bucket, in seconds (the best of a few runs)."""
    model, lines = workload.make_model(settings.seed), workload.parts[0]
    found = {}
    for length in settings.track(sorted(set(lines.padded_lengths.tolist()))):
        chosen = (lines.padded_lengths == length).nonzero().flatten()[:_BATCH_SIZE]
        inputs, targets = lines.padded(chosen, length)
        times = []
        for _ in range(settings.pick(_REPEATS, 1)):
            started = time.process_time()  # not wall time: the machine may be busy
            workload.loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            times.append(time.process_time() - started)
        found[length] = min(times)
    return found


@artifact("wagma-fig6", "even in length buckets, run times of batches differ widely", minutes=0.3)
def figure_6(settings: Settings) -> Outcome:
    """Run times of batches of sentences."""
    workload = LinesWorkload(width=64, layers=2)
    seconds, lines = _seconds_by_length(workload, settings), workload.parts[0]
    batches = settings.pick(_BATCHES, 50)
    drawn = [
        lines.draw(np.random.default_rng([settings.seed, batch, 0]), 1)[1]
        for batch in range(batches)
    ]
    times = [seconds[length] for length in drawn]
    varies = pstdev(times) / fmean(times)
    rows = Table()
    bars: list[tuple[float | str, float]] = []
    for length, each in seconds.items():
        share = 100 * drawn.count(length) / batches
        rows.append(
            {
                "longest line of the bucket": length,
                "lines, %": 100 * (lines.padded_lengths == length).double().mean().item(),
                "batches, %": share,
                "ms per batch": 1e3 * each,
            }
        )
        bars.append((f"{1e3 * each:.3g}", share))
    what = "run time of batches of one bucket each"
    comparison = Comparison(
        what,
        '"a high variance in workload size"',
        "section 5.3",
        f"deviation {100 * varies:.0f} % of the mean, longest / shortest {max(times) / min(times):.1f}",
        varies > _VARIES,
        "with such small batches the fixed cost outweighs that of the lines",
    )
    return Outcome(
        rows,
        [comparison],
        {"batches": batches, "lines per batch": _BATCH_SIZE, "bucket width": workload.bucket_width},
        "Lines of Python's source in length buckets, a byte transformer, this machine's CPU: not "
        "WMT17's sentences on a P100.",
        [Panel("run time of a batch", "ms", "% of batches", {"ours": bars}, kind="bars")],
    )
