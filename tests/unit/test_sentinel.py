"""Test that the sentinel names differing tensors and ranks, heals by majority, or is silent."""

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sparsync import ConfigurationError
from sparsync.errors import PeerError
from sparsync.gradients import sentinel as module
from sparsync.gradients.sentinel import Sentinel, check_replicas
from sparsync.transports.agree import digest, divergences, heal_
from sparsync.transports.driver import run
from sparsync.transports.groups import SoloCommunicator, Subgroup
from sparsync.transports.sim import simulate
from tests.tables import cases, refuses

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.int64, torch.bool,
          torch.complex64, torch.float8_e4m3fn]  # fmt: skip


# ---- digests --------------------------------------------------------------------------------------


@given(
    size=st.integers(1, 5000),
    at=st.integers(0, 10**6),
    bit=st.integers(0, 31),
    dtype=st.sampled_from([torch.float32, torch.int32]),
)
def test_every_bit_counts(size, at, bit, dtype):
    values = torch.arange(size, dtype=torch.int32).view(dtype)
    flipped = values.clone()
    flipped.view(torch.int32)[at % size] ^= -(2**31) if bit == 31 else 2**bit
    assert digest(values) != digest(flipped)
    assert digest(values) == digest(values.clone())


@given(size=st.integers(2, 5000), one=st.integers(0, 10**6), other=st.integers(0, 10**6))
def test_two_that_change_places_are_seen(size, one, other):
    one, other = one % size, other % size
    values = torch.arange(size)
    swapped = values.clone()
    swapped[one], swapped[other] = other, one
    assert (digest(values) == digest(swapped)) == (one == other)


@pytest.mark.parametrize("distance", [1, 1023, 1024, 1025, 2048])
def test_neighbours_in_a_row_or_column_that_change_places_are_seen(distance):
    values = torch.arange(4096)
    swapped = values.clone()
    swapped[7], swapped[7 + distance] = 7 + distance, 7
    assert digest(values) != digest(swapped)


@pytest.mark.parametrize("dtype", DTYPES)
def test_digests_do_not_depend_on_where_a_tensor_lies(dtype):
    values = torch.arange(20_001).remainder(2).to(dtype)
    shifted = torch.cat([values[:1], values])[1:]  # not at a multiple of 8 bytes
    apart = torch.stack([values, values], 1)[:, 0]  # not contiguous
    assert digest(values) == digest(shifted) == digest(apart)
    assert digest(values) != digest(values[:-1])


@pytest.mark.parametrize("size", [0, 3, 20_001])
def test_a_tensor_can_be_resized_after_its_digest(size):
    """NumPy would forbid it for good, and observers of quantisation resize their buffers."""
    values = torch.ones(size)
    digest(values)
    assert values.untyped_storage().resizable()


def test_digests_know_dtype_shape_and_sign_of_zero():
    zeros = torch.zeros(6)
    others = [zeros.view(2, 3), -zeros, zeros.int(), torch.zeros(5), torch.zeros(0)]
    assert len({digest(t) for t in (zeros, *others)}) == 6


# ---- comparing and healing ------------------------------------------------------------------------


def compare(world_size, change, policy="raise"):
    """Compare three tensors after ``change(rank, tensors)``; return each rank's tensors afterwards."""

    async def program(comm):
        tensors = {"a": torch.arange(5.0), "b": torch.ones(2, 3), "count": torch.tensor(7)}
        change(comm.rank, tensors)
        await check_replicas(Sentinel(policy=policy), comm, tensors, place="step 99")
        return {name: tensor.tolist() for name, tensor in tensors.items()}

    return simulate(program, world_size).results


def flip(which, *ranks):
    def change(rank, tensors):
        if rank in ranks:
            tensors[which].view(-1)[0] += 1 + rank

    return change


@pytest.mark.parametrize("policy", ["raise", "warn", "heal"])
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_equal_replicas_pass_without_a_word(world_size, policy):
    assert compare(world_size, lambda rank, tensors: None, policy)[0]["b"] == [[1.0] * 3] * 2


@refuses(
    (4, flip("b", 2), "step 99: 'b' differs on rank 2: replicas are no longer equal"),
    (5, flip("count", 0, 3), "'count' differs on ranks 0, 3"),
    (2, flip("a", 1), "'a' differs between rank 0 and rank 1, none of which is a majority"),
    error=PeerError,
)
def test_the_tensor_and_the_ranks_are_named(world_size, change):
    compare(world_size, change)


def test_many_tensors_are_counted():
    async def program(comm):
        tensors = {f"t{i}": torch.full((2,), float(comm.rank == 1)) for i in range(8)}
        await check_replicas(Sentinel(), comm, tensors, place="step 0")

    said = r"'t0' .*'t1' .*'t2' differs on rank 1; and 5 more tensors"
    with pytest.raises(PeerError, match=said):
        simulate(program, 3)


def test_a_warning_changes_nothing():
    with pytest.warns(RuntimeWarning, match="'b' differs on rank 2"):
        held = compare(4, flip("b", 2), "warn")
    assert held[2]["b"][0][0] == 4.0
    assert held[1]["b"][0][0] == 1.0


@given(
    world_size=st.integers(3, 6),
    torn=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 5)), max_size=4),
)
def test_a_majority_heals_in_place(world_size, torn):
    wrong = {name: {rank % world_size for n, rank in torn if n == name} for name in "ab"}
    healthy = all(2 * len(ranks) < world_size for ranks in wrong.values())

    def change(rank, tensors):
        for name, ranks in wrong.items():
            flip(name, *ranks)(rank, tensors)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not healthy:  # without a majority, all ranks keep their tensors, and get an error
            with pytest.raises(PeerError, match="none of which is a majority: nobody can tell"):
                compare(world_size, change, "heal")
            return
        held = compare(world_size, change, "heal")
    right = {"a": [0.0, 1.0, 2.0, 3.0, 4.0], "b": [[1.0] * 3] * 2, "count": 7}
    assert held == [right] * world_size


def groups_of(comm):
    """Return the replicas of this rank's part, and the parts of its replica, among six ranks."""
    home = comm.rank // 2 * 2
    return Subgroup(comm, range(comm.rank % 2, 6, 2)), Subgroup(comm, [home, home + 1])


def compare_parts(policy, *torn):
    """Compare three replicas of two parts, ranks 10 to 15; return their tensors and messages."""

    async def program(comm):
        peers, parts = groups_of(comm)
        tensors = {"a": torch.zeros(2)}
        flip("a", *torn)(comm.rank, tensors)
        try:
            sentinel, rank = Sentinel(policy=policy), 10 + comm.rank
            await check_replicas(sentinel, peers, tensors, "step 99", parts, rank=rank)
        except PeerError as error:
            return str(error)
        return tensors["a"].tolist()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return simulate(program, 6).results


def test_what_one_part_finds_all_parts_do():
    assert compare_parts("raise") == [[0.0, 0.0]] * 6
    told = compare_parts("raise", 3)
    assert told[0].startswith("step 99: 'a' differs on rank 13: replicas are no longer equal")
    assert told == [told[0]] * 6


def test_a_part_without_majority_ends_all_parts():
    assert compare_parts("heal", 3) == [[0.0, 0.0]] * 6
    told = compare_parts("heal", 1, 3)
    assert "between rank 11 and rank 13 and rank 15" in told[0]
    assert told == [told[0]] * 6


def test_what_one_part_warns_of_all_parts_say():
    async def program(comm):
        peers, parts = groups_of(comm)
        tensors = {"a": torch.ones(1) * (comm.rank == 3)}
        await check_replicas(Sentinel(policy="warn"), peers, tensors, "step 0", parts)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        simulate(program, 6)
    assert ["'a' differs on rank 1" in str(each.message) for each in said] == [True] * 6


@pytest.mark.parametrize("breaks_off", [False, True])
def test_only_a_comparison_that_broke_off_refuses_the_next_exchange(monkeypatch, breaks_off):
    """A difference is raised after all messages have arrived, also on parts that find none."""
    compare = module._compare

    async def failing(sentinel, comm, tensors, place, rank):
        if breaks_off and rank % 2:
            raise PeerError("the other rank is gone")
        return await compare(sentinel, comm, tensors, place, rank)

    async def program(comm):
        peers, parts = groups_of(comm)
        tensors = {"a": torch.ones(1) * (comm.rank == 3)}
        with pytest.raises(PeerError), peers.exchange():
            await check_replicas(Sentinel(), peers, tensors, "step 0", parts, rank=comm.rank)
        return len(peers.broken)

    monkeypatch.setattr(module, "_compare", failing)
    assert simulate(program, 6).results == [int(breaks_off)] * 6


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_dtype_and_layout_is_healed(dtype):
    async def program(comm):
        values = torch.arange(24).remainder(2).to(dtype).view(2, 3, 2, 2)
        image = values.contiguous(memory_format=torch.channels_last)
        pointer, stride = image.data_ptr(), image.stride()
        if comm.rank == 0:
            image.copy_(torch.zeros_like(values))
        # the tensor has one element, so torch considers it contiguous whatever its stride
        single = torch.full((6, 6), comm.rank > 0, dtype=dtype)[:1, 0]
        tensors = {"image": image, "empty": torch.zeros(0, dtype=dtype), "single": single}
        await heal_(comm, tensors, await divergences(comm, tensors))
        assert (image.data_ptr(), image.stride()) == (pointer, stride)
        assert digest(single) == digest(torch.ones(1, dtype=dtype))
        return digest(image) == digest(values)

    assert simulate(program, 3).results == [True] * 3


@cases(
    ("a", "ab", "rank 0 compares 'none' where rank 1 compares 'b'; give all "),
    (["b (3,)"], ["b (4,)"], r"'b \(3,\)' where rank 1 compares 'b \(4,\)'; "),
    ("ba", "ab", "rank 0 compares 'b' where rank 1 compares 'a'"),
)
def test_other_tensors_are_refused_not_compared(first, others, message):
    async def program(comm):
        names = others if comm.rank else first
        await divergences(comm, {name: torch.ones(2) for name in names})

    with pytest.raises(PeerError, match=message):
        simulate(program, 3)


# ---- what is compared -----------------------------------------------------------------------------


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.local = nn.BatchNorm1d(2)
        self.together = nn.SyncBatchNorm(2)
        self.register_buffer("positions", torch.arange(3.0))
        self.first.weight.requires_grad = False


def test_parameters_and_synchronised_statistics_are_compared():
    assert list(Sentinel().tensors(Mixed())) == [
        "first.weight",  # frozen, and equal all the same
        *("local.weight", "local.bias", "together.weight", "together.bias"),
        *(f"together.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")),
    ]
    assert "positions" in Sentinel(buffers=["positions"]).tensors(Mixed())
    assert "local.bias" not in Sentinel().tensors(Mixed(), ignored=["local.bias"])


def test_the_optimizer_is_compared_too():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sentinel = Sentinel(optimizer=optimizer)
    assert list(sentinel.tensors(model)) == ["weight", "bias"]
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    moments = ["momentum_buffer of weight", "momentum_buffer of bias"]
    assert list(sentinel.tensors(model))[2:] == moments
    run(check_replicas(sentinel, SoloCommunicator(), sentinel.tensors(model), "step 0"))


@refuses(
    ({"period": 0}, "period is 0; give a whole number"),
    ({"period": 1.5}, "period is 1.5"),
    ({"policy": "pray"}, "policy is 'pray'; choose one of raise, warn, heal"),
    ({"buffers": "positions"}, "give a list of names"),
    ({"buffers": torch.float32}, "buffers is torch.float32"),
    ({"buffers": [1]}, "give a list of names"),
    ({"optimizer": "sgd"}, "give a torch.optim.Optimizer"),
)
def test_bad_settings_are_refused(settings):
    Sentinel(**settings)


def test_an_unknown_buffer_is_named():
    with pytest.raises(ConfigurationError, match="'place', which is not a buffer of this model"):
        Sentinel(buffers=["place"]).tensors(Mixed())


def test_it_is_due_when_a_period_closes():
    assert [step for step in range(9) if Sentinel(period=3).due(step)] == [2, 5, 8]
