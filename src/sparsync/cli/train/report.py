"""Compare training runs: a closing table, and a plot of the loss over seconds, bytes and steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, cycle
from pathlib import Path
from statistics import fmean, median

from rich.console import Group
from rich.text import Text

from sparsync.cli.output import Columns, drawing, format_ratio
from sparsync.cli.train.results import TrainResult, smoothed
from sparsync.cli.workloads import workload_class
from sparsync.cost.wording import format_bytes, format_seconds
from sparsync.presets import PRESETS

__all__ = ["comparison", "write_plot"]

_STYLES = (
    ("black", "-"),
    ("#d95f02", "--"),
    ("#1b6ca8", "-."),
    ("#7a7a7a", ":"),
    ("#1a7a4c", (0, (6, 1, 1, 1, 1, 1))),
)


# ---- the table --------------------------------------------------------------------------------------


def comparison(results: Sequence[TrainResult]) -> Group:
    """Compare runs with the same settings: the time to reach dense's loss, then figures that explain it.

    The training loss is averaged over up to five steps before and after each step, fewer in a short
    run.
    """
    goal = results[0].target_loss
    rows = []
    for result in results:
        seconds = result.seconds_to_target
        reached = "never" if seconds is None else format_seconds(seconds)
        # use the median, because the first steps may be dense (a warm-up; PowerSGD's first two); for
        # averaging schemes, use the mean, because most of their steps may send nothing
        sent = median(result.bytes_sent) if result.options is None else fmean(result.bytes_sent)
        accuracy = result.accuracy
        rows.append(
            {
                "algorithm": result.algorithm,
                f"time to loss {goal or 0:.2f}": "-" if goal is None else reached,
                "speed-up": _times(result.speedup_to_target),
                "steps": f"{result.steps}",
                # the mean, because if a scheme rarely waits, its median step contains no wait
                "time per step": format_seconds(result.seconds_per_step_mean),
                "sent per step": format_bytes(sent),
                "bytes out": f"{result.sent_per_parameter_and_step:.3g}",
                "bytes in": f"{result.received_per_parameter_and_step:.3g}",
                "training loss": f"{smoothed(result.loss, min(5, result.steps // 20))[-1]:.3f}",
                "held-out loss": f"{result.eval_loss:.3f}",
                "held-out accuracy": "-" if accuracy is None else f"{100 * accuracy:.1f} %",
            }
        )
    return Group(Columns.of(rows), Text("\n" + _caption(results)))


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{format_ratio(ratio)} x"


def _caption(results: Sequence[TrainResult]) -> str:
    """Describe the runs, how bytes and times are counted, and whether the replicas agree."""
    first = results[0]
    densities = sorted({result.density for result in results if result.density < 1})
    network = f" on links of {first.links}" if first.links else " on this machine"
    target = workload_class(first.workload).target
    lines = [
        f"{first.ranks} ranks{network}, {first.parameters:,} parameters"
        + "".join(f", density {density:g}" for density in densities),
        f"workload {first.workload}, {first.optimizer} lr {first.lr:g}"
        + ("" if first.lr_schedule == "constant" else f" ({first.lr_schedule})")
        + (f", momentum {first.momentum:g}" if first.optimizer == "sgd" and first.momentum else "")
        + ("" if first.clip is None else f", clip {first.clip:g}")
        + f", loss in nats per {target}",
    ]
    if first.target_loss is not None:
        lines.append(
            f"loss {first.target_loss:.2f}: the training loss of dense at step {first.target_step}"
            + (f" (mean of {first.target_window} steps)" if first.target_window != 1 else "")
        )
    computation = format_seconds(first.seconds_computation_median)
    lines.append(f"a step without any exchange, measured before: {computation}")
    for metric in first.metrics:
        figures = [f"{r.metrics[metric]:.3g} ({r.algorithm})" for r in results]
        lines.append(f"held out, {metric}: {', '.join(figures)}")
    medians = [f"{format_seconds(r.seconds_per_step_median)} ({r.algorithm})" for r in results]
    lines.append(f"time per step: the mean over all steps; the median step: {', '.join(medians)}")
    lines.append("bytes out, in: per parameter and step, the mean over all steps")
    for result in results:
        if result.dense_share > 0.5:
            share = f"{result.algorithm}: {100 * result.dense_share:.0f} % of its bytes"
            lines.append(f"{share} are of layers that it leaves uncompressed{_rule(result)}")
    for result in results:
        if result.lr_divisor > 1:
            divided = f"{result.lr:g} / {result.lr_divisor}"
            lines.append(
                f"lr of {result.algorithm}: {divided}, because it sums gradients over ranks"
            )
    if corrected := ", ".join(r.algorithm for r in results if r.momentum_corrected):
        lines.append(f"momentum before the exchange, on each rank's own gradient: {corrected}")
    if any(r.options is not None for r in results):
        lines.append("sent by schemes that average models: the mean over steps, the end included")
    for result in results:
        if result.stale_share is not None and result.seconds_waited is not None:
            waited = format_seconds(result.seconds_waited / result.steps)
            lines.append(
                f"{result.algorithm}: a rank waits {waited} per step in averages; "
                f"{100 * result.stale_share:.0f} % of the models in them are stale"
                + (f", by up to {n} steps" if (n := result.largest_staleness) else "")
            )
    if signs := ", ".join(r.algorithm for r in results if (r.options or {}).get("sign")):
        lines.append(f"optimizer of {signs}: sgd without momentum, whose rate is a step's length")
    if any(r.bytes_counted == "formula" for r in results if r.algorithm != "dense"):
        lines.append("sent by PyTorch's hooks: 2 (P - 1) / P of the bytes that they allreduce")
    if first.delay != "none":
        lines.append(f"delay {first.delay}: before steps, in all times but the computation's")
    wrong = ", ".join(result.algorithm for result in results if not result.replicas_equal)
    equal = "parameters at the end: bit-identical on all ranks"
    lines.append(f"REPLICAS DIFFER at the end: {wrong}" if wrong else equal)
    return "\n".join(lines)


def _rule(result: TrainResult) -> str:
    """Name the option that decides which layers are too small to compress, if there is one."""
    name, _, _ = result.algorithm.partition(":")  # strip the options that follow the name
    small = name in PRESETS and "compress_thd" in PRESETS[name].options
    return ", being small (compress_thd)" if small else ""


# ---- the picture ------------------------------------------------------------------------------------


def write_plot(results: Sequence[TrainResult], path: Path) -> None:
    """Plot the loss against seconds, against bytes if any were sent, and against steps.

    The picture is readable in grey, because each algorithm has its own line style.  Thin lines show
    single steps, and thick lines show averages over a twentieth of the run.  A dot marks the step at
    which a run has reached the target.  Values above the initial loss are cut off.
    """
    from matplotlib.ticker import EngFormatter

    first = results[0]
    sent_anything = any(result.bytes_sent_per_step_max for result in results)
    names = ["seconds", *["bytes"] * sent_anything, "steps"]
    title = f"{first.ranks} ranks, {first.parameters:,} parameters"
    if first.target_loss is not None:
        title += f"; dots: the step that reached loss {first.target_loss:.2f}"
    with drawing(path, (4.4 * len(names), 4.2), title, len(names)) as panels:
        axes = dict(zip(names, panels, strict=True))
        for result, (colour, style) in zip(results, cycle(_STYLES), strict=False):
            each: dict[str, Sequence[float]] = {
                "seconds": result.seconds,
                "bytes": result.bytes_sent,
                "steps": [1] * result.steps,
            }
            curve, reached = smoothed(result.loss, result.steps // 40), result.steps_to_target
            label = result.algorithm
            if result.speedup_to_target is not None and label != "dense":
                label += f": {_times(result.speedup_to_target)} as fast to the loss"
            for panel, axis in axes.items():
                x = list(accumulate(each[panel]))
                axis.plot(x, result.loss, color=colour, linewidth=0.6, alpha=0.25)
                axis.plot(x, curve, linestyle=style, color=colour, linewidth=1.8, label=label)
                if reached is not None:
                    axis.plot(x[reached - 1], curve[reached - 1], "o", color=colour, markersize=6)
        clock = f"links of {first.links}" if first.links else "this machine, no network"
        axes["seconds"].set_ylim(top=1.05 * max(result.loss[0] for result in results))
        axes["seconds"].set_xlabel(f"seconds ({clock})")
        axes["seconds"].set_ylabel(
            f"training loss (nats per {workload_class(first.workload).target})"
        )
        axes["seconds"].legend(frameon=False)
        axes["steps"].set_xlabel("steps")
        if sent_anything:
            axes["bytes"].set_xscale("log")
            axes["bytes"].set_xlabel("sent by each rank since the start (bytes)")
            axes["bytes"].xaxis.set_major_formatter(EngFormatter(unit="B"))
        for axis in axes.values():
            if first.target_loss is not None:
                axis.axhline(first.target_loss, color="black", linewidth=0.6, linestyle=(0, (1, 3)))
            axis.grid(alpha=0.3, linewidth=0.6)
