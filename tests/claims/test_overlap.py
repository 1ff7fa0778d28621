"""Units in flight that each take a share of the global k keep the energy of the global top-k."""

import pytest
import torch
import torch.nn.functional as F

from sparsync.cli.workloads.stdlib_text import ByteText, ByteTransformer
from sparsync.cli.workloads.workload import Draw
from sparsync.feedback import shares
from sparsync.feedback.reducer import Reducer
from sparsync.presets import resolve
from sparsync.transports.groups import SoloCommunicator
from sparsync.transports.sim import Links, simulate
from sparsync.units import plan_units

DENSITY = 0.01
STEPS = 12


def gradients(model, text, step, rank, units):
    model.zero_grad()
    tokens, targets = text.batch(Draw(0, step, rank, 1, 4))
    F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    return [part.clone() for part in flat.split([unit.size for unit in units])]


def energies(algorithm, world_size, steps, monkeypatch=None):
    """Train; return for every step the energy of the total over that of the joint top-k of all units."""
    torch.manual_seed(0)
    text, model = ByteText.of_standard_library(), ByteTransformer(width=64, layers=2)
    units = plan_units(model.named_parameters(), unit_bytes=60_000)
    reducers = [Reducer(SoloCommunicator(), units, algorithm, DENSITY) for _ in range(world_size)]
    k = sum(unit.entries(DENSITY) for unit in units)
    ratios = []
    for step in range(steps):
        given = [gradients(model, text, step, rank, units) for rank in range(world_size)]
        best = torch.zeros(sum(unit.size for unit in units))
        for reducer, parts in zip(reducers, given, strict=True):
            kept = [torch.zeros(()) if r.value is None else r.value for r in reducer.residuals]
            accumulated = torch.cat([p + r for p, r in zip(parts, kept, strict=True)])
            chosen = accumulated.abs().topk(k).indices
            best[chosen] += accumulated[chosen]

        async def program(comm, given=given):
            reducers[comm.rank].comm = comm
            return await reducers[comm.rank].reduce(given[comm.rank])

        averages = simulate(program, world_size).results[0]
        assert sum(reducers[0].plan.quotas) == k, "the shares sum to k on every step"
        assert len({reducer.plan.shares for reducer in reducers}) == 1, "all ranks agree"
        average = torch.cat([a.to_dense() for a in averages])
        total = world_size * average
        ratios.append(float(total.square().sum() / best.abs().topk(k).values.square().sum()))
        torch.nn.utils.vector_to_parameters(
            torch.nn.utils.parameters_to_vector(model.parameters()).detach() - 0.1 * average,
            model.parameters(),
        )
    return ratios


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("algorithm", "world_size"),
    [(resolve("budgeted"), 1), (resolve("budgeted"), 2), (resolve("allgather"), 1)],
    ids=["budgeted-1", "budgeted-2", "allgather-1"],
)
def test_shares_keep_the_energy_of_the_global_top_k(algorithm, world_size):
    """Thresholds move fast in the first steps of this small model, 8 units of 16,000 elements."""
    ratios = energies(algorithm, world_size, STEPS)
    assert min(ratios[1:]) > 0.9
    assert sum(ratios[2:]) / len(ratios[2:]) > 0.97


def test_equal_densities_lose_energy(monkeypatch):
    """Negative control: every unit selects 1 % of its own entries."""
    monkeypatch.setattr(shares, "next_shares", lambda state, *rest: state)
    ratios = energies(resolve("budgeted"), 1, STEPS)
    assert sum(ratios[2:]) / len(ratios[2:]) < 0.9


def test_units_in_flight_hide_each_others_latency():
    """Four units on a network of pure latency take little longer than one."""

    def seconds(count):
        units = plan_units([(f"w{i}", torch.zeros(4000)) for i in range(count)], unit_bytes=1)
        assert len(units) == count

        async def program(comm):
            reducer = Reducer(comm, units, resolve("budgeted"), DENSITY)
            generator = torch.Generator().manual_seed(comm.rank)
            for _ in range(4):
                await reducer.reduce([torch.randn(4000, generator=generator) for _ in units])

        return simulate(program, 4, links=Links(alpha=1e-3, beta=0.0)).seconds

    assert seconds(4) < 2 * seconds(1)
