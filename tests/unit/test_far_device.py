"""Run every algorithm, scheme, codec, selector and engine on tensors of a device, from one table.

Messages are in the host's memory. The rows come from the registries, so that a new row is tested
without being named here; the contracts' variants are included.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sparsync
from sparsync import selection, wire
from sparsync.averaging.schemes import SCHEMES, options_of
from sparsync.feedback.reducer import Reducer
from sparsync.kernels import divide_
from sparsync.presets import PRESETS, resolve
from sparsync.sparse import DenseVector, SparseVector
from sparsync.transports.sim import simulate
from sparsync.units import Slot, Unit
from tests.contracts import table

from .far_device import FAR, far, far_device

SIZE, RANKS, STEPS = 700, 3, 2
BITS = {f"{bits} bits": resolve("quantised", bits=bits, block=64) for bits in (1, 3, 8, 16)}


def noise(rank, step):
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(10 * step + rank))


# ---- the tensors that a row computes on a device ------------------------------------------------------


def averages_and_residuals(algorithm, device):
    dtypes = torch.float32, torch.bfloat16

    async def program(comm):
        units = [Unit((Slot(str(dtype), 0, SIZE),), dtype, device) for dtype in dtypes]
        reducer, averages = Reducer(comm, units, algorithm, 0.05), []
        for step in range(STEPS):
            gradients = [noise(comm.rank, step).to(device, dtype) for dtype in dtypes]
            await reducer.reduce(gradients)
            averages += gradients
        return [*averages, *(residual.accumulated for residual in reducer.residuals)]

    return [x for results in simulate(program, RANKS).results for x in results]


def models(make, ranks, device):
    async def program(comm):
        averager, weights = make(), torch.ones(SIZE, device=device)
        await averager.begin(comm, weights, 0)
        for step in range(STEPS):
            local = weights + noise(comm.rank, step).to(device)
            weights = await averager.average(comm, local, step)
            assert weights.device == device
        final = await averager.conclude(comm, weights, STEPS)
        assert final.device == device
        return final

    return simulate(program, ranks).results


def message(codec, device):
    values = noise(0, 0).to(device)
    whole = codec.is_dense
    chosen = DenseVector(values) if whole else SparseVector.from_dense(values * (values > 1))
    payload = codec.encode(chosen).payload
    assert payload.device == device
    return [payload, codec.decode(payload, SIZE).to_dense()]


def selections(make, device):
    selector, found = make(), []
    for step in range(STEPS):
        found.append(selector.select(noise(0, step).to(device), 35, step).to_dense())
    return found


def weights_after_training(optimizer, exchange, device):
    """Train a plain module with ``attach``, because DDP itself would need a driver."""
    torch.manual_seed(0)
    net = nn.Linear(SIZE, 3)
    if device == FAR:
        for name, p in list(net.named_parameters()):
            setattr(net, name, nn.Parameter(far(p)))
    made = optimizer(net.parameters(), lr=0.1)
    replicas = dist.group.WORLD if exchange == "gradients" else None
    with sparsync.attach(net, made, exchange=exchange, replicate=replicas) as sync:
        for step in range(2 * STEPS):
            made.zero_grad()
            net(noise(0, step).to(device)).square().sum().backward()
            made.step()
        if exchange == "updates":
            sync.finish()
    return [p.detach() for p in net.parameters()]


# ---- the table ---------------------------------------------------------------------------------------


def made_small(name):
    """Return a scheme whose period ends within the test."""
    small = {"period": STEPS, "noise_correction": False}
    return partial(SCHEMES[name], **{k: v for k, v in small.items() if k in options_of(name)})


PRESETS = {name: row.make() for name, row in PRESETS.items()}
AVERAGERS = {
    **{name: made_small(name) for name in SCHEMES},
    **{k: v for k, v in (table.AVERAGERS | table.DRIFTING_AVERAGERS).items() if k not in SCHEMES},
}
CODECS = {**wire.CODECS, **table.CODECS, **table.EXPANSIVE_CODECS, **table.SPREADING_CODECS}
SELECTORS = {**selection.SELECTORS, **table.SELECTORS, **table.INEXACT_SELECTORS}
OPTIMIZERS = torch.optim.SGD, torch.optim.AdamW, torch.optim.Adamax
ROWS = {
    **{
        f"preset {name}": partial(averages_and_residuals, algorithm)
        for name, algorithm in {**PRESETS, **table.ALGORITHMS, **BITS}.items()
    },
    # with groups of two, WAGMA uses recursive doubling
    **{
        f"scheme {name} of {ranks}": partial(models, make, ranks)
        for name, make in AVERAGERS.items()
        for ranks in (2, RANKS)
    },
    **{f"codec {name}": partial(message, codec) for name, codec in CODECS.items()},
    **{f"selector {name}": partial(selections, make) for name, make in SELECTORS.items()},
    **{
        f"engine {exchange}, {kind.__name__}": partial(weights_after_training, kind, exchange)
        for exchange in ("gradients", "updates")
        for kind in OPTIMIZERS
    },
}


# the variants of an algorithm, whose names have commas, in `make test-slow` alone
VARIANTS = {name for name in ROWS if name.startswith("preset") and "," in name}
CASES = [pytest.param(name, marks=[pytest.mark.slow] * (name in VARIANTS)) for name in ROWS]


@pytest.mark.fast(60)
@pytest.mark.filterwarnings("ignore:AdamW divides by its second moment")
@pytest.mark.parametrize("name", CASES)
def test_the_device_and_the_cpu_compute_equal_bits(name, alone):
    compute = ROWS[name]
    expected = compute(torch.device("cpu"))
    # AdamW itself divides by numbers
    with far_device(reciprocals=torch.optim.AdamW not in compute.args):
        computed = [x.cpu() for x in compute(FAR)]
    assert all(torch.equal(*pair) for pair in zip(computed, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_divisions_round_once_on_the_device(dtype):
    values = noise(0, 0).to(dtype)
    for divisor in (3, 7, 257, 2049, 1.1):
        with far_device():
            divided = divide_(far(values), divisor).cpu()
            assert divided.dtype == dtype
        assert torch.equal(divided, divide_(values.clone(), divisor))
    with far_device():
        by_reciprocal = (far(noise(0, 0)) / 3).cpu()
    assert not torch.equal(by_reciprocal, noise(0, 0) / 3)


def test_the_stand_in_refuses_operands_from_two_devices():
    with far_device(), pytest.raises(RuntimeError, match="add: expected all tensors"):
        noise(0, 0).to(FAR) + noise(0, 0)
