import pytest

from sparsync import testing

from .table import (
    ALGORITHMS,
    AVERAGERS,
    CODECS,
    COLLECTIVES,
    DRIFTING_AVERAGERS,
    EXPANSIVE_CODECS,
    INEXACT_SELECTORS,
    ROUNDING_COLLECTIVES,
    ROWS,
    SELECTORS,
    SPREADING_CODECS,
    rows,
)

# 5 = 4 + 1: one rank is left over, and the others take two rounds; of 7 three are left over.  With 3
# and 4 ranks, tests/distributed runs the same rows on gloo, ZeroMQ and MPI.
QUICK = (1, 2, 5)
PLAIN = [name for name in ROWS if "," not in name]


@pytest.mark.parametrize("name", SELECTORS)
def test_selector(name):
    testing.check_selector(SELECTORS[name])


@pytest.mark.parametrize("name", INEXACT_SELECTORS)
def test_inexact_selector(name):
    testing.check_selector(INEXACT_SELECTORS[name], exact=False)


@pytest.mark.parametrize("name", EXPANSIVE_CODECS)
def test_expansive_codec(name):
    testing.check_codec(EXPANSIVE_CODECS[name], contractive=False)


@pytest.mark.parametrize("name", SPREADING_CODECS)
def test_spreading_codec(name):
    testing.check_codec(SPREADING_CODECS[name], spreading=True)


@pytest.mark.parametrize("name", CODECS)
def test_codec(name):
    testing.check_codec(CODECS[name])


@pytest.mark.parametrize("name", rows(COLLECTIVES))
def test_collective(name):
    testing.check_collective(COLLECTIVES[name], world_sizes=QUICK)


@pytest.mark.parametrize("name", rows(ROUNDING_COLLECTIVES, ROWS))
def test_rounding_collective(name):
    testing.check_collective(ROUNDING_COLLECTIVES[name], rounding=True, world_sizes=QUICK)


@pytest.mark.parametrize("name", rows(ALGORITHMS))
def test_algorithm(name):
    testing.check_algorithm(ALGORITHMS[name], world_sizes=(1, 5))


@pytest.mark.parametrize("name", AVERAGERS)
def test_averager(name):
    testing.check_averager(AVERAGERS[name])


@pytest.mark.parametrize("name", DRIFTING_AVERAGERS)
def test_drifting_averager(name):
    worlds = (2, 3, 4, 7, 16)  # one rank alone compresses, too
    drift = testing.check_averager(
        DRIFTING_AVERAGERS[name], preserves_mean=False, world_sizes=worlds
    )
    assert 0 < drift < 1


def test_communicator():
    testing.check_communicator(world_sizes=(1, 2, 3, 4, 5, 7, 8, 9, 16))


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAIN)
def test_collective_on_seven_ranks(name):
    make, options = ROWS[name]
    testing.check_collective(make, world_sizes=(7,), **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["allgather", "oktopk", "oktopk, as published"])
def test_collective_on_more_ranks(name):
    testing.check_collective(COLLECTIVES[name], world_sizes=(8, 16))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "oktopk", "oktopk-paper"])
def test_algorithm_on_more_ranks(name):
    testing.check_algorithm(ALGORITHMS[name], world_sizes=(7, 16))
