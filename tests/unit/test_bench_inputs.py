"""Test inputs and simulated networks of ``sparsync bench``."""

import pytest
import torch

from sparsync import ConfigurationError
from sparsync.cli.bench.inputs import INPUTS, Draw, gradient
from sparsync.cli.network_choice import parse_network
from tests.tables import cases

# ---- inputs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", INPUTS)
def test_a_gradient_depends_on_seed_step_and_rank_alone(kind):
    def draw(**changes):
        drawn = {"size": 640, "world_size": 4, "rank": 1, "step": 2, "seed": 3} | changes
        return gradient(kind, Draw(**drawn))

    assert draw().dtype == torch.float32 and draw().shape == (640,)
    assert torch.equal(draw(), draw())
    for other in ({"seed": 4}, {"step": 3}, {"rank": 2}):
        assert not torch.equal(draw(), draw(**other))


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize(("size", "world_size"), [(1, 1), (1, 4), (3, 8), (100, 7)])
def test_every_size_and_world_size_is_legal(kind, size, world_size):
    for rank in range(world_size):
        values = gradient(kind, Draw(size, world_size, rank, step=0, seed=0))
        assert values.shape == (size,) and bool(values.isfinite().all())


@cases(
    ("one-region", [0, 0, 0, 0]),
    ("disjoint", [1, 2, 3, 0]),
    ("dominated", [1, 2, 3, 0]),
    ("matching", [0, 1, 2, 3]),
)
def test_supports_lie_where_they_should(kind, regions):
    for rank, region in enumerate(regions):
        values = gradient(kind, Draw(400, 4, rank, step=0, seed=0))
        assert set((values.nonzero() // 100).flatten().tolist()) == {region}


def test_one_rank_dominates():
    norms = [float(gradient("dominated", Draw(400, 4, r, 0, 0)).norm()) for r in range(4)]
    assert norms[1] > 50 * max(norms[:1] + norms[2:])


# ---- networks -------------------------------------------------------------------------------------


@cases(
    ("1gbit,50us", 50e-6, 8e-9),
    ("100mbit, 1ms", 1e-3, 80e-9),
    ("0us,2.5Gbit/s", 0.0, 3.2e-9),
    ("64kbit,1s", 1.0, 125e-6),
    ("1e9bit,100ns", 100e-9, 8e-9),
    ("alpha=1.5us,beta=0.4ns/word", 1.5e-6, 0.1e-9),
    ("beta = 2ns/byte, alpha=0s", 0.0, 2e-9),
    ("alpha=1ms,1gbit", 1e-3, 8e-9),
)
def test_networks_are_read(text, alpha, beta):
    links = parse_network(text)
    assert (links.alpha, links.beta) == (pytest.approx(alpha), pytest.approx(beta))


@cases(
    ("1gbit", "no latency"),
    ("50us", "no bandwidth"),
    ("1gbit,1gbit", "cannot read '1gbit'"),
    ("1gbyte,50us", "cannot read '1gbyte'"),
    ("fast", "cannot read 'fast'"),
    ("", "cannot read ''"),
    ("-1gbit,50us", "cannot read '-1gbit'"),
    ("0gbit,50us", "moves nothing"),
    ("alpha=1us,beta=1ns", "cannot read 'beta=1ns'"),
    ("alpha=1us,beta=1ns/bit", "cannot read 'beta=1ns/bit'"),
    ("alpha=1us/word,beta=1ns/word", "cannot read 'alpha=1us/word'"),
    ("beta=1gbit,1us", "cannot read 'beta=1gbit'"),
    ("alpha=1us,2us", "cannot read '2us'"),
)
def test_bad_networks_are_refused(text, said):
    with pytest.raises(ConfigurationError, match=said) as caught:
        parse_network(text)
    assert '"1gbit,50us"' in str(caught.value)
