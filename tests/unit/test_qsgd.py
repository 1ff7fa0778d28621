"""Quantised messages: their bytes, sizes and round trips, and where their draws come from."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsync import ConfigurationError, SparseVector
from sparsync.testing import check_codec
from sparsync.transports.ledger import Parts
from sparsync.wire import StreamCodec
from sparsync.wire.base import MessageFraming
from sparsync.wire.qsgd import Qsgd, SparseQsgd

from .packed_messages import packable, vector
from .qsgd_messages import SETTINGS, hex_of, options
from .strategies import FLOATS, dense_tensors, same, same_vector

NAN = float("nan")


# ---- literal bytes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bits", "values", "start", "body"),
    [
        # codes 01 11 00 10, then 01: the lowest bits first
        (2, [2.0, -2.0, 0.0, NAN, 2.0], "51040112 05000000 0500000000000800", "00000040 8d 01"),
        (4, [7.0, -3.0, 0.0, NAN, 7.0], "51040114 05000000 0500000000000800", "0000e040 d7 80 07"),
        (8, [127.0, -1.0, NAN], "51040118 03000000 0300000000000800", "0000fe42 7f ff 80"),
    ],
)
def test_bytes_of_dense_messages(bits, values, start, body):
    encoded = Qsgd(bits, block=8, scale="max").encode(torch.tensor(values))
    assert hex_of(encoded.payload) == (start + body).replace(" ", "")
    same(encoded.decoded, torch.tensor(values))


def test_bytes_of_a_sparse_message_in_two_blocks():
    """The worked example of docs/wire-format.md."""
    codec = SparseQsgd(4, block=2, scale="max")
    encoded = codec.encode(vector([1, 7, 10], [7.0, -3.0, -0.5], 12))
    start, scales, codes = "51050114 03000000 0c0000000000 0200", "0000e040 0000003f", "d7 09"
    indices = "6d 05"  # as packed: low bits 10 11 01, then 1 01 01 0
    assert hex_of(encoded.payload) == (start + scales + codes + indices).replace(" ", "")


def test_bytes_of_the_scale_l2_and_of_shrink():
    one = Qsgd(8, block=4).encode(torch.tensor([-2.5])).payload
    assert hex_of(one) == "5104010801000000" + "0100000000000400" + "00002040" + "81"
    pair = Qsgd(4, block=4, shrink=True).encode(torch.tensor([3.0, -4.0])).payload
    assert hex_of(pair)[:-2] == "5104012402000000" + "0200000000000400" + "0000a040"


def test_empty_messages_are_header_and_shape():
    assert hex_of(Qsgd().encode(torch.zeros(0)).payload) == "5104010400000000" + "0000000000000004"
    empty = SparseQsgd(block=1).encode(vector([], [], 5, torch.float64)).payload
    assert hex_of(empty) == "5105020400000000" + "0500000000000100"


# ---- round trips ----------------------------------------------------------------------------------


@settings(max_examples=300)
@given(packable(), options())
def test_decode_gives_what_encode_said(original, arguments):
    codec = SparseQsgd(**arguments).seeded(1, 2)
    encoded = codec.encode(original)
    decoded = SparseQsgd().decode(encoded.payload, original.size).check()  # told by the message
    same_vector(decoded, encoded.decoded)
    same(decoded.indices, original.indices)
    assert torch.equal(decoded.isfinite(), original.isfinite())
    parts = codec.parts(original.nnz, original.size, original.values.dtype)
    assert encoded.payload.numel() == parts.nbytes
    assert SparseQsgd().measure(encoded.payload) == parts


@settings(max_examples=200)
@given(dense_tensors(), options())
def test_dense_messages_are_decoded_to_what_encode_said(values, arguments):
    codec = Qsgd(**arguments)
    encoded = codec.encode(values)
    same(Qsgd().decode(encoded.payload, values.numel()), encoded.decoded)
    assert torch.equal(encoded.decoded.isfinite(), values.isfinite())
    assert not bool(encoded.decoded[values == 0].any())
    parts = codec.parts(values.numel(), values.dtype)
    assert encoded.payload.numel() == parts.nbytes
    assert Qsgd().measure(torch.cat([encoded.payload, encoded.payload])) == parts


@given(packable(), options())
def test_dense_and_sparse_messages_round_alike(original, arguments):
    """One scheme: the blocks of a sparse vector are those of its values."""
    dense = Qsgd(**arguments).encode(original.values)
    sparse = SparseQsgd(**arguments).encode(original)
    same(sparse.decoded.values, dense.decoded)


@pytest.mark.parametrize(("bits", "scale"), SETTINGS)
def test_contract(bits, scale):
    check_codec(SparseQsgd(bits, scale=scale, shrink=True))
    if (bits, scale) not in [(2, "l2"), (2, "max"), (4, "l2")]:  # their noise exceeds the vector
        check_codec(SparseQsgd(bits, scale=scale))
    if scale == "max":
        check_codec(SparseQsgd(bits, scale=scale, block=7))


@pytest.mark.parametrize("offset", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_message_may_start_anywhere_in_a_buffer(bits, offset):
    original = vector([1, 4, 6], [1, 2, 3], 8)
    sparse, dense = SparseQsgd(bits).encode(original), Qsgd(bits).encode(original.values)
    shift = torch.zeros(offset, dtype=torch.uint8)
    buffer = torch.cat([shift, sparse.payload])
    same_vector(SparseQsgd().decode(buffer[offset:], 8), sparse.decoded)
    same(Qsgd().decode(torch.cat([shift, dense.payload])[offset:], 3), dense.decoded)
    framing = MessageFraming(SparseQsgd())
    assert framing.length(torch.cat([sparse.payload, buffer])) == sparse.payload.numel()


def test_strided_views_are_encoded_and_left_as_they_are():
    indices, values = torch.arange(20)[1::2], torch.randn(20)[1::2]
    views, before = SparseVector(indices, values, 20), values.clone()
    copies = SparseVector(indices.clone(), values.clone(), 20)
    codec = SparseQsgd(block=3)
    assert torch.equal(codec.encode(views).payload, codec.encode(copies).payload)
    same(values, before)


# ---- draws ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [Qsgd(), SparseQsgd()])
def test_draws_depend_on_seed_rank_step_and_message_alone(codec):
    values = torch.linspace(-1, 1, 300)

    def bytes_of(codec, scale=1.0):
        sent = values * scale
        if isinstance(codec, SparseQsgd):
            sent = SparseVector(torch.arange(300), sent, 300)
        return codec.encode(sent).payload[20:170].numpy().tobytes()  # the codes alone

    other_seed = type(codec)(seed=1)
    drawn = [codec.seeded(0, 0), codec.seeded(1, 0), codec.seeded(0, 1), other_seed]
    assert len({bytes_of(c) for c in drawn}) == len(drawn)
    assert bytes_of(drawn[0], 2.0) != bytes_of(drawn[0])  # the same ratios in another message
    assert bytes_of(drawn[0]) == bytes_of(drawn[0]) == bytes_of(codec.seeded(7, 8).seeded(0, 0))
    assert codec.quantiser.step == 0, "the codec itself was changed"
    before = torch.get_rng_state()
    bytes_of(codec)
    assert torch.equal(before, torch.get_rng_state())


def test_draws_are_the_same_on_every_machine():
    """What torch's generator, the hash and the arithmetic give is pinned here."""
    payload = Qsgd(4, seed=3).seeded(2, 5).encode(torch.arange(-12, 12) / 8).payload
    assert hex_of(payload[16:]) == "00008840eefeeffeff00000011212132"


def test_ranks_compare_codecs_by_their_names():
    name = "Qsgd(bits=2, block=64, scale='max', shrink=True, seed=5)"
    assert repr(Qsgd(2, block=64, scale="max", shrink=True, seed=5).seeded(3, 4)) == name
    assert repr(SparseQsgd()) == "SparseQsgd(bits=4, block=1024, scale='l2', shrink=False, seed=0)"


# ---- sizes ----------------------------------------------------------------------------------------


@given(st.integers(0, 3000), st.integers(0, 1 << 32), options((1, 5, 300)))
def test_one_more_entry_never_takes_fewer_bytes(nnz, more, arguments):
    size = min(nnz + 1 + more, 1 << 32)
    codec = SparseQsgd(**arguments)
    assert codec.nbytes(nnz, size) <= codec.nbytes(nnz + 1, size)
    assert Qsgd(**arguments).nbytes(nnz) <= Qsgd(**arguments).nbytes(nnz + 1)


def test_parts_tell_header_index_and_value_bytes_apart():
    codec = SparseQsgd(4, block=2)
    assert codec.parts(3, 12, torch.float32) == Parts(header=16, index=2, value=2 * 4 + 2)
    assert Qsgd(2).parts(1025, torch.float64) == Parts(header=16, value=2 * 4 + 257)


def test_a_dense_message_of_4_bits_takes_an_eighth():
    assert Qsgd(4).nbytes(1 << 20) / (4 << 20) == pytest.approx(1 / 8, rel=0.01)


def test_streams_carry_both_forms():
    codec = StreamCodec(SparseQsgd(8), Qsgd(4)).seeded(1, 1)
    limit = codec.limit(4096, torch.float32)
    assert limit is not None and 0 < limit < 4096
    sparse = SparseVector.from_dense(torch.eye(64)[3])
    assert codec.decode(codec.encode(sparse).payload, 64).nnz == 1
    assert not codec.is_exact(torch.float32)


# ---- what is refused by the sender ----------------------------------------------------------------


@pytest.mark.parametrize("make", [Qsgd, SparseQsgd])
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"bits": 3}, "bits=3 per value is unknown; use 2, 4 or 8"),
        ({"block": 0}, "block=0 .* use 1 to 65535"),
        ({"block": 1 << 16}, "block=65536"),
        ({"scale": "l1"}, "scale='l1' is unknown; use 'l2' or 'max'"),
    ],
)
def test_impossible_options_are_refused(make, arguments, says):
    with pytest.raises(ConfigurationError, match=says):
        make(**arguments)


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (vector([0], [1], 1, torch.int32), r"not torch\.int32; use Coo"),
        (vector([0], [1.0], (1 << 32) + 1), "not 1 of 4294967297"),
        (vector([0, 1], [1.0, 2.0], 1), "not 2 of 1"),
    ],
)
def test_what_has_no_sparse_form_is_refused(sent, says):
    with pytest.raises(ConfigurationError, match=says):
        SparseQsgd().encode(sent)


def test_what_has_no_dense_form_is_refused():
    with pytest.raises(ConfigurationError, match=r"not torch\.int64"):
        Qsgd().encode(torch.ones(3, dtype=torch.int64))
    with pytest.raises(ConfigurationError, match="flatten it"):
        Qsgd().encode(torch.ones(3, 3))


@pytest.mark.parametrize("dtype", FLOATS)
def test_nothing_is_exact(dtype):
    assert not Qsgd(8).is_exact(dtype) and not SparseQsgd(8).is_exact(dtype)
