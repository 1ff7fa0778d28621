import gc
import sys
import warnings
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from scipy import sparse

from sparsync import (
    ConfigurationError,
    DenseVector,
    SparseVector,
    Transport,
    allgather,
    allreduce,
    api,
    connect,
    iallreduce,
)
from sparsync import simulate as simulate_ranks
from sparsync.algorithm import Algorithm
from sparsync.api import _prepare, _prepare_gather
from sparsync.averaging import LocalSgd
from sparsync.collectives import Allgather
from sparsync.cost.machine import Machine
from sparsync.errors import CheckpointError, DeadlineError, DisagreementError, PeerError
from sparsync.feedback import agreed_setup as agreement
from sparsync.feedback.reducer import Reducer
from sparsync.presets import PRESETS, resolve
from sparsync.reduction import Reduction, densify, entries_of, reduction
from sparsync.selection import Exact
from sparsync.transports.agree import agree, on_all_or_none, worst
from sparsync.transports.groups import Subgroup
from sparsync.units import plan_units
from sparsync.wire import Coo, Packed, StreamCodec
from tests.tables import cases, refuses

from .zmq_group import SECONDS
from .zmq_group import together as zmq_ranks

WHOLE = ("dense", "quantised", "ring-dense")
INF, FOUR = torch.inf, [1] * 4


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_world_of_one_selects_and_sends_nothing(name):
    comm, vector = connect(), torch.tensor([1.0, -5.0, 0.0, 2.0])
    reduced = allreduce(vector, comm, name, k=None if name in WHOLE else 2)
    expected = [1.0, -5.0, 0.0, 2.0] if name in WHOLE else [0.0, -5.0, 0.0, 2.0]
    if name == "redsync-quantized":
        expected = [1.5, 0.0, 0.0, 1.5]  # one mean
    assert reduced.total.to_dense().tolist() == expected
    assert reduced.delivered.to_dense().tolist() == expected
    assert comm.ledger.total().messages_sent == 0
    assert vector.tolist() == [1.0, -5.0, 0.0, 2.0]


@pytest.mark.parametrize(
    "launcher",
    [
        {"RANK": "1", "WORLD_SIZE": "2"},
        {"PMI_RANK": "1", "PMI_SIZE": "2"},
        {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"},
    ],
    ids=["torchrun", "mpiexec", "srun"],
)
def test_ranks_of_a_launcher_are_not_each_a_world_of_one(monkeypatch, launcher):
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    said = r"2 ranks were launched, .*; first call init_process_group\(\) .*launchers"
    said += ', or give transport="mpi"$' if "PMI_RANK" in launcher else "$"
    for connected in (connect, lambda: LocalSgd(torch.nn.Linear(2, 1))):
        with pytest.raises(ConfigurationError, match=said):
            connected()
    for name in launcher:  # a launcher's only rank is alone
        monkeypatch.setenv(name, launcher[name].replace("1", "0").replace("2", "1"))
    assert connect().world_size == 1


@pytest.mark.parametrize("name", WHOLE)
def test_what_sums_whole_vectors_takes_no_k(name):
    with pytest.raises(ConfigurationError, match=f"k is 2, but {name} sums whole vectors; omit k"):
        allreduce(torch.ones(4), connect(), name, k=2)


@cases(
    (8, ("budgeted", "gtopk", "halving", "oktopk", "oktopk-paper")),
    (4 * 8, ("allgather", "recursive-doubling", "ring", "sparcml-auto", "split-allgather")),
)
def test_k_bounds_the_total_or_each_share(most, names):
    """No two ranks have a nonzero element in common."""

    async def program(comm, name):
        mine = torch.zeros(4 * 100)
        mine[comm.rank :: 4] = torch.arange(1.0, 101.0)
        return (await _prepare(mine, name, 8, None, {})(comm)).total

    for name in names:
        for total in simulate_ranks(partial(program, name=name), 4).results:
            assert entries_of(total) == most


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
        np.array([3.0, 0.0], dtype=np.float32)[::-1],
        np.array([0.0, 3.0], dtype=">f4"),
        np.frombuffer(np.array([0.0, 3.0], dtype=np.float32).tobytes(), dtype=np.float32),
        sparse.csr_array((np.frombuffer(b"\0\0\x40\x40", "<f4"), [1], [0, 1]), shape=(1, 2)),
        torch.sparse_coo_tensor([[1, 1]], [1.0, 2.0], (2,), check_invariants=True),
        torch.sparse_coo_tensor([[0], [1]], [3.0], (1, 2), check_invariants=True),
        (np.array([1, 0]), np.array([3.0, 0.0], dtype=np.float32), 2),
        (torch.tensor([1]), torch.tensor([3.0]), np.int32(2)),
    ],
    ids=[
        *("tensor", "dense", "sparse", "numpy", "row", "column", "duplicates", "one dimension"),
        *("backwards", "big-endian", "read-only", "read-only row", "torch", "torch row"),
        *("parts", "parts of tensors"),
    ],
)
def test_every_form_of_a_vector_is_taken(vector):
    total = allreduce(vector, connect()).total
    assert total.to_dense().tolist() == [0.0, 3.0]
    assert total.values.dtype == torch.float32


@pytest.mark.parametrize("form", ["coo_array", "coo_matrix", "csr_array", "csc_matrix"])
def test_zeros_that_scipy_stores_count_as_those_of_other_forms_do(form):
    """The duplicates at 2 cancel, which leaves a zero as well."""
    row, values = np.array([0, 0, 0, 0]), np.array([0.0, -5.0, 1.0, -1.0])
    stored = sparse.coo_array((values, (row, np.array([0, 1, 2, 2]))), shape=(1, 4))
    total = allreduce(getattr(sparse, form)(stored), connect(), op="max").total
    assert total.to_dense().tolist() == [0.0, -5.0, 0.0, -torch.inf]
    assert stored.nnz == 4  # what was given is not modified


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_csr_tensor_of_one_column_is_taken():
    column = torch.tensor([[0.0], [3.0]]).to_sparse_csr()
    assert allreduce(column, connect()).total.to_dense().tolist() == [0.0, 3.0]


@pytest.mark.parametrize("kind", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", ">i4"])
def test_indices_of_any_integer_type_in_any_order_are_taken(kind):
    indices = np.array([100, 3, 7], dtype=kind)
    total = allreduce((indices, np.array([1.0, 2.0, 3.0]), 101), connect()).total
    assert (total.indices.tolist(), total.values.tolist()) == ([3, 7, 100], [2.0, 3.0, 1.0])
    assert indices.tolist() == [100, 3, 7]


@pytest.mark.parametrize("dense", [False, True])
def test_results_go_to_other_libraries(dense):
    values = torch.tensor([0.0, 3.0, 0.0, -1.0])
    total = DenseVector(values) if dense else SparseVector.from_dense(values)
    indices, stored, size = total.to_numpy()
    assert (indices.tolist(), stored.tolist(), size) == ([1, 3], [3.0, -1.0], 4)
    assert (indices.dtype, stored.dtype) == (np.int64, np.float32)
    matrix = total.to_scipy()
    assert matrix.shape == (1, 4) and matrix.toarray().tolist() == [values.tolist()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PyTorch warns of tensors whose invariants are not checked
        tensor = total.to_torch()
    assert tensor.is_coalesced() and torch.equal(tensor.to_dense(), values)
    for form in (total.to_numpy(), matrix, tensor):
        assert torch.equal(allreduce(form, connect()).total.to_dense(), values)


@cases(
    ("prod", [[1.0, 2, 1, 0, *FOUR], [1.0, 3, 1, 5, *FOUR]], [1, 6, 1, 0, *FOUR], [1, 3]),
    ("logical_and", [[1, 1, 0, 1, 1], [1, 1, 1, 1, 1]], [1, 1, 0, 1, 1], [2]),
    ("and", [[-1, 6, -1, -1, -1], [-1, 3, -1, 0, -1]], [-1, 2, -1, 0, -1], [1, 3]),
    ("min", [[INF, 2.0, INF], [INF, 0.0, INF]], [INF, 0, INF], [1]),
    ("max", [[0.0, -1.0, 3.0], [-1.0, 0.0, 1.0]], [0, 0, 3], [0, 1, 2]),  # zeros that count
)
@pytest.mark.parametrize("algorithm", ["sparcml-auto", "recursive-doubling", "dynamic"])
def test_results_of_any_operation_go_to_other_libraries(op, values, expected, stored, algorithm):
    async def program(comm):
        return await _prepare(torch.tensor(values[comm.rank]), algorithm, None, op, {})(comm)

    for rank, reduced in enumerate(simulate_ranks(program, 2).results):
        total = reduced.total
        assert total.to_dense().tolist() == expected
        assert total.to_torch().to_dense().tolist() == expected
        assert total.to_scipy().toarray().tolist() == [expected]
        assert total.to_numpy()[0].tolist() == stored
        assert total.absent == reduction(op).neutral(total.values.dtype)
        assert reduced.delivered.to_dense().tolist() == values[rank]
        # each form may be reduced again
        for form in (total, total.to_dense(), total.to_torch(), total.to_numpy()):
            assert allreduce(form, connect(), op=op).total.to_dense().tolist() == expected


OTHER = r"does not store are 1, but .* are 0; give its to"


@refuses((allreduce, OTHER), (allgather, OTHER))
def test_a_total_of_another_operation_is_refused(call):
    call(allreduce(torch.tensor([1.0, 2.0]), connect(), op="prod").total, connect())


def test_a_result_shares_its_memory_with_numpy():
    total = SparseVector(torch.tensor([1]), torch.tensor([3.0]), 2)
    total.to_numpy()[1][0] = 5.0
    assert total.values.tolist() == [5.0]


def test_a_form_that_a_library_lacks_is_one_line(monkeypatch):
    total = SparseVector.from_dense(torch.ones(2, dtype=torch.bfloat16))
    with pytest.raises(ConfigurationError, match=r"NumPy has no torch.bfloat16; take to_torch\(\)"):
        total.to_numpy()
    monkeypatch.setitem(sys.modules, "scipy.sparse", None)
    with pytest.raises(ConfigurationError, match=r"to_scipy needs SciPy .*: pip install scipy"):
        SparseVector.from_dense(torch.ones(2)).to_scipy()


@cases(
    ("max", torch.float32, [[1.0, -2.0, 0.0], [3.0, -5.0, -1.0]], [3.0, -2.0, 0.0]),
    ("min", torch.int32, [[1, -2, 0], [3, -5, -1]], [1, -5, -1]),
    ("sum", torch.bfloat16, [[1.0, -2.0, 0.0], [3.0, 2.0, 0.5]], [4.0, 0.0, 0.5]),
)
def test_any_operation_without_k(op, dtype, values, expected):
    async def program(comm):
        mine = torch.tensor(values[comm.rank], dtype=dtype)
        return (await _prepare(mine, None, None, op, {})(comm)).total

    operation = reduction(op)
    for total in simulate_ranks(program, 2).results:
        assert densify(total, operation).values.tolist() == expected
        assert total.values.dtype == dtype


FLOATS = torch.float32, torch.float64, torch.float16, torch.bfloat16


@cases(
    (None, (*FLOATS, torch.int32, torch.int64), "have no wire format; choose"),
    (2, FLOATS, "magnitudes of .* are not defined; use one of"),
)
def test_the_defaults_take_the_documented_dtypes_and_refuse_others(k, taken, says):
    async def program(comm, dtype):
        mine = torch.tensor([1, 0, 3], dtype=dtype)
        return (await _prepare(mine, None, k, None, {})(comm)).total

    for dtype in taken:
        for total in simulate_ranks(partial(program, dtype=dtype), 2).results:
            assert total.to_dense().tolist() == [2, 0, 6]
            assert total.values.dtype == dtype
        assert str(dtype).removeprefix("torch.") in allreduce.__doc__
    for dtype in (torch.bool, torch.uint8, torch.int8, torch.int16):
        with pytest.raises(ConfigurationError, match=says):
            simulate_ranks(partial(program, dtype=dtype), 2)


@cases("ring", "recursive-doubling", "dynamic", "split-allgather", "sparcml-auto")
def test_the_operation_inside_an_algorithm_counts(name):
    async def program(comm):
        mine = torch.tensor([[0.0, 5.0, -3.0], [-1.0, 2.0, -4.0]][comm.rank])
        algorithm = resolve(name, op="max", cap=None)
        return (await _prepare(mine, algorithm, None, None, {})(comm)).total.to_dense().tolist()

    assert simulate_ranks(program, 2).results == [[0.0, 5.0, -3.0]] * 2


@refuses(
    ({"op": "sum"}, "op is 'sum', but the Algorithm ring reduces with 'max'; omit op"),
    ({"k": 1}, "k works with sums, not with 'max'"),
)
def test_what_contradicts_the_operation_inside_an_algorithm_is_refused(arguments):
    allreduce(torch.ones(2), connect(), resolve("ring", op="max", cap=None), **arguments)


@cases(
    ("size", lambda rank: (torch.ones(2 + rank), None, "sum")),
    ("dtype", lambda rank: (torch.ones(2).to([torch.int32, torch.int64][rank]), None, "sum")),
    ("operation", lambda rank: (torch.ones(2), None, ["max", "min"][rank])),
    ("algorithm", lambda rank: (torch.ones(2), ["ring", "dense"][rank], "sum")),
)
def test_ranks_that_disagree_are_named_before_any_data_moves(fact, arguments):
    async def program(comm):
        vector, algorithm, op = arguments(comm.rank)
        with pytest.raises(PeerError, match=f"disagree on {fact}: rank {comm.rank} has"):
            await _prepare(vector, algorithm, None, op, {})(comm)
        return sorted(comm.ledger.by_phase())

    assert simulate_ranks(program, 2).results == [["agreement"]] * 2


def disagreement(*calls):
    """Let each rank make its own call; return what each of them said, or its total."""

    async def program(comm):
        algorithm, k, options = calls[comm.rank]
        vector = torch.tensor([4.0, 3.0, 2.0, 1.0])
        try:
            return (await _prepare(vector, algorithm, k, None, options)(comm)).total.to_dense()
        except PeerError as error:
            assert sorted(comm.ledger.by_phase()) == ["agreement"]
            return str(error)

    return simulate_ranks(program, len(calls)).results


@cases(
    ("recursive-doubling", {"op": "max", "cap": None}, {"op": "min", "cap": None}),
    ("budgeted", {"codec": Packed("fp32")}, {"codec": Packed("bf16")}),
    ("sparcml-auto", {"codec": StreamCodec(factor=0.5)}, {}),
    ("oktopk", {"cap": 0.5}, {"cap": 1.0}),
    ("oktopk", {"boundaries": "average"}, {"boundaries": "histogram"}),
    ("auto", {"machine": Machine(alpha=1.0)}, {}),
    ("redsync", {"thsd1": 1}, {"thsd1": 2}),
)
def test_the_options_inside_algorithms_are_compared(name, first, second):
    k = None if "op" in first else 2
    calls = [(resolve(name, **options), k, {}) for options in (first, second)]
    fact = "operation" if "op" in first else "options"
    for said in disagreement(*calls):
        assert f"ranks disagree on {fact}: rank" in said


def test_algorithms_with_settings_that_no_option_names_are_compared():
    made = [Algorithm("mine", Exact, lambda cap=cap: Allgather(cap=cap)) for cap in (1.0, 2.0)]
    said, _ = disagreement(*[(one, 2, {}) for one in made])
    words = "on options: rank 0 has Exact(), Allgather(cap=1.0, codec=Coo(), keep_error=True)"
    assert words in said


def test_a_default_that_only_one_rank_gives_is_no_disagreement():
    given = {"codec": Packed("bf16")}
    calls = [("budgeted", 2, {}), ("budgeted", 2, given), (resolve("budgeted"), 2, {})]
    assert [total.tolist() for total in disagreement(*calls)] == [[12.0, 9.0, 0.0, 0.0]] * 3


def test_no_k_is_not_the_k_of_all_entries():
    said, _ = disagreement(("allgather", None, {}), ("allgather", 4, {}))
    assert "disagree on k: rank 0 has None, rank 1 has 4; give" in said


# ---- the memory of a communicator ----------------------------------------------------------------


def counted(vectors, **arguments):
    """Return a rank's messages, without those that compare the call, and the totals' entries."""

    async def program(comm):
        counts, entries = [], []
        for vector in vectors:
            reduced = await _prepare(vector(comm.rank), None, None, "sum", {})(comm)
            compared = comm.ledger.by_phase()["agreement"].messages_sent
            counts.append(comm.ledger.total().messages_sent - compared - sum(counts))
            entries.append(reduced.total.nnz)
        return counts, entries

    return simulate_ranks(program, 64).results[0]


def same_places(size):
    """Return equal supports, because random ones of 2 % on 64 ranks would make the sum dense."""
    return lambda _rank: SparseVector(torch.arange(2_000), torch.ones(2_000), size)


def test_the_size_of_the_last_total_is_remembered_between_calls():
    def one(rank):
        return SparseVector(torch.tensor([rank, 900]), torch.ones(2), 100_000)

    # recursive doubling, without a round to learn how many entries ranks have, which takes 18
    # messages
    assert counted([one] * 3) == ([6, 6, 6], [65, 65, 65])


def test_a_remembered_size_chooses_the_collective_for_each_kind_of_call():
    size = 100_000
    # the first total is sent dense, but its number of entries is still remembered
    assert counted([same_places(size)] * 3) == ([63 + 6, 6, 6], [size, 2_000, 2_000])
    assert counted([*map(same_places, (size, size + 1, size))])[0] == [69, 69, 6]


def test_ranks_that_remember_different_totals_choose_alike():
    """When ranks start the next call, a call in flight may have ended on only some of them."""

    async def program(comm):
        vector = same_places(100_000)(comm.rank)
        for turn in range(2):
            if turn and comm.rank:
                comm.companions.clear()
            reduced = await _prepare(vector, None, None, "sum", {})(comm)
        return reduced.total.nnz

    assert simulate_ranks(program, 8).results == [2_000] * 8


def test_a_memory_is_bounded_and_ends_with_its_communicator():
    comm = connect()
    for size in range(1, 600):
        allreduce((np.array([0]), np.array([1.0]), size), comm)
    memory = comm.companions["totals"]
    assert len(memory._entries) == 256
    kept = weakref.ref(memory)
    del comm, memory
    gc.collect()
    assert kept() is None


# ---- allgather -----------------------------------------------------------------------------------


def test_allgather_collects_all_vectors_in_rank_order():
    async def program(comm):
        dense = torch.zeros(100)
        dense[comm.rank :: 100 if comm.rank else 1] = comm.rank + 1.0  # all elements of rank 0
        parts = await _prepare_gather(dense)(comm)
        return parts, comm.ledger.by_phase()["allgather"].messages_sent

    for parts, messages in simulate_ranks(program, 5).results:
        assert messages == 3
        assert isinstance(parts[0], DenseVector) and parts[0].values.tolist() == [1.0] * 100
        found = [(part.indices.tolist(), part.values.tolist()) for part in parts[1:]]
        assert found == [([rank], [rank + 1.0]) for rank in range(1, 5)]


def test_what_travels_is_the_shorter_form():
    async def program(comm):
        ones = torch.ones(1_000, dtype=torch.float64)
        await _prepare_gather(SparseVector.from_dense(ones))(comm)
        return comm.ledger.by_phase()["allgather"].sent

    assert simulate_ranks(program, 2).results == [8 + 8 * 1_000] * 2


def test_allgather_keeps_stored_zeros_and_any_dtype():
    parts = allgather((np.array([2, 1]), np.array([0, 7]), 3), connect())
    [(indices, values, size)] = [part.to_numpy() for part in parts]
    assert (indices.tolist(), values.tolist(), size) == ([1, 2], [7, 0], 3)


def test_allgather_goes_through_the_thread_of_iallreduce():
    with connect() as comm:
        future = iallreduce(torch.ones(2), comm)
        assert allgather(torch.ones(2), comm)[0].values.tolist() == [1.0, 1.0]
        assert future.result().total.values.tolist() == [1.0, 1.0]


def test_ranks_that_gather_vectors_of_two_sizes_are_named():
    async def program(comm):
        with pytest.raises(PeerError, match=f"disagree on size: rank {comm.rank} has"):
            await _prepare_gather(torch.ones(2 + comm.rank))(comm)

    simulate_ranks(program, 2)


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


def test_a_disagreement_fails_one_of_several_calls_on_every_rank(monkeypatch):
    """Later calls use the same channels again, and must not find messages of earlier ones there."""
    monkeypatch.setattr(api, "_MOST_OUTSTANDING", 4)

    def program(comm):
        sizes = [100, 100 + comm.rank, 100, 100]
        futures = [iallreduce(torch.ones(size), comm, k=10) for size in sizes]
        errors = [type(future.exception(timeout=SECONDS)) for future in futures]
        totals = []
        for i in range(1, 9):
            future = iallreduce(torch.full((100,), float(i)), comm, k=100)
            totals += future.result(timeout=SECONDS).total.values.unique().tolist()
        return errors, totals

    nothing = type(None)
    errors = [nothing, DisagreementError, nothing, nothing]
    assert zmq_ranks(program, 2) == [(errors, [2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0])] * 2


def test_a_call_that_breaks_off_ends_those_in_flight_and_refuses_later_ones():

    def add(a, b):
        if len(a) > 1:  # ``allreduce`` tries an operation on one element before the call
            raise ValueError("no such sum")
        return a + b

    def program(comm):
        future = iallreduce(torch.ones(4), comm, op=Reduction("add", add, lambda dtype: 0))
        assert str(future.exception(timeout=SECONDS)) == "no such sum"
        said = r"earlier exchange broke off \(no such sum\), .* on all ranks close\(\), connect or"
        with pytest.raises(ConfigurationError, match=said):
            iallreduce(torch.ones(4), comm).result(timeout=SECONDS)
        with pytest.raises(ConfigurationError, match=said):
            allreduce(torch.ones(4), comm)

    zmq_ranks(program, 2)


def test_a_blocking_call_that_breaks_off_refuses_later_ones_but_a_disagreement_does_not():
    """A late rank would otherwise pair its call with another one, and both would get a wrong sum."""

    def program(comm):
        with pytest.raises(DisagreementError):
            allreduce(torch.ones(4 + comm.rank), comm)
        assert allreduce(torch.ones(4), comm).total.to_dense().tolist() == [2.0] * 4
        comm.timeout = 0.2
        if comm.rank == 0:
            with pytest.raises(DeadlineError):
                allreduce(torch.ones(4), comm)
            said = r"rank 0: an earlier exchange broke off \(.* did not complete within 0.2 s"
            for call in (allreduce, allgather):
                with pytest.raises(ConfigurationError, match=said):
                    call(torch.ones(4), comm)
            with pytest.raises(ConfigurationError, match=said):
                iallreduce(torch.ones(4), comm).result(timeout=SECONDS)
        comm.everyone.wait(SECONDS)

    zmq_ranks(program, 2)


ONES, MINE = torch.ones(2), Reduction("mine", lambda a, b: [][0], lambda dtype: 0)


def row_of(dtype):
    return sparse.coo_array(np.ones((1, 2), dtype=dtype))


@refuses(
    (ONES, {"k": 1, "op": "max"}, "k works with sums, not with 'max'"),
    (ONES, {"op": "mean"}, "unknown operation 'mean'"),
    (ONES, {"op": "and"}, r"'and' is not defined on torch\.float32"),
    (
        ONES,
        {"op": "max", "algorithm": "budgeted"},
        "budgeted only sums, and does not support 'max'",
    ),
    ("text", {}, "got str; give a 1-D tensor"),
    (np.array(["a"]), {}, "convert it to a numeric dtype"),
    (sparse.csr_matrix((2, 2)), {}, r"shape \(2, 2\); give one row"),
    (ONES, {"k": -1}, "k is -1; give the number of entries to take"),
    (torch.ones(2, 2), {}, r"shape \(2, 2\); flatten it first"),
    (torch.eye(2).to_sparse(), {}, r"shape \(2, 2\); give one row"),
    (torch.ones(1, 2).to_sparse(1), {}, "has 1 dense dimensions; give one without"),
    ((np.arange(2), np.ones(2)), {}, r"tuple of \(ndarray, ndarray\); give \(indices, values, "),
    ((np.arange(2), np.ones(2), 2.0), {}, r"tuple of \(ndarray, ndarray, float\); give"),
    ((np.ones(2), np.ones(2), 2), {}, "the indices are torch.float64; convert them to integers"),
    ((np.arange(2), np.ones(3), 3), {}, r"indices \(2,\) and values \(3,\); give"),
    ((np.array([0, 2]), np.ones(2), 2), {}, r"indices are from 0 to 2; give them within \[0, 2\)"),
    ((np.array([2**63], dtype="u8"), np.ones(1), 9), {}, r"from -\d+ to -\d+; give them within"),
    ((np.array([1, 1]), np.ones(2), 2), {}, "an index occurs more than once"),
    ((np.array([], int), np.ones(0), -5), {}, r"size is -5; give the number of elements, in"),
    ((np.array([], int), np.ones(0), 2**63), {}, r"size is 9\d+; give .*, in \[0, 2\^63\)"),
    (SparseVector(torch.tensor([0])[:0], torch.ones(0), -5), {}, r"size is -5; give the number"),
    (np.ma.masked_array([1.0, 2.0], mask=[0, 1]), {}, r"the array is masked; give filled\(0\)"),
    ((np.arange(2), np.ma.ones(2), 2), {}, r"the array is masked; give filled\(0\)"),
    (row_of(np.uint32), {}, r"'sum' is not defined on torch.uint32 .*; convert the values first"),
    (row_of(np.longdouble), {}, "convert it to a numeric dtype"),
    (ONES, {"op": ["max"]}, r"unknown operation \['max'\]; choose one of sum"),
    (ONES, {"op": MINE}, r"'mine' is not .* torch.float32 \(list index out of range\); convert"),
    (ONES, {"algorithm": "nothing"}, "choose one of allgather, auto, budgeted"),
    (ONES, {"capp": 1}, "has no option capp"),
    (torch.arange(3), {"k": 1}, r"torch\.int64 are not defined"),
    (SparseVector(torch.tensor([1, 0]), torch.ones(2), 2), {}, "strictly ascending"),
)
def test_bad_calls_are_refused(vector, arguments):
    allreduce(vector, connect(), **arguments)


def told(facts_of, ranks):
    """Return what each rank is told of facts that differ."""

    async def program(comm):
        with pytest.raises(PeerError) as caught:
            await agree(comm, facts_of(comm.rank))
        return str(caught.value)

    return simulate_ranks(program, ranks).results


def test_disagreement_names_the_fact_and_the_ranks():
    results = told(lambda rank: {"size": 5, "k": 3 if rank else 2}, 3)
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
    """Report the outcomes of all replicas of ``parts`` parts; return the result of each rank."""

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
        options = {"codec": Coo()}  # a separate object on each rank
        reduced = await _prepare(vector, "oktopk", 3, "sum", options)(comm)
        return reduced.total.to_dense().tolist()

    assert simulate_ranks(program, 3).results == [[1.0, 1.0, 1.0]] * 3


def test_attach_compares_the_options_too(monkeypatch):
    """With unequal caps, ranks would post receives of unequal lengths, and gloo would abort."""
    heard, units = [], plan_units([("w", torch.zeros(4))])

    async def listen(comm, facts):
        heard.append(str(facts))

    monkeypatch.setattr(agreement, "agree", listen)
    for cap in (1.0, None):
        agreement.agree_on_reducer(Reducer(connect(), units, resolve("oktopk", cap=cap), 0.5))
    assert heard[0] != heard[1]


@cases(
    ({"timeout": float("nan")}, "timeout is nan; give seconds > 0"),
    ({"timeout": -1}, "timeout is -1; give seconds > 0"),
    ({"timeout": "5"}, "timeout is '5'; give seconds > 0"),
    ({"connect_timeout": 0}, "connect_timeout is 0; give seconds > 0"),
    ({"transport": "tcp"}, "unknown transport 'tcp'; choose one of auto, torch, zmq, mpi"),
    ({"curve_keys": ""}, "curve_keys is ''; give the folder that holds the keys"),
    ({"transport": "zmq", "port_range": (5, 1)}, r"port_range is \(5, 1\); give"),
    ({"transport": "torch", "port_range": (1, 5)}, "port_range: for transport='zmq'"),
)
def test_a_single_process_refuses_what_a_group_refuses(arguments, says):
    with pytest.raises(ConfigurationError, match=says):
        connect(**arguments)
    its = {"name" if name == "transport" else name: value for name, value in arguments.items()}
    with pytest.raises(ConfigurationError, match=says):
        Transport(**its)


NO_COMMUNICATOR = r"of type NoneType; give .* sparsync\.connect\(\)"


@refuses(*((call, NO_COMMUNICATOR) for call in (allreduce, iallreduce, allgather)))
def test_something_that_is_no_communicator_is_named(call):
    call(torch.ones(2), None)
