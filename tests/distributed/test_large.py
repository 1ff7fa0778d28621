"""Test vectors of more than 2^31 elements and messages of more than 2 GiB; they need that memory."""

import functools
from pathlib import Path

import pytest
import torch

import sparsync
from sparsync import DenseVector, kernels
from sparsync.cli.doctor.machine_facts import free_bytes
from sparsync.cli.launch import launch
from sparsync.kernels import normal_levels
from sparsync.transports.driver import run
from sparsync.transports.ledger import Raw
from sparsync.transports.sim import simulate
from sparsync.wire import LloydMax
from tests.unit.strategies import same

FAR = 1 << 31
GIB = 1 << 30


def needs(gib):
    """Mark a slow test with the memory it needs; it runs alone, or is skipped if less is free."""

    def mark(test):
        @pytest.mark.slow
        @pytest.mark.alone
        @functools.wraps(test)
        def checked(*arguments, **named):
            meminfo = Path("/proc/meminfo")
            free = free_bytes(meminfo.read_text()) if meminfo.exists() else None
            if free is None or free < gib * GIB:
                pytest.skip(f"takes {gib} GiB of memory, which are not free here")
            test(*arguments, **named)

        return checked

    return mark


def send_far(transport):
    size, end = 2 * GIB + 4096, torch.arange(1000).to(torch.uint8)

    async def program(comm):
        payloads = [torch.empty(0, dtype=torch.uint8)] * 2
        if comm.rank == 0:
            payloads[1] = torch.zeros(size, dtype=torch.uint8)
            payloads[1][-1000:] = end
        return await comm.alltoallv(payloads, [size, 0], "far", Raw("value", variable=True))

    with sparsync.connect(transport=transport, timeout=200) as comm:
        arrived = run(program(comm))[0]
        if comm.rank == 1:
            assert arrived.numel() == size
            assert torch.equal(arrived[-1000:], end) and not arrived[:-1000].any()


@needs(10)
@pytest.mark.parametrize("transport", ["zmq", "torch"])
def test_a_message_of_more_than_2_gib_arrives_at_another_process(transport):
    launch(send_far, 2, transport, timeout=300.0)


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


@needs(10)
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
    # in a block with a single element of magnitude m, that element is decoded as m / 512, rounded
    # to bf16
    block = slice(FAR - 512, FAR)
    assert x[block].abs().unique().tolist() == [2 / 512] and x[FAR - 1] < 0 and x[FAR - 2] > 0
    assert not x[FAR:].any()
    kernels.scatter_(x, places, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert x[places].tolist() == [1.0, 2.0, 3.0, 4.0] and int(torch.count_nonzero(x)) == 4
