import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsync import ConfigurationError, DenseVector, SparseVector
from sparsync.reduction import OPERATIONS, SUM, Reduction, reduction
from sparsync.sparse import combine, densify, fold

from .strategies import same

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int32,
    torch.int64,
]
BITWISE = ("and", "or", "xor")
LOGICAL = ("logical_and", "logical_or")


def elements(name: str, dtype: torch.dtype):
    """Values on which the operation is associative bit for bit, its neutral element among them."""
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
    """An operation, a dtype, and one dense vector per rank."""
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
    vectors = [
        SparseVector.from_dense(row, neutral) if data.draw(st.booleans()) else DenseVector(row)
        for row in rows
    ]
    before = [v.values.clone() for v in vectors]
    folded = fold(vectors, operation, limit)
    same(densify(folded, operation).values + 0, reference(operation, rows) + 0)
    for vector, values in zip(vectors, before, strict=True):
        same(vector.values, values)  # nothing was modified
    if isinstance(folded, SparseVector):
        folded.check()
        assert len(rows) == 1 or bool((folded.values != neutral).all())


@given(problems(), st.integers(0, 24))
def test_a_result_is_dense_exactly_when_the_bound_exceeds_the_limit(problem, limit):
    operation, rows = problem
    a, b = (
        SparseVector.from_dense(row, operation.neutral(row.dtype)) for row in (rows[0], rows[-1])
    )
    combined = combine(a, b, operation, limit)
    assert isinstance(combined, DenseVector) == (a.nnz + b.nnz > limit)


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
    with pytest.raises(
        ConfigurationError, match="unknown operation 'mean'; choose one of sum, max"
    ):
        reduction("mean")
