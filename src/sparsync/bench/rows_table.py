"""The rows of ``sparsync bench`` as tables: ratios first, then seconds, then volume."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from sparsync.bench.report import format_bytes, format_ratio
from sparsync.bench.rows import Row, ratios
from sparsync.planning import costs
from sparsync.transports.ledger import STAGES

__all__ = ["tables"]

_MS = 1e3


def tables(rows: Sequence[Row]) -> Group:
    """Show the rows of one bench, three tables per size and density, and what the columns mean."""
    groups: dict[tuple[int, float], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.size, row.density), []).append(row)
    makers = (_times, _stages, _volumes)
    shown = [make(group) for group in groups.values() for make in makers]
    return Group(*shown, Text(_legend(rows)))


def _times(rows: Sequence[Row]) -> Table:
    """Say how fast: over dense, over the wire, over an addition; then in milliseconds."""
    real = rows[0].transport != "sim"
    columns = ["speed-up\nwhole", *["\nexchange"] * real]
    columns += ["exchange\n/ wire"] * (rows[0].lab is not None) + ["local\n/ add_"] * real
    columns += ["whole\nms", "\nspread", *["exchange\nms", "add_\nms"] * real]
    shown = _empty(_title(rows[0]), columns)
    for row in rows:
        compared = ratios(row, rows)
        cells = [format_ratio(compared.speedup)]
        if real:
            cells.append(format_ratio(compared.speedup_exchange))
        if row.lab is not None:
            cells.append(format_ratio(compared.exchange_over_wire))
        if real:
            cells.append(format_ratio(compared.local_over_add))
        cells += [_ms(row.seconds_median), _spread(row)]
        if real:
            cells += [_ms(row.seconds_exchange_median), _ms(row.seconds_add_median)]
        shown.add_row(row.collective, *cells)
    return shown


def _stages(rows: Sequence[Row]) -> Table:
    """Say where a step goes (RedSync, Figure 10): mean milliseconds of rank 0."""
    shown = _empty(None, [f"{stage}\nms" for stage in STAGES])
    for row in rows:
        shown.add_row(row.collective, *(_ms(row.seconds_stages[stage]) for stage in STAGES))
    return shown


def _volumes(rows: Sequence[Row]) -> Table:
    """Say how much, against what is claimed; and whether it is right."""
    counted = rows[0].lab is not None
    columns = ["words\nper k", "\nbound", "\nvolume"] + ["kernel\ncounted"] * counted
    shown = _empty(None, [*columns, "entries\nper k", "\nlaw", "\nwrong", "verified\nin full"])
    for row in rows:
        bound = row.bound_words_per_k
        over = ">" if bound is not None and row.words_per_k_max > bound else ""
        cells = [
            f"{over}{row.words_per_k_max:.4g}",
            "-" if bound is None else f"{bound:.4g}",
            format_bytes(max(row.bytes_sent_max, row.bytes_received_max)),
        ]
        if counted:
            cells.append(
                "-" if row.bytes_kernel_max is None else format_bytes(row.bytes_kernel_max)
            )
        shown.add_row(
            row.collective,
            *cells,
            f"{row.entries_min:.3g}",
            "-" if row.law_error_max is None else f"{row.law_error_max:.2g}",
            f"{'' if row.correct else '!'}{row.wrong}",
            f"{row.steps_verified} / {row.steps_total}",
        )
    return shown


def _empty(title: str | None, columns: Sequence[str]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    shown.padding = (0, 0, 0, 0)  # of 80 columns none is to spare
    shown.add_column("\ncollective", no_wrap=True)
    for heading in columns:
        shown.add_column(heading, justify="right", no_wrap=True)
    return shown


def _title(row: Row) -> str:
    return f"n = {row.size:,}, density {row.density:g}: k = {row.k:,}"


def _ms(seconds: float | None) -> str:
    return format_ratio(None if seconds is None else _MS * seconds)


def _spread(row: Row) -> str:
    """Say how far apart the quartiles of the whole step are, relative to its median."""
    if not row.seconds_median:
        return "-"
    return f"{(row.seconds_75 - row.seconds_25) / row.seconds_median:.0%}"


def _legend(rows: Sequence[Row]) -> str:
    first = rows[0]
    transports = " and ".join(sorted({row.transport for row in rows}))
    clock = "virtual clock: communication alone" if first.transport == "sim" else "wall clock"
    steps = sorted({row.steps for row in rows})
    timed = f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
    lower = costs.lower_bound_words(1, first.ranks)
    lines = [
        f"{first.ranks} ranks, transport {transports} ({clock}), input {first.input}, "
        f"medians of {timed} steps; spread: 75 % - 25 % quartile over the median",
        "speed-up: over dense: between processes gloo's native allreduce, over MPI its own",
    ]
    if first.transport != "sim":
        lines.append(
            "exchange: selected -> total; local: the rest; add_: residual.add_(gradient) on all "
            "ranks at once"
        )
    if first.lab is not None:
        lines.append(
            f"wire: what a link of {first.lab / 1e6:g} Mbit/s takes for the volume, less its burst; "
            "kernel counted: with the headers of TCP, IP and Ethernet"
        )
    return "\n".join(
        [
            *lines,
            "volume: max(sent, received) of any rank on any step; > above the bound, which is claimed "
            "for k / P >= 256",
            f"words per k: of 4 bytes; at least {lower:.4g} for k entries of two words (Theorem 3.1)",
            "law: |sum accumulated - total - sum residual| / tolerance; ! incorrect; where a step was "
            "not verified in full, all ranks' totals were compared",
        ]
    )
