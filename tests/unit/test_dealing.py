import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsync import kernels
from sparsync.kernels import reference

sizes = st.integers(0, 300)
world_sizes = st.integers(1, 40)


def owners(dealt):
    return torch.repeat_interleave(torch.tensor(dealt.counts))


@given(sizes, world_sizes, st.integers(0, 2**40))
def test_undeal_is_the_inverse_of_deal(size, world_size, start):
    indices = torch.arange(start, start + 3 * size, 3)
    dealt = kernels.deal(indices, world_size)
    assert sorted(dealt.order.tolist()) == list(range(size))
    for owner, (local, order) in enumerate(
        zip(
            torch.split_with_sizes(dealt.local, dealt.counts),
            torch.split_with_sizes(dealt.order, dealt.counts),
            strict=True,
        )
    ):
        assert torch.equal(kernels.undeal(local, owner, world_size), indices[order])
        assert bool((local.diff() > 0).all()), "order is kept, and no two share an index"


@given(st.integers(0, 100), world_sizes)
def test_every_p_consecutive_elements_have_p_owners(group, world_size):
    indices = torch.arange(group * world_size, (group + 1) * world_size)
    dealt = kernels.deal(indices, world_size)
    assert dealt.counts == [1] * world_size and set(dealt.local.tolist()) == {group}


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 8, 64])
@pytest.mark.parametrize("start", [0, 2**31 - 50, 2**32 - 50, 2**45])
def test_cpp_equals_the_specification(world_size, start):
    indices = start + torch.randperm(5000, generator=torch.Generator().manual_seed(0)).sort().values
    dealt = kernels.deal(indices, world_size)
    order, local, counts = reference.deal(indices, world_size)
    assert torch.equal(dealt.order, order) and torch.equal(dealt.local, local)
    assert dealt.counts == counts
    back = kernels.undeal(local, 0, world_size)
    assert torch.equal(back, reference.undeal(local, 0, world_size))


@pytest.mark.parametrize("stride", [1, 2, 3, 8, 64, 1000, 4096, 2**20])
@pytest.mark.parametrize("world_size", [3, 8, 16])
def test_strides_are_dealt_evenly(stride, world_size):
    count = 1000 * world_size
    dealt = kernels.deal(torch.arange(0, count * stride, stride), world_size)
    # binomial with mean 1000: five deviations are 0.16
    assert all(840 < c < 1160 for c in dealt.counts)
