"""Hostile bytes: every quantised message is a valid vector or a WireFormatError."""

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsync import WireFormatError
from sparsync.kernels import packing
from sparsync.wire import Coo
from sparsync.wire.qsgd import Qsgd, SparseQsgd
from sparsync.wire.quantiser import Quantiser

from .packed_messages import packable
from .qsgd_messages import options, uint8


def message(format_=5, count=2, size=10, block=8, option=0x14, body=b"", dtype=1) -> bytes:
    return struct.pack("<4BIQ", 0x51, format_, dtype, option, count, size | block << 48) + body


SCALE = struct.pack("<f", 7.0)
# 7.0 and -3.0, then l = 2: low bits 3 and 0 (11 00), then 1 01 00: indices 3 and 4
GOOD = message(body=SCALE + bytes([0xD7, 0b01010011, 0]))
DENSE = message(4, 3, 3, body=SCALE + bytes([0xD7, 0x07]))


def test_the_good_messages_are_good():
    sparse = SparseQsgd().decode(uint8(GOOD), 10)
    assert (sparse.indices.tolist(), sparse.values.tolist()) == ([3, 4], [7.0, -3.0])
    assert Qsgd().decode(uint8(DENSE), 3).tolist() == [7.0, -3.0, 7.0]


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "0 bytes cannot hold a message header"),
        (GOOD[:15], "15 bytes cannot hold a qsgd header of 16"),
        (GOOD[:16], "16 bytes says that it has 2 entries, which take 23"),
        (GOOD[:-1], "truncated or corrupt"),
        (GOOD + b"\x00", "truncated or corrupt"),
        (b"\x52" + GOOD[1:], "starts with 52050114"),
        (GOOD[:1] + b"\x02" + GOOD[2:], r"format 2, expected sparse qsgd \(5\)"),
        (DENSE, r"format 4, expected sparse qsgd \(5\)"),
        (GOOD[:2] + b"\x00" + GOOD[3:], "unknown value dtype 0"),
        (GOOD[:2] + b"\x05" + GOOD[3:], r"torch\.int32 has option 20 and blocks of 8"),
        (message(option=0x10), "option 16"),
        (message(option=0x13), "option 19"),
        (message(option=0x44), "option 68"),
        (message(option=0x06), "option 6 "),
        (message(block=0), "blocks of 0"),
        (message(count=11), "claims 11 entries of 10 elements"),
        (message(count=(1 << 32) - 1, size=1 << 32), "says that it has 4294967295 entries"),
        (message(size=(1 << 32) + 1), "claims 2 entries of 4294967297"),
        (message(size=11, body=GOOD[16:]), "a region of 11 elements, expected 10"),
        (GOOD[:21] + bytes([0b00010011, 0]), "1 bits set"),
        (GOOD[:21] + bytes([0b00110011, 0]), "strictly ascending"),
        (GOOD[:21] + bytes([0b00010011, 0b10]), r"within \[0, 10\)"),
        (message(count=1, size=10, body=SCALE + bytes([0x17, 0b1000])), "set behind the last"),
    ],
)
def test_broken_sparse_messages_are_refused_by_name(raw, says):
    with pytest.raises(WireFormatError, match=says):
        SparseQsgd().decode(uint8(raw), 10)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (DENSE[:7], "7 bytes cannot hold a message header"),
        (DENSE[:12], "12 bytes cannot hold a qsgd header"),
        (DENSE[:-1], "truncated or corrupt"),
        (DENSE + b"\x00", "truncated or corrupt"),
        (GOOD, r"format 5, expected qsgd \(4\)"),
        (message(4, 3, 4), "claims 3 entries of 4 elements"),
        (message(4, (1 << 32) - 1, (1 << 32) - 1), "says that it has 4294967295 entries"),
        (message(4, 2, 2, body=SCALE + b"\xd7"), "a region of 2 elements, expected 3"),
        (DENSE[:-1] + b"\x17", "set behind the last"),
        (message(4, 3, 3, option=0), "option 0"),
    ],
)
def test_broken_dense_messages_are_refused_by_name(raw, says):
    with pytest.raises(WireFormatError, match=says):
        Qsgd().decode(uint8(raw), 3)


def test_codecs_do_not_read_each_other():
    with pytest.raises(WireFormatError, match=r"format 5, expected coo \(1\)"):
        Coo().decode(uint8(GOOD), 10)


@st.composite
def hostile_messages(draw):
    """A plausible start with any body of the right length, or a good message changed."""
    arguments = draw(options((1, 3, 8)))
    whole = draw(st.booleans())
    if draw(st.booleans()):
        quantiser = Quantiser(**arguments)
        size = draw(st.integers(0, 40)) if whole else draw(st.integers(0, 1 << 32))
        count = size if whole else draw(st.integers(0, min(size, 20)))
        length = quantiser.value_bytes(count)
        if not whole:
            length += (packing.index_bits(count, size) + 7) // 8
        body = draw(st.binary(min_size=length, max_size=length))
        start = 4 if whole else 5, count, size, quantiser.block, quantiser.option
        return message(*start, body, draw(st.integers(1, 4))), size, whole
    vector = draw(packable())
    if whole:
        payload, size = Qsgd(**arguments).encode(vector.values).payload, vector.nnz
    else:
        payload, size = SparseQsgd(**arguments).encode(vector).payload, vector.size
    raw = bytearray(payload.tolist())
    for _ in range(draw(st.integers(1, 3))):
        raw[draw(st.integers(0, len(raw) - 1))] ^= 1 << draw(st.integers(0, 7))
    cut = draw(st.sampled_from([len(raw), len(raw), len(raw) // 2]))
    return bytes(raw)[:cut], size, whole


random_bytes = st.tuples(st.binary(max_size=60), st.integers(0, 40), st.booleans())


@settings(max_examples=1000)
@given(st.one_of(hostile_messages(), random_bytes))
def test_any_bytes_give_a_valid_vector_or_a_wire_format_error(drawn):
    raw, size, whole = drawn
    try:
        if whole:
            values = Qsgd().decode(uint8(raw), size)
            assert values.numel() == size
            return
        decoded = SparseQsgd().decode(uint8(raw), size).check()
    except WireFormatError:
        return
    assert decoded.size == size
    indices = bytes(packing.pack_indices(decoded.indices, size).tolist())
    assert raw.endswith(indices)


def test_a_decoder_given_a_slice_reads_nothing_behind_it():
    for fill in (0x00, 0xFF):
        buffer = torch.full((len(GOOD) + 16,), fill, dtype=torch.uint8)
        buffer[3 : 3 + len(GOOD)] = uint8(GOOD)
        assert SparseQsgd().decode(buffer[3 : 3 + len(GOOD)], 10).values.tolist() == [7.0, -3.0]
