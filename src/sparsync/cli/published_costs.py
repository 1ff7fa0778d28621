"""Table 1 of Ok-Topk as a plan: a cost is only alpha per message plus beta per word."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group
from rich.text import Text

from sparsync.cli.output import Columns
from sparsync.collectives.costs import WORD_BYTES
from sparsync.cost.machine import Machine
from sparsync.cost.wording import format_percent, format_seconds
from sparsync.published.oktopk.table_1 import TABLE_1, Interval

__all__ = ["PublishedRow", "published_rows", "show_published"]


@dataclass(frozen=True)
class PublishedRow:
    """One algorithm at one world size; its fields are the keys of the JSON."""

    collective: str  # name of the preset
    published: str  # name in the paper
    ranks: int
    size: int
    k: int
    bandwidth: str  # the terms as text
    latency: str
    words: Interval  # the terms as numbers, best and worst case
    messages: int
    seconds: Interval


def published_rows(
    size: int, k: int, ranks: Sequence[int], machine: Machine, names: Sequence[str]
) -> list[PublishedRow]:
    """Return the rows of Table 1 for every world size, with the times on the machine's links.

    Example:
        >>> links = Machine(alpha=1e-6, beta=2.5e-10)
        >>> rows = published_rows(10**6, 10**4, [16], links, list(TABLE_1))
        >>> [row.published for row in rows if row.seconds[1] < 1e-4]
        ['Ok-Topk']
    """
    alone = (0.0, 0.0)
    return [
        PublishedRow(
            name,
            row.title,
            p,
            size,
            k,
            row.bandwidth,
            row.latency,
            row.words(size, k, p) if p > 1 else alone,
            row.messages(p) if p > 1 else 0,
            row.seconds(size, k, p, machine.alpha, WORD_BYTES * machine.beta),
        )
        for p in ranks
        for name in names
        for row in [TABLE_1[name]]
    ]


def show_published(rows: Sequence[PublishedRow], machine: Machine) -> Group:
    """Show the table, with a column per world size if there are several."""
    first, ranks = rows[0], list(dict.fromkeys(row.ranks for row in rows))
    part = f" ({format_percent(first.k / first.size)})" if first.size else ""
    title = Text(
        f"Ok-Topk, Table 1: n = {first.size:,}, k = {first.k:,}{part}, alpha = "
        f"{format_seconds(machine.alpha)} per message, beta = "
        f"{format_seconds(WORD_BYTES * machine.beta)} per word of {WORD_BYTES} bytes"
    )
    terms = [
        {"algorithm": row.published, "bandwidth, words": row.bandwidth, "latency": row.latency}
        for row in rows
        if row.ranks == first.ranks
    ]
    of = {(row.published, row.ranks): row for row in rows}
    views: Mapping[str, Callable[[PublishedRow], str]] = {
        "time": lambda row: _interval(row.seconds, format_seconds),
        "words": lambda row: _interval(row.words, "{:,.0f}".format),
        "messages, one after the other": lambda row: f"{row.messages:,}",
    }
    tables = [
        Columns.by_ranks("algorithm", {at: cell(row) for at, row in of.items()}, f"\n{what}")
        for what, cell in views.items()
    ]
    fastest = [
        f"P = {p:,}: {min(at_p, key=lambda row: row.seconds[1]).published}"
        for p in ranks
        for at_p in [[row for row in rows if row.ranks == p]]
        if p > 1
    ]
    lines = [
        "time: alpha messages + beta words; no selection, packing, headers or overlap",
        "log P: rounded up; intervals: the best and the worst case",
        f"fastest in the worst case: {', '.join(fastest) or 'one rank has nobody to exchange with'}",
    ]
    return Group(title, Text(), Columns.of(terms), *tables, Text("\n" + "\n".join(lines)))


def _interval(interval: Interval, write: Callable[[float], str]) -> str:
    least, most = (write(number) for number in interval)
    return least if least == most else f"{least} to {most}"
