import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsync.collectives.density import expected_union, most_in_union


@given(st.integers(1, 12), st.integers(1, 60), st.data())
def test_the_closed_form_is_the_sum_of_appendix_b(ranks, size, data):
    k = data.draw(st.integers(0, size))
    terms = ((-1) ** (i - 1) * math.comb(ranks, i) * (k / size) ** i for i in range(1, ranks + 1))
    assert expected_union(k, size, ranks) == pytest.approx(size * sum(terms), rel=1e-9, abs=1e-9)


@given(st.integers(1, 64), st.integers(1, 10**7), st.data())
def test_the_expectation_lies_between_the_extremes(ranks, size, data):
    k = data.draw(st.integers(0, size))
    union = expected_union(k, size, ranks)
    assert k * (1 - 1e-12) <= union <= most_in_union(k, size, ranks) * (1 + 1e-12)


@pytest.mark.parametrize("ranks", [2, 5, 16, 64])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.1])
def test_expected_union_of_uniform_indices_within_one_percent(ranks, density):
    size = 200_000
    k = round(density * size)
    generator = torch.Generator().manual_seed(ranks)
    hit = torch.zeros(size, dtype=torch.bool)
    for _ in range(ranks):
        hit[torch.randperm(size, generator=generator)[:k]] = True
    assert int(hit.sum()) == pytest.approx(expected_union(k, size, ranks), rel=0.01)
