"""Test all wire formats: literal bytes, round trips, sizes, and refusals by the sender."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsync import ConfigurationError, DenseVector, SparseVector
from sparsync.published.redsync import SignMean
from sparsync.transports.ledger import Parts
from sparsync.wire import Coo, LloydMax, Packed, Qsgd, SparseQsgd, StreamCodec, Whole
from sparsync.wire.codec import Header, MessageFraming
from tests.tables import cases, refuses

from .strategies import FLOATS, same, same_vector
from .wire_messages import hex_of, messages, receiver_of, vector

DTYPES = [*FLOATS, torch.int32, torch.int64]
CODECS = [Coo(), Whole(), Packed(), Qsgd(8), SparseQsgd(8), SignMean(), LloydMax()]
SPARSE = [codec for codec in CODECS if not codec.is_dense]
NAN = float("nan")

each_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: type(codec).__name__)


def sent(codec, indices, values, size, dtype=torch.float32):
    """Return a vector that the codec accepts."""
    sparse = vector(indices, values, size, dtype)
    return sparse if type(codec) in map(type, SPARSE) else DenseVector(sparse.to_dense())


# ---- literal bytes: what docs/wire-format.md promises -----------------------------------------------

EXAMPLE = [1, 7, 10]  # of 12; packed: low bits 1, 3, 2 (10 11 01), then 1 01 01 0
MEANS = "01000000 0000803f  00000000 00000000  02000000 000020c0"


@cases(
    (Packed("bf16"), [1.0, -2.5, 127 / 128],
     "51020101 03000000 0c0000000000 0000  803f 20c0 7e3f  6d 05"),
    # the scales are 2.5 / 127 and 127/128 / 127 = 2^-7, and the codes 51, -127, 127
    (Packed("int8", block=2), [1.0, -2.5, 127 / 128],
     "51020102 03000000 0c0000000000 0200  8542a13c 0000003c 33 81 7f  6d 05"),
    (Packed("fp32"), [1.0, -2.5, 127 / 128],
     "51020103 03000000 0c0000000000 0000  0000803f 000020c0 00007e3f  6d 05"),
    (SparseQsgd(4, block=2, scale="max"), [7.0, -3.0, -0.5],
     "51050114 03000000 0c0000000000 0200  0000e040 0000003f d7 09  6d 05"),
    (SignMean("coo", (5, 0, 7)), [1.0, -3.0, -2.0],
     "51060101 03000000 0c0000000000 0300" + MEANS + "01000000 07000000 0a000000"),
    (SignMean("packed", (5, 0, 7)), [1.0, -3.0, -2.0],
     "51060102 03000000 0c0000000000 0300" + MEANS + "6d 05"),
)  # fmt: skip
def test_bytes_of_sparse_messages_with_indices_1_7_10_of_12(codec, values, expected, each_backend):
    encoded = codec.encode(vector(EXAMPLE, values, 12))
    assert hex_of(encoded.payload) == expected.replace(" ", "")
    assert isinstance(codec, SignMean) or encoded.decoded.nnz == 3


@cases(
    (Whole(), [1.0], "51030100 01000000 0000803f", None),
    # codes 01 11 00 10, then 01: the lowest bits first
    (Qsgd(2, block=8, scale="max"), [2.0, -2.0, 0.0, NAN, 2.0],
     "51040112 05000000 0500000000000800 00000040 8d 01", None),
    (Qsgd(4, block=8, scale="max"), [7.0, -3.0, 0.0, NAN, 7.0],
     "51040114 05000000 0500000000000800 0000e040 d7 80 07", None),
    (Qsgd(8, block=8, scale="max"), [127.0, -1.0, NAN],
     "51040118 03000000 0300000000000800 0000fe42 7f ff 80", None),
    (Qsgd(8, block=4), [-2.5], "51040108 01000000 0100000000000400 00002040 81", None),
    # scales 2 and 0.664: codes 01 10 00 11, then 01
    (LloydMax(2, block=4), [3.0, -1.0, 1.0, -3.0, 1.0],
     "51080102 05000000 0500000000000400 0040 2a3f c9 01",
     [3.02, -0.9056, 0.9056, -3.02, 1.002734375]),
)  # fmt: skip
def test_bytes_of_dense_messages(codec, values, expected, decoded):
    encoded = codec.encode(DenseVector(torch.tensor(values)))
    assert hex_of(encoded.payload) == expected.replace(" ", "")
    same(encoded.decoded.values, torch.tensor(decoded or values))


@cases(
    (torch.float32, "01", "0000c0bf"),
    (torch.float64, "02", "000000000000f8bf"),
    (torch.bfloat16, "03", "c0bf"),
    (torch.float16, "04", "00be"),
    (torch.int32, "05", "ffffffff"),
    (torch.int64, "06", "ffffffffffffffff"),
)
def test_coo_bytes_of_minus_one_and_a_half_at_258(dtype, code, value):
    payload = Coo().encode(vector([258], [-1.5], 1000, dtype)).payload
    assert hex_of(payload) == f"5101{code}0001000000" + "02010000" + value


def test_the_packed_example_of_the_document():  # tests/house_rules reads the others
    text = (Path(__file__).parents[2] / "docs" / "wire-format.md").read_text()
    packed = Packed().encode(vector(EXAMPLE, [1.0, -2.5, 0.9921875], 12)).payload
    shown = re.findall(r"^\| `((?:[0-9a-f]{2} ?)+)` \|", text, flags=re.MULTILINE)
    assert hex_of(packed) == "".join(shown).replace(" ", "")


@cases(
    (Coo(), "ffffffff0000803f"),
    (Packed("fp32"), "0000803fffffffff01"),  # 32 low bits, then 1 and 0 for the one high part
    (SignMean(), "ffffffff"),
    (SignMean("packed"), "ffffffff01"),
)
def test_a_region_may_have_2_to_the_32_elements(codec, tail, each_backend):
    encoded = codec.encode(vector([(1 << 32) - 1], [1.0], 1 << 32))
    assert hex_of(encoded.payload).endswith(tail)
    same_vector(codec.decode(encoded.payload, 1 << 32), encoded.decoded)


# ---- round trips ------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(messages())
def test_decode_gives_what_encode_said_in_the_bytes_that_were_promised(drawn):
    codec, original = drawn
    before = original.values.clone()
    encoded = codec.encode(original)
    same(original.values, before)
    decoded = receiver_of(codec).decode(encoded.payload, original.size)
    same(decoded.values, encoded.decoded.values)
    if isinstance(original, SparseVector):
        same(decoded.check().indices, original.indices)
    if not isinstance(codec, LloydMax | SignMean):  # where NaN and Inf spread
        assert torch.equal(decoded.isfinite(), original.isfinite())
    if codec.exact:
        same(decoded.values, before)
    nnz, size, dtype = original.nnz, original.size, before.dtype
    twice = torch.cat([encoded.payload, encoded.payload])
    parts = codec.parts(nnz, size, dtype)
    assert encoded.payload.dtype == torch.uint8
    assert encoded.payload.numel() == parts.nbytes == codec.nbytes(nnz, size, dtype)
    assert codec.measure(twice) == parts == MessageFraming(codec).parts(encoded.payload)
    assert MessageFraming(codec).length(twice) == parts.nbytes
    assert torch.equal(codec.encode(original).payload, encoded.payload)


@each_codec
@pytest.mark.parametrize("offset", [1, 2, 4])
def test_a_message_may_start_anywhere_and_nothing_after_it_is_read(codec, offset, each_backend):
    original = sent(codec, [1, 4, 6], [1, 2, 3], 8)
    encoded = codec.encode(original)
    end = offset + encoded.payload.numel()
    for fill in (0x00, 0xFF):
        buffer = torch.full((end + 16,), fill, dtype=torch.uint8)
        buffer[offset:end] = encoded.payload
        same(codec.decode(buffer[offset:end], 8).to_dense(), encoded.decoded.to_dense())


@each_codec
def test_strided_views_are_encoded_as_their_copies(codec, each_backend):
    indices, values = torch.arange(20)[1::2], torch.linspace(-1, 1, 20)[1::2]
    views = SparseVector(indices, values, 20)
    copies = SparseVector(indices.clone(), values.clone(), 20)
    if isinstance(sent(codec, [], [], 0), DenseVector):
        views, copies = DenseVector(values), DenseVector(values.clone())
    assert torch.equal(codec.encode(views).payload, codec.encode(copies).payload)


@pytest.mark.parametrize("codec", [*CODECS, Packed("fp32")], ids=str)
@pytest.mark.parametrize("nnz", [0, 1])
def test_strides_of_a_single_element_do_not_matter(codec, nnz, each_backend):
    """Torch considers such a view contiguous, so ``contiguous()`` would keep its stride."""
    values = torch.arange(36.0).view(6, 6)[1 : 1 + nnz, 1]
    indices = torch.zeros(6, 6, dtype=torch.int64)[:nnz, 0]
    assert values.is_contiguous() and values.stride() == indices.stride() == (6,)
    whole = DenseVector(values), DenseVector(torch.full((nnz,), 7.0))
    sparse = SparseVector(indices, values, 1), SparseVector(torch.arange(nnz), whole[1].values, 1)
    view, copy = whole if codec.is_dense else sparse
    assert torch.equal(codec.encode(view).payload, codec.encode(copy).payload)


@pytest.mark.parametrize("dtype", FLOATS)
def test_whole_rounds_to_its_dtype_and_keeps_finite_values_finite(dtype):
    values = torch.tensor([1.0, torch.finfo(dtype).max, float("inf"), NAN], dtype=dtype)
    encoded = Whole(torch.bfloat16).encode(DenseVector(values))
    assert encoded.payload.numel() == 8 + 2 * 4 == Whole(torch.bfloat16).nbytes(4, 4, dtype)
    assert encoded.decoded.values.dtype == dtype
    assert torch.equal(encoded.decoded.isfinite(), values.isfinite())
    assert Whole(torch.bfloat16).is_exact(dtype) == (dtype == torch.bfloat16)


@pytest.mark.parametrize("coded", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_finite_values_stay_finite_in_every_pair_of_dtypes(dtype, coded):
    values = torch.tensor([torch.finfo(dtype).max, -torch.finfo(dtype).max, 1.0], dtype=dtype)
    decoded = Whole(coded).encode(DenseVector(values)).decoded.values
    assert decoded.isfinite().all() and decoded[0] == -decoded[1] > 65_000 and decoded[2] == 1


# ---- sizes ------------------------------------------------------------------------------------------


def test_a_budget_below_an_empty_message_is_refused():
    with pytest.raises(ConfigurationError, match=r"15 bytes cannot hold .* takes 16"):
        Packed().entries_within(15, 100)


@cases(
    (Coo(), (10, 99, torch.bfloat16), Parts(header=8, index=40, value=20)),
    (Whole(), (99, 99, torch.bfloat16), Parts(header=8, value=198)),
    (Packed(), (3, 12, torch.float32), Parts(header=16, index=2, value=6)),
    (Packed("int8", block=2), (3, 12, torch.float32), Parts(16, 2, 3 + 8)),
    (SparseQsgd(4, block=2), (3, 12, torch.float32), Parts(16, index=2, value=2 * 4 + 2)),
    (Qsgd(2), (1025, 1025, torch.float64), Parts(16, value=2 * 4 + 257)),
    (SignMean("coo", (50, 49)), (10, 99, torch.bfloat16), Parts(24, index=40, value=8)),
    (SignMean("packed"), (3, 12, torch.float64), Parts(20, index=2, value=4)),
    (LloydMax(3, block=2), (9, 9, torch.float64), Parts(16, value=5 * 2 + 4)),
)
def test_parts_tell_header_index_and_value_bytes_apart(codec, shape, parts):
    assert codec.parts(*shape) == parts


# ---- streams ----------------------------------------------------------------------------------------


def test_streams_carry_both_forms():
    codec = StreamCodec(SparseQsgd(8), Qsgd(4)).seeded(1, 1)
    limit = codec.limit(4096, torch.float32)
    assert limit is not None and 0 < limit < 4096
    for sparse in (True, False):
        row = SparseVector.from_dense(torch.eye(64)[3])
        original = row if sparse else DenseVector(row.to_dense())
        encoded = codec.encode(original)
        decoded = codec.decode(encoded.payload, 64)
        assert type(decoded) is type(original)
        same(decoded.values, encoded.decoded.values)
        assert codec.measure(encoded.payload).nbytes == encoded.payload.numel()
    assert not codec.is_exact(torch.float32) and StreamCodec().is_exact(torch.float32)
    assert 0 < StreamCodec(dense=LloydMax(1)).limit(4096, torch.float32) < 4096 / 32


@given(st.integers(0, 300), st.sampled_from([0.3, 1.0, None]), st.sampled_from([Coo(), Packed()]))
def test_the_size_of_a_stream_bounds_both_forms(size, factor, sparse):
    codec = StreamCodec(sparse, factor=factor)
    limit = codec.limit(size, torch.float32)
    sizes = [codec.nbytes(nnz, size) for nnz in range(size + 1)]
    assert sizes == sorted(sizes)
    for nnz in range(size + 1):
        stays_sparse = limit is None or nnz <= limit
        assert sizes[nnz] >= (sparse if stays_sparse else codec.dense).nbytes(nnz, size)


# ---- settings, and refusals of a sender ------------------------------------------------------------


@cases(
    (Packed("int8", block=64), "Packed(values='int8', block=64)"),
    (Qsgd(2, block=64, scale="max", shrink=True, seed=5).seeded(3, 4),
     "Qsgd(bits=2, block=64, scale='max', shrink=True, seed=5)"),
    (SparseQsgd(), "SparseQsgd(bits=4, block=1024, scale='l2', shrink=False, seed=0)"),
    (SignMean("packed").for_layers([2, 3]), "SignMean(indices='packed', layers=(2, 3))"),
    (LloydMax(3), "LloydMax(bits=3, block=256)"),
    (StreamCodec(factor=0.5), "StreamCodec(Coo(), Whole(), factor=0.5)"),
)  # fmt: skip
def test_ranks_compare_codecs_by_their_names(codec, name):
    assert repr(codec) == name


@refuses(
    (Packed, {"values": "fp8"}, "values='fp8' is unknown; use one of bf16, int8, fp32"),
    (Packed, {"block": 0}, "block=0 .* use 1 to 65535"),
    (Packed, {"block": 1 << 16}, "block=65536"),
    (Qsgd, {"bits": 3}, "bits=3 per value is unknown; use 2, 4 or 8"),
    (SparseQsgd, {"block": 0}, "block=0 .* use 1 to 65535"),
    (SparseQsgd, {"block": 1 << 16}, "block=65536"),
    (Qsgd, {"scale": "l1"}, "scale='l1' is unknown; use 'l2' or 'max'"),
    (SignMean, {"indices": "bf16"}, "indices='bf16' is unknown; use one of coo, packed"),
    (SignMean, {"layers": ()}, "0 layers of 0 or more"),
    (SignMean, {"layers": (3, -1)}, "2 layers of -1 or more"),
    (SignMean, {"layers": (0,) * 65536}, "65536 layers of 0 or more"),
    (LloydMax, {"bits": 5}, "bits=5 per value is unknown; use 1, 2, 3, 4 or 8"),
    (LloydMax, {"block": 0}, "block=0 .* use 1 to 65535"),
    (StreamCodec, {"factor": -0.1}, "factor is -0.1"),
    (StreamCodec, {"factor": 1.5}, "factor is 1.5"),
)
def test_impossible_settings_are_refused(make, arguments):
    make(**arguments)


@each_codec
def test_what_has_no_message_is_refused_by_the_sender(codec):
    wrong = {r"torch\.bool": sent(codec, [0], [True], 1, torch.bool)}
    if not codec.exact:
        wrong[r"not torch\.int32; use Coo or Whole"] = sent(codec, [0], [1], 1, torch.int32)
    if isinstance(wrong[r"torch\.bool"], SparseVector):
        wrong["got 1 entries in a region of 4294967297"] = vector([0], [1.0], (1 << 32) + 1)
        wrong["got 2 entries in a region of 1 elements"] = vector([0, 1], [1.0, 2.0], 1)
    else:
        wrong[r"shape \(3, 3\); flatten"] = DenseVector(torch.ones(3, 3))
    for says, original in wrong.items():
        with pytest.raises(ConfigurationError, match=says):
            codec.encode(original)


def test_a_count_beyond_32_bits_is_refused_by_the_sender():
    with pytest.raises(ConfigurationError, match="4294967296 entries"):
        Header(1, torch.float32, 1 << 32).pack()
