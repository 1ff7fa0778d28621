"""Hostile bytes: every signs message is a valid vector or a WireFormatError."""

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsync import WireFormatError
from sparsync.wire import Whole
from sparsync.wire.signs import Signs

from .strategies import dense_tensors


def uint8(raw: bytes) -> torch.Tensor:
    return torch.tensor(list(raw), dtype=torch.uint8)


def message(
    count=10, size=None, block=6, scales=(2.0, 0.5), signs=b"\xa2\x01", dtype=1, option=0
) -> bytes:
    word = (count if size is None else size) | block << 48
    start = struct.pack("<4BIQ", 0x51, 7, dtype, option, count, word)
    return start + struct.pack(f"<{len(scales)}f", *scales) + signs


GOOD = message()


def test_the_good_message_is_good():
    expected = [2.0, -2.0, 2.0, 2.0, 2.0, -2.0, 0.5, -0.5, -0.5, 0.5]
    assert Signs().decode(uint8(GOOD), 10).tolist() == expected


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "0 bytes cannot hold a message header"),
        (GOOD[:15], "15 bytes cannot hold a signs header of 16"),
        (GOOD[:16], "of 16 bytes says that it has 10 values, expected 10, in 26 bytes"),
        (GOOD[:-1], "truncated or corrupt"),
        (GOOD + b"\x00", "truncated or corrupt"),
        (b"\x52" + GOOD[1:], "starts with 52070100"),
        (GOOD[:1] + b"\x03" + GOOD[2:], r"format 3, expected signs \(7\)"),
        (message(dtype=0), "unknown value dtype 0"),
        (message(dtype=5), r"torch\.int32 .* which signs never write"),
        (message(option=1), "with option 1, which signs never write"),
        (message(block=0), "in blocks of 0"),
        (message(size=11), "claims 10 of 11 values"),
        (message(count=9), "has 9 values, expected 10, in 26 bytes"),
        (message(count=11), "has 11 values, expected 10, in 26 bytes"),
        (message(count=(1 << 32) - 1), "says that it has 4294967295 values"),
        (message(block=4), "in 30 bytes"),
        (message(scales=(2.0, -0.5)), "a scale below zero"),
        (message(scales=(-0.0, 0.5)), "a scale below zero"),
        (message(signs=b"\xa2\x05"), "bits set behind the last"),
        (message(signs=b"\xa2\x81"), "bits set behind the last"),
    ],
)  # fmt: skip
def test_broken_messages_are_refused_by_name(raw, says):
    with pytest.raises(WireFormatError, match=says):
        Signs().decode(uint8(raw), 10)


def test_codecs_do_not_read_each_other():
    with pytest.raises(WireFormatError, match=r"format 7, expected dense \(3\)"):
        Whole().decode(uint8(GOOD), 10)


def outcome(raw: bytes, size: int) -> torch.Tensor | None:
    """What the decoder makes of the bytes: a vector, or None if it refuses them."""
    try:
        decoded = Signs().decode(uint8(raw), size)
    except WireFormatError:
        return None
    assert decoded.shape == (size,)
    return decoded


@pytest.mark.parametrize("good", [GOOD, message(8, None, 3, (1.0, 2.0, 3.0), b"\x5a")])
def test_every_changed_byte_is_refused_or_changes_the_vector(good):
    size = good[4]
    original = outcome(good, size)
    for at in range(len(good)):
        for byte in set(range(256)) - {good[at]}:
            raw = good[:at] + bytes([byte]) + good[at + 1 :]
            decoded = outcome(raw, size)
            if decoded is not None:
                alike = decoded.dtype == original.dtype and torch.equal(decoded, original)
                assert not alike, (at, byte)


@st.composite
def hostile_messages(draw):
    """A plausible start with any body of the right length, or a good message changed."""
    if draw(st.booleans()):
        count, block = draw(st.integers(0, 40)), draw(st.sampled_from([1, 3, 8, 65535]))
        length = Signs(block).nbytes(count) - 16
        body = draw(st.binary(min_size=length, max_size=length))
        raw = message(count, None, block, (), body, draw(st.integers(1, 4)))
        return raw, count
    values, codec = draw(dense_tensors()), Signs(draw(st.sampled_from([1, 3, 8, 256])))
    raw = bytearray(codec.encode(values).payload.tolist())
    for _ in range(draw(st.integers(1, 3))):
        raw[draw(st.integers(0, len(raw) - 1))] ^= 1 << draw(st.integers(0, 7))
    cut = draw(st.sampled_from([len(raw), len(raw), len(raw) // 2]))
    return bytes(raw)[:cut], values.numel()


random_bytes = st.tuples(st.binary(max_size=60), st.integers(0, 40))


@settings(max_examples=500)
@given(st.one_of(hostile_messages(), random_bytes))
def test_any_bytes_give_a_valid_vector_or_a_wire_format_error(drawn):
    raw, size = drawn
    decoded = outcome(raw, size)
    if decoded is not None:  # then its length and its start are those that a sender writes
        block = int.from_bytes(raw[14:16], "little")
        again = bytes(Signs(block).encode(decoded).payload.tolist())
        assert len(again) == len(raw) and again[:16] == raw[:16]
