"""Positions beyond 2^31: in vectors, in messages, and in messages of more than 2 GiB."""

import functools
import os

import pytest
import torch

from sparsync import DenseVector, SparseVector, kernels
from sparsync.collectives import Budgeted
from sparsync.kernels import native, normal_levels
from sparsync.kernels.normal_levels import Codes
from sparsync.transports.ledger import Raw
from sparsync.transports.sim import simulate
from sparsync.wire import LloydMax

from .strategies import same

FAR = 1 << 31
GIB = 1 << 30


def available_bytes():
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not on Windows
        return 0


def needs(gib):
    """Mark a slow test that takes so much memory; skip it where there is less."""

    def mark(test):
        @pytest.mark.slow
        @functools.wraps(test)
        def checked(*arguments, **named):
            if available_bytes() < gib * GIB:
                pytest.skip(f"takes {gib} GiB of memory, which are not free here")
            test(*arguments, **named)

        return checked

    return mark


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
    Codes.sum_to_(total, [message, message], FAR, own=values)
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


@needs(5)
def test_a_message_of_more_than_2_gib_arrives():
    size, codec, seen = 2 * GIB + 4096, LloydMax(8), 1000
    values = torch.linspace(-3, 3, seen)
    like = torch.empty(0)

    async def program(comm):
        payloads = [torch.empty(0, dtype=torch.uint8)] * 2
        if comm.rank == 0:
            payloads[1] = codec.blank(size, like)
            payloads[1][16:].zero_()
            codec.writer(payloads[1])(size - 1024, torch.nn.functional.pad(values, (0, 24)))
        room = [codec.nbytes(size, size), 0] if comm.rank else [0, 0]
        arrived = await comm.alltoallv(payloads, room, "far", Raw("value", variable=True))
        if comm.rank == 0:
            return None
        assert arrived[0].numel() > 2 * GIB
        end = torch.empty(1024)
        codec.decode_to(arrived[0], end, start=size - 1024, size=size)
        return end

    end = simulate(program, 2).results[1]
    expected = codec.encode(DenseVector(torch.nn.functional.pad(values, (0, 24)))).decoded
    same(end, expected.values)


@needs(18)
@pytest.mark.timeout(900)
def test_passes_over_more_than_2_31_elements():
    n = FAR + 4096
    x = torch.zeros(n)
    places = torch.tensor([5, FAR - 1, FAR, n - 1])
    x[places] = torch.tensor([1.0, -2.0, 3.0, -4.0])
    key = int(kernels.magnitude_keys(torch.tensor([1.0])))
    found = kernels.find(x, key, 10)
    assert found is not None and found[0].tolist() == places.tolist()
    assert kernels.top(x, 2).tolist() == [FAR, n - 1]
    kernels.subtract_(x, places[2:], torch.tensor([3.0, -4.0]))
    assert kernels.find(x, key, 10)[0].tolist() == places[:2].tolist()
    raw = normal_levels.quantise(x, 1, 512, 2.0**100)
    normal_levels.decode_(x, raw, 1, 512, keep=False)
    # a block with one element of magnitude m is decoded as m / 512, rounded to bf16
    block = slice(FAR - 512, FAR)
    assert x[block].abs().unique().tolist() == [2 / 512] and x[FAR - 1] < 0 and x[FAR - 2] > 0
    assert not x[FAR:].any()
    kernels.scatter_(x, places, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert x[places].tolist() == [1.0, 2.0, 3.0, 4.0] and int(torch.count_nonzero(x)) == 4
