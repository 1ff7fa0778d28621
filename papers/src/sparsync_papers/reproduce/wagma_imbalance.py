"""WAGMA, Figures 6 and 9: how unequal the work of a step is."""

from __future__ import annotations

import importlib.util
import time
from statistics import fmean, median, pstdev

import numpy as np

from sparsync_papers.reproduce import Outcome, Panel, Points, Settings, Stated, Table, artifact
from sparsync_papers.reproduce.wagma_throughput import TAIL
from sparsync_papers.workloads.lengths import LinesWorkload
from sparsync_papers.workloads.ppo import Ppo

_BATCHES, _BATCH_SIZE, _REPEATS = 2000, 16, 5
_VARIES = 0.2  # standard deviation over mean from which "high variance" holds
_ITERATIONS = 5000  # section 5.4
_PLAYED = 40  # iterations of the small task
_RANKS = 64  # among which the iterations are dealt
_FAR = 10.0  # longest over median from which times are widely distributed
_EDGES = (1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 8.0)  # times the median


def _seconds_by_length(workload: LinesWorkload, settings: Settings) -> dict[int, float]:
    """Return the seconds of a batch of each bucket, forward and backward: the best of a few."""
    model, lines = workload.make_model(settings.seed), workload.parts[0]
    found = {}
    for length in settings.track(sorted(set(lines.padded_lengths.tolist()))):
        chosen = (lines.padded_lengths == length).nonzero().flatten()[:_BATCH_SIZE]
        inputs, targets = lines.padded(chosen, length)
        times = []
        for _ in range(settings.pick(_REPEATS, 1)):
            started = time.process_time()  # the machine may have other work
            workload.loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            times.append(time.process_time() - started)
        found[length] = min(times)
    return found


@artifact("wagma-fig6", "even in length buckets batches differ much in run time", minutes=0.3)
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
    comparison = Stated(what, '"a high variance in workload size"', "section 5.3").compare(
        f"deviation {100 * varies:.0f} % of the mean, longest / shortest {max(times) / min(times):.1f}",
        varies > _VARIES,
        "so small a batch costs this machine more than its lines",
    )
    return Outcome(
        rows,
        [comparison],
        {"batches": batches, "lines per batch": _BATCH_SIZE, "bucket width": workload.bucket_width},
        "Lines of Python's source in length buckets, a byte transformer, this machine's CPU: not "
        "WMT17's sentences on a P100.",
        [Panel("run time of a batch", "ms", "% of batches", {"ours": bars}, kind="bars")],
    )


def _played(settings: Settings) -> list[float]:
    """Return the steps that iterations of the small task collect before anything is learned."""
    task = Ppo()
    model = task.make_model(settings.seed)
    return [
        float(task.collect(model, seed=settings.seed, iteration=iteration, rank=0).steps)
        for iteration in settings.track(range(settings.pick(_PLAYED, 3)))
    ]


def _histogram(values: list[float]) -> Points:
    """Return the percentages of values below each edge, in medians, and of those above the last."""
    middle = median(values)
    counts = np.histogram([x / middle for x in values], (0.0, *_EDGES, np.inf))[0]
    names = [*(f"< {edge:g}" for edge in _EDGES), "more"]
    return [(name, 100 * int(n) / len(values)) for name, n in zip(names, counts, strict=True)]


@artifact("wagma-fig9", "run times are very widely distributed, mostly short", minutes=0.2)
def figure_9(settings: Settings) -> Outcome:
    """Run times of collecting experience."""
    iterations = settings.pick(_ITERATIONS, 500)
    drawn = [
        TAIL.seconds(number // _RANKS, number % _RANKS, _RANKS, settings.seed)
        for number in range(iterations)
    ]
    found = {"heavy tail of wagma-fig10": ("s", drawn)}
    if importlib.util.find_spec("gymnasium"):
        found["CartPole, four episodes"] = ("steps", _played(settings))
    rows = Table()
    others = ""
    for source, (unit, values) in found.items():
        over = max(values) / median(values)
        rows.append(
            {
                "source": source,
                "iterations": len(values),
                "unit": unit,
                "shortest": min(values),
                "median": median(values),
                "mean": fmean(values),
                "longest": max(values),
                "longest over median": over,
            }
        )
        if values is not drawn:
            others += f"; {source}: {over:.1f} x"
    middle, longest, where = median(drawn), max(drawn), "section 5.4"
    wide = longest / middle > _FAR
    drawn_so = "drawn to be so"  # also the reason why few draws may not be
    comparisons = [
        stated.compare(ours, same, drawn_so, remark=drawn_so)
        for stated, ours, same in (
            (
                Stated("shortest and longest", "1.7 to 43.5 s", where, (1.7, 43.5)),
                f"{min(drawn):.1f} to {longest:.1f} s",
                wide,
            ),
            (Stated("median", "below 2 s", where, (2.0,)), f"{middle:.2f} s", middle < 2.0),
            (
                Stated("longest over median", "more than 21 x", where, (43.5 / 2,)),
                f"{longest / middle:.0f} x{others}",
                wide,
            ),
        )
    ]
    series = {source: _histogram(values) for source, (_, values) in found.items()}
    return Outcome(
        rows,
        comparisons,
        {"iterations": iterations},
        "Habitat is out of reach: the heavy tail is a lognormal made of the three figures that the text "
        "gives, so these agree by construction; CartPole (with Gymnasium) is played, before learning.",
        [Panel("time of an iteration", "times the median", "% of iterations", series, kind="bars")],
    )
