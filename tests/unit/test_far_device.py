"""Every algorithm, scheme and codec on tensors of a device, whose messages are in the host's memory."""

import pytest
import torch

from sparsync.averaging import OUTER_SETTINGS, OuterStep
from sparsync.feedback.reducer import Reducer
from sparsync.presets import resolve
from sparsync.sparse import DenseVector, SparseVector
from sparsync.transports.sim import simulate
from sparsync.units import Slot, Unit
from tests.contracts.table import ALGORITHMS, CODECS

from .far_device import FAR, far_device

SIZE, RANKS, STEPS = 700, 3, 2
BITS = {f"{bits} bits": resolve("quantised", bits=bits, block=64) for bits in (1, 3, 8, 16)}
ROWS = {**ALGORITHMS, **BITS}


def noise(rank, step):
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(10 * step + rank))


def on_both(compute):
    """Equal bits from the CPU and from the device."""
    expected = compute(torch.device("cpu"))
    with far_device():
        computed = [x.cpu() for x in compute(FAR)]
    assert all(torch.equal(*pair) for pair in zip(computed, expected, strict=True))


@pytest.mark.parametrize("algorithm", ROWS.values(), ids=ROWS)
def test_averages_and_residuals(algorithm):
    dtypes = torch.float32, torch.bfloat16

    def compute(device):
        async def program(comm):
            units = [Unit((Slot(str(dtype), 0, SIZE),), dtype, device) for dtype in dtypes]
            reducer, averages = Reducer(comm, units, algorithm, 0.05), []
            for step in range(STEPS):
                gradients = [noise(comm.rank, step).to(device, dtype) for dtype in dtypes]
                await reducer.reduce(gradients)
                averages += gradients
            return [*averages, *(residual.accumulated for residual in reducer.residuals)]

        return [x for results in simulate(program, RANKS).results for x in results]

    on_both(compute)


@pytest.mark.parametrize("name", OUTER_SETTINGS)
def test_outer_steps(name):
    # the noise correction is the optimizer's
    settings = {**OUTER_SETTINGS[name], "noise_correction": False, "period": 2}

    def compute(device):
        async def program(comm):
            averager = OuterStep(**settings)
            weights = torch.ones(SIZE, device=device)
            await averager.begin(comm, weights, 0)
            for step in range(STEPS):
                local = weights + noise(comm.rank, step).to(device)
                weights = await averager.average(comm, local, step)
            return await averager.conclude(comm, weights, STEPS)

        return simulate(program, RANKS).results

    on_both(compute)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_messages(codec):
    def compute(device):
        values = noise(0, 0).to(device)
        chosen = (
            DenseVector(values)
            if codec.is_dense
            else SparseVector.from_dense(values * (values > 1))
        )
        payload = codec.encode(chosen).payload
        assert payload.device == device
        return [payload, codec.decode(payload, SIZE).to_dense()]

    on_both(compute)


def test_the_stand_in_refuses_operands_from_two_devices():
    with far_device(), pytest.raises(RuntimeError, match="add: expected all tensors"):
        noise(0, 0).to(FAR) + noise(0, 0)
