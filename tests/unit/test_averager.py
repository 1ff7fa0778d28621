"""Test averagers on models: tensors sent, comparisons, refusals and saved states."""

import copy
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sparsync.averaging import LocalSgd
from sparsync.averaging.averager import mean
from sparsync.averaging.schemes import SCHEMES
from sparsync.errors import ConfigurationError, NonFiniteGradientError, PeerError, SparsyncError
from sparsync.fields import sealed
from tests.tables import cases, refused, refuses

from .averager_models import Smoothed, add_, failure, linear, train_
from .zmq_group import together

EXAMPLE = Path(__file__).parents[2] / "examples" / "average_models.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]

allreduce = SCHEMES["allreduce"]


# ---- what travels ----------------------------------------------------------------------------------


@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_parameters_are_averaged_in_place_whatever_their_dtypes_and_strides(wide, layout):
    def program(comm):
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(-9, 9, (3, 2, 3, 2, 2), generator=generator)
        parts = map(torch.Tensor.to, drawn, (torch.float16, torch.bfloat16, wide))
        model = nn.ParameterList(parts).to(memory_format=layout)
        model.append(nn.Parameter(torch.tensor([1 + 2j])))
        model.append(model[0])  # tied: it travels once
        kept = [(p, p.data_ptr(), p.dtype, p.stride()) for p in model]
        start = [p.detach().clone() for p in model]
        averager = allreduce(model, comm=comm)
        add_(model, 2 * comm.rank)
        averager.step()
        for p, value, (own, *place) in zip(model, start, kept, strict=True):
            assert p is own
            assert [p.data_ptr(), p.dtype, p.stride()] == place
            assert torch.equal(p, value + 1)
        read = averager._binding.read()
        return read.dtype, read.numel()

    assert together(program, 2) == [(wide, 3 * 24 + 2)] * 2


def test_frozen_parameters_stay_and_are_settled_only_where_they_differ():
    rounds = 1.5 + 2**-22
    assert float(torch.tensor([rounds] * 3).mean()) != rounds  # so an average would be seen

    def program(comm):
        model = nn.ModuleList([linear(), linear(1), linear(2)])
        model[0].requires_grad_(False)
        model[1].requires_grad_(False)
        nn.init.constant_(model[0].weight, rounds)
        averager = allreduce(model, comm=comm)
        add_(model, 1.0)
        averager.step()
        assert averager._binding.read().numel() == 3
        with torch.no_grad():  # like a teacher that follows
            model[1].weight.fill_(comm.rank)
        averager.finish()
        assert float(model[0].weight[0, 0]) == rounds
        return model[1].weight.tolist()

    assert together(program, 3) == [[[1.0, 1.0]]] * 3


@pytest.mark.parametrize("loaded", [False, True])
def test_a_teacher_may_follow_before_the_first_step(loaded):
    """Its value when the averager was made, or that of a later load, is compared."""

    def program(comm):
        model = nn.ModuleList([linear(), linear(comm.rank if loaded else 1).requires_grad_(False)])
        averager = allreduce(model, comm=comm)
        if loaded:
            model[1].load_state_dict(linear(7).state_dict())
        with torch.no_grad():
            model[1].weight.add_(1.0 + comm.rank)
        averager.step()
        averager.finish()
        return model[1].weight.detach()

    start = linear(7 if loaded else 1).weight.detach()
    for weight in together(program, 2):
        torch.testing.assert_close(weight, start + 1.5)


@pytest.mark.parametrize("rule", ["average", "local"])
def test_buffers_follow_their_rule(rule):
    def program(comm):
        model = nn.BatchNorm1d(1, momentum=1.0)
        model.register_buffer("table", torch.tensor([-torch.inf]), persistent=False)
        averager = allreduce(model, comm=comm, buffers=rule)
        for _ in range(comm.rank + 1):
            model(torch.full((4, 1), 2.0 * comm.rank))
        model.table = torch.tensor([float(comm.rank)])
        averager.step()
        model.running_mean = model.running_mean.clone()  # modules may replace their buffers
        between = float(model.running_mean), int(model.num_batches_tracked)
        averager.finish()
        return between, (float(model.running_mean), int(model.num_batches_tracked)), model.table

    (low, end_low, _), (high, end_high, table) = together(program, 2)
    assert (low, high) == (((1.0, 1), (1.0, 2)) if rule == "average" else ((0.0, 1), (2.0, 2)))
    assert end_low == end_high == (1.0, 1)  # the mean; batches as rank 0 counts them
    assert table == 1  # unsaved buffers are never touched


@cases(
    ("local", [[0.1, 1, 0, 0], [0.2, 1, 0.1, 1]]),
    ("average", [[0.15, 1, 0, 0], [0.15, 1, 0.05, 1]]),
    ("reset", [[0, 0, 0, 0], [0, 0, 0, 0]]),
)
def test_moments_stay_or_travel_or_are_reset(rule, expected):
    def program(comm):
        model = linear()
        optimizer = torch.optim.Adam(model.parameters())
        averager = allreduce(model, comm=comm, optimizer=optimizer, moments=rule)
        ((comm.rank + 1) * model.weight).sum().backward()
        if comm.rank:
            model.bias.sum().backward()  # rank 0 has no state for its bias: zero to others
        optimizer.step()
        averager.step()
        states = [optimizer.state.get(p, {}) for p in model.parameters()]
        named = [state.get(k, torch.zeros(1)) for state in states for k in ("exp_avg", "step")]
        return [float(value.flatten()[0]) for value in named]

    found = torch.tensor(together(program, 2))
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32))


class Plain(torch.optim.Optimizer):
    """An optimizer that is not torch's."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
            parameter.sub_(mean.add_(parameter.grad), alpha=0.1)


@pytest.mark.parametrize("resting", [{0}, {0, 1}])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RMSprop])
def test_moments_that_come_after_the_first_average_are_averaged(kind, resting):
    """Of ranks whose first step is skipped, of a late group, and of a parameter without dimensions."""

    def program(comm):
        model = nn.ParameterList([torch.zeros(3), torch.tensor(0.0)])
        optimizer = kind([{"params": [p]} for p in model], lr=0.1)
        averager = allreduce(model, comm=comm, optimizer=optimizer, moments="average")
        for step in range(3):
            if step or comm.rank not in resting:
                for parameter in [*model][: 1 + step]:
                    parameter.grad = torch.full_like(parameter, 1.0 + comm.rank + step)
                optimizer.step()
            averager.step()
        states = [optimizer.state[parameter] for parameter in model]
        kinds = ("exp_avg", "exp_avg_sq") if kind is torch.optim.Adam else ("square_avg",)
        return [state[name].flatten().tolist() for state in states for name in kinds]

    first, second = together(program, 2)
    assert first == second and all(all(values) for values in first)


def test_moments_of_an_unknown_optimizer_that_come_later_are_refused():
    def program(comm):
        model = linear()
        optimizer = Plain(model.parameters())
        averager = allreduce(model, comm=comm, optimizer=optimizer, moments="average")
        averager.step()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        with refused("has created moments since averaging began"):
            averager.step()
        again = allreduce(model, comm=comm, optimizer=optimizer, moments="average")
        optimizer.state[model.weight]["mean"] += comm.rank
        again.step()
        return optimizer.state[model.weight]["mean"].tolist()

    assert together(program, 2) == [[[1.5, 1.5]]] * 2


def test_all_begin_from_the_same_vector_though_they_have_stepped():
    def program(comm):
        model = linear()
        start = nn.utils.parameters_to_vector(model.parameters()).detach()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        averager = Smoothed(model, comm=comm, optimizer=optimizer, moments="average")
        seen = averager.memory
        averager.average = plain_mean
        train_(model, optimizer, comm.rank, 1, averager)
        assert torch.equal(seen["last"], torch.cat([start, torch.zeros(3)]))

    together(program, 2)


async def plain_mean(comm, vector, step):
    return await mean(comm, vector)


def nested(seed=0):
    return nn.Sequential(nn.Sequential(linear(seed)), nn.BatchNorm1d(1))


@pytest.mark.parametrize("load", ["whole", "parts"])
def test_weights_that_are_loaded_before_the_first_step_are_the_start_of_all(load):
    """A late rank also lets others average these weights, e.g. in WAGMA."""

    def program(comm):
        model, other = nested(), nested(seed=5)
        with torch.no_grad():
            other[1].running_mean += 3
        averager = Smoothed(model, comm=comm)
        copied = copy.deepcopy(model)
        torch.save(model, io.BytesIO())
        if load == "whole":
            model.load_state_dict(other.state_dict())
        else:
            model[0].load_state_dict(other[0].state_dict())
            model[1].load_state_dict(other[1].state_dict())
        copied.load_state_dict(nested(seed=7).state_dict())  # a copy is another model
        add_(model, 1 + comm.rank)
        averager.average = plain_mean
        averager.step()
        start = [*other.parameters(), other[1].running_mean, other[1].running_var]
        assert torch.equal(averager.memory["last"], nn.utils.parameters_to_vector(start))
        averager.close()
        assert not any(module._load_state_dict_post_hooks for module in model.modules())

    together(program, 2)


def test_a_tied_weight_that_is_loaded_under_its_second_name_is_the_start():
    def program(comm):
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        model[1].weight = model[0].weight
        averager = Smoothed(model, comm=comm)
        start = torch.arange(9.0).view(3, 3)
        model[1].load_state_dict({"weight": start})
        add_(model, 1 + comm.rank)
        averager.average = plain_mean
        averager.step()
        assert torch.equal(averager.memory["last"], start.flatten())
        averager.close()

    together(program, 2)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", ["smoothed", "wagma", "diloco", "allreduce", "dpsgd"])
def test_weights_that_are_loaded_between_steps_are_refused_if_former_ones_are_kept(name, assign):
    keeps = name in ("smoothed", "wagma", "diloco")

    def program(comm):
        make = {**SCHEMES, "smoothed": Smoothed}[name]
        model = nn.Sequential(linear())
        averager = make(model, comm=comm)
        for _ in range(2):
            add_(model, 1 + comm.rank)
            averager.step()
        own = copy.deepcopy(model.state_dict())
        other = linear(seed=5).state_dict()
        # to evaluate an EMA, for example
        model[0].load_state_dict(other, assign=assign)
        model.load_state_dict(own, assign=assign)
        averager.step()
        model[0].load_state_dict(other, assign=assign)
        if keeps:
            for act in (averager.step, averager.finish):
                told = failure(ConfigurationError, act)
                assert "local step 3: weights were loaded" in told and "make a new one" in told
        else:
            averager.step()
            torch.testing.assert_close(model[0].state_dict(), other)

    together(program, 2)


# ---- what is compared at the start -----------------------------------------------------------------


def unequal_after_a_load(comm):
    averager = allreduce(linear(comm.rank), comm=comm)
    averager.load_state_dict(averager.state_dict())  # from before the first step
    return averager


def of(model_of):
    """Return a maker of averagers of these models, by rank."""
    return lambda comm: allreduce(model_of(comm.rank), comm=comm)


def unequal_moments(comm):
    model = linear()
    kind = torch.optim.Adam if comm.rank == 0 else torch.optim.RMSprop
    return allreduce(model, comm=comm, optimizer=kind(model.parameters()), moments="average")


@cases(
    (of(linear), r"initial values of 'weight' .*seed all ranks alike"),
    (unequal_after_a_load, r"initial values of 'weight' .*seed all ranks alike"),
    (
        of(lambda rank: nn.ModuleList([linear(rank).requires_grad_(False), linear()])),
        r"initial values of '0.weight'",
    ),
    (
        of(lambda rank: linear(bias=rank == 0)),
        r"tensor 1 of the model: rank (0 has 'bias' \[1\] torch.float32|1 has nothing)",
    ),
    (
        of(lambda rank: linear().requires_grad_(rank == 0)),
        r"tensor 0 of the model: rank \d has 'weight' \[1, 2\] torch.float32",
    ),
    (unequal_moments, r"tensor 2 of the model: rank \d has 'weight \((exp_avg|square_avg)\)'"),
    (lambda comm: LocalSgd(linear(), period=2 + comm.rank, comm=comm), r"settings.*'period': \d"),
)
def test_what_differs_at_the_start_is_named_on_all_ranks(make, words):
    def program(comm):
        averager = make(comm)
        error = failure(PeerError, averager.step)
        assert averager.steps == 0
        return error

    for error in together(program, 2):
        assert re.search(words, error), error


# ---- what is refused -------------------------------------------------------------------------------


def wrapped(name):
    return nn.Sequential(type("Mine", (type(name, (nn.Sequential,), {}),), {})(linear()))


@pytest.mark.filterwarnings("ignore:Lazy modules")
@refuses(
    (lambda: wrapped("DistributedDataParallel"), {}, r"wrapped \(DistributedDataParallel\)"),
    (lambda: wrapped("FSDPModule"), {}, r"wrapped \(FSDPModule\)"),
    (lambda: nn.LazyLinear(2), {}, "'weight' is a UninitializedParameter"),
    (lambda: nn.Linear(2, 1, device="meta"), {}, "materialise"),
    (linear, {"buffers": "mean"}, "buffers is 'mean'; choose average or local"),
    (linear, {"moments": "keep"}, "choose local or average or reset"),
    (linear, {"nonfinite": "skip"}, "choose raise or spread"),
    (linear, {"moments": "average"}, "give optimizer=, which holds them"),
)
def test_what_cannot_work_is_refused(make, options):
    allreduce(make(), **options)


def test_a_model_that_changes_is_refused_but_may_freeze():
    model = nn.ModuleList([linear(), linear()])
    model[1].requires_grad_(False)
    averager = allreduce(model)
    model[0].requires_grad_(False)
    averager.step()
    model[1].requires_grad_(True)
    assert "'1.bias' was added" in failure(ConfigurationError, averager.step)
    model[1].requires_grad_(False)
    averager.step()
    model[0].bias = None
    assert "'0.bias' was added, removed" in failure(ConfigurationError, averager.step)


@pytest.mark.parametrize("rule", ["raise", "spread"])
@pytest.mark.parametrize("name", ["0.bias", "1.running_mean", "0.bias (exp_avg)"])
def test_what_is_not_finite_stays_at_home_unless_it_may_spread(name, rule):
    def program(comm):
        model = nn.Sequential(linear(), nn.BatchNorm1d(1))
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(2, 2)).sum().backward()
        moments = {"optimizer": optimizer, "moments": "average"}
        averager = allreduce(model, comm=comm, nonfinite=rule, **moments)
        optimizer.step()
        averager.step()
        state = optimizer.state[model[0].bias]
        own = (model.state_dict() | {"0.bias (exp_avg)": state["exp_avg"]})[name]
        if comm.rank == 1:
            own.fill_(torch.nan)
            if rule == "raise":
                said = failure(NonFiniteGradientError, averager.step)
                return f"rank 1: NaN or Inf in '{name}';" in said
        if rule == "raise":
            failure(PeerError, averager.step)  # the other one has gone
            return bool(own.isfinite())
        averager.step()
        return not own.isfinite()

    assert together(program, 2) == [True, True]


def test_a_local_buffer_that_is_not_finite_is_not_averaged_at_the_end():
    def program(comm):
        model = nn.BatchNorm1d(1)
        averager = allreduce(model, comm=comm, buffers="local")
        averager.step()
        model.running_var.fill_(torch.inf if comm.rank else 2.0)
        if comm.rank:
            return "in 'running_var'" in failure(NonFiniteGradientError, averager.finish)
        failure(PeerError, averager.finish)
        return float(model.running_var) == 2

    assert together(program, 2) == [True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_of_the_lowest_number_is_not_averaged(dtype):
    """Its sum over the ranks would be -Inf."""

    def program(comm):
        model, lowest = linear(), torch.finfo(dtype).min
        model.register_buffer("mask", torch.full((4,), lowest, dtype=dtype))
        averager = allreduce(model, comm=comm)
        for _ in range(2):
            averager.step()
        averager.finish()
        return averager._binding.left_out, model.mask.tolist() == [lowest] * 4

    assert together(program, 2) == [(["mask"], True)] * 2


def test_without_a_model_there_is_no_step():
    assert "without a model" in failure(ConfigurationError, allreduce().step)


# ---- the end, and what is saved --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bmuf", "diloco"])
def test_an_outer_step_lets_what_is_not_finite_spread(name):
    SCHEMES[name](linear(), nonfinite="spread")
    with pytest.raises(ConfigurationError, match="nonfinite is 'raise'; an outer step knows only"):
        SCHEMES[name](linear(), nonfinite="raise")


@pytest.mark.parametrize("name", ["wagma", "eager-solo", "adpsgd", "allreduce"])
def test_a_closed_averager_says_so_at_once(name):
    def program(comm):
        averager = SCHEMES[name](linear(), comm=comm)
        averager.step()
        averager.finish()
        averager.close()
        for act in (averager.step, averager.finish):
            with pytest.raises(SparsyncError, match=r"closed.*make a new one"):
                act()

    together(program, 2)


@pytest.mark.parametrize("steps", [(3, 3, 3, 5), (3, 2, 3, 3)])
@pytest.mark.parametrize("name", ["wagma", "eager-solo", "allreduce"])
def test_a_finish_after_unequal_numbers_of_steps_is_refused_at_once(name, steps):
    def program(comm):
        averager = SCHEMES[name](linear(), comm=comm)

        def train():
            for _ in range(steps[comm.rank]):
                averager.step()
            averager.finish()

        words = failure(PeerError, train)
        averager.close()
        return words

    assert any("the ranks are not in the same call" in words for words in together(program, 4))


@pytest.mark.parametrize("breaks", ["average", "conclude"])
def test_an_average_that_breaks_off_refuses_later_ones(breaks):
    """Messages of the average that broke off would otherwise be part of the next one."""

    async def failing(comm, vector, step):
        raise KeyboardInterrupt

    def program(comm):
        averager = SCHEMES["dpsgd"](linear(), comm=comm)
        averager.step()
        kept = getattr(averager, breaks)
        setattr(averager, breaks, failing)
        with pytest.raises(KeyboardInterrupt):
            (averager.step if breaks == "average" else averager.finish)()
        setattr(averager, breaks, kept)
        for call in (averager.step, averager.finish):
            said = failure(ConfigurationError, call)
            assert f"rank {comm.rank}: an earlier exchange broke off (KeyboardInterrupt)" in said
        assert averager.steps == 1

    together(program, 2)


def test_two_averagers_whose_agents_need_one_communicator_are_told():
    def program(comm):
        first, second = (SCHEMES["wagma"](linear(seed), comm=comm) for seed in (0, 1))
        first.step()
        second.step()
        said = "another one took over its communicator; give each"
        with pytest.raises(SparsyncError, match=said):
            first.step()

    together(program, 2)


@pytest.mark.parametrize("act", ["step", "finish", "state_dict", "load_state_dict"])
def test_whatever_needs_the_ranks_own_weights_is_refused_within_shared(act):
    def program(comm):
        model = linear()
        averager = SCHEMES["diloco"](model, comm=comm, period=2)
        for _ in range(3):
            add_(model, 1.0 + comm.rank)
            averager.step()
        own, state = model.weight.detach().clone(), averager.state_dict()
        given = (state,) if act == "load_state_dict" else ()
        with averager.shared(), pytest.raises(ConfigurationError, match="leave that block first"):
            getattr(averager, act)(*given)
        assert torch.equal(model.weight, own)
        averager.finish()

    together(program, 2)


def test_the_context_finishes_unless_an_error_is_on_its_way():
    closed = []
    averager = LocalSgd(linear())
    averager._binding.comm.companions["thread"] = SimpleNamespace(close=lambda: closed.append(1))
    averager.finish = lambda: pytest.fail("finish would wait for ranks that will not come")
    with pytest.raises(KeyError), averager:
        raise KeyError
    assert closed == [1]


@pytest.mark.parametrize("load_first", [True, False])
def test_a_resumed_run_continues_bit_for_bit(load_first):
    """Use a scheme with memory, and save it between two averages, when all models differ."""

    def program(comm):
        def parts():
            model = linear()
            return model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

        model, optimizer = parts()
        averager = Smoothed(model, comm=comm)
        train_(model, optimizer, comm.rank, 4, averager)
        file = io.BytesIO()
        torch.save([x.state_dict() for x in (model, optimizer, averager)], file)
        file.seek(0)
        train_(model, optimizer, comm.rank, 4, averager)
        averager.finish()
        saved = torch.load(file, weights_only=True)
        again, optimizer = parts()
        if load_first:
            again.load_state_dict(saved[0])
        resumed = Smoothed(again, comm=comm)
        again.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        resumed.load_state_dict(saved[2])
        assert resumed.steps == 4
        train_(again, optimizer, comm.rank, 4, resumed)
        resumed.finish()
        assert torch.equal(again.weight, model.weight)
        return model.weight.detach(), saved[0]["weight"]

    (first, own), (second, other) = together(program, 2)
    assert torch.equal(first, second)
    assert not torch.equal(own, other)


@pytest.mark.parametrize(("first", "then"), [(torch.inf, 1.0), (1.0, -torch.inf)])
def test_a_state_of_a_run_in_which_a_buffer_was_finite_or_not_is_refused_by_its_name(first, then):
    """The error names the buffer, although only one of the two ranks averages it."""

    def averager(value):
        model = linear()
        model.register_buffer("lowest", torch.tensor([value]))
        return Smoothed(model)

    saved = averager(first).state_dict()
    averager(first).load_state_dict(saved)
    words = failure(ConfigurationError, averager(then).load_state_dict, saved)
    assert "buffer 'lowest' held NaN, Inf or huge numbers when " in words
    assert "make the averager while the buffer" in words
    assert ("the saved run made" in words) == (first == torch.inf)


@refuses(
    ({"rank": 1}, r"the saved state\['rank'\] is 1, expected 0; load a state that this rank's"),
    ({"world_size": 4}, r"\['world_size'\] is 4"),
    ({"scheme": "LocalSgd"}, r"\['scheme'\] is 'LocalSgd', expected 'Smoothed'"),
    ({"steps": 0.5}, r"\['steps'\] is 0.5, expected a whole number"),
    ({"surprise": 1}, r"the saved state has an unknown state\['surprise'\]"),
)
def test_states_of_others_are_refused(wrong):
    state = Smoothed(linear()).state_dict()
    Smoothed(linear()).load_state_dict(sealed("averager", {**state["content"], **wrong}))


@pytest.mark.slow
@cases(([], 1), pytest.param([*TORCHRUN, "2"], 2, marks=pytest.mark.gloo))
def test_the_example_learns_and_ends_with_equal_replicas(launcher, ranks):
    command = [sys.executable, *launcher, str(EXAMPLE), "--steps", "40"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = rf"^{ranks} ranks?, 40 steps: loss ([\d.]+) -> ([\d.]+), replicas equal: True$"
    found = re.search(said, done.stdout, re.M)
    assert found, done.stdout
    assert float(found[2]) < 0.6 * float(found[1])


# ---- numbers ---------------------------------------------------------------------------------------

# on 4 ranks: S, tau, the averages in 8 steps, and the models per average (None if the order of
# arrival matters)
NUMBERS = dict.fromkeys(("allreduce", "eager-solo", "eager-majority", "demo"), (4, 1, 8, 4))
NUMBERS |= {"local": (1, 8, 1, 4), "bmuf": (1, 8, 1, 4), "streaming-diloco": (1, 100, 0, 0)}
NUMBERS |= {"wagma": (2, 10, 8, 2), "dpsgd": (3, None, 8, 3), "sgp": (2, None, 8, 2)}
NUMBERS |= {"adpsgd": (2, None, None, 2)}


@cases(
    (4, 3, 3, 4, "4 ranks\n"),
    (5, 3, 3, 3, "2 or 3 ranks, which end at different times and so use stale models\n"),
    (5, None, 2, 3, "2 or 3 ranks, which end"),  # the default
    (3, 3, 3, 3, None),
    (4, None, 2, 2, None),
)
def test_groups_that_do_not_divide_the_ranks_are_told(ranks, asked, size, most, sizes, capsys):
    def program(comm):
        model = linear()
        with SCHEMES["wagma"](model, comm=comm, group_size=asked) as averager:
            for _ in range(2):
                averager.step()
            comm.everyone.wait()  # no rank waits for an agent any more
            return averager.stats()

    for numbers in together(program, ranks):
        assert numbers["group_size"] == most
    said = capsys.readouterr().err
    told = f"group_size={size} does not divide {ranks} ranks: groups of {sizes}"
    assert said.count("does not divide") == bool(sizes) and (sizes is None or told in said)


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_every_averager_has_numbers(name):
    def program(comm):
        model = linear()
        options = {"comm": comm, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
        with SCHEMES[name](model, **options) as averager:
            for _ in range(8):
                add_(model, comm.rank + 1.0)
                averager.step()
            comm.everyone.wait()  # no rank waits for an agent any more
            return averager.stats()

    everyone = together(program, 4)
    for numbers in everyone:
        assert numbers["local_steps"] == 8
        assert (numbers["seconds_waited"] > 0) == (numbers["averages"] > 0 or name == "adpsgd")
        assert 0 <= numbers["stale_share"] <= 1
        assert numbers["stale_contributions"] <= numbers["averages"]
        assert numbers["bytes_sent_by_finish"] == numbers["bytes_received_by_finish"] == 0
        assert json.loads(json.dumps(numbers)) == numbers
    if name in NUMBERS:
        size, period, averages, models = NUMBERS[name]
        for numbers in everyone:
            assert (numbers["group_size"], numbers["sync_period"]) == (size, period)
            if averages is not None:
                assert numbers["averages"] == averages
            assert not numbers["averages"] or numbers["models_per_average"] == models
    if SCHEMES[name]().staleness == "none":
        assert all(n["stale_share"] == n["largest_staleness"] == 0 for n in everyone)
    if name == "allreduce":  # 3 float32: 4 blocks of 1, 3 sent twice
        assert everyone[0]["bytes_sent_per_local_step"] == 24


def test_numbers_of_the_end_are_apart_and_need_a_model():
    def program(comm):
        model = linear()
        averager = allreduce(model, comm=comm)
        assert averager.stats()["bytes_sent_per_local_step"] == 0
        add_(model, 1.0)
        averager.step()
        before = averager.stats()
        averager.finish()
        return before, averager.stats()

    for before, after in together(program, 2):
        assert before["bytes_sent_by_finish"] == 0 < after["bytes_sent_by_finish"]
        for name in ("bytes_sent_per_local_step", "averages", "local_steps"):
            assert before[name] == after[name] > 0
    with pytest.raises(ConfigurationError, match=r"give it one to call stats\(\)"):
        LocalSgd().stats()
