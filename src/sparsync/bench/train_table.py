"""Trainings side by side, as a table: what was gained first, then what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

from rich import box
from rich.table import Table

from sparsync.bench.report import TrainResult, format_bytes, format_ratio
from sparsync.bench.target import smoothed
from sparsync.workloads import workload_class

__all__ = ["comparison"]

_LONG_NAME = 12  # characters; with longer ones and an accuracy 80 columns do not hold two losses


def comparison(
    results: Sequence[TrainResult], *, columns: int = 2, radius: int = 5, link: float = 1e9
) -> Table:
    """Compare runs: time to dense's loss, bytes, loss at equal steps, held-out loss, time.

    Args:
        results: of the same settings; "dense" among them is what others are compared with.
        columns: steps at which the loss is shown, evenly spread, the last one included; 1 where
            there is an accuracy and a name is long.
        radius: each shown loss is averaged over so many steps before and behind it, fewer in a
            run of less than 20 times as many.
        link: bits per second, for what sending alone would take on a network.
    """
    baseline = next((r for r in results if r.algorithm == "dense"), None)
    accuracies = ["right\n%"] if any(r.accuracy is not None for r in results) else []
    wide = bool(accuracies) and max(len(r.algorithm) for r in results) > _LONG_NAME
    shown = _shown_steps(results, 1 if wide else columns)
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 0),  # of 80 columns none is to spare
        caption=_caption(results, link),
        caption_justify="left",
    )
    table.add_column("algorithm", no_wrap=True)
    ratios = ["\nto loss", "bytes/\nstep", "s to\nloss"] if baseline else []
    losses = [f"loss\n@ {step}" for step in shown]
    rest = ("sent per\nstep", "ms per\nstep", "rest\nms")
    for heading in (*ratios, *losses, "eval\nloss", *accuracies, *rest):
        table.add_column(heading, justify="right", no_wrap=True, vertical="bottom")
    for result in results:
        table.add_row(
            result.algorithm,
            *_ratio_cells(result, baseline),
            *_loss_cells(result, shown, radius),
            f"{result.eval_loss:.3f}",
            *([] if result.accuracy is None else [f"{100 * result.accuracy:.1f}"]),
            format_bytes(_bytes_per_step(result)),
            f"{1e3 * result.seconds_per_step_median:.0f}",
            f"{1e3 * result.seconds_rest_median:.0f}",
        )
    return table


def _shown_steps(results: Sequence[TrainResult], columns: int) -> list[int]:
    """Spread over the steps that all runs made: "dense" may have ended at the target."""
    common = min(result.steps for result in results)
    return sorted({max(1, common * (i + 1) // columns) for i in range(columns)})


def _ratio_cells(result: TrainResult, baseline: TrainResult | None) -> list[str]:
    """Write how much sooner than dense the target was reached, and how many fewer bytes were sent."""
    if baseline is None:
        return []
    sent, seconds = _bytes_per_step(result), result.seconds_to_target
    reduced = _bytes_per_step(baseline) / sent if sent else None
    return [
        _times(result.speedup_to_target),
        _times(reduced),
        "never" if seconds is None else f"{seconds:.1f}",
    ]


def _bytes_per_step(result: TrainResult) -> float:
    """Return the median: first steps may be dense (a warm-up; PowerSGD's first two).

    Of schemes of averaging the mean: most of their steps may send nothing.
    """
    return median(result.bytes_sent) if result.options is None else fmean(result.bytes_sent)


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{format_ratio(ratio)} x"


def _loss_cells(result: TrainResult, shown: Sequence[int], radius: int) -> list[str]:
    curve = smoothed(result.loss, min(radius, result.steps // 20))
    return [f"{curve[step - 1]:.3f}" for step in shown]


def _caption(results: Sequence[TrainResult], link: float) -> str:
    """Say what was run, what the columns mean, what the bytes take, whether the replicas agree."""
    first = results[0]
    densities = sorted({result.density for result in results if result.density < 1})
    parts = [
        f"{first.workload}: {first.parameters:,} parameters",
        f"{first.ranks} ranks",
        f"{first.optimizer} lr {first.lr:g}",
        *([] if first.clip is None else [f"clip {first.clip:g}"]),
        *(f"density {density:g}" for density in densities),
    ]
    lines = [", ".join(parts), *_target_lines(results)]
    target = workload_class(first.workload).target
    lines.append(
        f"loss in nats per {target}; sent: by the rank that sends most, in the median step"
    )
    for metric in first.metrics:
        figures = [f"{r.metrics[metric]:.3g} ({r.algorithm})" for r in results]
        lines.append(f"held out, {metric}: {', '.join(figures)}")
    if any(r.options is not None for r in results):
        lines.append("sent by schemes that average models: the mean over steps, the end included")
    if any(r.bytes_counted == "formula" for r in results if r.algorithm != "dense"):
        lines.append("sent by PyTorch's hooks: 2 (P - 1) / P of what they allreduce")
    if first.delay != "none":
        lines.append(f"delay {first.delay}: before steps, in all times but the computation's")
    computation = 1e3 * first.seconds_computation_median
    lines.append(
        f"computation: {computation:.0f} ms per step on all ranks at once; rest: the others"
    )
    if first.ranks > 1:
        rate = first.lab or link
        times = [f"{1e3 * 8 * _bytes_per_step(r) / rate:.3g} ms ({r.algorithm})" for r in results]
        place = "of the lab" if first.lab else "alone"
        lines.append(f"sending {place} at {rate / 1e9:g} Gbit/s, per step: {', '.join(times)}")
    wrong = [r.algorithm for r in results if not r.replicas_equal]
    if wrong:
        lines.append(f"REPLICAS DIFFER at the end: {', '.join(wrong)}")
    else:
        lines.append("parameters at the end: bit-identical on all ranks")
    return "\n".join(lines)


def _target_lines(results: Sequence[TrainResult]) -> list[str]:
    first = results[0]
    if first.target_loss is None:
        return []
    return [
        f"to loss: dense's seconds to {first.target_loss:.3f} (its loss at step {first.target_step}, "
        f"mean of {first.target_window}) over a run's own"
    ]
