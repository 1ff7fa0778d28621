"""Test that hostile bytes decode to a valid vector or raise WireFormatError."""

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsync import SparseVector
from sparsync.errors import WireFormatError
from sparsync.kernels import packing
from sparsync.published.redsync import SignMean
from sparsync.wire import Coo, LloydMax, Packed, Qsgd, SparseQsgd, StreamCodec, Whole
from sparsync.wire.codec import Header
from tests.tables import cases

from .strategies import same
from .wire_messages import BACKENDS, backends, messages, packable, receiver_of, uint8, using


def message(format_, count, size, detail, body=b"", *, option=0, dtype=1) -> bytes:
    return struct.pack("<4BIQ", 0x51, format_, dtype, option, count, size | detail << 48) + body


def packed(count=2, size=10, block=0, body=b"", form=1, dtype=1) -> bytes:
    return message(2, count, size, block, body, option=form, dtype=dtype)


def qsgd(format_=5, count=2, size=10, block=8, body=b"", option=0x14) -> bytes:
    return message(format_, count, size, block, body, option=option)


def means(count=3, size=12, counts=(1, 2), values=(1.0, -2.5), body=None, form=1) -> bytes:
    table = b"".join(struct.pack("<If", c, m) for c, m in zip(counts, values, strict=True))
    body = struct.pack("<3I", 1, 7, 10) if body is None else body
    return message(6, count, size, len(counts), table + body, option=form)


def levels(count=5, size=5, block=4, scales=b"\x00\x40\x2a\x3f", codes=b"\xc9\x01", option=2):
    return message(8, count, size, block, scales + codes, option=option)


SCALE = struct.pack("<f", 7.0)
COO = bytes.fromhex("5101010002000000" + "0300000004000000" + "0000803f00000040")
WHOLE = bytes.fromhex("5103010002000000" + "0000803f00000040")
# l = 2; the low bits are 3 and 0 (11 00), then 1 001 0 gives the indices 3 and 4 (unary 1 01 00)
PACKED = packed(body=b"\x80\x3f\x00\x40" + bytes([0b01010011, 0b0]))
SPARSE_QSGD = qsgd(body=SCALE + bytes([0xD7, 0b01010011, 0]))
QSGD = qsgd(4, 3, 3, body=SCALE + bytes([0xD7, 0x07]))
EIGHT_BITS = levels(3, 3, scales=b"\x00\x40", codes=b"\x7f\x81\x00", option=8)
MEANS, PACKED_MEANS = means(), means(body=b"\x6d\x05", form=2)

GOOD = {  # a receiver, a message, its size, and its content
    "coo": (Coo(), COO, 10, [0, 0, 0, 1, 2, 0, 0, 0, 0, 0]),
    "whole": (Whole(), WHOLE, 2, [1, 2]),
    "packed": (Packed(), PACKED, 10, [0, 0, 0, 1, 2, 0, 0, 0, 0, 0]),
    "qsgd": (Qsgd(), QSGD, 3, [7, -3, 7]),
    "sparse qsgd": (SparseQsgd(), SPARSE_QSGD, 10, [0, 0, 0, 7, -3, 0, 0, 0, 0, 0]),
    "sign-mean": (SignMean("coo", (5, 7)), MEANS, 12, [0, 1, *[0] * 5, -2.5, 0, 0, -2.5, 0]),
    "lloyd-max": (LloydMax(8), EIGHT_BITS, 3, [254, -2, 0]),
}
each = pytest.mark.parametrize("name", GOOD)


@each
def test_the_good_messages_are_good(name, each_backend):
    codec, raw, size, expected = GOOD[name]
    assert codec.decode(uint8(raw), size).to_dense().tolist() == expected


def with_bits(bits: int) -> bytes:
    return PACKED[:-2] + bits.to_bytes(2, "little")


LENGTH, ORDER = "truncated or corrupt", "strictly ascending"
MANY = (1 << 32) - 1


@each
def test_what_every_format_refuses(name, each_backend):
    codec, raw, size, _ = GOOD[name]
    start = codec.header_bytes
    broken = {
        b"": "0 bytes cannot hold a message header",
        raw[:7]: "7 bytes cannot hold a message header",
        raw[:start]: rf"of {start} bytes says that it has \d+ entries, which take {len(raw)}",
        raw[:-1]: LENGTH,
        raw + b"\x00": LENGTH,
        b"\x52" + raw[1:]: "starts with 520",
        raw[:1] + b"\xc8" + raw[2:]: rf"format 200, expected {type(codec).__name__} \({raw[1]}\)",
        raw[:2] + b"\x00" + raw[3:]: "unknown value dtype 0",
        raw[:2] + b"\x07" + raw[3:]: "unknown value dtype 7",
        raw[:3] + b"\x4f" + raw[4:]: r"starts with 510\d014f",
    }
    if start == 16:
        broken[raw[:15]] = "15 bytes cannot hold the header of"
        broken[raw[:2] + b"\x05" + raw[3:]] = r"torch\.int32.* never writes"
        large = raw[:8] + (size + (1 << 32)).to_bytes(6, "little") + raw[14:]
        broken[large] = "never writes"
        more = raw[:4] + MANY.to_bytes(4, "little") + bytes([*(b"\xff" * 4), 0, 0]) + raw[14:]
        broken[more] = "says that it has 4294967295 entries"
        broken[raw[:4] + (size + 1).to_bytes(4, "little") + raw[8:]] = "never writes"
    else:
        broken[raw[:4] + MANY.to_bytes(4, "little") + raw[8:]] = "it has 4294967295 entries"
    for bad, says in broken.items():
        with pytest.raises(WireFormatError, match=says):
            codec.decode(uint8(bad), size)
    with pytest.raises(WireFormatError, match=rf"format {raw[1]}, expected"):
        (Whole() if isinstance(codec, Coo) else Coo()).decode(uint8(raw), size)


@cases(
    ("coo", COO[:2] + b"\x02" + COO[3:], "24 bytes says that it has 2 entries, which take 32"),
    ("coo", COO[:8] + b"\x04" + COO[9:], ORDER),
    ("coo", COO[:8] + b"\x05" + COO[9:], ORDER),
    ("coo", COO[:12] + b"\x0a" + COO[13:], r"within \[0, 10\)"),
    ("coo", COO[:15] + b"\x80" + COO[16:], r"within \[0, 10\)"),
    ("whole", WHOLE[:4] + b"\x01\0\0\0" + WHOLE[8:12], "has 1 values, expected 2"),
    ("packed", packed(block=1), "detail 1, which"),
    ("packed", packed(form=2), "option 2, detail 0, which"),
    ("packed", packed(size=11, body=PACKED[16:]), "a region of 11 elements, expected 10"),
    ("packed", packed(size=(1 << 48) - 1), "of 281474976710655 elements"),
    ("packed", with_bits(0b0_00010011), "1 bits set"),
    ("packed", with_bits(0b1_01010011), "3 bits set"),
    ("packed", with_bits(0b10_00010011), r"within \[0, 10\)"),  # in the padding
    ("packed", with_bits(0b0_00110011), ORDER),  # high parts 0, 0 of low bits 3, 0
    ("packed", with_bits(0b1_00011100), r"within \[0, 10\)"),  # the second one: high part 3
    ("sparse qsgd", qsgd(option=0x10), "starts with 51050110"),
    ("sparse qsgd", qsgd(option=0x13), "starts with 51050113"),
    ("sparse qsgd", qsgd(option=0x06), "starts with 51050106"),
    ("sparse qsgd", qsgd(block=0), "detail 0, which"),
    ("sparse qsgd", qsgd(size=11, body=SPARSE_QSGD[16:]), "a region of 11 elements"),
    ("sparse qsgd", SPARSE_QSGD[:21] + bytes([0b00010011, 0]), "1 bits set"),
    ("sparse qsgd", SPARSE_QSGD[:21] + bytes([0b00110011, 0]), ORDER),
    ("sparse qsgd", SPARSE_QSGD[:21] + bytes([0b00010011, 0b10]), r"within \[0, 10\)"),
    ("sparse qsgd", qsgd(count=1, body=SCALE + bytes([0x17, 0b1000])), "set after the last"),
    ("qsgd", SPARSE_QSGD, r"format 5, expected Qsgd \(4\)"),
    ("qsgd", qsgd(4, 2, 2, body=SCALE + b"\xd7"), "a region of 2 elements, expected 3"),
    ("qsgd", QSGD[:-1] + b"\x17", "set after the last"),
    ("sign-mean", means(counts=(), values=()), "detail 0, which"),
    ("sign-mean", means(size=13), "a region of 13 elements, expected 12"),
    ("sign-mean", means(counts=(3,), values=(1.0,)), "has 1 layers, expected 2"),
    ("sign-mean", means(counts=(0,) * 65535, values=(0.0,) * 65535), "has 65535 layers"),
    ("sign-mean", means(counts=(2, 1)), "layer 0 has 2 entries, but 1 of its indices"),
    ("sign-mean", means(counts=(1, MANY)), "layer 1 has 4294967295 entries, but 2"),
    ("sign-mean", means(counts=(0, 3), body=struct.pack("<3I", 5, 7, 10)),
     "mean for a layer without"),
    ("sign-mean", means(body=struct.pack("<3I", 1, 7, 7)), ORDER),
    ("sign-mean", means(body=struct.pack("<3I", 7, 1, 10)), ORDER),
    ("sign-mean", means(body=struct.pack("<3I", 1, 7, 12)), r"within \[0, 12\)"),
    ("sign-mean", means(body=struct.pack("<3I", 1, 7, 1 << 31)), r"within \[0, 12\)"),
    ("sign-mean", means(body=b"\x6d\x04", form=2), "2 bits set"),
    ("sign-mean", means(body=b"\x6d\x0d", form=2), "4 bits set"),
    ("lloyd-max", levels(3, 3, option=5), "starts with 51080105"),
    ("lloyd-max", levels(3, 3, block=0), "detail 0, which"),
    ("lloyd-max", levels(3, 4), "3 entries of 4 elements"),
    ("lloyd-max", levels(4, 4), "which take 19"),
    ("lloyd-max", levels(3, 3, scales=b"\x00\xc0", codes=b"\x09"), "a scale below zero"),
    ("lloyd-max", levels(3, 3, scales=b"\x00\x80", codes=b"\x09"), "a scale below zero"),
    ("lloyd-max", levels(3, 3, scales=b"\x00\x40", codes=b"\x49"), "set after the last"),
)  # fmt: skip
def test_broken_messages_are_refused_by_name(name, raw, says, each_backend):
    codec, _, size, _ = GOOD[name]
    with pytest.raises(WireFormatError, match=says):
        codec.decode(uint8(raw), size)


def test_a_hostile_count_allocates_nothing():
    """2^32 - 1 entries in 60 bytes are refused by their length, before any tensor is made."""
    raw = packed(form=3, count=MANY, size=1 << 32, body=bytes(44))
    with pytest.raises(WireFormatError, match=LENGTH):
        Packed().decode(uint8(raw), 1 << 32)


def outcome(codec, raw, size, backend="torch"):
    """Decode bytes; return a checked vector, or the text of the error."""
    with using(backend):
        try:
            decoded = codec.decode(uint8(raw), size)
        except WireFormatError as error:
            return str(error)
    assert decoded.size == size
    return decoded.check() if isinstance(decoded, SparseVector) else decoded


@pytest.mark.parametrize("name", ["coo", "whole", "packed", "sign-mean"])
def test_every_changed_byte_is_refused_or_changes_the_vector(name):
    codec, good, size, _ = GOOD[name]
    original = outcome(codec, good, size)
    for at in range(len(good)):
        for byte in {0, 255, *(good[at] ^ 1 << bit for bit in range(8))} - {good[at]}:
            decoded = outcome(codec, good[:at] + bytes([byte]) + good[at + 1 :], size)
            if not isinstance(decoded, str):
                alike = decoded.values.dtype == original.values.dtype
                alike = alike and torch.equal(decoded.to_dense(), original.to_dense())
                assert not alike, (at, byte)


@st.composite
def hostile_messages(draw):
    """Draw a plausible header with a body of the right length, a damaged valid message, or any bytes."""
    codec, original = draw(messages())
    size, kind = original.size, draw(st.sampled_from(["body", "flips", "bytes"]))
    if kind == "bytes":
        return codec, draw(st.binary(max_size=60)), draw(st.integers(0, 40))
    if kind == "body":
        dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
        header = codec.header(original.nnz, size, dtype)
        length = codec.layout(header).nbytes - header.nbytes
        return codec, header.pack() + draw(st.binary(min_size=length, max_size=length)), size
    raw = bytearray(codec.encode(original).payload.tolist())
    for _ in range(draw(st.integers(1, 3))):
        raw[draw(st.integers(0, len(raw) - 1))] ^= 1 << draw(st.integers(0, 7))
    return codec, bytes(raw)[: draw(st.sampled_from([len(raw), len(raw), len(raw) // 2]))], size


@settings(max_examples=400)
@given(hostile_messages())
def test_any_bytes_give_a_valid_vector_or_a_wire_format_error(drawn):
    codec, raw, size = drawn
    decoded, *others = [outcome(receiver_of(codec), raw, size, backend) for backend in BACKENDS]
    for other in others:
        if isinstance(decoded, str):
            assert other == decoded
        else:
            same(other.values, decoded.values)
            same(other.to_dense() if size < 1 << 20 else other.indices,
                 decoded.to_dense() if size < 1 << 20 else decoded.indices)  # fmt: skip
    if isinstance(decoded, str):
        return
    assert Header.read(uint8(raw)).entries == decoded.nnz
    if isinstance(decoded, SparseVector):  # indices have one form
        coo = isinstance(codec, Coo) or (isinstance(codec, SignMean) and raw[3] == 1)
        packed_indices = packing.pack_indices(decoded.indices, size)
        indices = decoded.indices.to(torch.uint32).view(torch.uint8) if coo else packed_indices
        assert bytes(indices.tolist()) in raw


@settings(max_examples=100)
@given(packable(), backends, st.data())
def test_every_flipped_index_bit_is_seen_or_gives_other_indices(vector, backend, data):
    payload = Packed().encode(vector).payload
    start = 16 + 2 * vector.nnz
    if payload.numel() == start:
        return
    at = data.draw(st.integers(start, payload.numel() - 1))
    payload[at] ^= 1 << data.draw(st.integers(0, 7))
    decoded = outcome(Packed(), bytes(payload.tolist()), vector.size, backend)
    assert isinstance(decoded, str) or not torch.equal(decoded.indices, vector.indices)


def test_a_stream_refuses_messages_of_neither_form():
    with pytest.raises(WireFormatError, match=r"format 8, expected Coo \(1\)"):
        StreamCodec().decode(uint8(levels(10, 10)), 10)
    with pytest.raises(WireFormatError, match="cannot hold"):
        StreamCodec().measure(uint8(b"\x51"))
