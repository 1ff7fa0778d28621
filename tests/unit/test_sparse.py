from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsync import ConfigurationError, SparseVector

from .strategies import (
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


def test_split_works_where_32_bits_end():
    far = vector([5, (1 << 31) + 5, (1 << 40) - 1], [1.0, 2.0, 3.0], 1 << 40)
    parts = far.split([0, 1 << 31, 1 << 39, 1 << 40])
    assert [p.indices.tolist() for p in parts] == [[5], [5], [(1 << 39) - 1]]
    placed = [p.embed(b, far.size) for p, b in zip(parts, (0, 1 << 31, 1 << 39), strict=True)]
    same_vector(SparseVector.join(placed), far)


# ---- arithmetic and checks -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (vector([0, 1], [1.0], 4), "equally long"),
        (vector([[0]], [[1.0]], 4), "1-D"),
        (SparseVector(torch.tensor([0], dtype=torch.int32), torch.ones(1), 4), "torch.int64"),
        (vector([2, 1], [1.0, 1.0], 4), "strictly ascending"),
        (vector([1, 1], [1.0, 1.0], 4), "coalesce"),
        (vector([-1, 1], [1.0, 1.0], 4), r"\[0, 4\)"),
        (vector([3, 4], [1.0, 1.0], 4), r"\[0, 4\)"),
    ],
)
def test_check_says_what_is_wrong(broken, says):
    with pytest.raises(ConfigurationError, match=says):
        broken.check()


@pytest.mark.parametrize(
    ("arguments", "kinds"),
    [
        ((object(), torch.ones(1), 3), "object, Tensor, int"),
        ((torch.zeros(1, dtype=torch.int64), [1.0], 3), "Tensor, list, int"),
        ((torch.zeros(1, dtype=torch.int64), torch.ones(1), "3"), "Tensor, Tensor, str"),
    ],
)
def test_arguments_of_other_types_are_refused_in_one_line(arguments, kinds):
    with pytest.raises(ConfigurationError, match=f"are {kinds}; give two tensors and an int$"):
        SparseVector(*arguments)
