"""WAGMA, Figures 6 and 9: how unequal the work of a step is."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator, Sequence
from statistics import fmean, median, pstdev

import numpy as np

from sparsync.reproduce.base import Artifact, Outcome, Panel, Row, Settings, Stated
from sparsync.reproduce.wagma_throughput import TAIL
from sparsync.workloads.lengths import LinesWorkload
from sparsync.workloads.ppo import Ppo

__all__ = ["FIGURE_6", "FIGURE_9"]

_BATCHES, _BATCH_SIZE, _REPEATS = 2000, 16, 5
_VARIES = 0.2  # standard deviation over mean from which "high variance" holds (ours)
_ITERATIONS = 5000  # section 5.4
_PLAYED = 40  # iterations of the small task
_RANKS = 64  # among which the iterations are dealt
_FAR = 10.0  # longest over median from which times are widely distributed (ours)
_EDGES = (1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 8.0)  # times the median

_VARIANCE = Stated(
    "run time of batches of one bucket each", '"a high variance in workload size"', "section 5.3"
)
_RANGE = Stated("shortest and longest", "1.7 to 43.5 s", "section 5.4", (1.7, 43.5))
_MEDIAN = Stated("median", "below 2 s", "section 5.4", (2.0,))
_WIDE = Stated("longest over median", "more than 21 x", "section 5.4", (43.5 / 2,))


def _seconds_by_length(workload: LinesWorkload, settings: Settings) -> dict[int, float]:
    """Return what forward and backward of a batch of each bucket take here: the best of a few."""
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


def _figure_6(settings: Settings) -> Outcome:
    workload = LinesWorkload(width=64, layers=2)
    seconds, lines = _seconds_by_length(workload, settings), workload.parts[0]
    batches = settings.pick(_BATCHES, 50)
    drawn = [
        lines.draw(np.random.default_rng([settings.seed, batch, 0]), 1)[1]
        for batch in range(batches)
    ]
    times = [seconds[length] for length in drawn]
    varies = pstdev(times) / fmean(times)
    rows: list[Row] = [
        {
            "longest line of the bucket": length,
            "lines, %": 100 * (lines.padded_lengths == length).double().mean().item(),
            "batches, %": 100 * drawn.count(length) / batches,
            "ms per batch": 1e3 * each,
        }
        for length, each in seconds.items()
    ]
    return Outcome(
        rows,
        [
            _VARIANCE.beside(
                f"deviation {100 * varies:.0f} % of the mean, longest {max(times) / min(times):.1f} x "
                "the shortest",
                varies > _VARIES,
                ""
                if varies > _VARIES
                else "so small a batch costs this machine more than its lines",
            )
        ],
        {"batches": batches, "lines per batch": _BATCH_SIZE, "bucket width": workload.bucket_width},
        "Lines of Python's source in length buckets, a byte transformer, this machine's CPU: not "
        "WMT17's sentences on a P100.",
        [
            Panel(
                "run time of a batch",
                "ms",
                "% of batches",
                {"ours": [(f"{1e3 * each:.3g}", share) for each, share in _shares(rows)]},
                kind="bars",
            )
        ],
    )


def _shares(rows: Sequence[Row]) -> Iterator[tuple[float, float]]:
    for row in rows:
        each, share = row["ms per batch"], row["batches, %"]
        yield float(each or 0) / 1e3, float(share or 0)


def _played(settings: Settings) -> list[float]:
    """Return the steps that iterations of the small task collect before anything is learned."""
    task = Ppo()
    model = task.make_model(settings.seed)
    return [
        float(task.collect(model, seed=settings.seed, iteration=iteration, rank=0).steps)
        for iteration in settings.track(range(settings.pick(_PLAYED, 3)))
    ]


def _distribution(source: str, unit: str, values: list[float]) -> Row:
    middle = median(values)
    return {
        "source": source,
        "iterations": len(values),
        "unit": unit,
        "shortest": min(values),
        "median": middle,
        "mean": fmean(values),
        "longest": max(values),
        "longest over median": max(values) / middle,
    }


def _histogram(values: list[float]) -> list[tuple[float | str, float]]:
    """Return the percentages of values below each edge, in medians, and of those above the last."""
    middle = median(values)
    counts = np.histogram([x / middle for x in values], (0.0, *_EDGES, np.inf))[0]
    names = [*(f"< {edge:g}" for edge in _EDGES), "more"]
    return [(name, 100 * int(n) / len(values)) for name, n in zip(names, counts, strict=True)]


def _figure_9(settings: Settings) -> Outcome:
    iterations = settings.pick(_ITERATIONS, 500)
    drawn = [
        TAIL.seconds(number // _RANKS, number % _RANKS, _RANKS, settings.seed)
        for number in range(iterations)
    ]
    found = {"heavy tail of wagma-fig10": ("s", drawn)}
    if importlib.util.find_spec("gymnasium"):
        found["CartPole, four episodes"] = ("steps", _played(settings))
    rows = [_distribution(source, *values) for source, values in found.items()]
    middle, longest = median(drawn), max(drawn)
    wide = longest / middle > _FAR
    others = "".join(f"; {row['source']}: {row['longest over median']:.1f} x" for row in rows[1:])
    drawn_so = "drawn to be so"  # also the reason why few draws may not be
    return Outcome(
        rows,
        [
            _RANGE.beside(f"{min(drawn):.1f} to {longest:.1f} s", wide, drawn_so),
            _MEDIAN.beside(f"{middle:.2f} s", middle < _MEDIAN.numbers[0], drawn_so),
            _WIDE.beside(f"{longest / middle:.0f} x{others}", wide, drawn_so),
        ],
        {"iterations": iterations},
        "Habitat is out of reach: the heavy tail is a lognormal made of the three figures that the text "
        "gives, so these agree by construction; CartPole (with Gymnasium) is played, before learning.",
        [
            Panel(
                "time of an iteration",
                "times the median",
                "% of iterations",
                {source: _histogram(values) for source, (_, values) in found.items()},
                kind="bars",
            )
        ],
    )


FIGURE_6 = Artifact(
    "wagma-fig6",
    "WAGMA",
    "run times of batches of sentences",
    "even in length buckets batches differ much in run time",
    0.3,
    _figure_6,
)
FIGURE_9 = Artifact(
    "wagma-fig9",
    "WAGMA",
    "run times of collecting experience",
    "run times are very widely distributed, mostly short",
    0.2,
    _figure_9,
)
