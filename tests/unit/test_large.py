"""Test positions beyond 2^31 in vectors and messages; the distributed ``test_large.py`` fills memory."""

import pytest
import torch

from sparsync import SparseVector, kernels
from sparsync.collectives import Budgeted
from sparsync.kernels import native, normal_levels
from sparsync.kernels.normal_levels import Codes
from sparsync.transports.sim import simulate

from .strategies import same

FAR = 1 << 31


@pytest.mark.parametrize("backend", [*native.instruction_sets(), "torch"])
def test_levels_are_written_and_read_beyond_2_31(backend, monkeypatch):
    block, size = 1 << 15, FAR + (1 << 15) + 24  # large blocks: few scales
    codes = torch.zeros(-(-size // 8), dtype=torch.uint8)  # 256 MiB that are hardly touched
    scales = torch.zeros(2 * -(-size // block), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn((1 << 15) + 24, generator=generator)
    monkeypatch.setattr(kernels.native, "chosen", lambda: backend)
    message = Codes(scales, codes, size, 1, block, 2.0**100)
    message.write_(values, FAR)
    raw = normal_levels.quantise_plainly(values, 1, block, 2.0**100)
    last = 2 * -(-values.numel() // block)
    same(torch.cat(message.run(FAR, values.numel())), raw)
    assert not scales[:-last].any() and not codes[: FAR // 8].any()
    decoded, expected = torch.zeros_like(values), torch.zeros_like(values)
    message.decode_(decoded, FAR, keep=False)
    normal_levels.decode_plainly_(expected, raw, 1, block)
    same(decoded, expected)
    total = torch.zeros_like(values)
    Codes.sum_to_(total, [message, message], FAR, values)
    same(total, expected + expected + values)


def test_budgeted_sums_entries_beyond_2_31():
    size, ranks = (1 << 33) + 5, 4
    near = torch.tensor([0, 7, FAR - 1, FAR, FAR + 1, 1 << 32, (1 << 32) + 3, size - 1])

    async def program(comm):
        # rank r contributes r + 1 times a power of two, so every sum is exact in bf16
        values = torch.tensor([2.0**i for i in range(8)]) * (comm.rank + 1)
        mine = SparseVector(near, values, size)
        return await Budgeted().reduce(comm, mine, k=8, step=0)

    for reduced in simulate(program, ranks).results:
        assert reduced.total.indices.tolist() == near.tolist()
        assert reduced.total.values.tolist() == [10.0 * 2**i for i in range(8)]
