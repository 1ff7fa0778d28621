import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsync import ConfigurationError, SparseVector, WireFormatError
from sparsync.transports.ledger import Parts
from sparsync.wire import Coo
from sparsync.wire.base import Header, MessageFraming, pack_header, parse_header

from .strategies import same_vector, sparse_vectors

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int32,
    torch.int64,
]


def vector(indices, values, size, dtype=torch.float32) -> SparseVector:
    indices = torch.tensor(indices, dtype=torch.int64)
    return SparseVector(indices, torch.tensor(values, dtype=dtype), size)


def uint8(raw: bytes) -> torch.Tensor:
    return torch.tensor(list(raw), dtype=torch.uint8)


# ---- literal bytes: what docs/wire-format.md promises ---------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "code_and_value"),
    [
        (torch.float32, ("01", "0000c0bf")),
        (torch.float64, ("02", "000000000000f8bf")),
        (torch.bfloat16, ("03", "c0bf")),
        (torch.float16, ("04", "00be")),
    ],
)
def test_coo_bytes_of_minus_one_and_a_half_at_258(dtype, code_and_value):
    code, value = code_and_value
    encoded = Coo().encode(vector([258], [-1.5], 1000, dtype))
    assert bytes(encoded.payload.tolist()).hex() == f"5101{code}0001000000" + "02010000" + value


@pytest.mark.parametrize(
    ("dtype", "code", "value"),
    [(torch.int32, "05", "feffffff"), (torch.int64, "06", "feffffffffffffff")],
)
def test_coo_bytes_of_integers(dtype, code, value):
    encoded = Coo().encode(vector([0], [-2], 1, dtype))
    assert bytes(encoded.payload.tolist()).hex() == f"5101{code}0001000000" + "00000000" + value


def test_coo_bytes_all_indices_then_all_values():
    """The worked example of docs/wire-format.md."""
    encoded = Coo().encode(vector([3, 70000], [1.0, -2.5], 100000))
    assert bytes(encoded.payload.tolist()) == bytes.fromhex(
        "51 01 01 00 02 00 00 00"
        "03 00 00 00 70 11 01 00"
        "00 00 80 3f 00 00 20 c0"
    )  # fmt: skip


def test_an_empty_message_is_its_header():
    assert bytes(Coo().encode(vector([], [], 5)).payload.tolist()).hex() == "5101010000000000"


def test_the_largest_index_uses_all_32_bits():
    last = (1 << 32) - 1
    encoded = Coo().encode(vector([1 << 31, last], [1.0, 2.0], 1 << 32))
    assert bytes(encoded.payload[8:16].tolist()).hex() == "00000080ffffffff"
    same_vector(Coo().decode(encoded.payload, 1 << 32), encoded.decoded)


# ---- round trips ---------------------------------------------------------------------------------


@given(sparse_vectors())
def test_decode_restores_what_encode_was_given(original):
    encoded = Coo().encode(original)
    same_vector(encoded.decoded, original)
    same_vector(Coo().decode(encoded.payload, original.size).check(), original)
    parts = Coo().parts(original.nnz, original.size, original.values.dtype)
    assert encoded.payload.dtype == torch.uint8
    assert encoded.payload.numel() == parts.nbytes
    assert parts == Coo().measure(encoded.payload)
    assert parts.nbytes == Coo().nbytes(original.nnz, original.size, original.values.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 2, 7])
def test_full_and_empty_vectors_of_every_dtype_survive(dtype, size):
    full = SparseVector.from_dense(torch.arange(1, size + 1).to(dtype))
    for original in (full, SparseVector.empty(size, full.values)):
        same_vector(Coo().decode(Coo().encode(original).payload, size), original)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [1, 3, 4, 8])
def test_a_message_may_start_anywhere_in_a_buffer(dtype, offset):
    original = vector([1, 4, 6], [1, 2, 3], 8, dtype)
    payload = Coo().encode(original).payload
    buffer = torch.cat([torch.zeros(offset, dtype=torch.uint8), payload])
    same_vector(Coo().decode(buffer[offset:], 8), original)


def test_parts_tell_header_index_and_value_bytes_apart():
    assert Coo().parts(10, 99, torch.bfloat16) == Parts(header=8, index=40, value=20)


def test_framing_reads_the_length_and_ignores_what_follows():
    payload = Coo().encode(vector([1], [1.0], 4)).payload
    framing = MessageFraming(Coo())
    assert framing.length(torch.cat([payload, payload])) == payload.numel()
    assert framing.parts(payload) == Parts(header=8, index=4, value=4)


# ---- what is refused -----------------------------------------------------------------------------


def test_a_region_beyond_32_bits_is_refused_by_the_sender():
    with pytest.raises(ConfigurationError, match="32 bits"):
        Coo().encode(vector([0], [1.0], (1 << 32) + 1))


def test_a_dtype_without_a_code_is_refused_by_the_sender():
    with pytest.raises(ConfigurationError, match=r"torch\.bool"):
        Coo().encode(vector([0], [True], 1, torch.bool))


def test_a_count_beyond_32_bits_is_refused_by_the_sender():
    with pytest.raises(ConfigurationError, match="4294967296 entries"):
        pack_header(Header(1, torch.float32, 1 << 32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, (1 << 32) - 1])
def test_headers_survive(dtype, count):
    header = Header(7, dtype, count)
    assert parse_header(pack_header(header)) == header


GOOD = bytes.fromhex("5101010002000000" + "0300000004000000" + "0000803f00000040")


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "0 bytes cannot hold"),
        (GOOD[:7], "7 bytes cannot hold"),
        (b"\x52" + GOOD[1:], "starts with 52010100"),
        (GOOD[:3] + b"\x01" + GOOD[4:], "starts with 51010101"),
        (GOOD[:1] + b"\x02" + GOOD[2:], r"format 2, expected coo \(1\)"),
        (GOOD[:2] + b"\x00" + GOOD[3:], "unknown value dtype 0"),
        (GOOD[:2] + b"\x07" + GOOD[3:], "unknown value dtype 7"),
        (GOOD[:2] + b"\x02" + GOOD[3:], "24 bytes says that it has 2 entries, which take 32"),
        (GOOD[:-1], "truncated or corrupt"),
        (GOOD + b"\x00", "truncated or corrupt"),
        (GOOD[:4] + b"\xff\xff\xff\xff" + GOOD[8:], "says that it has 4294967295 entries"),
        (GOOD[:8] + b"\x04" + GOOD[9:], "strictly ascending"),
        (GOOD[:8] + b"\x05" + GOOD[9:], "strictly ascending"),
        (GOOD[:12] + b"\x0a" + GOOD[13:], r"within \[0, 10\)"),
        (GOOD[:15] + b"\x80" + GOOD[16:], r"within \[0, 10\)"),
    ],
)
def test_broken_messages_are_refused_by_name(raw, says):
    with pytest.raises(WireFormatError, match=says):
        Coo().decode(uint8(raw), 10)


@st.composite
def hostile_messages(draw):
    """Random bytes behind a plausible header, or a good message with a few bytes changed."""
    if draw(st.booleans()):
        count = draw(st.one_of(st.integers(0, 6), st.integers(0, (1 << 32) - 1)))
        start = bytes([0x51, draw(st.integers(0, 2)), draw(st.integers(0, 8)), 0])
        return start + count.to_bytes(4, "little") + draw(st.binary(max_size=60))
    raw = bytearray(Coo().encode(draw(sparse_vectors())).payload.tolist())
    for _ in range(draw(st.integers(1, 3))):
        raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    return bytes(raw)[: draw(st.integers(0, len(raw)))]


@settings(max_examples=500)
@given(st.one_of(hostile_messages(), st.binary(max_size=40)), st.integers(0, 40))
def test_any_bytes_give_a_valid_vector_or_a_wire_format_error(raw, size):
    payload = uint8(raw)
    try:
        decoded = Coo().decode(payload, size)
    except WireFormatError:
        return
    decoded.check()
    assert decoded.size == size
    assert bytes(Coo().encode(decoded).payload.tolist()) == raw  # one message, one vector
