"""gTop-k by hand and against a loop over ranks; the contracts run over it as over all collectives."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsync import SparseVector
from sparsync.collectives.gtopk import GTopk
from sparsync.transports.sim import simulate
from sparsync.wire import Packed
from sparsync.wire.quantised import SparseQsgd

from .strategies import same_vector


def reduced(inputs: list[SparseVector], k: int, collective: GTopk | None = None, step: int = 0):
    """One call on as many virtual ranks as there are inputs."""

    async def program(comm):
        return await (collective or GTopk()).reduce(comm, inputs[comm.rank], k, step)

    return simulate(program, len(inputs)).results


def tree(inputs: list[SparseVector], k: int) -> SparseVector:
    """The simple version: neighbours are merged and cut, again and again."""
    level = [vector.top(k) for vector in inputs]
    while len(level) > 1:
        pairs = [level[i : i + 2] for i in range(0, len(level), 2)]
        level = [SparseVector.merge(pair).top(k) if len(pair) == 2 else pair[0] for pair in pairs]
    return level[0]


def sparse(*values: float, dtype: torch.dtype = torch.float32) -> SparseVector:
    return SparseVector.from_dense(torch.tensor(values, dtype=dtype))


def shares(results) -> list[list[float]]:
    return [result.delivered.to_dense().tolist() for result in results]


# ---- by hand --------------------------------------------------------------------------------------


def test_what_is_dropped_on_the_way_stays_with_the_rank_on_the_way():
    """Ranks 2 and 3 merge first: 4 loses against 6 there; then 6 against 8 at rank 0."""
    inputs = [sparse(3, 0, 0, 0), sparse(5, 0, 0, 0), sparse(0, 4, 0, 0), sparse(0, 0, 6, 0)]
    results = reduced(inputs, k=1)
    assert [r.total.to_dense().tolist() for r in results] == [[8.0, 0.0, 0.0, 0.0]] * 4
    assert shares(results) == [[3, 0, -6, 0], [5, 0, 0, 0], [0, 0, 0, 0], [0, 0, 6, 0]]


def test_lower_ranks_are_the_left_operands():
    """1 + 2^-24 is 1 in float32: which pair is added first shows in the last bit."""
    tiny = 2.0**-24
    total = reduced([sparse(1.0), sparse(tiny), sparse(tiny), sparse(tiny)], k=1)[0].total
    assert total.values.tolist() == [1.0 + 2 * tiny]  # (1 + t) + (t + t)
    total = reduced([sparse(1.0), sparse(tiny), sparse(tiny)], k=1)[0].total
    assert total.values.tolist() == [1.0]  # (1 + t) + t


def test_one_rank_sends_nothing():
    (result,) = reduced([sparse(1.0, 3.0, 2.0)], k=2, collective=GTopk(Packed("int8")))
    assert result.total.to_dense().tolist() == [0.0, 3.0, 2.0]
    assert result.delivered is result.total


# ---- against the loop -----------------------------------------------------------------------------


@st.composite
def contributions(draw):
    """1 to 9 ranks, whole numbers: sums are exact in any order."""
    size = draw(st.integers(1, 12))
    element = st.one_of(st.just(0.0), st.integers(-9, 9).map(float))
    rank = st.lists(element, min_size=size, max_size=size).map(lambda v: sparse(*v))
    return draw(st.lists(rank, min_size=1, max_size=9)), draw(st.integers(0, size + 1))


@settings(max_examples=60)
@given(contributions())
def test_the_total_is_that_of_the_tree_and_the_sum_of_what_was_delivered(drawn):
    inputs, k = drawn
    results = reduced(inputs, k)
    expected = tree(inputs, k)
    for result in results:
        same_vector(result.total.check(), expected)
        result.delivered.check()
    summed = sum(result.delivered.to_dense() for result in results)
    assert torch.equal(summed, results[0].total.to_dense())
    # and nothing else was lost: what entered is the total and what the ranks keep
    entered = sum(vector.top(k).to_dense() for vector in inputs)
    kept = sum(
        v.top(k).to_dense() - r.delivered.to_dense() for v, r in zip(inputs, results, strict=True)
    )
    assert torch.equal(entered, results[0].total.to_dense() + kept)


def test_random_draws_differ_by_rank_and_step_and_totals_do_not():
    inputs = [SparseVector.from_dense(torch.linspace(1, 2, 50)) for _ in range(4)]
    collective = GTopk(SparseQsgd(4))
    totals = [[r.total for r in reduced(inputs, 50, collective, step)] for step in (0, 1, 0)]
    for step in totals:
        for total in step:
            same_vector(total, step[0])
    assert not torch.equal(totals[0][0].values, totals[1][0].values)
    same_vector(totals[2][0], totals[0][0])
