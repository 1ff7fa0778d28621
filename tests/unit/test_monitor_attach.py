"""``attach(..., log=...)`` on one rank of gloo: what comes out of a training loop."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync.feedback.schedule import AdaptiveDensity
from tests import attaching

from .small_training import backward, model


@pytest.fixture
def ddp():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield lambda: DistributedDataParallel(model())
    dist.destroy_process_group()


def attach(wrapped, log, **options):
    return attaching.attach(wrapped, density=0.1, transport="torch", log=log, **options)


def test_a_training_is_logged_and_goes_on_where_it_was_saved(ddp, tmp_path):
    first = ddp()
    sync = attach(first, tmp_path / "run.jsonl", xi_period=2)
    for step in range(3):
        backward(first, step)
    saved = sync.state_dict()
    sync.close()
    sync.close()
    second = ddp()
    resumed = attach(second, tmp_path / "run.jsonl", xi_period=2)
    resumed.load_state_dict(saved)
    backward(second, 3)
    resumed.close()
    lines = [json.loads(line) for line in (tmp_path / "run.rank0.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert ["xi" in line for line in lines] == [True, False, True, False]
    assert lines[-1]["density_local"] == pytest.approx(0.1, abs=0.01)
    assert lines[-1]["seconds_select"] > 0


def test_an_error_of_the_log_leaves_the_step_whole(ddp):
    def broken(step, values):
        if step == 1:
            raise ZeroDivisionError("mine")

    plain, watched = ddp(), ddp()
    handles = attach(plain, None), attach(watched, broken)
    backward(plain, 0), backward(watched, 0)
    backward(plain, 1)
    with pytest.warns(RuntimeWarning, match="failed at step 1 and ends here"):
        backward(watched, 1)
    for a, b in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    states = [handle.state_dict() for handle in handles]
    assert all(
        torch.equal(value, states[1]["residual"][name])
        for name, value in states[0]["residual"].items()
    )
    backward(watched, 2)  # and nobody hears of it
    for handle in handles:
        handle.close()


def test_a_skipped_step_is_logged(ddp):
    seen = {}
    wrapped = ddp()
    sync = attach(wrapped, seen.__setitem__, nonfinite="skip")
    backward(wrapped, 0)
    (wrapped(torch.ones(1, 6)).sum() * float("inf")).backward()
    assert [values["skipped"] for values in seen.values()] == [0, 1]
    sync.close()


def test_attach_takes_an_adaptive_density(ddp):
    wrapped = ddp()
    sync = attaching.attach(wrapped, density=AdaptiveDensity(0.1), transport="torch")
    backward(wrapped, 0)
    assert sync.stats()["density"] == 0.1
    assert sync.reducer.xi_period == AdaptiveDensity().period
    sync.close()


def test_what_cannot_be_logged_to_is_refused(ddp):
    with pytest.raises(sparsync.ConfigurationError, match="log is 3"):
        attach(ddp(), 3)
    with pytest.raises(sparsync.ConfigurationError, match="xi_period is 0"):
        attach(ddp(), None, xi_period=0)
