"""Hostile bytes: every sign-mean message is a valid vector or a WireFormatError."""

import struct
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsync import SparseVector, WireFormatError
from sparsync.wire import Coo
from sparsync.wire.sign_mean import SignMean

from .packed_messages import vector
from .sign_mean_messages import forms, layered
from .strategies import boundaries_of, same_vector


def uint8(raw: bytes) -> torch.Tensor:
    return torch.tensor(list(raw), dtype=torch.uint8)


def message(
    count=3, size=12, counts=(1, 2), means=(1.0, -2.5), body=None, form=1, dtype=1
) -> bytes:
    start = struct.pack("<4BIQ", 0x51, 6, dtype, form, count, size | len(counts) << 48)
    table = b"".join(struct.pack("<If", c, m) for c, m in zip(counts, means, strict=True))
    return start + table + (struct.pack("<3I", 1, 7, 10) if body is None else body)


LAYERS = (5, 7)
GOOD, PACKED = message(), message(body=b"\x6d\x05", form=2)


@pytest.mark.parametrize("raw", [GOOD, PACKED], ids=["coo", "packed"])
def test_the_good_messages_are_good(raw):
    decoded = SignMean("coo", LAYERS).decode(uint8(raw), 12)
    same_vector(decoded, vector([1, 7, 10], [1.0, -2.5, -2.5], 12))


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "0 bytes cannot hold a message header"),
        (GOOD[:15], "15 bytes cannot hold a sign-mean header of 16"),
        (GOOD[:16], "16 bytes says that it has 3 entries in 2 layers, which take 44"),
        (GOOD[:-1], "truncated or corrupt"),
        (GOOD + b"\x00", "truncated or corrupt"),
        (PACKED[:-1], "truncated or corrupt"),
        (b"\x52" + GOOD[1:], "starts with 52060101"),
        (GOOD[:1] + b"\x02" + GOOD[2:], r"format 2, expected signmean \(6\)"),
        (message(dtype=0), "unknown value dtype 0"),
        (message(dtype=5), r"in 2 layers of torch\.int32, which sign-mean never writes"),
        (message(form=0), "starts with 51060100"),
        (message(form=3), "starts with 51060103"),
        (message(count=13), "claims 13 entries of 12 elements"),
        (message(size=(1 << 32) + 1), "claims 3 entries of 4294967297"),
        (message(counts=(), means=()), "in 0 layers"),
        (message(count=(1 << 32) - 1, size=1 << 32), "says that it has 4294967295 entries"),
        (message(counts=(0,) * 65535, means=(0.0,) * 65535), "for 12 elements in 65535 layers"),
        (message(size=13), "for 13 elements in 2 layers, expected 12 in 2"),
        (message(counts=(3,), means=(1.0,)), "for 12 elements in 1 layers, expected 12 in 2"),
        (message(counts=(2, 1)), "layer 0 has 2 entries, but 1 of its indices"),
        (message(counts=(1, 3)), "layer 1 has 3 entries, but 2 of its indices"),
        (message(counts=(1, (1 << 32) - 1)), "layer 1 has 4294967295 entries"),
        (message(counts=(0, 3), body=struct.pack("<3I", 5, 7, 10)), "mean for a layer without"),
        (message(body=struct.pack("<3I", 1, 7, 7)), "strictly ascending"),
        (message(body=struct.pack("<3I", 7, 1, 10)), "strictly ascending"),
        (message(body=struct.pack("<3I", 1, 7, 12)), r"within \[0, 12\)"),
        (message(body=struct.pack("<3I", 1, 7, 1 << 31)), r"within \[0, 12\)"),
        (message(body=b"\x6d\x04", form=2), "2 bits set"),
        (message(body=b"\x6d\x0d", form=2), "4 bits set"),
    ],
)  # fmt: skip
def test_broken_messages_are_refused_by_name(raw, says):
    with pytest.raises(WireFormatError, match=says):
        SignMean("coo", LAYERS).decode(uint8(raw), 12)


def test_codecs_do_not_read_each_other():
    with pytest.raises(WireFormatError, match=r"format 6, expected coo \(1\)"):
        Coo().decode(uint8(GOOD), 12)


def outcome(raw: bytes, size: int, layers: tuple[int, ...] | None) -> SparseVector | None:
    """What the decoder makes of the bytes: a checked vector, or None if it refuses them."""
    try:
        decoded = SignMean("coo", layers).decode(uint8(raw), size).check()
    except WireFormatError:
        return None
    assert decoded.size == size
    return decoded


@pytest.mark.parametrize("good", [GOOD, PACKED], ids=["coo", "packed"])
def test_every_changed_byte_is_refused_or_changes_the_vector(good):
    original = outcome(good, 12, LAYERS)
    for at in range(len(good)):
        for byte in set(range(256)) - {good[at]}:
            raw = good[:at] + bytes([byte]) + good[at + 1 :]
            decoded = outcome(raw, 12, LAYERS)
            if decoded is not None:
                alike = decoded.values.dtype == original.values.dtype
                alike = alike and torch.equal(decoded.values, original.values)
                assert not (alike and torch.equal(decoded.indices, original.indices)), (at, byte)


@st.composite
def hostile_messages(draw):
    """A plausible start with any body of the right length, or a good message changed."""
    if draw(st.booleans()):
        size = draw(st.one_of(st.integers(0, 40), st.integers(0, 1 << 32)))
        layers = [b - a for a, b in pairwise(draw(boundaries_of(size)))]
        counts = [draw(st.integers(0, min(width, 4))) for width in layers]
        means = [draw(st.floats(width=32)) if count else 0.0 for count in counts]
        codec = SignMean(draw(forms), layers)
        count = min(sum(counts) + draw(st.sampled_from([0, 0, 0, 1])), size)
        length = codec.parts(count, size, torch.float32).index
        body = draw(st.binary(min_size=length, max_size=length))
        form, dtype = 2 if codec.indices == "packed" else 1, draw(st.integers(1, 4))
        return message(count, size, counts, means, body, form, dtype), size, codec.layers
    original, codec = draw(layered())
    raw = bytearray(codec.encode(original).payload.tolist())
    for _ in range(draw(st.integers(1, 3))):
        raw[draw(st.integers(0, len(raw) - 1))] ^= 1 << draw(st.integers(0, 7))
    cut = draw(st.sampled_from([len(raw), len(raw), len(raw) // 2]))
    return bytes(raw)[:cut], original.size, codec.layers


random_bytes = st.tuples(st.binary(max_size=60), st.integers(0, 40), st.none())


def without_means(raw: bytes, layers: int) -> bytes:
    changed = bytearray(raw)
    for layer in range(layers):
        changed[20 + 8 * layer : 24 + 8 * layer] = bytes(4)
    return bytes(changed)


@settings(max_examples=500)
@given(st.one_of(hostile_messages(), random_bytes))
def test_any_bytes_give_a_valid_vector_or_a_wire_format_error(drawn):
    raw, size, layers = drawn
    decoded = outcome(raw, size, layers)
    if decoded is not None:  # then there is one message for it, but for the means' bits
        codec = SignMean("packed" if raw[3] == 2 else "coo", layers)
        again = bytes(codec.encode(decoded).payload.tolist())
        count = len(layers or (size,))
        assert without_means(again, count) == without_means(raw, count)
