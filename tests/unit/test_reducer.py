"""The reducer's own bookkeeping; what it computes is checked by the contracts."""

import pytest
import torch

from sparsync.feedback.reducer import Reducer
from sparsync.monitoring import XiProbe
from sparsync.presets import resolve
from sparsync.selection import Exact, Sampled
from sparsync.selection.base import mixed_seed
from sparsync.transports.communicator import SoloCommunicator
from sparsync.transports.driver import run, together
from sparsync.units import Unit, plan_units


@pytest.mark.parametrize("parameters", [3, 60])
def test_quotas_are_derived_once_per_step_however_many_parameters_there_are(
    parameters, monkeypatch
):
    """Per parameter it was every unit's quota again: parameters x units on autograd's thread."""
    calls = []
    collect_from = Exact.collect_from
    monkeypatch.setattr(
        Exact, "collect_from", lambda *given: calls.append(0) or collect_from(*given)
    )
    entries = Unit.entries
    units = plan_units([(str(i), torch.zeros(8)) for i in range(parameters)], parameters * 32 // 3)
    reducer = Reducer(SoloCommunicator(), units, resolve("budgeted"), 0.5)
    monkeypatch.setattr(Unit, "entries", lambda *given: calls.append(1) or entries(*given))
    for _ in range(2):
        calls.clear()
        for index, unit in enumerate(units):
            for slot in unit.slots:
                reducer.accumulate(index, slot.start, torch.ones(slot.size))
        exchanges = [reducer.exchange(index) for index in range(len(units))]
        run(together([*exchanges, reducer.share()]))
        reducer.commit()
        assert len(calls) <= 2 * len(units)


def test_draws_of_two_seeds_are_two_sequences_and_not_one_shifted():
    drawn = {(seed, step): mixed_seed(seed, step) for seed in range(20) for step in range(20)}
    assert len(set(drawn.values())) == 400 and all(0 <= s < 2**63 for s in drawn.values())
    values = torch.randn(20_000, generator=torch.Generator().manual_seed(0))

    def counts(seed):
        selector = Sampled(0.1, enough=0, least=1, seed=seed)
        return [selector.select(values, 400, step).nnz for step in range(4)]

    assert counts(0)[1:] != counts(1)[:-1]
    probes = [XiProbe(1, plan_units([("a", values)]), seed=seed) for seed in (0, 1)]
    for probe, step in zip(probes, (1, 0), strict=True):
        probe.accumulate(step, 0, 0, values)
    assert not torch.equal(*(probe._samples[0] for probe in probes))
