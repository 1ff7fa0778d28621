"""What ``sparsync linear`` measured: its fields, and its tables."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from sparsync.bench.linear_settings import DENSE
from sparsync.bench.report import format_bytes, format_ratio

__all__ = ["LinearResult", "tables", "with_ratios", "write_results"]


@dataclass(frozen=True)
class LinearResult:
    """One training; its fields are the keys of the JSON.  None: does not apply.

    Attributes:
        exchange: by which the ranks exchanged.
        solver: "sgd" or "scd".
        model: "logistic" or "svm".
        data: the file, or "trigrams".
        ranks: world size P.
        transport: what carried the bytes: "sim", "torch" (gloo), "zmq" or "mpi".
        lab: bits per second of the shaped links.
        rows: of the training, over all ranks.
        dimensions: number of weights n.
        steps: of an epoch.
        staleness: steps by which a gradient was applied late.
        objective: mean loss plus penalties over all ranks' rows of the training: before the first
            epoch, then after each.
        accuracy: on the rows that were held out (or on those of the training), likewise.
        accuracy_on: "held-out rows" or "training rows".
        seconds: per epoch: of every stretch of computation the slowest rank's time, plus the next.
            Evaluations are not counted.
        seconds_communication: per epoch: of every exchange, from when all ranks are there to when the
            last has its result.  Asynchronous: what a rank waits for what it needs.
        seconds_updates: of these, the collective that ``exchange`` names (scd also sums derivatives,
            in the same way in all exchanges).
        bytes_sent: per epoch, by the ledger: the most that any rank sent.
        bytes_received: likewise.
        messages_sent: likewise.
        bytes_updates: what the rank that sends most sent, without scd's derivatives.
        replicas_equal: all ranks ended with bit-identical weights.
        speedup_communication: seconds of communication of "dense" over these.
        speedup_updates: likewise, of ``seconds_updates``.
        speedup: seconds of "dense" over these.
        bytes_ratio: bytes sent by "dense" over these.
        objective_difference: largest difference to the objective of "dense", relative to it.
    """

    exchange: str
    solver: str
    model: str
    data: str
    ranks: int
    transport: str
    lab: float | None
    rows: int
    dimensions: int
    steps: int
    staleness: int
    objective: list[float]
    accuracy: list[float]
    accuracy_on: str
    seconds: list[float]
    seconds_communication: list[float]
    seconds_updates: list[float]
    bytes_sent: list[int]
    bytes_received: list[int]
    messages_sent: list[int]
    bytes_updates: list[int]
    replicas_equal: bool
    speedup_communication: float | None = None
    speedup_updates: float | None = None
    speedup: float | None = None
    bytes_ratio: float | None = None
    objective_difference: float | None = None


def with_ratios(results: Sequence[LinearResult]) -> list[LinearResult]:
    """Compare all with the dense one, if it is there."""
    dense = next((result for result in results if result.exchange == DENSE), None)
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


def tables(results: Sequence[LinearResult]) -> Group:
    """Show the ratios to dense first, seconds and bytes per epoch; then the losses."""
    compared = any(result.speedup is not None for result in results)
    table = Table(box=box.SIMPLE_HEAD, padding=0)  # of 80 columns none is to spare
    table.add_column("exchange", no_wrap=True, vertical="bottom")
    updates = results[0].solver == "scd"
    ratios = ["ratio\ncomm.", *(["ratio\nupd."] if updates else []), "ratio\ntime", "ratio\nbytes"]
    rest = ("s per\nepoch", "comm.\ns", "sent/\nepoch", "loss", "acc.\n%")
    for heading in (*(ratios if compared else []), *rest):
        table.add_column(heading, justify="right", no_wrap=True, vertical="bottom")
    for result in results:
        own = [result.speedup_updates] if updates else []
        shown = [result.speedup_communication, *own, result.speedup, result.bytes_ratio]
        table.add_row(
            result.exchange,
            *(format_ratio(ratio) for ratio in shown if compared),
            f"{_mean(result.seconds):.3g}",
            f"{_mean(result.seconds_communication):.3g}",
            format_bytes(_mean(result.bytes_sent)),
            f"{result.objective[-1]:.4f}",
            f"{100 * result.accuracy[-1]:.2f}",
        )
    return Group(table, Text(_caption(results)), _losses(results))


def _losses(results: Sequence[LinearResult], columns: int = 6) -> Table:
    """Show the loss before the first and after the last epoch, and some between."""
    last = len(results[0].objective) - 1
    shown = sorted({last * column // (columns - 1) for column in range(columns)})
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    table.add_column("loss after epoch", no_wrap=True)
    for epoch in shown:
        table.add_column(str(epoch), justify="right", no_wrap=True)
    for result in results:
        table.add_row(result.exchange, *(f"{result.objective[epoch]:.7f}" for epoch in shown))
    return table


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def _caption(results: Sequence[LinearResult]) -> str:
    first = results[0]
    carriers = "/".join(sorted({result.transport for result in results}))
    place = f", {first.lab / 1e9:g} Gbit/s" if first.lab else ""
    late = f", gradients {first.staleness} steps late" if first.staleness else ""
    lines = [
        f"{first.model} by {first.solver}, {first.data}: {first.rows:,} rows, "
        f"{first.dimensions:,} weights",
        f"{first.ranks} ranks over {carriers}{place}; {first.steps} steps per epoch{late}",
        f"ratio: {DENSE} over this; sent: by the rank that sends most; accuracy on {first.accuracy_on}",
    ]
    if first.solver == "scd":
        lines.append("upd.: the exchange of the updates, without the sums of the derivatives")
    if first.transport == "sim":
        lines.append("communication under the virtual clock; computation as this process took it")
    differences = [r.objective_difference for r in results if r.objective_difference is not None]
    if differences:
        lines.append(f"losses differ from {DENSE}'s by at most {max(differences):.1e} of them")
    wrong = [result.exchange for result in results if not result.replicas_equal]
    lines.append(
        f"REPLICAS DIFFER at the end: {', '.join(wrong)}"
        if wrong
        else "weights at the end: bit-identical on all ranks"
    )
    return "\n".join(lines)


def write_results(results: Sequence[LinearResult], path: Path) -> None:
    """Write a list of objects; NaN becomes null."""
    entries = [{k: _finite(v) for k, v in asdict(result).items()} for result in results]
    path.write_text(json.dumps(entries, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _finite(value: object) -> object:
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
