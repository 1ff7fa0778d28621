"""Test that exchanged updates may keep their memory on the host, and that bad settings are refused."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sparsync
from sparsync.errors import ConfigurationError
from sparsync.feedback.reducer import Reducer
from sparsync.presets import resolve
from sparsync.transports.sim import simulate
from sparsync.updates import OUTER_SETTINGS, OuterStep, offload, outer_engine
from sparsync.updates.outer_engine import OuterEngine
from sparsync.updates.weights import ModelWeights
from tests.tables import cases, refused, refuses

from .far_device import FAR, far, far_device, passes

pytestmark = pytest.mark.usefixtures("alone")


def on_device(net):
    for name, p in list(net.named_parameters()):
        setattr(net, name, nn.Parameter(far(p)))
    return net


def attached(free=None, **given):
    """Attach a model on the device; return where its memory is."""
    net = on_device(nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(net.parameters())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "free_bytes", lambda device: free)
        with sparsync.attach(net, optimizer, **given) as sync:
            largest = max(sync.reducer.residuals, key=lambda one: len(one.accumulated))
            return largest.accumulated.device.type, sync.outer.memory["shared"].device.type


@cases((None, ("cpu", "cuda")), (True, ("cpu", "cpu")), (False, ("cuda", "cuda")))
def test_memory_is_where_it_was_asked_for(asked, expected):
    with far_device():
        assert attached(compression=sparsync.Compression(offload=asked)) == expected


def test_without_room_on_the_device_all_of_it_is_on_the_host_and_that_is_said(capsys):
    n = 64 * 8 + 8
    with far_device():
        # still to be allocated: the shared weights, gradients and Adam's two moments, 4 bytes each
        assert attached(free=16 * n) == ("cpu", "cuda")
        assert "kept in host memory" not in capsys.readouterr().err
        assert attached(free=16 * n - 1) == ("cpu", "cpu")
    said = capsys.readouterr().err
    assert f"{FAR} has" in said and "the shared weights of 520 parameters" in said


def test_parameters_on_several_devices_are_refused():
    with far_device():
        net = nn.Sequential(nn.Linear(64, 8), on_device(nn.Linear(8, 8)))
        optimizer = torch.optim.AdamW(net.parameters())
        with refused("('0.weight' on cpu, '1.weight' on cuda:0)"):
            sparsync.attach(net, optimizer)


def test_buffers_may_be_on_another_device():
    with far_device():
        net = on_device(nn.Linear(64, 8))
        net.register_buffer("mean", torch.ones(3))
        optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
        with sparsync.attach(net, optimizer) as sync:
            for _ in range(2):
                net(far(torch.ones(2, 64))).sum().backward()
                optimizer.step()
                net.mean += 1
            sync.finish()
        assert net.mean.tolist() == [3.0] * 3


@pytest.mark.parametrize("exchange", ["gradients", "updates"])
def test_make_gpu_finds_residuals_where_they_are(exchange, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import gpu_parts

    with far_device():
        net = on_device(nn.Linear(64, 8))
        optimizer = gpu_parts.optimizer_of(net, exchange)
        replicas = dist.group.WORLD if exchange == "gradients" else None
        with sparsync.attach(net, optimizer, exchange=exchange, replicate=replicas) as sync:
            net(far(torch.ones(2, 64))).sum().backward()
            optimizer.step()
            assert gpu_parts._of_exchange(sync, FAR)["MB sent per step"] == 0


@refuses(
    ("updates", {"algorithm": "allgather", "density": 0.5}, "is not for allgather"),
    ("gradients", {}, "is for exchanging updates"),
)
def test_what_reads_the_whole_residual_cannot_be_offloaded(exchange, given):
    net = nn.Linear(64, 8)
    if exchange == "gradients":
        given = {"replicate": dist.group.WORLD}
    given |= {"exchange": exchange, "compression": sparsync.Compression(offload=True)}
    sparsync.attach(net, torch.optim.AdamW(net.parameters()), **given)


def test_offload_is_a_switch():
    with pytest.raises(ConfigurationError, match="offload is 'host'; give True, False, or None"):
        sparsync.Compression(offload="host")


def test_vectors_on_the_host_stay_where_copies_are_fast(monkeypatch):
    """After a load, and with a momentum, which begins at the first exchange."""
    made = []

    def host_memory(*given):
        made.append(torch.zeros(given[0], dtype=given[1]))
        return made[-1]

    monkeypatch.setattr(outer_engine, "host_memory", host_memory)
    with far_device():
        net = on_device(nn.Linear(64, 8))
        optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
        outer = OuterStep(**{**OUTER_SETTINGS["updates"], "momentum": 0.5, "period": 1})
        given = {"algorithm": outer, "compression": sparsync.Compression(offload=True)}
        with sparsync.attach(net, optimizer, **given) as sync:
            net(far(torch.ones(2, 64))).sum().backward()
            optimizer.step()
            for _ in range(2):
                assert sync.outer.memory.keys() == {"shared", "momentum"}
                assert all(any(one is its for its in made) for one in sync.outer.memory.values())
                before = {name: one.clone() for name, one in sync.outer.memory.items()}
                sync.load_state_dict(sync.state_dict())
            assert all(torch.equal(one, before[n]) for n, one in sync.outer.memory.items())
            sync.finish()


# ---- bytes over the bus ------------------------------------------------------------------------------


def bytes_over_the_bus(residual, shared):
    """Return the bytes per parameter that an exchange of two bits per weight copies, on 2 ranks."""
    found = []

    async def program(comm):
        net = on_device(nn.Linear(4096, 1, bias=False))
        trained = dict(net.named_parameters())
        weights = ModelWeights(net, trained, True)
        algorithm = resolve("quantised", bits=2, block=512)
        settings = OuterStep(algorithm=algorithm, period=1, residual="weights")
        layout = settings.plan(weights.read(slice(0, None)), trained, rest=weights.rest)
        chosen = await settings.chosen.on(comm)
        reducer = Reducer(comm, layout.units, chosen, settings.density, on_host=residual)
        engine = OuterEngine(settings, layout, reducer, weights, on_host=shared)
        for step in range(2):
            with torch.no_grad():
                net.weight += far(torch.randn(1, 4096) * 0.01)
            await comm.allgather(torch.zeros(1), "all have moved")
            passes.clear()
            await comm.allgather(torch.zeros(1), "nothing is counted")
            await engine.advance(step)
            engine.count()
            await comm.allgather(torch.zeros(1), "all have exchanged")
            found.append(passes["copy from or to the host"])

    with far_device():
        simulate(program, 2)
    return found[-1] / 2 / 4096


@cases(("None", (True, False)), ("True", (True, True)), ("False", (False, False)))
def test_bytes_over_the_bus_are_documented(offload, on_host):
    text = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text()
    (documented,) = re.findall(rf"^\| `offload={offload}`.*\| (\d+) \|$", text, re.MULTILINE)
    assert int(documented) == pytest.approx(bytes_over_the_bus(*on_host), abs=0.5)
