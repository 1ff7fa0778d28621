import pytest
import torch

from sparsync import ConfigurationError, DenseVector, PeerError, SparseVector, allreduce, connect
from sparsync import simulate as simulate_ranks
from sparsync.api import _allreduce
from sparsync.collectives.agreement import agree
from sparsync.integrations import base
from sparsync.presets import PRESETS, resolve
from sparsync.reducer import Reducer
from sparsync.transports.solo import SoloCommunicator
from sparsync.units import plan_units
from sparsync.wire import Coo


def test_without_a_process_group_the_world_is_one_rank():
    comm = connect()
    assert isinstance(comm, SoloCommunicator)
    assert (comm.rank, comm.world_size) == (0, 1)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_world_of_one_selects_and_sends_nothing(name):
    comm, vector = connect(), torch.tensor([1.0, -5.0, 0.0, 2.0])
    reduced = allreduce(vector, comm, name, k=2)
    expected = [1.0, -5.0, 0.0, 2.0] if name == "dense" else [0.0, -5.0, 0.0, 2.0]
    assert reduced.total.to_dense().tolist() == expected
    assert reduced.delivered.to_dense().tolist() == expected
    assert comm.ledger.total().messages_sent == 0
    assert vector.tolist() == [1.0, -5.0, 0.0, 2.0]


@pytest.mark.parametrize(
    "vector",
    [
        torch.tensor([0.0, 3.0]),
        DenseVector(torch.tensor([0.0, 3.0])),
        SparseVector(torch.tensor([1]), torch.tensor([3.0]), 2),
    ],
    ids=["tensor", "dense", "sparse"],
)
def test_every_form_of_a_vector_is_taken(vector):
    assert allreduce(vector, connect()).total.to_dense().tolist() == [0.0, 3.0]


@pytest.mark.parametrize("size", [0, 3])
def test_k_may_be_zero_and_more_than_there_is(size):
    for k in (0, 100):
        assert allreduce(torch.ones(size), connect(), k=k).total.nnz == min(k, size)


@pytest.mark.parametrize(
    ("vector", "arguments", "says"),
    [
        (torch.ones(2), {"k": -1}, "k is -1; give the number of entries to take"),
        (torch.ones(2, 2), {}, r"shape \(2, 2\); flatten it first"),
        (torch.ones(2), {"algorithm": "nothing"}, "choose one of allgather, budgeted, dense"),
        (torch.ones(2), {"capp": 1}, "has no option capp"),
        (torch.arange(3), {"k": 1}, r"torch\.int64 are not defined"),
        (SparseVector(torch.tensor([1, 0]), torch.ones(2), 2), {}, "strictly ascending"),
    ],
)
def test_bad_calls_are_refused(vector, arguments, says):
    with pytest.raises(ConfigurationError, match=says):
        allreduce(vector, connect(), **arguments)


def test_disagreement_names_the_fact_and_the_ranks():
    async def program(comm):
        with pytest.raises(PeerError) as caught:
            await agree(comm, {"size": 5, "k": 3 if comm.rank else 2})
        return str(caught.value)

    results = simulate_ranks(program, 3).results
    assert "disagree on k: rank 0 has 2, but not ranks 1, 2; give all ranks the same" in results[0]
    assert "disagree on k: rank 1 has 3, but not rank 0; give all ranks the same" in results[1]


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_agreement_passes_when_all_say_the_same(world_size):
    async def program(comm):
        await agree(comm, {"size": 5, "options": [("cap", None)]})

    assert simulate_ranks(program, world_size).results == [None] * world_size


def test_ranks_that_give_equal_codecs_agree():
    async def program(comm):
        vector = torch.eye(3)[comm.rank]
        options = {"codec": Coo()}  # an object of its own on each rank
        reduced = await _allreduce(vector, comm, resolve("oktopk", **options), 3, 3, options)
        return reduced.total.to_dense().tolist()

    assert simulate_ranks(program, 3).results == [[1.0, 1.0, 1.0]] * 3


def test_attach_compares_the_options_too(monkeypatch):
    """Ranks with another cap post receives of another length: gloo aborts the process."""
    told = []

    async def listen(comm, facts):
        told.append(str(facts))

    monkeypatch.setattr(base, "agree", listen)
    for cap in (1.0, None):
        units = plan_units([("w", torch.zeros(4))])
        base.agree_on_reducer(Reducer(connect(), units, resolve("oktopk", cap=cap), density=0.5))
    assert told[0] != told[1]
