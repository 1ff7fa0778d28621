"""The rows of ``sparsync bench``: measured, claimed and possible; and their tables.

Ratios come first in the tables: they compare between machines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
from rich.console import Group
from rich.text import Text

from sparsync.cli.bench.cases import Case
from sparsync.cli.bench.inputs import input_named
from sparsync.cli.bench.measure import Measured
from sparsync.cli.lab import default_burst, parse_rate
from sparsync.cli.output import Columns, format_bytes, format_ms, format_ratio
from sparsync.collectives.costs import WORD_BYTES, Job, lower_bound_words
from sparsync.presets import resolve
from sparsync.transports.ledger import STAGES

__all__ = ["Ratios", "Row", "Wire", "bound_words_per_k", "entry", "ratios", "summarize", "tables"]

_QUARTILES = (0.25, 0.5, 0.75)
_BITS_PER_BYTE = 8


@dataclass(frozen=True)
class Wire:
    """The shaped links of the lab.

    Attributes:
        bits_per_second: in each direction of each rank's link.
        burst_bytes: that pass at once; no transfer pays for them.
    """

    bits_per_second: float
    burst_bytes: int

    @staticmethod
    def of(rate: str) -> Wire:
        """Return the links of a lab of this rate."""
        return Wire(parse_rate(rate), default_burst(parse_rate(rate)))

    def seconds(self, nbytes: float) -> float:
        """Return the seconds of the link alone.

        Example:
            >>> Wire(1e9, burst_bytes=100_000).seconds(1_100_000)
            0.008
        """
        return max(nbytes - self.burst_bytes, 0) * _BITS_PER_BYTE / self.bits_per_second


@dataclass(frozen=True)
class Row:
    """The measurements of one collective; the fields are keys of the JSON.  None: does not apply.

    Maxima and minima are over all ranks and all steps, warm-up included; times over timed steps, each
    that of the slowest rank.  Words have 4 bytes.
    """

    collective: str
    transport: str  # carried the bytes; "dense" is always gloo's native allreduce
    lab: float | None  # bits per second of the shaped links
    ranks: int
    size: int
    density: float
    k: int
    input: str
    steps: int  # timed as a whole; as many again with the exchange timed alone
    warmup: int
    steps_total: int  # of the row, untimed ones included
    steps_verified: int  # of these, against the sum and the law; on the others totals were compared
    seed: int
    seconds_25: float
    seconds_median: float  # of the whole ``reduce()``: accumulate, select, exchange, commit
    seconds_75: float
    seconds_exchange_median: float  # selected -> total, from a common start
    seconds_local_median: float  # the whole minus the exchange
    seconds_add_median: float | None  # of ``residual.add_(gradient)`` on all ranks at once
    seconds_stages: dict[str, float]  # mean per step of rank 0, by stage of ``ledger.STAGES``
    wire_seconds: float | None  # max(sent, received) of the median step on the link, less its burst
    bytes_sent_max: int
    bytes_received_max: int
    bytes_kernel_max: int | None  # max(sent, received) as the kernel counted, headers included
    words_per_k_max: float  # max(sent, received) in words / k
    bound_words_per_k: float | None  # claimed for this collective on this input
    entries_min: float  # of the total / min(k, those of the sum of the selected); dense: 1
    law_error_max: float | None  # of the law of conservation, in units of its tolerance
    wrong: int  # entries of totals that differ between ranks or from the sum of the delivered

    @property
    def correct(self) -> bool:
        """Nothing is wrong and the law of conservation holds, where it was verified."""
        return self.wrong == 0 and (self.law_error_max is None or self.law_error_max <= 1)


def summarize(case: Case, measured: Measured, wire: Wire | None = None) -> Row:
    """Make a row of all steps of a case."""
    outcomes, whole, alone = measured.outcomes, measured.whole, measured.alone
    seconds = torch.tensor([o.seconds for o in whole], dtype=torch.float64)
    quartiles = torch.tensor(_QUARTILES, dtype=torch.float64)
    low, middle, high = seconds.quantile(quartiles).tolist()
    exchange = median([o.exchange for o in alone if o.exchange is not None])
    volume = median([max(o.sent, o.received) for o in alone])
    sent, received = max(o.sent for o in outcomes), max(o.received for o in outcomes)
    in_full = [o.verdict.law_error for o in outcomes if o.in_full]
    kernel = [o.kernel for o in outcomes if o.kernel is not None]
    return Row(
        collective=str(case.collective),
        transport=measured.transport,
        lab=None if wire is None else wire.bits_per_second,
        ranks=case.ranks,
        size=case.size,
        density=case.density,
        k=case.k,
        input=case.input,
        steps=len(whole),
        warmup=measured.warmup,
        steps_total=len(outcomes),
        steps_verified=len(in_full),
        seed=case.seed,
        seconds_25=low,
        seconds_median=middle,
        seconds_75=high,
        seconds_exchange_median=exchange,
        seconds_local_median=max(middle - exchange, 0.0),
        seconds_add_median=median(measured.add_seconds) if measured.add_seconds else None,
        seconds_stages={
            # accumulating is called as RedSync calls it
            "mask" if s == "accumulate" else s: measured.stages.get(s, 0.0)
            for s in STAGES
        },
        wire_seconds=None if wire is None else wire.seconds(volume),
        bytes_sent_max=sent,
        bytes_received_max=received,
        bytes_kernel_max=max(kernel) if kernel else None,
        words_per_k_max=max(sent, received) / WORD_BYTES / case.k,
        bound_words_per_k=bound_words_per_k(case),
        entries_min=min(o.verdict.entries for o in outcomes),
        law_error_max=max(in_full) if in_full else None,
        wrong=sum(o.verdict.wrong for o in outcomes),
    )


# ---- ratios: these compare between machines ---------------------------------------------------------


class Ratios(NamedTuple):
    """A row's times over others of the same run; the fields are keys of the JSON.  None: no such.

    Attributes:
        speedup: whole ``reduce()``, over the row "dense" of the same size and density.
        speedup_exchange: of the exchange alone.
        exchange_over_wire: the exchange in units of what the link takes for its bytes.
        local_over_add: the rest in units of ``residual.add_(gradient)``.
    """

    speedup: float | None
    speedup_exchange: float | None
    exchange_over_wire: float | None
    local_over_add: float | None


def ratios(row: Row, rows: Sequence[Row]) -> Ratios:
    """Compare a row with the dense one of its group."""
    group = (row.size, row.density, "dense")
    dense = next((r for r in rows if (r.size, r.density, r.collective) == group), None)
    return Ratios(
        _over(dense.seconds_median, row.seconds_median) if dense else None,
        _over(dense.seconds_exchange_median, row.seconds_exchange_median) if dense else None,
        _over(row.seconds_exchange_median, row.wire_seconds),
        _over(row.seconds_local_median, row.seconds_add_median),
    )


def entry(row: Row, rows: Sequence[Row]) -> dict[str, Any]:
    """Return a row and its ratios as they go into the JSON."""
    return {**asdict(row), **ratios(row, rows)._asdict()}


def _over(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


# ---- claims -----------------------------------------------------------------------------------------


def bound_words_per_k(case: Case) -> float | None:
    """Return the claimed words per requested entry: max(sent, received) of any rank on any step.

    For "oktopk-paper" that is the paper's claim, which leaves out the exact steps and the drift of
    reused thresholds.  None: nothing is claimed.
    """
    job = Job(case.size, case.k, case.ranks)
    collective = resolve(case.collective).make_collective()
    words = collective.promised_words(job, exchangeable=input_named(case.input).exchangeable)
    return None if words is None else words / case.k


# ---- tables ----------------------------------------------------------------------------------------


def tables(rows: Sequence[Row]) -> Group:
    """Show the rows of one bench, three tables per size and density, and a legend."""
    groups: dict[tuple[int, float], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.size, row.density), []).append(row)
    makers = (_times, _stages, _volumes)
    shown = [part for group in groups.values() for make in makers for part in (make(group), Text())]
    return Group(*shown, Text(_legend(rows)))


_Column = tuple[str, bool, Callable[[Row], str]]
"""A head, whether it is shown, and a row's cell."""


def _table(rows: Sequence[Row], columns: Sequence[_Column], title: str = "") -> Columns:
    shown = [(head, cell) for head, there, cell in columns if there]
    cells = [[row.collective, *(cell(row) for _, cell in shown)] for row in rows]
    return Columns(["collective", *(head for head, _ in shown)], cells, title)


def _times(rows: Sequence[Row]) -> Columns:
    """Show the speed: over dense, over the wire, over an addition; then in milliseconds."""
    real, lab = rows[0].transport != "sim", rows[0].lab is not None

    def ratio(name: str) -> Callable[[Row], str]:
        return lambda row: format_ratio(getattr(ratios(row, rows), name))

    columns: list[_Column] = [
        ("speed-up whole", True, ratio("speedup")),
        ("speed-up exchange", real, ratio("speedup_exchange")),
        ("exchange / wire", lab, ratio("exchange_over_wire")),
        ("local / add_", real, ratio("local_over_add")),
        ("whole ms", True, lambda row: format_ms(row.seconds_median)),
        ("spread", True, _spread),
        ("exchange ms", real, lambda row: format_ms(row.seconds_exchange_median)),
        ("add_ ms", real, lambda row: format_ms(row.seconds_add_median)),
    ]
    first = rows[0]
    title = f"n = {first.size:,}, density {first.density:g}: k = {first.k:,}"
    return _table(rows, columns, title)


def _stages(rows: Sequence[Row]) -> Columns:
    """Show where a step's time goes (RedSync, Figure 10): mean milliseconds of rank 0."""
    cells = [[r.collective, *map(format_ms, r.seconds_stages.values())] for r in rows]
    return Columns(["collective", *(f"{stage} ms" for stage in STAGES)], cells)


def _volumes(rows: Sequence[Row]) -> Columns:
    """Show the volume, against the claim, and whether the results are right."""

    def number(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}g}"

    def words(row: Row) -> str:
        bound = row.bound_words_per_k
        over = ">" if bound is not None and row.words_per_k_max > bound else ""
        return f"{over}{row.words_per_k_max:.4g}"

    columns: list[_Column] = [
        ("words per k", True, words),
        ("bound", True, lambda row: number(row.bound_words_per_k, 4)),
        ("volume", True, lambda row: format_bytes(max(row.bytes_sent_max, row.bytes_received_max))),
        (
            "kernel counted",
            rows[0].lab is not None,
            lambda row: "-" if row.bytes_kernel_max is None else format_bytes(row.bytes_kernel_max),
        ),
        ("entries per k", True, lambda row: number(row.entries_min, 3)),
        ("law", True, lambda row: number(row.law_error_max, 2)),
        ("wrong", True, lambda row: f"{'' if row.correct else '!'}{row.wrong}"),
        ("verified in full", True, lambda row: f"{row.steps_verified} / {row.steps_total}"),
    ]
    return _table(rows, columns)


def _spread(row: Row) -> str:
    """Write the distance between the quartiles of the whole step, relative to its median."""
    if not row.seconds_median:
        return "-"
    return f"{(row.seconds_75 - row.seconds_25) / row.seconds_median:.0%}"


def _legend(rows: Sequence[Row]) -> str:
    first = rows[0]
    transports = " and ".join(sorted({row.transport for row in rows}))
    clock = "virtual clock: communication alone" if first.transport == "sim" else "wall clock"
    steps = sorted({row.steps for row in rows})
    timed = f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
    lower = lower_bound_words(1, first.ranks)
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
            f"wire: the time of a link of {first.lab / 1e6:g} Mbit/s for the volume, less its burst; "
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
