import pytest

from sparsync import testing

from .table import (
    ALGORITHMS,
    AVERAGERS,
    CODECS,
    DRIFTING_AVERAGERS,
    EXPANSIVE_CODECS,
    INEXACT_SELECTORS,
    ROWS,
    SELECTORS,
    SPREADING_CODECS,
    rows,
)

# With 3 ranks, one is left over; with 5 as well, and the other four take two rounds; with 7, three are.
# With 3 and 4 ranks, tests/distributed runs the same rows on gloo, ZeroMQ and MPI.
QUICK = (1, 2, 3)
MORE = {name: (5,) if "," in name else (5, 7) for name in ROWS} | {
    name: (5, 7, 8, 16) for name in ("allgather", "oktopk", "oktopk, as published")
}


@pytest.mark.parametrize("name", [*SELECTORS, *INEXACT_SELECTORS])
def test_selector(name):
    make = {**SELECTORS, **INEXACT_SELECTORS}[name]
    testing.check_selector(make, exact=name in SELECTORS)


@pytest.mark.parametrize("name", [*CODECS, *EXPANSIVE_CODECS, *SPREADING_CODECS])
def test_codec(name):
    codec = {**CODECS, **EXPANSIVE_CODECS, **SPREADING_CODECS}[name]
    testing.check_codec(
        codec, contractive=name not in EXPANSIVE_CODECS, spreading=name in SPREADING_CODECS
    )


@pytest.mark.parametrize("name", rows(ROWS))
def test_collective(name):
    make, options = ROWS[name]
    testing.check_collective(make, world_sizes=QUICK, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_collective_on_more_ranks(name):
    make, options = ROWS[name]
    testing.check_collective(make, world_sizes=MORE[name], **options)


@pytest.mark.parametrize("name", rows(ALGORITHMS))
def test_algorithm(name):
    testing.check_algorithm(ALGORITHMS[name], world_sizes=(1, 3))


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithm_on_more_ranks(name):
    most = (7, 16) if name in ("dense", "oktopk", "oktopk-paper") else ()
    testing.check_algorithm(ALGORITHMS[name], world_sizes=(5, *most))


@pytest.mark.parametrize("name", AVERAGERS)
def test_averager(name):
    testing.check_averager(AVERAGERS[name])


@pytest.mark.parametrize(
    "worlds", [(2, 3), pytest.param((4, 7, 16), marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("name", DRIFTING_AVERAGERS)
def test_drifting_averager(name, worlds):  # a single rank also compresses
    drift = testing.check_averager(
        DRIFTING_AVERAGERS[name], preserves_mean=False, world_sizes=worlds
    )
    assert 0 < drift < 1


def test_communicator():
    testing.check_communicator(world_sizes=(1, 2, 3, 4, 5, 7, 8, 9, 16))
