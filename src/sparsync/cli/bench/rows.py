"""The rows of ``sparsync bench`` (measurements, claims and bounds), and the tables that show them.

Tables start with the ratios, because these can be compared between machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from rich.console import Group
from rich.text import Text

from sparsync.cli.bench.inputs import input_named
from sparsync.cli.bench.measure import Measured
from sparsync.cli.bench.verified_row import Case
from sparsync.cli.lab import default_burst
from sparsync.cli.named_algorithms import algorithm_of
from sparsync.cli.output import Columns, format_ms, format_ratio
from sparsync.collectives.costs import WORD_BYTES, Job, lower_bound_words
from sparsync.cost.wording import format_bytes
from sparsync.transports.ledger import STAGES

__all__ = ["Row", "bound_words_per_k", "entry", "ratios", "summarize", "tables"]

_BITS_PER_BYTE = 8


@dataclass(frozen=True)
class Row:
    """The measurements of one collective; the field names are the keys of the JSON.

    Fields that do not apply are None.  Maxima and minima are taken over all ranks and steps, including
    the warm-up.  Times are measured on the slowest rank, over the timed steps.  A word has 4 bytes.
    """

    collective: str
    transport: str  # what carries the bytes; "dense" always uses gloo's native allreduce
    lab: float | None  # lowest rate of the shaped links in bits per second
    ranks: int
    size: int
    density: float
    k: int
    input: str
    steps: int  # steps timed as a whole; as many again are run to time the exchange alone
    warmup: int
    steps_total: int  # all steps of the row, including untimed ones
    # steps verified in full, as in ``Verdict``; on all other steps, totals were only compared
    steps_verified: int
    seed: int
    seconds_25: float
    seconds_median: float  # seconds of the whole ``reduce()``: accumulate, select, exchange, commit
    seconds_75: float
    seconds_exchange_median: float  # seconds from selection to total, with a common start
    seconds_local_median: float  # the whole minus the exchange
    # seconds of ``residual.add_(gradient)``, on all ranks concurrently
    seconds_add_median: float | None
    # processor seconds over all threads, mean over ranks
    processor_exchange_median: float | None
    processor_add_median: float | None  # the same for ``residual.add_(gradient)``
    # mean seconds per step on rank 0, by stage of ``ledger.STAGES``
    seconds_stages: dict[str, float]
    # seconds that the link needs for max(sent, received) of the median step, without the link's burst
    wire_seconds: float | None
    bytes_sent_max: int
    bytes_received_max: int
    bytes_kernel_max: int | None  # max(sent, received) as counted by the kernel, with headers
    words_per_k_max: float  # max(sent, received) in words / k
    bound_words_per_k: float | None  # the claim for this collective on this input
    # entries of the total / min(k, entries of the sum of selections); dense: 1
    entries_min: float
    law_error_max: float | None  # error of the law of conservation, in units of its tolerance
    wrong: int  # entries of totals that differ between ranks or from the sum of delivered entries
    links: str | None = None  # the lab's links, as ``parse_links`` reads them

    @property
    def correct(self) -> bool:
        """Whether no entry is wrong, and the law of conservation held on every step that verified it."""
        return self.wrong == 0 and (self.law_error_max is None or self.law_error_max <= 1)


def summarize(
    case: Case, measured: Measured, rate: int | None = None, links: str | None = None
) -> Row:
    """Summarise all steps of a case; ``rate`` is the lowest rate of the lab's ``links``, in bit/s."""
    outcomes, whole, alone = measured.outcomes, measured.whole, measured.alone
    seconds = torch.tensor([o.seconds for o in whole], dtype=torch.float64)
    quartiles = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    low, middle, high = seconds.quantile(quartiles).tolist()
    exchange = median([o.exchange for o in alone if o.exchange is not None])
    on_link = None
    if rate is not None:  # bytes within the burst take no time
        late = median([max(o.sent, o.received) for o in alone]) - default_burst(rate)
        on_link = max(late, 0) * _BITS_PER_BYTE / rate
    sent, received = max(o.sent for o in outcomes), max(o.received for o in outcomes)
    law_errors = [o.verdict.law_error for o in outcomes if o.in_full]
    return Row(
        collective=case.name,
        transport=measured.transport,
        lab=None if rate is None else float(rate),
        links=links,
        **{
            name: getattr(case, name) for name in ("ranks", "size", "density", "k", "input", "seed")
        },
        steps=len(whole),
        warmup=measured.warmup,
        steps_total=len(outcomes),
        steps_verified=len(law_errors),
        seconds_25=low,
        seconds_median=middle,
        seconds_75=high,
        seconds_exchange_median=exchange,
        seconds_local_median=max(middle - exchange, 0.0),
        seconds_add_median=_median(measured.add_seconds),
        processor_exchange_median=_median([o.processor for o in alone if o.processor is not None]),
        processor_add_median=_median(measured.add_processor),
        seconds_stages={s: measured.stages.get(s, 0.0) / len(outcomes) for s in STAGES},
        wire_seconds=on_link,
        bytes_sent_max=sent,
        bytes_received_max=received,
        bytes_kernel_max=max((o.kernel for o in outcomes if o.kernel is not None), default=None),
        words_per_k_max=max(sent, received) / WORD_BYTES / case.k,
        bound_words_per_k=bound_words_per_k(case),
        entries_min=min(o.verdict.entries for o in outcomes),
        law_error_max=max(law_errors, default=None),
        wrong=sum(o.verdict.wrong for o in outcomes),
    )


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def ratios(row: Row, rows: Sequence[Row]) -> dict[str, float | None]:
    """Return a row's times as ratios, keyed as in the JSON.

    Speed-ups are relative to the row "dense" of the same run, size and density.  The exchange's time is
    relative to the time that its bytes need on the link.  The remaining time of the step is relative to
    ``residual.add_(gradient)``.
    """

    def over(one: float | None, other: float | None) -> float | None:
        return one / other if one is not None and other else None

    group = (row.size, row.density, "dense")
    dense = next((r for r in rows if (r.size, r.density, r.collective) == group), None)
    whole, exchange = row.seconds_median, row.seconds_exchange_median
    return {
        "speedup": over(dense.seconds_median, whole) if dense else None,
        "speedup_exchange": over(dense.seconds_exchange_median, exchange) if dense else None,
        "exchange_over_wire": over(exchange, row.wire_seconds),
        "local_over_add": over(row.seconds_local_median, row.seconds_add_median),
        "processor_over_add": over(row.processor_exchange_median, row.processor_add_median),
    }


def entry(row: Row, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the row's entry in the JSON, including its ratios."""
    return {**asdict(row), **ratios(row, rows)}


def bound_words_per_k(case: Case) -> float | None:
    """Return the claimed bound on max(sent, received) of any rank on any step, in words per k.

    For "oktopk-paper", this is the paper's claim, which ignores the exact steps and the drift of reused
    thresholds.  Return None if there is no claim.
    """
    job = Job(case.size, case.k, case.ranks)
    collective = algorithm_of(case.collective).make_collective()
    words = collective.promised_words(job, exchangeable=input_named(case.input).exchangeable)
    return None if words is None else words / case.k


# ---- tables ----------------------------------------------------------------------------------------


def tables(rows: Sequence[Row]) -> Group:
    """Show the rows of a bench: three tables per size and density, and a legend."""
    groups: dict[tuple[int, float], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.size, row.density), []).append(row)
    shown: list[Columns | Text] = []
    for (size, density), group in groups.items():
        title = f"n = {size:,}, density {density:g}: k = {group[0].k:,}"
        shown += [Columns.of([_times(row, group) for row in group], title), Text()]
        shown += [Columns.of([_stages(row) for row in group]), Text()]
        shown += [Columns.of([_volumes(row) for row in group]), Text()]
    return Group(*shown, Text(_legend(rows)))


def _times(row: Row, rows: Sequence[Row]) -> dict[str, str]:
    """Show times relative to dense, to the wire and to an addition, then in milliseconds."""
    over = {name: format_ratio(ratio) for name, ratio in ratios(row, rows).items()}
    real, between = row.transport != "sim", row.seconds_75 - row.seconds_25
    return {
        "collective": row.collective,
        "speed-up whole": over["speedup"],
        "speed-up exchange": over["speedup_exchange"] if real else "-",
        "exchange / wire": over["exchange_over_wire"],
        "local / add_": over["local_over_add"],
        "whole ms": format_ms(row.seconds_median),
        "spread": f"{between / row.seconds_median:.0%}" if row.seconds_median else "-",
        "exchange ms": format_ms(row.seconds_exchange_median) if real else "-",
        "add_ ms": format_ms(row.seconds_add_median),
        "processor / add_": over["processor_over_add"],
    }


def _stages(row: Row) -> dict[str, str]:
    """Show the parts of a step's time (RedSync, Figure 10): mean milliseconds on rank 0."""
    stages = {f"{name} ms": format_ms(seconds) for name, seconds in row.seconds_stages.items()}
    return {"collective": row.collective, **stages}


def _volumes(row: Row) -> dict[str, str]:
    """Show the volume next to the claim, and whether the results are right."""

    def number(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}g}"

    bound, kernel = row.bound_words_per_k, row.bytes_kernel_max
    over = ">" if bound is not None and row.words_per_k_max > bound else ""
    return {
        "collective": row.collective,
        "words per k": f"{over}{row.words_per_k_max:.4g}",
        "bound": number(bound, 4),
        "volume": format_bytes(max(row.bytes_sent_max, row.bytes_received_max)),
        "kernel counted": "-" if kernel is None else format_bytes(kernel),
        "entries per k": number(row.entries_min, 3),
        "law": number(row.law_error_max, 2),
        "wrong": f"{'' if row.correct else '!'}{row.wrong}",
        "verified in full": f"{row.steps_verified} / {row.steps_total}",
    }


def _legend(rows: Sequence[Row]) -> str:
    first, steps = rows[0], [row.steps for row in rows]
    real = first.transport != "sim"
    clock = "wall clock" if real else "virtual clock: communication alone"
    transports = " and ".join(sorted({row.transport for row in rows}))
    timed = " to ".join(map(str, sorted({min(steps), max(steps)})))
    lines = [
        f"{first.ranks} ranks, transport {transports} ({clock}), input {first.input}, "
        f"medians of {timed} steps; spread: 75 % - 25 % quartile over the median",
        "speed-up: over dense: between processes gloo's native allreduce, over MPI its own",
        "volume: max(sent, received) of any rank on any step; > above the bound, which is claimed "
        "for k / P >= 256",
        f"words per k: of 4 bytes; at least {lower_bound_words(1, first.ranks):.4g} for k entries of "
        "two words (Theorem 3.1)",
        "law: |sum accumulated - total - sum residual| / tolerance; ! incorrect; where a step was "
        "not verified in full, all ranks' totals were compared",
    ]
    if real:
        lines.append(
            "exchange: selected -> total; local: the rest; add_: residual.add_(gradient) on all "
            "ranks at once"
        )
    if first.lab is not None:
        lines.append(
            f"links of {first.links}; wire: the time of the volume at the lowest rate, less its burst; "
            "kernel counted: with the headers of TCP, IP and Ethernet"
        )
    return "\n".join(lines)
