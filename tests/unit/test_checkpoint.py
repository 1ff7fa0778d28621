"""Test exact resumption, that files are complete or absent, and that bad files are refused."""

import argparse
import contextlib
import copy
import os
import pickle
import random
import resource
import shutil
import struct
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from sparsync import ConfigurationError, Correction
from sparsync.averaging import LocalSgd
from sparsync.checkpoint import load, load_states, save, save_state
from sparsync.checkpoint.distributed import DistributedState
from sparsync.checkpoint.files import read_file, write_file
from sparsync.errors import CheckpointError, NoCheckpointError, SparsyncError
from sparsync.feedback.reducer_state import reducer_state, restore_reducer
from sparsync.fields import sealed
from sparsync.transports.sim import simulate
from tests.contracts.table import ALGORITHMS
from tests.tables import cases, refused

from .small_reducers import gradients, reducer_on
from .small_sync import Sync, residual

# ---- exact resume ---------------------------------------------------------------------------------


async def one_by_one(reducer, step):
    """Run a step as DDP with small buckets does: parameters arrive one by one, last first."""
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


@pytest.mark.fast(14)
@pytest.mark.parametrize("unit_bytes", [pytest.param(None, marks=pytest.mark.slow), 80])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_resumes_bit_for_bit(name, unit_bytes, tmp_path):
    correction = Correction(momentum=0.9)

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
    files = sorted(path.name for path in folder.iterdir())
    assert files == ["shared.pt", "sparsync-rank-0-of-1.pt"]
    other, fresh = Sync(), torch.nn.Linear(2, 1)
    moments = torch.optim.SGD(fresh.parameters(), lr=0.1, momentum=0.9)
    assert load(other, tmp_path, model=fresh, optimizer=moments) == {"epoch": 7, "best": 0.25}
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
    with pytest.raises(CheckpointError, match="no complete checkpoint of step 1 in"):
        load(other, tmp_path, step=1)
    assert save(sync, tmp_path, keep=None).name == "000005-step-00000004"
    for keep in (0, 10**39, 2.5, True):
        with refused(f"keep is {str(keep)[:20]}; give a number of checkpoints from 1"):
            save(sync, tmp_path, keep=keep)


@contextlib.contextmanager
def small_disk():
    """Limit files to 1 kB, as on a full disk; the limit includes pytest's own files, so be brief."""
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
    wrong = r"cannot write .*rank-0-of-1\.pt: \[Errno 27\] File too large; earlier checkpoints are"
    with pytest.raises(CheckpointError, match=wrong), small_disk():
        save(sync, tmp_path)
    assert sorted(tmp_path.rglob("*")) == kept
    other = Sync()
    load(other, tmp_path)
    assert other.reducer.step == 2
    assert torch.equal(residual(other), before)


def test_a_folder_that_is_a_file_or_has_no_name_ends_no_training(tmp_path):
    sync, file = Sync(steps=1), tmp_path / "checkpoints"
    file.write_text("mine")
    for path in (file, file / "run"):
        with pytest.raises(CheckpointError, match=r"is a file|Not a directory"):
            save(sync, path)
    with pytest.raises(CheckpointError, match="is a file; give a folder"):
        load(sync, file)
    for call in (save, load):
        with pytest.raises(ConfigurationError, match="the folder for checkpoints has no name"):
            call(sync, "")
    assert file.read_text() == "mine" and sync.reducer.step == 1


@pytest.mark.parametrize(
    "folder",
    [
        "s3://bucket/run",
        Path("s3://bucket/run"),
        "file:///tmp/run",
        "memory://run",
        None,
        3,
        b"run",
    ],
)
def test_what_names_no_folder_is_refused_before_anything_is_written(folder, tmp_path, monkeypatch):
    """``Path`` would make s3://bucket a folder of this machine, which goes with it."""
    monkeypatch.chdir(tmp_path)
    for call in (
        save,
        load,
        lambda *args: save_state(*args, weights=""),
        lambda *args: load_states(*args, weights=""),
    ):
        with refused(*([str(folder), "an address"] if "://" in str(folder) else ["folder"])):
            call(Sync(), folder)
    assert not list(tmp_path.iterdir())


def test_the_home_folder_and_folders_with_a_colon_work(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert save(Sync(), "~/runs").parent == tmp_path / "runs"
    assert load(Sync(), tmp_path / "runs") == {} == load(Sync(), "~/runs")
    assert save(Sync(), "lr=0.1:run").parent.name == "lr=0.1:run"


@pytest.mark.parametrize("given", [torch.nn.Linear(2, 2), None, "checkpoints"])
def test_what_is_no_handle_is_refused(given, tmp_path):
    for call in (save, load, lambda sync, _: DistributedState(sync)):
        with refused(f"{type(given).__name__} is not a handle", "attach() returned"):
            call(given, tmp_path)


def test_checkpoints_that_are_kept_elsewhere_are_not_touched(tmp_path):
    runs, archive, sync = tmp_path / "runs", tmp_path / "archive", Sync()
    first = save(sync, runs)
    first.rename(archive)
    first.symlink_to(archive)
    kept = sorted(path.name for path in archive.iterdir())
    for step in range(3):
        sync.train(step)
        save(sync, runs, keep=1)
    assert sorted(path.name for path in archive.iterdir()) == kept
    assert len(list(runs.iterdir())) == 2
    load(sync, runs, step=0)
    assert sync.reducer.step == 0


class Payload:
    """An object that runs a command when unpickled."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@contextlib.contextmanager
def unchanged(sync):
    """Check that a load that fails changes neither the residual nor the step."""
    before, step = residual(sync).clone(), sync.reducer.step
    yield
    assert torch.equal(residual(sync), before) and sync.reducer.step == step


def code(path, trace):
    path.write_bytes(pickle.dumps(Payload(f"touch {trace}"), protocol=2))


def zipped_code(path, trace):
    torch.save({"version": 2, "residual": Payload(f"touch {trace}")}, path)


def cut(path, trace):
    path.write_bytes(path.read_bytes()[:-200])


def noise(path, trace):
    path.write_bytes(b"\x00\xff" * 500)


def nothing(path, trace):
    path.write_bytes(b"")


def flipped(path, trace=None):
    """Flip a bit of the largest part of a file, e.g. of a tensor."""
    raw = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda part: part.file_size)
    lengths = struct.unpack_from("<HH", raw, largest.header_offset + 26)  # of the name, and of more
    raw[largest.header_offset + 30 + sum(lengths) + largest.file_size // 2] ^= 1
    path.write_bytes(raw)


def a_list(path, trace):
    torch.save([1, 2], path)


@pytest.mark.parametrize("damage", [code, zipped_code, cut, noise, nothing, flipped, a_list])
@pytest.mark.parametrize("name", ["sparsync-rank-0-of-1.pt", "shared.pt"])
def test_a_damaged_or_hostile_file_is_refused_in_one_line(tmp_path, name, damage):
    folder, trace, sync = save(Sync(steps=2), tmp_path), tmp_path / "trace", Sync(steps=1)
    damage(folder / name, trace)
    with unchanged(sync), refused(name, error=CheckpointError):
        load(sync, tmp_path)
    assert not trace.exists(), "code of a file was run"


def test_one_bit_that_has_flipped_is_found_although_torch_computes_no_checksums(tmp_path):
    path, before = tmp_path / "state.pt", torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        write_file(path, {"a": torch.arange(1000.0)})
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(before)
    assert torch.equal(read_file(path)["a"], torch.arange(1000.0))
    flipped(path)
    assert not torch.equal(torch.load(path)["a"], torch.arange(1000.0))
    with refused("data/0 in the file differs from its checksum", error=CheckpointError):
        read_file(path)


def test_states_of_other_ranks_are_compared_with_their_checksums(tmp_path):
    """A rank reads only parts of most of the files, so the ranks share the comparison."""
    (own,) = save(Sync(steps=2), tmp_path).glob("sparsync-rank-0-of-1.pt")
    both = [own.with_name(f"sparsync-rank-{rank}-of-2.pt") for rank in range(2)]
    for path in both:
        shutil.copy(own, path)
    own.unlink()
    load(sync := Sync(), tmp_path)
    torch.testing.assert_close(residual(sync), residual(Sync(steps=2)))  # the mean over ranks
    flipped(both[1])
    with unchanged(sync), refused(both[1].name, "differs from its checksum", error=CheckpointError):
        load(sync, tmp_path)


def test_damaged_bytes_raise_nothing_else(tmp_path):
    whole, damaged, draw = tmp_path / "whole.pt", tmp_path / "damaged.pt", random.Random(0)
    write_file(whole, {"a": torch.ones(4), "n": [1, 2.5, "x", None], "d": {"k": torch.ones(2, 3)}})
    with zipfile.ZipFile(whole) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    (pickled,) = [name for name in files if name.endswith("data.pkl")]
    refused = 0
    for turn in range(300):
        content = bytearray(files[pickled])
        for _ in range(draw.randint(1, 3)):
            content[draw.randrange(len(content))] = draw.randrange(256)
        with zipfile.ZipFile(damaged, "w") as archive:
            for name, before in files.items():
                archive.writestr(name, bytes(content) if name == pickled else before)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's, of unknown pickle protocols
                read_file(damaged, mapped=bool(turn % 2))
        except CheckpointError:
            refused += 1
    assert refused > 200


@cases(
    ({"best": np.float64(0.3)}, "['best'] is a float64, which could not be loaded again"),
    ({"log": {"args": [1, argparse.Namespace()]}}, "['log']['args'][1] is a Namespace"),
    ({"rate": lambda: 1}, "['rate'] is a function"),
)
def test_what_could_not_be_loaded_again_is_not_saved(shared, words, tmp_path):
    kept = save(Sync(steps=2), tmp_path, keep=1)
    with refused(words, error=CheckpointError):
        save(Sync(steps=3), tmp_path, keep=1, **shared)
    assert list(tmp_path.iterdir()) == [kept]


def test_what_a_crash_left_is_removed_by_a_later_save(tmp_path):
    save(Sync(steps=1), tmp_path)
    torn = tmp_path / "000002-step-00000002"
    torn.mkdir()
    for name in ("shared.pt.tmp", "sparsync-rank-0-of-1.pt", "sparsync-rank-0-of-1.pt.tmp"):
        (torn / name).touch()
    kept = save(Sync(steps=3), tmp_path, keep=1)
    assert list(tmp_path.iterdir()) == [kept]


def test_a_damaged_checkpoint_is_not_none(tmp_path):
    save(Sync(steps=2), tmp_path)
    cut(save(Sync(steps=3), tmp_path) / "shared.pt", None)
    with pytest.raises(CheckpointError, match=r"shared\.pt.*; an older .* step=2$") as caught:
        load(Sync(), tmp_path)
    assert not isinstance(caught.value, NoCheckpointError)
    sync = Sync()
    load(sync, tmp_path, step=2)
    assert sync.reducer.step == 2


def test_what_does_not_fit_changes_nothing(tmp_path):
    save(Sync(steps=2, momentum=0.5), tmp_path)
    sync = Sync(steps=1)
    with unchanged(sync), refused("['momentum'] is 0.5, expected 0.0"):
        load(sync, tmp_path)


def optimizer_of(model, groups=1):
    parameters = [{"params": [p]} for p in model.parameters()] if groups > 1 else model.parameters()
    return torch.optim.SGD(parameters, lr=0.1)


def test_what_is_shared_and_does_not_fit_changes_nothing(tmp_path):
    model, sync = torch.nn.Linear(2, 1), Sync(steps=1)
    save(Sync(steps=2), tmp_path, model=model, optimizer=optimizer_of(model))
    fresh = torch.nn.Linear(2, 1)
    weights = copy.deepcopy(fresh.state_dict())
    for wrong, words in [
        ({"optimizer": optimizer_of(fresh, groups=2)}, "'optimizer' does not fit: .*groups; give"),
        ({"optimizer": torch.nn.Linear(2, 1)}, "'optimizer' does not fit: .*: Missing key"),
        ({"scaler": fresh}, "has no 'scaler', only"),
    ]:
        with unchanged(sync), pytest.raises(ConfigurationError, match=words):
            load(sync, tmp_path, model=fresh, **wrong)
        assert all(torch.equal(weights[name], w) for name, w in fresh.state_dict().items())


def test_an_error_of_the_last_part_takes_all_back(tmp_path):
    class Late(Sync):
        """A handle that refuses a state after the reducer has loaded it, as an optimizer may."""

        def load_state_dict(self, state):
            super().load_state_dict(state)
            if state["content"]["reducer"]["step"] == 2:
                raise ValueError("too late")

    save(Sync(steps=2), tmp_path)
    sync = Late(steps=1)
    said = r"cannot load its state in .*ValueError: too late"
    with unchanged(sync), pytest.raises(CheckpointError, match=said):
        load(sync, tmp_path)


@pytest.mark.parametrize("key", ["selectors", "collectives"])
@pytest.mark.parametrize("value", [float("nan"), "x", (1, 2.5), 2**70, True, [None], {"a": 1}])
def test_fields_of_other_types_are_refused(key, value):
    sync = Sync(steps=3)
    state = sync.state_dict()
    saved = state["content"]["reducer"]
    for field in saved[key][0]:
        changed = {**saved, key: [{**saved[key][0], field: value}]}
        with pytest.raises(SparsyncError, match=f"the saved {field} of .* expected"):
            sync.load_state_dict(sealed("gradients", {**state["content"], "reducer": changed}))


def test_averagers_that_save_their_states_themselves_say_so(tmp_path):
    averager = LocalSgd(torch.nn.Linear(2, 1))
    for call, given in ((save, (tmp_path,)), (load, (tmp_path,)), (DistributedState, ())):
        with refused("LocalSgd is an averager, not a handle"):
            call(averager, *given)


def test_no_checkpoint_is_no_hang(tmp_path):
    with pytest.raises(NoCheckpointError, match="there is no complete checkpoint in"):
        load(Sync(), tmp_path / "nowhere")
