"""The rows of ``sparsync bench``: what was measured, beside what is claimed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from sparsync.bench.inputs import input_named
from sparsync.bench.measure import Case, Outcome
from sparsync.bench.report import format_bytes
from sparsync.errors import ConfigurationError
from sparsync.planning import costs

__all__ = ["Row", "bound_words_per_k", "summarize", "tables"]

_QUARTILES = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class Row:
    """One line of the table; the fields are the keys of the JSON.

    Maxima and minima are over all ranks and all steps, warm-up included; times over timed steps, each
    that of the slowest rank.  Words have 4 bytes.

    Attributes:
        words_per_k_max: max(sent, received) in words / k.
        bound_words_per_k: what is claimed for this collective on this input.
        entries_min: entries of total / min(k, entries of the sum of what was selected); dense: 1.
        law_error_max: of the law of conservation, in units of its tolerance.
        wrong: entries of the totals that differ between ranks or from the sum of what was delivered.
    """

    collective: str
    transport: str
    ranks: int
    size: int
    density: float
    k: int
    input: str
    steps: int
    warmup: int
    seed: int
    seconds_25: float
    seconds_median: float
    seconds_75: float
    bytes_sent_max: int
    bytes_received_max: int
    words_per_k_max: float
    bound_words_per_k: float
    entries_min: float
    law_error_max: float
    wrong: int

    @property
    def correct(self) -> bool:
        """Nothing is wrong and the law of conservation holds."""
        return self.wrong == 0 and self.law_error_max <= 1


def summarize(case: Case, transport: str, outcomes: Sequence[Outcome], warmup: int) -> Row:
    """Make a row of the outcomes of all steps, the first ``warmup`` of which are not timed."""
    seconds = torch.tensor([o.seconds for o in outcomes[warmup:]], dtype=torch.float64)
    quartiles = torch.tensor(_QUARTILES, dtype=torch.float64)
    low, median, high = seconds.quantile(quartiles).tolist()
    sent, received = max(o.sent for o in outcomes), max(o.received for o in outcomes)
    verdicts = [o.verdict for o in outcomes]
    return Row(
        collective=str(case.collective),
        transport=transport,
        ranks=case.ranks,
        size=case.size,
        density=case.density,
        k=case.k,
        input=case.input,
        steps=len(outcomes) - warmup,
        warmup=warmup,
        seed=case.seed,
        seconds_25=low,
        seconds_median=median,
        seconds_75=high,
        bytes_sent_max=sent,
        bytes_received_max=received,
        words_per_k_max=max(sent, received) / costs.WORD_BYTES / case.k,
        bound_words_per_k=bound_words_per_k(case),
        entries_min=min(v.entries for v in verdicts),
        law_error_max=max(v.law_error for v in verdicts),
        wrong=sum(v.wrong for v in verdicts),
    )


def bound_words_per_k(case: Case) -> float:
    """Return what is claimed per requested entry: max(sent, received) of any rank on any step.

    For "oktopk-paper" that is the paper's claim, which leaves out the exact steps and the drift of
    reused thresholds: see ``costs.oktopk_paper`` for the true cost.
    """
    k, world_size = case.k, case.ranks
    if case.collective == "dense":
        return costs.dense(case.size, world_size).words_per(k)
    if case.collective == "allgather":
        return costs.allgather(k, world_size).words_per(k)
    if case.collective == "oktopk":
        exchangeable = input_named(case.input).exchangeable
        return costs.oktopk_bound_words(k, world_size, exchangeable=exchangeable) / k
    if case.collective == "oktopk-paper":
        return costs.equation_3(k, world_size).words_per(k)
    raise ConfigurationError(f"no bound is known for {case.collective!r}")


def tables(rows: Sequence[Row]) -> Group:
    """Show the rows of one bench, a table per size and density, and what the columns mean."""
    groups: dict[tuple[int, float], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.size, row.density), []).append(row)
    return Group(*(_table(group) for group in groups.values()), Text(_legend(rows[0])))


def _table(rows: Sequence[Row]) -> Table:
    title = f"n = {rows[0].size:,}, density {rows[0].density:g}: k = {rows[0].k:,}"
    shown = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    shown.padding = (0, 1, 0, 0)
    shown.add_column("\ncollective", no_wrap=True)
    headings = ("\nms", "\n25-75 %", "\nvolume", "words\nper k", "\nbound", "entries\nper k")
    for heading in (*headings, "\nlaw", "\nwrong"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        over = ">" if row.words_per_k_max > row.bound_words_per_k else ""
        shown.add_row(
            row.collective,
            f"{1e3 * row.seconds_median:.3g}",
            f"{1e3 * row.seconds_25:.3g}-{1e3 * row.seconds_75:.3g}",
            format_bytes(max(row.bytes_sent_max, row.bytes_received_max)),
            f"{over}{row.words_per_k_max:.4g}",
            f"{row.bound_words_per_k:.4g}",
            f"{row.entries_min:.3g}",
            f"{row.law_error_max:.2g}",
            f"{'' if row.correct else '!'}{row.wrong}",
        )
    return shown


def _legend(row: Row) -> str:
    clock = "virtual clock: communication alone" if row.transport == "sim" else "wall clock"
    lower = costs.lower_bound_words(1, row.ranks)
    return "\n".join(
        (
            f"{row.ranks} ranks, transport {row.transport} ({clock}), input {row.input}, "
            f"{row.steps} steps after {row.warmup}",
            "volume: max(sent, received) of any rank on any step; > above the bound, which is claimed "
            "for k / P >= 256",
            f"words per k: of 4 bytes; at least {lower:.4g} for k entries (Theorem 3.1)",
            "law: |sum accumulated - total - sum residual| / tolerance; ! incorrect",
        )
    )
