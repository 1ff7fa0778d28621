"""The rows of ``sparsync bench``: what was measured, beside what is claimed and what is possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from types import MappingProxyType
from typing import Any

import torch

from sparsync.bench.cases import Case
from sparsync.bench.inputs import input_named
from sparsync.bench.measure import Measured
from sparsync.planning import costs, sparcml_costs
from sparsync.transports.ledger import STAGES

__all__ = ["Ratios", "Row", "Wire", "bound_words_per_k", "entry", "ratios", "summarize"]

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

    def seconds(self, nbytes: float) -> float:
        """Return what the link alone takes.

        Example:
            >>> Wire(1e9, burst_bytes=100_000).seconds(1_100_000)
            0.008
        """
        return max(nbytes - self.burst_bytes, 0) * _BITS_PER_BYTE / self.bits_per_second


@dataclass(frozen=True)
class Row:
    """What was measured of one collective; the fields are keys of the JSON.

    Maxima and minima are over all ranks and all steps, warm-up included; times over timed steps, each
    that of the slowest rank.  Words have 4 bytes.  None: does not apply.

    Attributes:
        transport: what carried the bytes; "dense" is always gloo's native allreduce.
        lab: bits per second of the shaped links.
        steps: timed as a whole; as many again with the exchange timed alone.
        steps_total: all steps of the row, untimed ones included.
        steps_verified: of these, so many against the sum and the law; on the others the totals of
            all ranks were compared.
        seconds_median: whole ``reduce()``: accumulate, select, exchange, commit.
        seconds_exchange_median: selected -> total, from a common start with all entries selected.
        seconds_local_median: the whole minus the exchange.
        seconds_add_median: ``residual.add_(gradient)`` on all ranks at once, after the timed steps.
        seconds_stages: mean per step of rank 0: mask (accumulate), select, pack, communicate, unpack.
        wire_seconds: the median step's max(sent, received) bytes, less the burst, over the rate.
        words_per_k_max: max(sent, received) in words / k.
        bound_words_per_k: what is claimed for this collective on this input.
        bytes_kernel_max: max(sent, received) as the kernel counted, its headers and repeats included.
        entries_min: entries of total / min(k, entries of the sum of what was selected); dense: 1.
        law_error_max: of the law of conservation, in units of its tolerance.
        wrong: entries of the totals that differ between ranks or from the sum of what was delivered.
    """

    collective: str
    transport: str
    lab: float | None
    ranks: int
    size: int
    density: float
    k: int
    input: str
    steps: int
    warmup: int
    steps_total: int
    steps_verified: int
    seed: int
    seconds_25: float
    seconds_median: float
    seconds_75: float
    seconds_exchange_median: float
    seconds_local_median: float
    seconds_add_median: float | None
    seconds_stages: dict[str, float]
    wire_seconds: float | None
    bytes_sent_max: int
    bytes_received_max: int
    bytes_kernel_max: int | None
    words_per_k_max: float
    bound_words_per_k: float | None
    entries_min: float
    law_error_max: float | None
    wrong: int

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
        seconds_stages={stage: measured.stages.get(stage, 0.0) for stage in STAGES},
        wire_seconds=None if wire is None else wire.seconds(volume),
        bytes_sent_max=sent,
        bytes_received_max=received,
        bytes_kernel_max=max(kernel) if kernel else None,
        words_per_k_max=max(sent, received) / costs.WORD_BYTES / case.k,
        bound_words_per_k=bound_words_per_k(case),
        entries_min=min(o.verdict.entries for o in outcomes),
        law_error_max=max(in_full) if in_full else None,
        wrong=sum(o.verdict.wrong for o in outcomes),
    )


# ---- ratios: what compares between machines ---------------------------------------------------------


@dataclass(frozen=True)
class Ratios:
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
    group = (row.size, row.density)
    dense = next(
        (r for r in rows if (r.size, r.density) == group and r.collective == "dense"), None
    )
    return Ratios(
        None if dense is None else _over(dense.seconds_median, row.seconds_median),
        None
        if dense is None
        else _over(dense.seconds_exchange_median, row.seconds_exchange_median),
        _over(row.seconds_exchange_median, row.wire_seconds),
        _over(row.seconds_local_median, row.seconds_add_median),
    )


def entry(row: Row, rows: Sequence[Row]) -> dict[str, Any]:
    """Return a row and its ratios as they go into the JSON."""
    return {**asdict(row), **asdict(ratios(row, rows))}


def _over(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


# ---- claims -----------------------------------------------------------------------------------------


def bound_words_per_k(case: Case) -> float | None:
    """Return what is claimed per requested entry: max(sent, received) of any rank on any step.

    For "oktopk-paper" that is the paper's claim, which leaves out the exact steps and the drift of
    reused thresholds: see ``costs.oktopk_paper`` for the true cost.  None: nothing is claimed.
    """
    bound = _BOUNDS.get(str(case.collective))
    return None if bound is None else bound(case) / case.k


def _oktopk(case: Case) -> float:
    exchangeable = input_named(case.input).exchangeable
    return costs.oktopk_bound_words(case.k, case.ranks, exchangeable=exchangeable)


def _doubling(case: Case) -> costs.Cost:
    """Bound SparCML's SSAR_Recursive_double by disjoint supports."""
    return sparcml_costs.recursive_doubling(case.k, case.size, case.ranks, "none")


def _ring_dense(case: Case) -> costs.Cost:
    return sparcml_costs.ring(case.k, case.size, case.ranks, dense=True)


_BOUNDS: MappingProxyType[str, Callable[[Case], float]] = MappingProxyType(
    {
        "dense": lambda case: costs.dense(case.size, case.ranks).words,
        "allgather": lambda case: costs.allgather(case.k, case.ranks).words,
        # of what a rank sends or receives, half of what passes through the root
        "gtopk": lambda case: sparcml_costs.gtopk(case.k, case.ranks).words / 2,
        "ring-dense": lambda case: _ring_dense(case).words,
        "recursive-doubling": lambda case: _doubling(case).words,
        "oktopk": _oktopk,
        "oktopk-paper": lambda case: costs.equation_3(case.k, case.ranks).words,
        # below the lower bound that holds for entries of two words: indices and values are packed
        "budgeted": lambda case: costs.lower_bound_words(case.k, case.ranks),
    }
)
