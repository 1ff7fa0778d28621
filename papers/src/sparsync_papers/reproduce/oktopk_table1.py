"""Count the words and messages of the six allreduces in Ok-Topk's Table 1 on the ledger."""

from __future__ import annotations

from sparsync.cli.bench.measure import SimulatedRanks
from sparsync.cli.bench.verified_row import Case
from sparsync.collectives.costs import WORD_BYTES
from sparsync.published.oktopk.table_1 import TABLE_1
from sparsync_papers.reproduce import Comparison, Outcome, Panel, Settings, Table, artifact

_RANKS = (4, 8, 16, 32)
_K, _DENSITY = 8192, 1 / 32  # k / P >= 256, so headers and histograms are small compared with k
_TOLERANCE = 0.04  # share of the words that may be headers
_HEADERS = "headers, which the table omits"


# algorithms that may exceed their row by more than headers -> the reason
_OTHERWISE = {
    "topkdsa": "headers and entries unevenly spread over the regions",
    "gaussiank": "selects more or fewer than k: its threshold is an estimate",
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
    cases = [(name, p) for name in (*TABLE_1, "oktopk-paper") for p in ranks]
    for name, p in settings.track(cases):
        virtual = SimulatedRanks(Case(name, p, size, _DENSITY, seed=settings.seed))
        row = TABLE_1[name.removesuffix("-paper")]
        low, high = row.words(size, k, p)
        for step in range(2):  # the first step agrees on regions and, as published, is exact
            ledgers = [ledger.total() for ledger in virtual.step().ledgers]
            # gTopk's messages depend on each other, so they count along the longest path
            passed = [
                t.sent + t.received if name == "gtopk" else max(t.sent, t.received) for t in ledgers
            ]
            rows.append(
                {
                    "algorithm": name,
                    "in the paper": row.title,
                    "P": p,
                    "step": step,
                    "words per k": max(passed) / WORD_BYTES / k,
                    "Table 1 from": low / k,
                    "to": high / k,
                    "messages": max(t.messages_sent for t in ledgers),
                    "Table 1, latency": row.messages(p),
                    "k": k,
                }
            )
    series = {
        row.title: rows.points("P", "words per k", {"algorithm": name, "step": 1})
        for name, row in TABLE_1.items()
    }
    return Outcome(
        rows,
        [*(_compare(name, rows) for name in TABLE_1), _as_published(rows)],
        {"n": size, "k": k, "ranks": max(ranks), "input": "uniform", "steps": 2},
        "Counted on two steps with error feedback, headers included; max(sent, received) of the busiest "
        "rank (gTopk: sent and received, which pass in sequence). Fresh supports that hardly overlap. "
        "Messages are those that a rank sends; Table 1's latency counts gTopk's in both directions.",
        [Panel("words of the busiest rank", "ranks P", "words / k", series, log="xy")],
    )


def _compare(name: str, rows: Table) -> Comparison:
    published = TABLE_1[name]
    mine = rows.where({"algorithm": name})
    words, low, high = map(mine.column, ("words per k", "Table 1 from", "to"))
    shares = [count / most for count, most in zip(words, high, strict=True)]
    within = all(
        (1 - _TOLERANCE) * least <= count <= (1 + _TOLERANCE) * most
        for count, least, most in zip(words, low, high, strict=True)
    )
    of = "the formula" if low == high else "the upper end"
    what, ours = f"words, {published.title}", f"{min(shares):.2f} to {max(shares):.2f} of {of}"
    why = _OTHERWISE.get(name, _HEADERS)
    return Comparison(what, published.bandwidth, "Table 1", ours, within, why)


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
        "exact steps allgather all reduced entries, which Equation 3 omits; a reused threshold then "
        "selects more than k of a residual that has accumulated below it",
    )
