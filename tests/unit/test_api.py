import numpy as np
import pytest
import torch
from scipy import sparse

from sparsync import ConfigurationError, DenseVector, SparseVector, allreduce, connect, iallreduce
from sparsync import simulate as simulate_ranks
from sparsync.api import _prepare
from sparsync.errors import CheckpointError, PeerError
from sparsync.feedback import agreed_setup as agreement
from sparsync.feedback.reducer import Reducer
from sparsync.presets import PRESETS, resolve
from sparsync.reduction import reduction
from sparsync.sparse import densify
from sparsync.transports.agree import agree, on_all_or_none, worst
from sparsync.transports.groups import Subgroup
from sparsync.units import plan_units
from sparsync.wire import Coo


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_world_of_one_selects_and_sends_nothing(name):
    comm, vector = connect(), torch.tensor([1.0, -5.0, 0.0, 2.0])
    reduced = allreduce(vector, comm, name, k=2)
    whole, largest = [1.0, -5.0, 0.0, 2.0], [0.0, -5.0, 0.0, 2.0]
    one_mean = [1.5, 0.0, 0.0, 1.5]
    others = {"dense": whole, "ring-dense": whole, "quantised": whole}
    expected = {**others, "redsync-quantized": one_mean}.get(name, largest)
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
        np.array([0.0, 3.0], dtype=np.float32),
        sparse.csr_matrix([[0.0, 3.0]], dtype=np.float32),
        sparse.csc_matrix([[0.0], [3.0]], dtype=np.float32),
        sparse.coo_matrix(([1.0, 2.0], ([0, 0], [1, 1])), shape=(1, 2), dtype=np.float32),
        sparse.coo_array(([3.0], [[1]]), shape=(2,), dtype=np.float32),
    ],
    ids=["tensor", "dense", "sparse", "numpy", "row", "column", "duplicates", "one dimension"],
)
def test_every_form_of_a_vector_is_taken(vector):
    total = allreduce(vector, connect()).total
    assert total.to_dense().tolist() == [0.0, 3.0]
    assert total.values.dtype == torch.float32


@pytest.mark.parametrize(
    ("op", "dtype", "values", "expected"),
    [
        ("max", torch.float32, [[1.0, -2.0, 0.0], [3.0, -5.0, -1.0]], [3.0, -2.0, 0.0]),
        ("min", torch.int32, [[1, -2, 0], [3, -5, -1]], [1, -5, -1]),
        ("sum", torch.bfloat16, [[1.0, -2.0, 0.0], [3.0, 2.0, 0.5]], [4.0, 0.0, 0.5]),
    ],
)
def test_any_operation_and_dtype_without_k(op, dtype, values, expected):
    async def program(comm):
        mine = torch.tensor(values[comm.rank], dtype=dtype)
        return (await _prepare(mine, None, None, op, {})(comm)).total

    operation = reduction(op)
    for total in simulate_ranks(program, 2).results:
        assert densify(total, operation).values.tolist() == expected
        assert total.values.dtype == dtype


@pytest.mark.parametrize(
    ("fact", "arguments"),
    [
        ("size", lambda rank: (torch.ones(2 + rank), None, "sum")),
        (
            "dtype",
            lambda rank: (torch.ones(2, dtype=[torch.int32, torch.int64][rank]), None, "sum"),
        ),
        ("operation", lambda rank: (torch.ones(2), None, ["max", "min"][rank])),
        ("algorithm", lambda rank: (torch.ones(2), ["ring", "dense"][rank], "sum")),
    ],
)
def test_ranks_that_disagree_are_named_before_any_data_moves(fact, arguments):
    async def program(comm):
        vector, algorithm, op = arguments(comm.rank)
        with pytest.raises(PeerError, match=f"disagree on {fact}: rank {comm.rank} has"):
            await _prepare(vector, algorithm, None, op, {})(comm)
        return sorted(comm.ledger.by_phase())

    assert simulate_ranks(program, 2).results == [["agreement"]] * 2


# ---- non-blocking --------------------------------------------------------------------------------


def test_several_calls_are_under_way_at_once_and_end_in_any_order():
    comm = connect()
    futures = [iallreduce(torch.full((4,), float(i)), comm) for i in range(20)]
    for i in reversed(range(20)):
        assert futures[i].result(timeout=10).total.to_dense().tolist() == [float(i)] * 4
        assert futures[i].done()
    blocking = allreduce(torch.ones(2), comm)  # goes through the same thread
    assert blocking.total.to_dense().tolist() == [1.0, 1.0]
    comm.close()
    comm.close()
    assert allreduce(torch.ones(2), comm).total.to_dense().tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("vector", "arguments", "says"),
    [
        (torch.ones(2), {"k": 1, "op": "max"}, "k works with sums, not with 'max'"),
        (torch.ones(2), {"op": "mean"}, "unknown operation 'mean'"),
        (torch.ones(2), {"op": "and"}, r"'and' is not defined on torch\.float32"),
        (
            torch.ones(2),
            {"op": "max", "algorithm": "budgeted"},
            "budgeted sums, and knows no 'max'",
        ),
        ("text", {}, "got str; give a 1-D tensor"),
        (np.array(["a"]), {}, "convert it to a numeric dtype"),
        (sparse.csr_matrix((2, 2)), {}, r"shape \(2, 2\); give one row"),
        (torch.ones(2), {"k": -1}, "k is -1; give the number of entries to take"),
        (torch.ones(2, 2), {}, r"shape \(2, 2\); flatten it first"),
        (torch.ones(2), {"algorithm": "nothing"}, "choose one of allgather, auto, budgeted"),
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
    assert "disagree on k: rank 0 has 2, rank 1 has 3, rank 2 has 3; give all" in results[0]
    assert "disagree on k: rank 1 has 3, rank 0 has 2; give all ranks the same" in results[1]


def test_disagreement_is_one_line_that_no_terminal_obeys():
    async def program(comm):
        with pytest.raises(PeerError) as caught:
            await agree(comm, {"name": "a\n\x1b[31mb" if comm.rank else "é"})
        return str(caught.value)

    assert "rank 0 has é, rank 1 has a??[31mb; give" in simulate_ranks(program, 2).results[0]


def test_disagreement_shows_long_values_where_they_differ():
    async def program(comm):
        sizes = [(f"layer{i}.weight", 7 + (i == 900 and comm.rank == 1)) for i in range(1000)]
        with pytest.raises(PeerError) as caught:
            await agree(comm, {"the parameters": sizes})
        return str(caught.value)

    for rank, said in enumerate(simulate_ranks(program, 2).results):
        mine, theirs = (f"('layer900.weight', {8 - (rank != r)})" for r in (1, 0))
        parts = said.split("rank ")
        assert parts[1].startswith(f"{rank} has ...") and mine in parts[1]
        assert parts[2].startswith(f"{1 - rank} has ...") and theirs in parts[2]
        assert len(said) < 600


def worst_of(outcomes, parts):
    """Let replicas of ``parts`` parts tell their outcomes; return what the ranks learn."""

    async def program(comm):
        home, part = comm.rank // parts * parts, comm.rank % parts
        replicas = Subgroup(comm, range(part, comm.world_size, parts))
        inner = Subgroup(comm, range(home, home + parts))
        marks = torch.arange(comm.world_size) == comm.rank
        return await worst([replicas, inner], *outcomes[comm.rank], "outcome", marks[1:])

    return simulate_ranks(program, len(outcomes)).results


def test_all_ranks_learn_the_worst_outcome_in_full():
    long = "layer " * 100 + "\x1b[31mé"
    outcomes = [(0, ""), (1, "NaN"), (0, ""), (1, "no"), (0, ""), (2, long)]
    for found in worst_of(outcomes, 2):
        assert found[:3] == (2, 5, long.replace("\x1b", "?")) and found.marks.tolist() == [True] * 5
    for found in worst_of(outcomes[:4], 2):
        assert found[:3] == (1, 1, "NaN") and found.marks.tolist() == [True] * 3
    for found in worst_of([(0, "")] * 3, 1):
        assert found.severity == 0 and found.words == ""


def test_an_action_that_fails_on_one_rank_raises_its_reason_on_all():
    async def program(comm):
        def action():
            if comm.rank == 1:
                raise OSError("disk full\nno room")
            return comm.rank

        with pytest.raises(CheckpointError) as caught:
            await on_all_or_none([comm], action, "write")
        return str(caught.value)

    others = "rank 1 could not write: OSError: disk full"
    own = "cannot write: OSError: disk full"
    assert simulate_ranks(program, 3).results == [others, own, others]


def test_ranks_that_give_equal_codecs_agree():
    async def program(comm):
        vector = torch.eye(3)[comm.rank]
        options = {"codec": Coo()}  # an object of its own on each rank
        reduced = await _prepare(vector, "oktopk", 3, "sum", options)(comm)
        return reduced.total.to_dense().tolist()

    assert simulate_ranks(program, 3).results == [[1.0, 1.0, 1.0]] * 3


def test_attach_compares_the_options_too(monkeypatch):
    """Ranks with another cap post receives of another length: gloo aborts the process."""
    told = []

    async def listen(comm, facts):
        told.append(str(facts))

    monkeypatch.setattr(agreement, "agree", listen)
    for cap in (1.0, None):
        units = plan_units([("w", torch.zeros(4))])
        agreement.agree_on_reducer(
            Reducer(connect(), units, resolve("oktopk", cap=cap), density=0.5)
        )
    assert told[0] != told[1]
