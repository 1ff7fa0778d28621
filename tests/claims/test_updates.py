"""Bytes of exchanged updates do not grow with the number of ranks, in either direction."""

import pytest
import torch

from sparsync import simulate
from sparsync.updates import OUTER_SETTINGS, OuterAverager

SIZE = 2**19  # with 64 ranks, each owns so many blocks that headers do not count


def bytes_per_element(ranks, name):
    """Return the most bytes that any rank sends or receives in an exchange."""
    settings = {**OUTER_SETTINGS[name], "period": 1, "fragments": 1, "delay": 0}

    async def program(comm):
        outer, start = OuterAverager(**settings), torch.zeros(SIZE)
        await outer.begin(comm, start, 0)
        before = comm.ledger.total()
        generator = torch.Generator().manual_seed(comm.rank)
        await outer.average(comm, start + torch.randn(SIZE, generator=generator), 0)
        after = comm.ledger.total()
        return max(after.sent - before.sent, after.received - before.received)

    return max(simulate(program, ranks).results) / SIZE


@pytest.mark.slow
def test_a_rank_receives_about_as_much_of_64_as_of_4():
    """With the all-gather of deployed systems, a rank would receive 21 times as much."""
    few, many = bytes_per_element(4, "updates"), bytes_per_element(64, "updates")
    assert many / few <= 1.35
    assert few <= 0.4  # with a period of 2: 0.2 per step
    assert bytes_per_element(64, "sparseloco") / bytes_per_element(4, "sparseloco") > 15
