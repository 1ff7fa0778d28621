"""Hostile bytes: every message is a valid vector or a WireFormatError, in every backend."""

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsync import SparseVector, WireFormatError
from sparsync.kernels import packing
from sparsync.wire import Coo, Packed

from .packed_messages import BACKENDS, backends, forms, packable, using
from .strategies import same_vector


def uint8(raw: bytes) -> torch.Tensor:
    return torch.tensor(list(raw), dtype=torch.uint8)


def message(form=1, count=2, size=10, block=0, body=b"", dtype=1) -> bytes:
    return struct.pack("<4BIQ", 0x51, 2, dtype, form, count, size | block << 48) + body


# l = 2; low bits 3 and 0 (11 00), then 1 001 0: indices 3 and 4 (unary 1 01 00)
GOOD = message(body=b"\x80\x3f\x00\x40" + bytes([0b01010011, 0b0]))
INDICES = len(GOOD) - 2


def test_the_good_message_is_good(each_backend):
    decoded = Packed().decode(uint8(GOOD), 10)
    assert (decoded.indices.tolist(), decoded.values.tolist()) == ([3, 4], [1.0, 2.0])


def with_indices(bits: int) -> bytes:
    return GOOD[:INDICES] + bits.to_bytes(2, "little")


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "0 bytes cannot hold a message header"),
        (GOOD[:15], "15 bytes cannot hold a packed header of 16"),
        (GOOD[:16], "16 bytes says that it has 2 entries, which take 22"),
        (GOOD[:-1], "truncated or corrupt"),
        (GOOD + b"\x00", "truncated or corrupt"),
        (b"\x52" + GOOD[1:], "starts with 52020101"),
        (GOOD[:1] + b"\x01" + GOOD[2:], r"format 1, expected packed \(2\)"),
        (GOOD[:2] + b"\x00" + GOOD[3:], "unknown value dtype 0"),
        (GOOD[:2] + b"\x05" + GOOD[3:], r"torch\.int32 has value form 1 with blocks of 0"),
        (GOOD[:3] + b"\x00" + GOOD[4:], "starts with 51020100"),
        (GOOD[:3] + b"\x04" + GOOD[4:], "starts with 51020104"),
        (GOOD[:3] + b"\x02" + GOOD[4:], "value form 2 with blocks of 0"),
        (message(block=1), "value form 1 with blocks of 1"),
        (message(count=11), "claims 11 entries of 10 elements"),
        (message(count=(1 << 32) - 1, size=1 << 32), "says that it has 4294967295 entries"),
        (message(size=(1 << 32) + 1), "claims 2 entries of 4294967297"),
        (message(size=(1 << 48) - 1), "claims 2 entries of 281474976710655"),
        (message(size=11, body=GOOD[16:]), "a region of 11 elements, expected 10"),
        (with_indices(0b0_00010011), "1 bits set"),
        (with_indices(0b1_01010011), "3 bits set"),
        (with_indices(0b10_00010011), r"within \[0, 10\)"),  # in the padding
        (with_indices(0b0_00110011), "strictly ascending"),  # high parts 0, 0 of low bits 3, 0
        (with_indices(0b1_00011100), r"within \[0, 10\)"),  # the second one: high part 3
    ],
)
def test_broken_messages_are_refused_by_name(raw, says, each_backend):
    with pytest.raises(WireFormatError, match=says):
        Packed().decode(uint8(raw), 10)


def test_codecs_do_not_read_each_other():
    with pytest.raises(WireFormatError, match=r"format 2, expected coo \(1\)"):
        Coo().decode(uint8(GOOD), 10)


def test_a_hostile_count_allocates_nothing():
    """2^32 - 1 entries in 60 bytes: refused by comparing lengths, before any tensor is made."""
    raw = message(form=3, count=(1 << 32) - 1, size=1 << 32, body=bytes(44))
    with pytest.raises(WireFormatError, match="truncated or corrupt"):
        Packed().decode(uint8(raw), 1 << 32)


@st.composite
def hostile_messages(draw):
    """A plausible start with any body of the right length, or a good message changed."""
    if draw(st.booleans()):
        size = draw(st.one_of(st.integers(0, 40), st.integers(0, 1 << 32)))
        count = draw(st.integers(0, min(size, 20)))
        form = draw(st.sampled_from([packing.BF16, packing.INT8, packing.FP32]))
        block = draw(st.integers(1, 9)) if form == packing.INT8 else 0
        length = (
            packing.value_bytes(count, form, block) + (packing.index_bits(count, size) + 7) // 8
        )
        body = draw(st.binary(min_size=length, max_size=length))
        return message(form, count, size, block, body, draw(st.integers(1, 4))), size
    vector = draw(packable())
    codec = Packed(draw(forms), block=draw(st.integers(1, 9)))
    raw = bytearray(codec.encode(vector).payload.tolist())
    for _ in range(draw(st.integers(1, 3))):
        raw[draw(st.integers(0, len(raw) - 1))] ^= 1 << draw(st.integers(0, 7))
    return bytes(raw)[: draw(st.sampled_from([len(raw), len(raw), len(raw) // 2]))], vector.size


random_bytes = st.tuples(st.binary(max_size=60), st.integers(0, 40))


def outcome(raw: bytes, size: int, backend: str) -> SparseVector | str:
    """What a backend makes of the bytes: a vector or the text of its error."""
    with using(backend):
        try:
            return Packed().decode(uint8(raw), size).check()
        except WireFormatError as error:
            return str(error)


@settings(max_examples=1000)
@given(st.one_of(hostile_messages(), random_bytes))
def test_any_bytes_give_a_valid_vector_or_a_wire_format_error(drawn):
    raw, size = drawn
    decoded, *others = [outcome(raw, size, backend) for backend in BACKENDS]
    if isinstance(decoded, str):
        assert others in ([], [decoded])
        return
    for other in others:
        same_vector(other, decoded)
    assert decoded.size == size
    form, block = raw[3], int.from_bytes(raw[14:16], "little")
    again = packing.pack_indices(decoded.indices, size)
    assert bytes(again.tolist()) == raw[16 + packing.value_bytes(decoded.nnz, form, block) :]


@settings(max_examples=300)
@given(packable(), backends, st.data())
def test_every_flipped_index_bit_is_seen_or_gives_other_indices(vector, backend, data):
    payload = Packed().encode(vector).payload
    start = 16 + 2 * vector.nnz
    if payload.numel() == start:
        return
    at = data.draw(st.integers(start, payload.numel() - 1))
    payload[at] ^= 1 << data.draw(st.integers(0, 7))
    decoded = outcome(bytes(payload.tolist()), vector.size, backend)
    assert isinstance(decoded, str) or not torch.equal(decoded.indices, vector.indices)


def test_a_decoder_given_a_slice_reads_nothing_behind_it(each_backend):
    """The bytes behind a message differ; the result does not."""
    vector = SparseVector(torch.arange(0, 300, 3), torch.randn(100), 301)
    payload = Packed().encode(vector).payload
    for fill in (0x00, 0xFF):
        buffer = torch.full((payload.numel() + 16,), fill, dtype=torch.uint8)
        buffer[3 : 3 + payload.numel()] = payload
        decoded = Packed().decode(buffer[3 : 3 + payload.numel()], 301)
        assert torch.equal(decoded.indices, vector.indices)
