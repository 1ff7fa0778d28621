"""Checkpoints: resume is exact, files are whole or not there, bad ones are refused."""

import contextlib
import resource

import pytest
import torch

from sparsync import ConfigurationError, Correction
from sparsync.checkpoint import load, save
from sparsync.errors import CheckpointError
from sparsync.feedback.state import reducer_state, restore_reducer
from sparsync.transports.sim import simulate
from tests.contracts.table import ALGORITHMS

from .small_reducers import gradients, reducer_on
from .small_sync import Sync, residual

# ---- exact resume ---------------------------------------------------------------------------------


async def one_by_one(reducer, step):
    """Do a step as DDP with small buckets does: parameters come alone, the last first."""
    whole = gradients(reducer, step)
    for unit, (planned, flat) in enumerate(zip(reducer.units, whole, strict=True)):
        weights = torch.ones(planned.size)
        for slot in reversed(planned.slots):
            here = slice(slot.start, slot.start + slot.size)
            reducer.accumulate(unit, slot.start, flat[here], weights[here])
        await reducer.exchange(unit)
    await reducer.share()
    return torch.cat([average.to_dense() for average in reducer.commit()])


async def at_once(reducer, step):
    whole = gradients(reducer, step)
    await reducer.reduce(whole, [torch.ones(unit.size) for unit in reducer.units])
    return torch.cat(whole)


@pytest.mark.parametrize("unit_bytes", [None, 80])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_resumes_bit_for_bit(name, unit_bytes, tmp_path):
    correction = Correction(momentum=0.9) if "signs" not in name else None

    async def program(comm):
        def make():
            return reducer_on(comm, ALGORITHMS[name], unit_bytes, correction)

        through, expected, saved = make(), [], {}
        for step in range(5):
            if step in (1, 2):  # within a period of 2, and where one opens
                path = tmp_path / f"{step}-{comm.rank}.pt"
                torch.save(reducer_state(through), path)
                saved[step] = torch.load(path, weights_only=True)
            expected.append(await at_once(through, step))
        for first, state in saved.items():
            resumed = make()
            await restore_reducer(resumed, state)
            for step in range(first, 5):
                assert torch.equal(await one_by_one(resumed, step), expected[step])
        return True

    assert simulate(program, 3).results == [True] * 3


# ---- files ----------------------------------------------------------------------------------------


def test_a_checkpoint_has_everything(tmp_path):
    sync, model = Sync(steps=3), torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    folder = save(sync, tmp_path, model=model, optimizer=optimizer, epoch=7, best=0.25)
    assert sorted(path.name for path in folder.iterdir()) == [
        "shared.pt",
        "sparsync-rank-0-of-1.pt",
    ]
    other, fresh = Sync(), torch.nn.Linear(2, 1)
    moments = torch.optim.SGD(fresh.parameters(), lr=0.1, momentum=0.9)
    rest = load(other, tmp_path, model=fresh, optimizer=moments)
    assert rest == {"epoch": 7, "best": 0.25}
    assert torch.equal(fresh.weight, model.weight)
    assert moments.state_dict()["state"][0]["momentum_buffer"].tolist() == [[1.0, 1.0]]
    assert other.reducer.step == 3
    assert torch.equal(residual(other), residual(sync))


def test_the_last_whole_checkpoint_counts_and_old_ones_go(tmp_path):
    sync = Sync()
    folders = []
    for step in range(4):
        sync.train(step)
        folders.append(save(sync, tmp_path))
    assert [folder.exists() for folder in folders] == [False, False, True, True]
    (folders[3] / "sparsync-rank-0-of-1.pt").unlink()
    other = Sync()
    load(other, tmp_path)
    assert other.reducer.step == 3
    load(other, tmp_path, step=3)
    with pytest.raises(CheckpointError, match="no whole checkpoint of step 1 in"):
        load(other, tmp_path, step=1)
    assert save(sync, tmp_path, keep=None).name == "000005-step-00000004"
    for keep in (0, 10**39, 2.5, True):
        with pytest.raises(
            ConfigurationError, match=r"keep is .*; give a number of checkpoints from 1"
        ):
            save(sync, tmp_path, keep=keep)


@contextlib.contextmanager
def small_disk():
    """Files cannot grow beyond 1 kB, as on a disk that is full; nor can pytest's own, so be brief."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path):
    sync = Sync(steps=2)
    save(sync, tmp_path)
    before, kept = residual(sync).clone(), sorted(tmp_path.rglob("*"))
    sync.train(2)
    wrong = r"cannot write .*rank-0-of-1\.pt: .*before are as they"
    with pytest.raises(CheckpointError, match=wrong), small_disk():
        save(sync, tmp_path)
    assert sorted(tmp_path.rglob("*")) == kept
    other = Sync()
    load(other, tmp_path)
    assert other.reducer.step == 2
    assert torch.equal(residual(other), before)
