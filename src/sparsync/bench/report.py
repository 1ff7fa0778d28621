"""What a training run measured, and how it is shown: JSON, a table, a picture."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean

from rich import box
from rich.table import Table

from sparsync.errors import ConfigurationError

__all__ = [
    "TrainResult",
    "check_plot_path",
    "check_writable",
    "comparison",
    "format_bytes",
    "smoothed",
    "write_json",
    "write_plot",
]

_PICTURE_FORMATS = (".png", ".pdf", ".svg")


@dataclass(frozen=True)
class TrainResult:
    """One training run; its fields are the keys of the JSON.

    Attributes:
        algorithm: the preset's name; "dense" is plain DDP.
        ranks: world size P.
        steps: optimizer steps.
        density: k / n asked for; 1 for "dense".
        parameters: number of trained elements n.
        optimizer: "sgd" or "adam".
        lr: learning rate after its warm-up.
        loss: training loss in nats per byte, mean over ranks, per step.
        eval_loss: nats per byte on held-out text after the last step.
        seconds_total: all steps of the slowest rank, evaluation apart.
        seconds_per_step_median: median over steps of the slowest rank's step.
        bytes_sent_per_step_max: the most that any rank sent in any step, headers included.
        replicas_equal: whether all ranks ended with bit-identical parameters.
        bytes_sent: the most that any rank sent, per step.
        seed: of the initial weights and of the data.
        batch_size: windows per rank and step.
        context: bytes per window.
        warmup_steps: first steps that ran dense.
    """

    algorithm: str
    ranks: int
    steps: int
    density: float
    parameters: int
    optimizer: str
    lr: float
    loss: list[float]
    eval_loss: float
    seconds_total: float
    seconds_per_step_median: float
    bytes_sent_per_step_max: int
    replicas_equal: bool
    bytes_sent: list[int]
    seed: int
    batch_size: int
    context: int
    warmup_steps: int


def format_bytes(nbytes: float) -> str:
    """Write a number of bytes with a decimal unit and three digits.

    Example:
        >>> format_bytes(0), format_bytes(238_291), format_bytes(7_943_040)
        ('0 B', '238 kB', '7.94 MB')
    """
    exponent = 0
    while nbytes >= 999.5 and exponent < 4:
        nbytes, exponent = nbytes / 1000, exponent + 1
    return f"{nbytes:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[exponent]}"


def smoothed(loss: Sequence[float], radius: int) -> list[float]:
    """Average each value with up to ``radius`` before and behind it; the first value stays itself.

    Example:
        >>> smoothed([8.0, 2.0, 2.0, 0.0], radius=1)
        [8.0, 4.0, 1.3333333333333333, 1.0]
    """
    reach = [min(i, radius) for i in range(len(loss))]  # as far back as forth, from the first on
    return [fmean(loss[i - r : i + r + 1]) for i, r in enumerate(reach)]


# ---- JSON ----------------------------------------------------------------------------------------


def check_writable(path: Path) -> None:
    """Make the folder of ``path`` and see whether the file can be written, before work begins.

    Raises:
        ConfigurationError: it cannot.
    """
    existed = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise ConfigurationError(
            f"cannot write to '{path}' ({error.strerror}); name a file in a writable folder"
        ) from error


def write_json(results: Sequence[TrainResult], path: Path) -> None:
    """Write one object, or a list where there are several; NaN and Inf become null."""
    entries = [
        {key: _without_nonfinite(value) for key, value in asdict(result).items()}
        for result in results
    ]
    written = json.dumps(entries if len(entries) > 1 else entries[0], indent=1, allow_nan=False)
    path.write_text(written + "\n", encoding="utf-8")


def _without_nonfinite(value: object) -> object:
    if isinstance(value, list):
        return [_without_nonfinite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- the table -----------------------------------------------------------------------------------


def comparison(
    results: Sequence[TrainResult], *, columns: int = 3, radius: int = 5, link: float = 1e9
) -> Table:
    """Compare runs: loss at equal steps, held-out loss, bytes sent, time.

    Args:
        results: of the same number of steps; "dense" among them is what others are compared with.
        columns: steps at which the loss is shown, evenly spread, the last one included.
        radius: each shown loss is averaged over so many steps before and behind it, fewer in a
            run of less than 20 times as many.
        link: bits per second, for what sending alone would take on a network.
    """
    first = results[0]
    baseline = next((r for r in results if r.algorithm == "dense"), None)
    shown = sorted({max(1, first.steps * (i + 1) // columns) for i in range(columns)})
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption=_caption(results, link),
        caption_justify="left",
    )
    table.add_column("algorithm", no_wrap=True)
    losses = [f"loss\n@ {step}" for step in shown]
    rest = ("eval\nloss", "sent per\nrank, step", "reduced", "ms per\nstep", "total\ns")
    for heading in (*losses, *rest):
        table.add_column(heading, justify="right", no_wrap=True, vertical="bottom")
    for result in results:
        curve = smoothed(result.loss, min(radius, result.steps // 20))
        table.add_row(
            result.algorithm,
            *(f"{curve[step - 1]:.3f}" for step in shown),
            f"{result.eval_loss:.3f}",
            format_bytes(result.bytes_sent_per_step_max),
            _reduction(result, baseline),
            f"{1e3 * result.seconds_per_step_median:.0f}",
            f"{result.seconds_total:.1f}",
        )
    return table


def _reduction(result: TrainResult, baseline: TrainResult | None) -> str:
    if baseline is None or not result.bytes_sent_per_step_max:
        return "-"
    return f"{baseline.bytes_sent_per_step_max / result.bytes_sent_per_step_max:.1f} x"


def _caption(results: Sequence[TrainResult], link: float) -> str:
    """Say what was run, what the bytes would take on a network, and whether the replicas agree."""
    first = results[0]
    densities = sorted({result.density for result in results if result.density < 1})
    parts = [
        f"{first.parameters:,} parameters",
        f"{first.ranks} ranks",
        f"{first.optimizer} lr {first.lr:g}",
        *(f"density {density:g}" for density in densities),
    ]
    lines = [", ".join(parts), "loss in nats per byte; sent: the most of any rank in any step"]
    if first.ranks > 1:
        times = [
            f"{1e3 * 8 * r.bytes_sent_per_step_max / link:.3g} ms ({r.algorithm})" for r in results
        ]
        lines.append(f"sending alone at {link / 1e9:g} Gbit/s, per step: {', '.join(times)}")
    wrong = [r.algorithm for r in results if not r.replicas_equal]
    if wrong:
        lines.append(f"REPLICAS DIFFER at the end: {', '.join(wrong)}")
    else:
        lines.append("parameters at the end: bit-identical on all ranks")
    return "\n".join(lines)


# ---- the picture ---------------------------------------------------------------------------------


def check_plot_path(path: Path) -> None:
    """Refuse a picture that could not be drawn or written, before work begins."""
    if path.suffix not in _PICTURE_FORMATS:
        raise ConfigurationError(
            f"cannot draw '{path}'; give a name that ends in {', '.join(_PICTURE_FORMATS)}"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError("--plot needs matplotlib: pip install sparsync[report]")
    check_writable(path)


def write_plot(results: Sequence[TrainResult], path: Path) -> None:
    """Draw the loss over steps and, where anything was sent, over bytes.

    Readable in grey: every algorithm has a line style of its own.  Thin lines are single steps, thick
    ones averages over a twentieth of the run.  What lies above the loss at the start is cut off.
    """
    from matplotlib.figure import Figure  # the object interface: no display, no global state
    from matplotlib.ticker import EngFormatter

    styles = (("black", "-"), ("#d95f02", "--"), ("#1b6ca8", "-."), ("#7a7a7a", ":"))
    sent_anything = any(result.bytes_sent_per_step_max for result in results)
    figure = Figure(figsize=(10, 4.2) if sent_anything else (5.4, 4.2), layout="constrained")
    axes = figure.subplots(1, 2 if sent_anything else 1, sharey=True, squeeze=False)[0]
    for number, result in enumerate(results):
        colour, style = styles[number % len(styles)]
        steps: list[float] = list(range(1, result.steps + 1))
        sent = [float(total) for total in accumulate(result.bytes_sent)]
        curve = smoothed(result.loss, result.steps // 40)
        for axis, x in zip(axes, (steps, sent), strict=False):
            axis.plot(x, result.loss, color=colour, linewidth=0.6, alpha=0.25)
            axis.plot(x, curve, style, color=colour, linewidth=1.8, label=result.algorithm)
    axes[0].set_ylim(top=1.05 * max(result.loss[0] for result in results))
    axes[0].set_xlabel("step")
    axes[0].set_ylabel("training loss (nats per byte)")
    axes[0].legend(frameon=False)
    if sent_anything:
        axes[1].set_xscale("log")
        axes[1].set_xlabel("sent per rank since the start (bytes)")
        axes[1].xaxis.set_major_formatter(EngFormatter(unit="B"))
    for axis in axes:
        axis.grid(alpha=0.3, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    first = results[0]
    figure.suptitle(
        f"Byte-level transformer, {first.parameters / 1e6:.2f} M parameters, {first.ranks} ranks",
        fontsize="medium",
    )
    figure.savefig(path, dpi=150)
