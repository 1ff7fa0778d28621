"""How packed messages round values: what each form promises, at the edges of the floats."""

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsync.kernels import packing
from sparsync.wire import Packed

from .strategies import FLOATS
from .wire_messages import FORMS, backends, using, vector

INF, NAN = float("inf"), float("nan")
FLOAT32_MAX = torch.finfo(torch.float32).max


def rounded(values, form="bf16", block=128, dtype=torch.float32) -> list[float]:
    sent = vector(range(len(values)), values, len(values), dtype)
    return Packed(form, block=block).encode(sent).decoded.values.tolist()


@given(st.floats(width=32, allow_nan=False), backends)
def test_bf16_is_torch_s_own_rounding_except_where_that_overflows(x, backend):
    expected = torch.tensor([x]).to(torch.bfloat16).float().item()
    with using(backend):
        (got,) = rounded([x])
    if abs(expected) == INF != abs(x):
        expected = torch.finfo(torch.bfloat16).max * (1 if x > 0 else -1)
    assert struct.pack("f", got) == struct.pack("f", expected)


def test_bf16_ties_go_to_even_and_finite_stays_finite(each_backend):
    bits = [0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x00008000, 0x00018000]
    values = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    got = torch.tensor(rounded(values.tolist())).view(torch.int32) >> 16
    assert [hex(b) for b in got.tolist()] == ["0x3f80", "0x3f82", "0x3f81", "0x7f7f", "0x0", "0x2"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_values_stay_finite_and_close(form, dtype, each_backend):
    most = torch.finfo(dtype).max
    got = rounded([most, -most, 1.0], form, dtype=dtype)
    nearest = min(most, FLOAT32_MAX)
    assert got[:2] == pytest.approx([nearest, -nearest], rel=2**-8)


def test_every_nan_is_a_nan_and_keeps_its_sign_in_bf16():
    bits = [0x7F800001, 0x7FFFFFFF, -0x007FFFFF, -1]  # the last two have the sign
    nans = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    raw = packing.pack_values(nans, packing.BF16, 0).view(torch.int16)
    assert raw.tolist() == [0x7FC0, 0x7FC0, -64, -64]


def test_int8_rounds_to_multiples_of_the_largest_over_127(each_backend):
    assert rounded([127.0, 0.5, 1.5, -2.5, -127.0, 0.49, 63.51], "int8") == [
        127.0, 0.0, 2.0, -2.0, -127.0, 0.0, 64.0
    ]  # fmt: skip


def test_int8_scales_each_block_alone(each_backend):
    assert rounded([127.0, 0.4, 0.0, 1.27], "int8", block=2) == pytest.approx([127, 0, 0, 1.27])


def test_int8_keeps_a_non_finite_entry_to_itself(each_backend):
    got = rounded([1.0, NAN, INF, -INF, -127.0], "int8")
    assert (got[0], got[4]) == (1.0, -127.0)
    assert all(x != x for x in got[1:4])


def test_int8_of_nothing_but_nan_is_nan():
    assert all(x != x for x in rounded([NAN, INF], "int8"))


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=30))
def test_int8_is_off_by_at_most_half_a_step(values):
    got = rounded(values, "int8", block=8)
    for start in range(0, len(values), 8):
        step = max(map(abs, values[start : start + 8])) / 127
        allowed = max(step / 2 * 1.001, 63.5 * 2.0**-149)  # denormal scales are coarse
        for x, y in zip(values[start : start + 8], got[start : start + 8], strict=True):
            assert abs(x - y) <= allowed


def test_explicit_zeros_are_kept():
    """What rounding made zero still travels: support in, support out."""
    decoded = Packed("int8").encode(vector([2, 5], [100.0, 0.1], 9)).decoded
    assert (decoded.indices.tolist(), decoded.values.tolist()) == ([2, 5], [100.0, 0.0])
