"""Results of ``sparsync linear``: their fields, which are also the JSON keys, and the tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from rich.console import Group
from rich.text import Text

from sparsync.cli.output import Columns, format_ratio
from sparsync.cost.wording import format_bytes, format_seconds

__all__ = ["LinearResult", "tables", "with_ratios"]


@dataclass(frozen=True)
class LinearResult:
    """One training run; its fields are the JSON keys.  Fields that do not apply are None.

    Lists have one value per epoch unless stated otherwise.  Bytes are from the ledger of the rank that
    sends or receives most.  Seconds are measured on the slowest rank and exclude evaluations.
    """

    exchange: str
    solver: str
    model: str
    data: str
    ranks: int
    transport: str
    lab: float | None  # lowest rate of the shaped links in bits per second
    rows: int  # training rows over all ranks
    dimensions: int
    steps: int  # steps per epoch
    staleness: int
    # mean loss plus penalties over all ranks' rows, before the first epoch and after each epoch
    objective: list[float]
    accuracy: list[float]  # at the same times, on the rows that ``accuracy_on`` names
    accuracy_on: str  # "held-out rows" or "training rows"
    seconds: list[float]  # computation and exchanges together
    # seconds of exchanges, from the time when all ranks are ready until the last one has its result; if
    # they are asynchronous, only the time that a rank waits for results that it needs
    seconds_communication: list[float]
    seconds_updates: list[float]  # the part spent on updates, i.e. not on scd's derivatives
    bytes_sent: list[int]
    bytes_received: list[int]
    messages_sent: list[int]
    bytes_updates: list[int]
    replicas_equal: bool  # whether all ranks ended with bit-identical weights
    links: str | None = None  # the lab's links, as ``parse_links`` reads them
    # the value of "dense" / the value of this result; the other ratios are formed in the same way
    speedup_communication: float | None = None
    speedup_updates: float | None = None
    speedup: float | None = None
    bytes_ratio: float | None = None
    # largest relative difference from the loss of "dense"
    objective_difference: float | None = None


def with_ratios(results: Sequence[LinearResult]) -> list[LinearResult]:
    """Compare all results with dense, if it is among them."""
    dense = next((result for result in results if result.exchange == "dense"), None)
    if dense is None:
        return list(results)
    return [
        replace(
            result,
            speedup_communication=_ratio(dense.seconds_communication, result.seconds_communication),
            speedup_updates=_ratio(dense.seconds_updates, result.seconds_updates),
            speedup=_ratio(dense.seconds, result.seconds),
            bytes_ratio=_ratio(dense.bytes_sent, result.bytes_sent),
            objective_difference=max(
                (abs(a - b) / abs(b) if b else abs(a))
                for a, b in zip(result.objective, dense.objective, strict=True)
            ),
        )
        for result in results
    ]


def _ratio(dense: Sequence[float], own: Sequence[float]) -> float | None:
    return sum(dense) / sum(own) if sum(own) else None


def _percent(share: float) -> str:
    """Write a percentage, or "-" if no row is held out (NaN)."""
    return "-" if math.isnan(share) else f"{100 * share:.2f} %"


def tables(results: Sequence[LinearResult]) -> Group:
    """Show the ratios to dense, then seconds and bytes per epoch, then the losses."""
    scd = results[0].solver == "scd"
    rows = [
        {
            "exchange": result.exchange,
            "fewer bytes": format_ratio(result.bytes_ratio),
            "faster exchange": format_ratio(result.speedup_communication),
            "faster updates": format_ratio(result.speedup_updates) if scd else "-",
            "speed-up": format_ratio(result.speedup),
            "time per epoch": format_seconds(fmean(result.seconds)),
            "of which exchange": format_seconds(fmean(result.seconds_communication)),
            "sent per epoch": format_bytes(fmean(result.bytes_sent)),
            "loss": f"{result.objective[-1]:.4f}",
            "accuracy": _percent(result.accuracy[-1]),
        }
        for result in results
    ]
    return Group(Columns.of(rows), Text("\n" + _caption(results) + "\n"), _losses(results))


def _losses(results: Sequence[LinearResult], columns: int = 6) -> Columns:
    """Show the loss before the first epoch, after the last one, and some losses in between."""
    last = len(results[0].objective) - 1
    shown = sorted({last * column // (columns - 1) for column in range(columns)})
    rows = [[r.exchange, *(f"{r.objective[epoch]:.7f}" for epoch in shown)] for r in results]
    return Columns(["loss after epoch", *map(str, shown)], rows)


def _caption(results: Sequence[LinearResult]) -> str:
    first = results[0]
    carriers = "/".join(sorted({result.transport for result in results}))
    place = f", links of {first.links}" if first.links else ""
    late = f", gradients {first.staleness} steps late" if first.staleness else ""
    ranks = f"{first.ranks} ranks over {carriers}{place}"
    if first.transport == "sim":
        ranks = f"{first.ranks} virtual ranks in one process"
    held_out = not math.isnan(first.accuracy[-1])
    accuracy = f"accuracy on {first.accuracy_on}" if held_out else "too few rows to hold any out"
    lines = [
        f"{ranks}; {first.model} by {first.solver}, {first.data}",
        f"{first.rows:,} rows, {first.dimensions:,} weights, {first.steps} steps per epoch{late}",
        f"sent: by the rank that sends most; {accuracy}",
    ]
    if any(result.bytes_ratio is not None for result in results):
        lines.append("fewer, faster, speed-up: ratios to dense")
    if first.solver == "scd":
        lines.append("updates: their exchange, without the sums of the derivatives")
    if first.transport == "sim":
        lines.append("communication under the virtual clock; computation as this process took it")
    differences = [r.objective_difference for r in results if r.objective_difference is not None]
    if differences:
        lines.append(
            f"losses differ from dense's by at most {max(differences):.1e}, relative to dense's"
        )
    wrong = [result.exchange for result in results if not result.replicas_equal]
    lines.append(
        f"REPLICAS DIFFER at the end: {', '.join(wrong)}"
        if wrong
        else "weights at the end: bit-identical on all ranks"
    )
    return "\n".join(lines)
