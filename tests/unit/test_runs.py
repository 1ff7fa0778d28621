"""Test that updates are exchanged in runs: the bits of whole vectors, but not their memory."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sparsync import simulate, sparse
from sparsync.collectives.quantised import Quantised
from sparsync.feedback.reducer import Reducer
from sparsync.sparse import DenseVector
from sparsync.updates.family import OUTER_SETTINGS
from sparsync.updates.fragments import Layout, Weights
from sparsync.updates.outer_engine import OuterEngine
from sparsync.updates.outer_step import OuterStep
from sparsync.updates.weights import ModelWeights

RUN = 1 << 18  # elements
SIZE = 12 * RUN
BYTES = 4


class Largest(TorchDispatchMode):
    """A mode that records the bytes of the largest storage allocated since ``watches`` was set."""

    def __init__(self):
        super().__init__()
        self.known, self.most, self.watches = set(), 0, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                if not self.watches:
                    self.known.add(storage.data_ptr())
                elif storage.data_ptr() not in self.known:
                    self.most = max(self.most, storage.nbytes())
        return made


def run_default(ranks, size, steps=3, before_step=lambda step: None, **changed):
    """Train on noise with the default exchange; return each rank's vectors."""

    async def program(comm):
        settings = OuterStep(**{**OUTER_SETTINGS["updates"], "noise_correction": False, **changed})
        draw = torch.Generator().manual_seed(comm.rank)
        weights = Weights(torch.zeros(size))
        layout = settings.plan(torch.zeros(size), {"all": torch.zeros(size, device="meta")})
        reducer = Reducer(comm, layout.units, await settings.chosen.on(comm), settings.density)
        engine = OuterEngine(settings, layout, reducer, weights)
        for step in range(steps):
            before_step(step)
            for start in range(0, size, RUN):
                moved = torch.randn(min(RUN, size - start), generator=draw)
                weights.write(slice(start, start + len(moved)), moved, add=True)
            await engine.advance(step)
            engine.count()
        (kept,) = reducer.residuals
        return engine.memory["shared"], weights.vector, kept.value

    return simulate(program, world_size=ranks).results


def test_an_exchange_takes_no_memory_of_the_models_size():
    largest = Largest()

    def before_step(step):
        largest.watches = step > 0  # the first exchange allocates the memory that is kept

    with largest:
        run_default(2, SIZE, before_step=before_step)
    # a run, and messages of one bit
    assert 0 < largest.most <= BYTES * RUN < BYTES * SIZE / 10


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("ranks", [2, 3])
def test_runs_change_no_bit(monkeypatch, ranks, delay, momentum):
    size, changed = 20_011, {"delay": delay, "momentum": momentum}
    whole = run_default(ranks, size, steps=6, **changed)
    monkeypatch.setattr(sparse, "run_length", lambda like: 1536)
    monkeypatch.setattr("sparsync.collectives.quantised.run_length", lambda like: 1024)
    for expected, found in zip(whole, run_default(ranks, size, steps=6, **changed), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


@pytest.mark.parametrize("bits", [1, 3, 8, 16])
@pytest.mark.parametrize("block", [7, 64])
def test_any_run_of_a_total_is_that_of_the_whole(monkeypatch, bits, block):
    monkeypatch.setattr("sparsync.collectives.quantised.run_length", lambda like: 128)

    async def program(comm):
        draw = torch.Generator().manual_seed(comm.rank)
        mine = DenseVector(torch.randn(1_001, generator=draw))
        reduced = await Quantised(bits, block).reduce(comm, mine, k=1_001, step=0)
        for vector in (reduced.total, reduced.delivered):
            whole = vector.values
            for start, stop in ((0, 1_001), (0, 0), (1, 2), (333, 335), (500, 1_001), (7, 700)):
                assert torch.equal(vector.run(start, stop), whole[start:stop])
                rest = torch.ones(stop - start)
                vector.subtract_from_(rest, start)
                assert torch.equal(rest, 1 - whole[start:stop])
        return reduced.total.values, reduced.delivered.values

    totals, delivered = zip(*simulate(program, world_size=3).results, strict=True)
    assert torch.equal(totals[0], totals[1])
    torch.testing.assert_close(sum(delivered), totals[0])


def test_units_and_vector_have_each_others_places():
    parameters = {f"p{i}": torch.zeros(n) for i, n in enumerate((5, 1, 7, 4, 3))}
    layout = Layout(parameters, {"buffer": 4}, 1)
    layout.plan(torch.zeros(24), None, lambda name, _: name not in ("p1", "p3", "buffer"), (), {})
    vector = torch.arange(24)
    for number, unit in enumerate(layout.units):
        whole = torch.cat([vector[place] for place, _ in layout.places(number, 0, unit.size)])
        for start in range(unit.size):
            found = torch.full((unit.size - start,), -1)
            for place, here in layout.places(number, start, unit.size):
                found[here] = vector[place]
            assert torch.equal(found, whole[start:])
        for start in range(24):
            for its, at, here in layout.units_at(slice(start, 24)):
                if its == number:
                    assert torch.equal(whole[at], vector[start:][here])
    assert sum(at.stop - at.start for _, at, _ in layout.units_at(slice(0, 24))) == 24


@pytest.mark.parametrize("channels_last", [False, True])
def test_parts_of_a_model_are_read_and_written(channels_last):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    net[1].running_mean.uniform_()
    if channels_last:
        net = net.to(memory_format=torch.channels_last)
    weights = ModelWeights(net, dict(net.named_parameters()), buffers=True)
    whole = weights.read(slice(0, None))
    for start, stop in ((0, 5), (3, 111), (107, 120), (len(whole) - 3, len(whole)), (4, 4)):
        assert torch.equal(weights.read(slice(start, stop)), whole[start:stop])
        weights.write(slice(start, stop), torch.ones(stop - start), add=True)
        whole[start:stop] += 1
        assert torch.equal(weights.read(slice(0, None)), whole)
    weights.write(slice(100, 112), torch.zeros(12))
    whole[100:112] = 0
    assert torch.equal(weights.read(slice(0, None)), whole)
