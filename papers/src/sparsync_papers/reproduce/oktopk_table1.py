"""Ok-Topk, Table 1: words and messages of six allreduces, counted by the ledger."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sparsync.cli.bench.measure import SimulatedRanks
from sparsync.cli.bench.verified_row import Case
from sparsync.collectives.costs import WORD_BYTES
from sparsync_papers.reproduce import Comparison, Outcome, Panel, Settings, Table, artifact

_RANKS = (4, 8, 16, 32)
_K, _DENSITY = 8192, 1 / 32  # k / P >= 256: headers and histograms are small next to k
_TOLERANCE = 0.04  # of the words: headers
_HEADERS = "headers, which the table omits"


class _Line(NamedTuple):
    """A line of Table 1."""

    title: str
    formula: str
    words: Callable[[int, int, int], tuple[float, float]]  # least and most per rank, by n, k and P
    otherwise: str = _HEADERS


def _log2(ranks: int) -> int:
    return (ranks - 1).bit_length()


_TABLE = {
    "dense": _Line("Dense", "2 n (P - 1) / P", lambda n, k, p: (2 * n * (p - 1) / p,) * 2),
    "allgather": _Line("TopkA", "2 k (P - 1)", lambda n, k, p: (2.0 * k * (p - 1),) * 2),
    "topkdsa": _Line(
        "TopkDSA",
        "[4 k (P - 1) / P, (2 k + n) (P - 1) / P]",
        lambda n, k, p: (4 * k * (p - 1) / p, (2 * k + n) * (p - 1) / p),
        "headers and entries unevenly spread over the regions",
    ),
    "gtopk": _Line("gTopk", "4 k log P", lambda n, k, p: (4.0 * k * _log2(p),) * 2),
    "gaussiank": _Line(
        "Gaussiank",
        "2 k (P - 1)",
        lambda n, k, p: (2.0 * k * (p - 1),) * 2,
        "it finds more or fewer than k: its threshold is an estimate",
    ),
    "oktopk": _Line(
        "Ok-Topk",
        "[2 k (P - 1) / P, 6 k (P - 1) / P]",
        lambda n, k, p: (2 * k * (p - 1) / p, 6 * k * (p - 1) / p),
    ),
}


@artifact(
    "oktopk-table1",
    "only Ok-Topk's volume depends on k alone: at most 6 k (P - 1) / P words, whatever P is",
    minutes=1.0,
)
def table_1(settings: Settings) -> Outcome:
    """Communication volume of dense and sparse allreduces."""
    ranks = settings.pick(_RANKS, (4,))
    k = settings.pick(_K, 2048)
    size = round(k / _DENSITY)
    rows = Table()
    cases = [(name, p) for name in (*_TABLE, "oktopk-paper") for p in ranks]
    for name, p in settings.track(cases):
        virtual = SimulatedRanks(Case(name, p, size, _DENSITY, seed=settings.seed))
        low, high = _TABLE[name.removesuffix("-paper")].words(size, k, p)
        for step in range(2):  # the first agrees on regions and, as published, is exact
            ledgers = [ledger.total() for ledger in virtual.step().ledgers]
            # gTopk's messages pass in sequence
            passed = [
                t.sent + t.received if name == "gtopk" else max(t.sent, t.received) for t in ledgers
            ]
            rows.append(
                {
                    "algorithm": name,
                    "P": p,
                    "step": step,
                    "words per k": max(passed) / WORD_BYTES / k,
                    "Table 1 from": low / k,
                    "to": high / k,
                    "messages": max(t.messages_sent for t in ledgers),
                    "k": k,
                }
            )
    series = {
        line.title: rows.points("P", "words per k", {"algorithm": name, "step": 1})
        for name, line in _TABLE.items()
    }
    return Outcome(
        rows,
        [*(_compare(name, rows) for name in _TABLE), _as_published(rows)],
        {"n": size, "k": k, "ranks": max(ranks), "input": "uniform"},
        "Counted on two steps with error feedback, headers included; max(sent, received) of the busiest "
        "rank (gTopk: sent and received, which pass in sequence). Fresh supports that hardly overlap.",
        [Panel("words of the busiest rank", "ranks P", "words / k", series, log="xy")],
    )


def _compare(name: str, rows: Table) -> Comparison:
    line = _TABLE[name]
    mine = rows.where({"algorithm": name})
    words, low, high = map(mine.column, ("words per k", "Table 1 from", "to"))
    shares = [count / most for count, most in zip(words, high, strict=True)]
    within = all(
        (1 - _TOLERANCE) * least <= count <= (1 + _TOLERANCE) * most
        for count, least, most in zip(words, low, high, strict=True)
    )
    of = "the formula" if low == high else "the upper end"
    what, ours = f"words, {line.title}", f"{min(shares):.2f} to {max(shares):.2f} of {of}"
    return Comparison(what, line.formula, "Table 1", ours, within, line.otherwise)


def _as_published(rows: Table) -> Comparison:
    exact, reused = (
        max(rows.where({"algorithm": "oktopk-paper", "step": step}).column("words per k"))
        for step in (0, 1)
    )
    return Comparison(
        "words, Ok-Topk as published, exact steps included",
        "less than 6 k",
        "abstract and Equation 3",
        f"up to {exact:.1f} k on the exact step, {reused:.1f} k on the next",
        max(exact, reused) <= 6.0,
        "exact steps allgather all reduced entries, which Equation 3 omits; then a threshold that is "
        "reused selects more than k of a residual that piles up below it",
    )
