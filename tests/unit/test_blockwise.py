import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsync import ConfigurationError, SparseVector
from sparsync.selection.blockwise import Blockwise

from .strategies import dense_tensors, same_vector


def block_by_block(accumulated, entries: int, block: int) -> SparseVector:
    """The simple version: the exact top of one block after the other."""
    size, parts = accumulated.numel(), []
    for start in range(0, size, block):
        piece = accumulated[start : start + block]
        of_this = entries if piece.numel() == block else max(entries * piece.numel() // block, 1)
        top = SparseVector.from_dense(piece).top(of_this)
        parts.append(top.embed(start, size))
    return SparseVector.join(parts) if parts else SparseVector.empty(size, accumulated)


@given(dense_tensors(max_size=60), st.integers(1, 9), st.data(), st.integers(0, 3))
def test_every_block_gives_its_largest(accumulated, block, data, step):
    entries = data.draw(st.integers(1, block))
    before = accumulated.clone()
    selected = Blockwise(entries, block).select(accumulated, 5, step).check()
    same_vector(selected, block_by_block(before, entries, block))


@given(dense_tensors(max_size=60), st.integers(1, 9), st.integers(1, 99))
def test_without_entries_a_block_gives_its_part_of_k(accumulated, block, k):
    size = accumulated.numel()
    selected = Blockwise(block=block).select(accumulated, k, 0)
    if size:
        entries = min(-(-k * block // size), block)
        same_vector(selected, block_by_block(accumulated, entries, block))
    assert selected.nnz <= k + -(-size // block)


@given(st.integers(1, 3000), st.integers(1, 600), st.integers(1, 4000))
def test_without_entries_at_least_k_come_and_one_more_per_block_at_most(size, block, k):
    dense = torch.arange(1.0, size + 1)
    nnz = Blockwise(block=block).select(dense, k, 0).nnz
    blocks = -(-size // block)
    assert min(k, size) <= nnz <= min(k + blocks, size)
    if blocks == 1:
        assert nnz == min(k, size)


@pytest.mark.parametrize("entries", [8, 16, 2, 4, 1])
def test_the_published_settings_select_so_many_of_512(entries):
    """CIFAR-10: 8 or 16; ATIS 2; Hansards and ASR 4; wide ResNets 1 (SparCML, section 8)."""
    accumulated = torch.randn(10 * 512, generator=torch.Generator().manual_seed(entries))
    selected = Blockwise(entries).select(accumulated, k=1, step=0)
    per_block = torch.bincount(selected.indices // 512, minlength=10)
    assert per_block.tolist() == [entries] * 10


def test_ties_go_to_the_lower_index_and_zeros_stay():
    accumulated = torch.tensor([2.0, -2.0, 2.0, 1.0, 0.0, 0.0, 3.0, 0.0, 1.0, -1.0])
    selected = Blockwise(2, block=4).select(accumulated, k=4, step=0)
    assert selected.indices.tolist() == [0, 1, 6, 8]  # the last block has half the length
    assert selected.values.tolist() == [2.0, -2.0, 3.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_nan_and_inf_come_first(dtype):
    accumulated = torch.tensor([9.0, float("nan"), 1.0, -float("inf")], dtype=dtype)
    assert Blockwise(2, block=4).select(accumulated, k=2, step=0).indices.tolist() == [1, 3]


@pytest.mark.parametrize("entries", [None, 3])
def test_nothing_is_asked_or_there_is_nothing(entries):
    selector = Blockwise(entries, block=4)
    assert selector.select(torch.ones(9), k=0, step=0).nnz == 0
    assert selector.select(torch.ones(0), k=5, step=0).size == 0
    assert selector.select(torch.zeros(9), k=5, step=0).nnz == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"block": 0}, "block is 0; give at least 1 element"),
        ({"entries": 0}, "entries is 0; give 1 to 512 per block, or None"),
        ({"entries": 9, "block": 8}, "entries is 9; give 1 to 8"),
    ],
)
def test_bad_constants_are_refused(arguments, says):
    with pytest.raises(ConfigurationError, match=says):
        Blockwise(**arguments)
