"""Averagers on models: what is compared at the start, refused, saved and shown."""

import io
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sparsync.averaging import LocalSgd
from sparsync.averaging.schemes import SCHEMES
from sparsync.errors import ConfigurationError, NonFiniteGradientError, PeerError

from .averager_models import Smoothed, failure, linear, train_
from .zmq_group import together

ROOT = Path(__file__).parents[2]

allreduce = SCHEMES["allreduce"]


# ---- what is compared at the start -----------------------------------------------------------------


def starts(make, words, world_size=2):
    """Every rank builds an averager; the first step says, on all of them, what differs."""

    def program(comm):
        averager = make(comm)
        error = failure(PeerError, averager.step)
        assert averager.steps == 0
        return error

    for error in together(program, world_size):
        assert re.search(words, error), error


def test_unequal_starts_are_named():
    starts(
        lambda comm: allreduce(linear(comm.rank), comm=comm),
        r"initial values of 'weight' .*seed all ranks alike",
    )

    def frozen(comm):
        model = nn.ModuleList([linear(comm.rank).requires_grad_(False), linear()])
        return allreduce(model, comm=comm)

    starts(frozen, r"initial values of '0.weight'")


def test_unequal_tensors_are_named():
    starts(
        lambda comm: allreduce(linear(bias=comm.rank == 0), comm=comm),
        r"tensor 1 of the model: rank (0 has 'bias' \[1\] torch.float32|1 has nothing)",
    )
    starts(
        lambda comm: allreduce(linear().requires_grad_(comm.rank == 0), comm=comm),
        r"tensor 0 of the model: rank \d has 'weight' \[1, 2\] torch.float32",
    )

    def stepped(comm):
        model = linear()
        optimizer = torch.optim.Adam(model.parameters())
        averager = allreduce(model, comm=comm, optimizer=optimizer, moments="average")
        if comm.rank == 0:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        return averager

    starts(stepped, r"tensor 2 of the model: rank (0 has 'weight \(exp_avg\)'|1 has nothing)")


def test_unequal_settings_are_named():
    starts(
        lambda comm: LocalSgd(linear(), period=2 + comm.rank, comm=comm), r"settings.*'period': \d"
    )


# ---- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", ["DistributedDataParallel", "FSDPModule"])
def test_models_that_do_not_train_alone_are_refused(wrapper):
    wrapped = type("Mine", (type(wrapper, (nn.Sequential,), {}),), {})(linear())
    for model in (wrapped, nn.Sequential(wrapped)):
        assert wrapper in failure(ConfigurationError, allreduce, model)


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (lambda: nn.LazyLinear(2), {}, "'weight' is a UninitializedParameter"),
        (lambda: nn.Linear(2, 1, device="meta"), {}, "materialise"),
        (linear, {"buffers": "mean"}, "buffers is 'mean'; choose average or local"),
        (linear, {"moments": "keep"}, "choose local or average or reset"),
        (linear, {"nonfinite": "skip"}, "choose raise or spread"),
        (linear, {"moments": "average"}, "give optimizer="),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_what_cannot_work_is_refused(make, options, words):
    assert words in failure(ConfigurationError, allreduce, make(), **options)


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


def test_what_is_not_finite_stays_at_home_unless_it_may_spread():
    def program(comm, rule):
        model = linear()
        averager = allreduce(model, comm=comm, nonfinite=rule)
        averager.step()
        if comm.rank == 1:
            model.bias.data.fill_(torch.nan)
            if rule == "raise":
                return "rank 1" in failure(NonFiniteGradientError, averager.step)
        if rule == "raise":
            failure(PeerError, averager.step)  # the other one has gone
            return bool(model.bias.isfinite())
        averager.step()
        return not model.bias.isfinite()

    for rule in ("raise", "spread"):
        assert together(lambda comm, rule=rule: program(comm, rule), 2) == [True, True]


def test_without_a_model_there_is_no_step():
    assert "without a model" in failure(ConfigurationError, allreduce().step)


# ---- the end, and what is saved --------------------------------------------------------------------


def test_the_context_finishes_unless_an_error_is_on_its_way():
    closed = []
    averager = LocalSgd(linear())
    averager._binding.comm.companions["thread"] = SimpleNamespace(close=lambda: closed.append(1))
    averager.finish = lambda: pytest.fail("finish would wait for ranks that will not come")
    with pytest.raises(KeyError), averager:
        raise KeyError
    assert closed == [1]


@pytest.mark.parametrize("make", [lambda *a, **o: LocalSgd(*a, period=3, **o), Smoothed])
@pytest.mark.parametrize("load_first", [True, False])
def test_a_resumed_run_continues_bit_for_bit(make, load_first):
    """Saved between two averages, when all models differ."""

    def program(comm):
        def parts():
            model = linear()
            return model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

        model, optimizer = parts()
        averager = make(model, comm=comm)
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
        resumed = make(again, comm=comm)
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


def test_states_of_others_are_refused():
    state = Smoothed(linear()).state_dict()
    for wrong, words in [
        ({**state, "rank": 1}, "the saved state has rank 1, this run has 0"),
        ({**state, "world_size": 4}, "world_size 4"),
        ({**state, "scheme": "LocalSgd"}, "scheme 'LocalSgd'"),
        ({}, "load what state_dict"),
        (None, "load what state_dict"),
    ]:
        assert words in failure(ConfigurationError, Smoothed(linear()).load_state_dict, wrong)


# ---- the example -----------------------------------------------------------------------------------

EXAMPLE = [str(ROOT / "examples" / "average_models.py"), "--steps", "40"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [([], 1), pytest.param([*TORCHRUN, "2"], 2, marks=[pytest.mark.gloo, pytest.mark.slow])],
)
def test_the_example_learns_and_ends_with_equal_replicas(launcher, ranks):
    done = subprocess.run(
        [sys.executable, *launcher, *EXAMPLE], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = re.search(
        rf"^{ranks} ranks?, 40 steps: loss ([\d.]+) -> ([\d.]+), replicas equal: True$",
        done.stdout,
        re.M,
    )
    assert found, done.stdout
    assert float(found[2]) < 0.6 * float(found[1])
