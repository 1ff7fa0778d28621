"""Reports of a script in the lab: bytes by rank, dense against attached, bytes over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group
from rich.text import Text

from sparsync.cli.lab_script.ranks import ScriptResult
from sparsync.cli.output import Columns, drawing, format_ratio
from sparsync.cost.wording import format_bytes, format_seconds

__all__ = ["comparison", "per_rank", "write_plot"]

_SAME = 0.95  # if more than this fraction of dense's bytes is sent, nothing was compressed
_STYLES = (("black", "-"), ("#d95f02", "--"))


def per_rank(result: ScriptResult) -> Group:
    """Describe one run: the seconds, and every rank's bytes as counted by the kernel."""
    rows = [
        {
            "rank": f"{rank}",
            "exit code": f"{code}",
            "bytes out": format_bytes(sent),
            "bytes in": format_bytes(received),
        }
        for rank, (code, sent, received) in enumerate(
            zip(result.exit_codes, result.bytes_sent, result.bytes_received, strict=True)
        )
    ]
    return Group(Columns.of(rows), Text("\n" + "\n".join([*_caption(result), *_silent(result)])))


def comparison(dense: ScriptResult, attached: ScriptResult) -> Group:
    """Compare the same script with plain DDP and with sparsync."""
    rows = []
    for result in (dense, attached):
        rows.append(
            {
                "run": result.run,
                "seconds": f"{result.seconds:.1f}",
                "speed-up": _times(dense.seconds, result.seconds),
                "bytes out": format_bytes(result.sent_most),
                "bytes in": format_bytes(result.received_most),
                "fewer bytes": _times(dense.sent_most, result.sent_most),
                "start-up": format_seconds(result.seconds_start),
            }
        )
    lines = [*_caption(dense), "bytes: of the rank that sent, or received, most"]
    lines += _silent(dense) or _same(dense, attached)
    return Group(Columns.of(rows), Text("\n" + "\n".join(lines)))


def _times(more: float, less: float) -> str:
    return f"{format_ratio(more / less)} x" if less > 0 else "-"


def _caption(result: ScriptResult) -> list[str]:
    start = f"{format_seconds(result.seconds_start)} of start-up not counted"
    return [
        f"{result.ranks} ranks on links of {result.links}",
        f"seconds: {result.seconds:.1f}, from the moment all ranks had met until the end ({start})",
        "bytes: on the rank's link, with all headers, as the kernel counts",
    ]


def _silent(result: ScriptResult) -> list[str]:
    """Return an explanation if links carried no data."""
    if all(result.bytes_sent):
        return []
    silent = [str(rank) for rank, sent in enumerate(result.bytes_sent) if not sent]
    return [
        f"nothing was sent by rank {', '.join(silent)}: the script must join the others by RANK, "
        "WORLD_SIZE and MASTER_ADDR, as torch.distributed.init_process_group() does, not by localhost"
    ]


def _same(dense: ScriptResult, attached: ScriptResult) -> list[str]:
    """Return an explanation if the comparison shows no difference."""
    if attached.sent_most < _SAME * dense.sent_most:
        return []
    return ["both sent the same: does the script call sparsync.attach?"]


def write_plot(results: Sequence[ScriptResult], path: Path) -> None:
    """Plot the bytes that a rank has sent against the seconds since all ranks have sent data.

    The picture is readable in grey, because each run has its own line style.  A dot marks the end of a
    run.
    """
    from matplotlib.ticker import EngFormatter

    first = results[0]
    with drawing(path, (6.4, 4.2), f"{first.ranks} ranks, links of {first.links}") as axis:
        for result, (colour, style) in zip(results, _STYLES, strict=False):
            end = result.seconds_start + result.seconds
            points = [
                (seconds - result.seconds_start, sent)
                for seconds, sent in zip(
                    result.sampled_seconds, result.sampled_bytes_sent, strict=True
                )
                if result.seconds_start <= seconds <= end and sent
            ]
            x, y = [seconds for seconds, _ in points], [sent for _, sent in points]
            label = result.run
            if result is not first:
                label += f": {_times(first.seconds, result.seconds)} as fast"
                label += f", {_times(first.sent_most, result.sent_most)} fewer bytes"
            axis.plot(x, y, linestyle=style, color=colour, linewidth=1.8, label=label)
            if points:
                axis.plot(x[-1], y[-1], "o", color=colour, markersize=6)
        axis.set_xlabel("seconds since all ranks had met")
        axis.set_ylabel("sent by the rank that sent most (bytes)")
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(EngFormatter(unit="B"))
        axis.grid(alpha=0.3, linewidth=0.6)
        axis.legend(frameon=False)
