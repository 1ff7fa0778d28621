import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsync import WireFormatError
from sparsync.cli.bench import kernels as bench
from sparsync.cli.bench.kernels import Backend, Messages
from sparsync.kernels import packing as spec

from .strategies import dense_tensors
from .triton_backend import DEVICE, identical, interpreter, load, numpy_warns, on  # noqa: F401

triton = load("sparsync.kernels.triton")
pytestmark = numpy_warns

few = settings(max_examples=20)  # the interpreter takes milliseconds for a launch
FORMS = [spec.BF16, spec.INT8, spec.FP32]
SIZES = [
    (0, 5000),
    (1, 1),
    (1, 1 << 32),
    (10, 10),
    (3, 11),
    (3, 12),
    (2500, 10_000),
    (5000, 1 << 32),
]


def ascending(nnz, size, seed=0):
    """About ``nnz`` indices below ``size``, the first and the last among them."""
    generator = torch.Generator().manual_seed(seed)
    drawn = (torch.rand(nnz, generator=generator, dtype=torch.float64) * size).long()
    return torch.cat([drawn, torch.tensor([0, size - 1][:nnz], dtype=torch.int64)]).unique()


def awkward(n):
    """Ordinary values, any bits, denormals whose scale underflows, and what is not finite."""
    generator = torch.Generator().manual_seed(n)
    bits = torch.randint(-(2**31), 2**31, (n,), generator=generator).int()
    special = [0.0, -0.0, 1e-45, -1e-45, 1e-43, 3.4e38, -3.4e38, math.inf, -math.inf, math.nan]
    ordinary = torch.randn(n, generator=generator)
    parts = [ordinary, bits.view(torch.float32), torch.tensor(special), 1e-43 * ordinary]
    return torch.cat(parts)


@pytest.mark.parametrize(("nnz", "size"), SIZES)
def test_indices_are_packed_like_the_specification(nnz, size):
    indices = on(ascending(nnz, size))
    packed = triton.pack_indices(indices, size)
    identical(packed, spec.pack_indices(indices, size))
    identical(triton.unpack_indices(packed, len(indices), size), indices)
    shifted = torch.cat([packed[:0].new_zeros(3), packed])[3:]  # a message has values before them
    identical(triton.unpack_indices(shifted, len(indices), size), indices)


@few
@given(st.integers(1, 3000), st.data())
def test_any_indices_come_back(size, data):
    drawn = data.draw(st.sets(st.integers(0, size - 1), max_size=60))
    indices = on(torch.tensor(sorted(drawn), dtype=torch.int64))
    packed = triton.pack_indices(indices, size)
    identical(packed, spec.pack_indices(indices, size))
    identical(triton.unpack_indices(packed, len(indices), size), indices)


def outcome(unpack, *arguments):
    try:
        return unpack(*arguments).tolist()
    except WireFormatError as error:
        return str(error)


@few
@given(
    st.sampled_from([(3, 11), (40, 50), (60, 4000), (5, 1 << 32)]),
    st.integers(0),
    st.integers(1, 255),
)
def test_corrupt_indices_are_refused_like_by_the_specification(case, at, flipped):
    nnz, size = case
    indices = on(ascending(nnz, size))
    packed = triton.pack_indices(indices, size)
    packed[at % len(packed)] ^= flipped
    expected = outcome(spec.unpack_indices, packed, len(indices), size)
    assert outcome(triton.unpack_indices, packed, len(indices), size) == expected


def test_hostile_bytes_are_refused():
    with pytest.raises(WireFormatError, match="0 bits set"):
        triton.unpack_indices(on(torch.zeros(500, dtype=torch.uint8)), 1000, 2000)
    with pytest.raises(WireFormatError, match="4000 bits set"):
        triton.unpack_indices(on(torch.full((500,), 255, dtype=torch.uint8)), 1000, 1000)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("block", [1, 100, 128, 3000])
def test_values_are_packed_like_the_specification(form, block):
    for values in on(torch.empty(0), torch.zeros(300), torch.ones(1), awkward(2000)):
        packed = triton.pack_values(values, form, block)
        identical(packed, spec.pack_values(values, form, block))
        unpacked = triton.unpack_values(packed, len(values), form, block)
        identical(unpacked, spec.unpack_values(packed, len(values), form, block))


@few
@given(dense_tensors(dtype=torch.float32), st.sampled_from(FORMS), st.integers(1, 9))
def test_any_values_are_packed_like_the_specification(values, form, block):
    identical(
        triton.pack_values(on(values), form, block), spec.pack_values(on(values), form, block)
    )


@few
@given(
    st.sampled_from(FORMS), st.integers(1, 50), st.integers(1, 9), st.integers(0, 3), st.randoms()
)
def test_any_bytes_are_some_values(form, nnz, block, offset, random):
    raw = random.randbytes(offset + spec.value_bytes(nnz, form, block))
    packed = on(torch.tensor(list(raw), dtype=torch.uint8))[offset:]
    unpacked = triton.unpack_values(packed, nnz, form, block)
    identical(unpacked, spec.unpack_values(packed, nnz, form, block))


def test_the_bench_compares_the_triton_kernels(monkeypatch):
    backend = Backend("triton", triton, Messages(triton))
    monkeypatch.setattr(bench, "backend_of", lambda device: backend)
    rows = bench.bench_kernels(DEVICE, 9000, 0.05, repetitions=1)
    assert {row.kernel: row.equal for row in rows} == {row.kernel: True for row in rows}
