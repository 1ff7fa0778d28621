"""Test vectors and their operations: sums, folds, cuts and refusals."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsync import ConfigurationError, DenseVector, SparseVector
from sparsync.reduction import OPERATIONS, SUM, Reduction, combine, densify, fold, reduction
from tests.tables import cases, refused, refuses

from .strategies import (
    FLOATS,
    boundaries_of,
    dense_tensors,
    families,
    same,
    same_vector,
    sparse_vectors,
)


def vector(indices, values, size) -> SparseVector:
    return SparseVector(torch.tensor(indices, dtype=torch.int64), torch.tensor(values), size)


# ---- to and from dense ---------------------------------------------------------------------------


@given(dense_tensors())
def test_from_dense_keeps_what_is_not_zero_and_to_dense_restores_it(dense):
    sparse = SparseVector.from_dense(dense).check()
    assert sparse.nnz == sum(x != 0 for x in dense.tolist())  # NaN counts, -0.0 does not
    same(sparse.to_dense(), dense + 0.0)  # + 0.0 turns -0.0 into 0.0


# ---- merge ---------------------------------------------------------------------------------------


@given(families())
def test_merge_is_the_dense_sum_in_rank_order(parts):
    merged = SparseVector.merge([SparseVector.from_dense(p) for p in parts]).check()
    total = torch.zeros_like(parts[0])
    for part in parts:
        total = total + part
    same(merged.to_dense(), total)
    assert bool((merged.values != 0).all())


# ---- cutting and joining -------------------------------------------------------------------------


@given(st.data(), sparse_vectors())
def test_split_then_embed_then_join_is_the_identity(data, whole):
    boundaries = data.draw(boundaries_of(whole.size))
    parts = whole.split(boundaries)
    assert [p.check().size for p in parts] == [b - a for a, b in pairwise(boundaries)]
    placed = [p.embed(b, whole.size) for p, b in zip(parts, boundaries, strict=False)]
    same_vector(SparseVector.join(placed), whole)


def test_parts_of_a_vector_have_its_absent_elements():
    whole = SparseVector(torch.tensor([1, 2]), torch.tensor([5.0, 3.0]), 4, absent=1)
    assert [part.to_dense().tolist() for part in whole.split([0, 1, 4])] == [[1.0], [5.0, 3.0, 1.0]]
    kept = [whole.top(1), whole.restrict(torch.tensor([1])), SparseVector.join([whole.keep([0])])]
    assert [one.to_dense().tolist() for one in kept] == [[1.0, 5.0, 1.0, 1.0]] * 3
    assert whole.embed(1, 5).to_dense().tolist() == [1.0, 1.0, 5.0, 3.0, 1.0]
    assert whole.to(torch.device("cpu")).absent == 1
    assert DenseVector(whole.to_dense(), 1).to(torch.device("cpu")).to_numpy()[0].tolist() == [1, 2]


def test_split_works_where_32_bits_end():
    far = vector([5, (1 << 31) + 5, (1 << 40) - 1], [1.0, 2.0, 3.0], 1 << 40)
    parts = far.split([0, 1 << 31, 1 << 39, 1 << 40])
    assert [p.indices.tolist() for p in parts] == [[5], [5], [(1 << 39) - 1]]
    placed = [p.embed(b, far.size) for p, b in zip(parts, (0, 1 << 31, 1 << 39), strict=True)]
    same_vector(SparseVector.join(placed), far)


# ---- arithmetic and checks -----------------------------------------------------------------------


@refuses(
    (vector([0, 1], [1.0], 4), "equally long"),
    (vector([[0]], [[1.0]], 4), "1-D"),
    (SparseVector(torch.tensor([0], dtype=torch.int32), torch.ones(1), 4), "torch.int64"),
    (vector([2, 1], [1.0, 1.0], 4), "strictly ascending"),
    (vector([1, 1], [1.0, 1.0], 4), "coalesce"),
    (vector([-1, 1], [1.0, 1.0], 4), r"\[0, 4\)"),
    (vector([3, 4], [1.0, 1.0], 4), r"\[0, 4\)"),
)
def test_check_says_what_is_wrong(broken):
    broken.check()


@cases(
    ((object(), torch.ones(1), 3), "object, Tensor, int"),
    ((torch.zeros(1, dtype=torch.int64), [1.0], 3), "Tensor, list, int"),
    ((torch.zeros(1, dtype=torch.int64), torch.ones(1), "3"), "Tensor, Tensor, str"),
)
def test_arguments_of_other_types_are_refused_in_one_line(arguments, kinds):
    with pytest.raises(ConfigurationError, match=f"are {kinds}; give two tensors and an int$"):
        SparseVector(*arguments)


DTYPES = [*FLOATS, torch.int32, torch.int64]
BITWISE = ("and", "or", "xor")
LOGICAL = ("logical_and", "logical_or")


def elements(name: str, dtype: torch.dtype):
    """Draw values, including the neutral element, for which the operation is associative bit for bit."""
    if name in LOGICAL:
        return st.sampled_from([0, 1])
    if name in BITWISE:
        return st.integers(-8, 8)
    if name in ("max", "min"):
        neutral = OPERATIONS[name].neutral(dtype)
        return st.one_of(st.just(neutral), st.integers(-50, 50))
    if name == "prod":
        return st.sampled_from([1, 1, -1, 2, 0])
    return st.integers(-20, 20)


@st.composite
def problems(draw):
    """Draw an operation, a dtype, and one dense vector per rank."""
    name = draw(st.sampled_from(sorted(OPERATIONS)))
    dtypes = [d for d in DTYPES if not (name in BITWISE and d.is_floating_point)]
    dtype = draw(st.sampled_from(dtypes))
    size = draw(st.integers(0, 12))
    values = elements(name, dtype)
    row = st.lists(values, min_size=size, max_size=size)
    rows = draw(st.lists(row, min_size=1, max_size=5))
    return OPERATIONS[name], [torch.tensor(r, dtype=dtype) for r in rows]


def reference(operation: Reduction, rows: list[torch.Tensor]) -> torch.Tensor:
    total = rows[0]
    for row in rows[1:]:
        total = operation.apply(total, row)
    return total


@given(problems(), st.sampled_from([None, 0, 3, 8]), st.data())
def test_a_fold_is_the_dense_reduction_whatever_the_forms(problem, limit, data):
    operation, rows = problem
    neutral = operation.neutral(rows[0].dtype)
    forms = partial(SparseVector.from_dense, absent=neutral), DenseVector
    vectors = [data.draw(st.sampled_from(forms))(row) for row in rows]
    before = [v.values.clone() for v in vectors]
    folded = fold(vectors, operation, limit)
    same(folded.to_dense() + 0, reference(operation, rows) + 0)
    for vector, values in zip(vectors, before, strict=True):
        same(vector.values, values)  # nothing was modified
    if isinstance(folded, SparseVector):
        folded.check()
        assert len(rows) == 1 or bool((folded.values != neutral).all())


@given(problems(), st.integers(0, 24))
def test_a_result_is_dense_exactly_when_the_bound_exceeds_the_limit(problem, limit):
    operation, rows = problem
    neutral = operation.neutral(rows[0].dtype)
    a, b = (SparseVector.from_dense(row, neutral) for row in (rows[0], rows[-1]))
    assert isinstance(combine(a, b, operation, limit), DenseVector) == (a.nnz + b.nnz > limit)


@pytest.mark.parametrize("name", sorted(OPERATIONS))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_neutral_element_is_neutral(name, dtype):
    operation = OPERATIONS[name]
    if name not in BITWISE or not dtype.is_floating_point:
        x = torch.tensor([0, 1] if name in LOGICAL else [-3, 0, 1, 7], dtype=dtype)
        neutral = torch.full_like(x, operation.check(dtype))
        same(operation.apply(neutral, x), x)
        same(operation.apply(x, neutral), x)


def test_operands_keep_their_order():
    left = Reduction("left", lambda a, b: torch.where(a == 0, b, a), lambda dtype: 0, False)
    a, b = (SparseVector(torch.tensor([1]), torch.tensor([x]), 3) for x in (5.0, 7.0))
    for first in (a, densify(a)):
        for second in (b, densify(b)):
            assert combine(first, second, left).to_dense().tolist() == [0.0, 5.0, 0.0]


def test_names_are_known_and_users_may_bring_their_own():
    assert reduction("sum") is SUM
    mine = Reduction("gcd", torch.gcd, lambda dtype: 0)
    assert reduction(mine) is mine
    assert mine.check(torch.int64) == 0
    with pytest.raises(ConfigurationError, match=r"'gcd' is not defined on torch\.float32"):
        mine.check(torch.float32)
    with refused("unknown operation 'mean'; choose one of sum, max"):
        reduction("mean")
