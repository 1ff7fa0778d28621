"""Compare every kernel on every backend with the specification, bit for bit, for any input."""

import functools
from itertools import product
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from sparsync import kernels
from sparsync.kernels import native, normal_levels
from sparsync.kernels import reference as specification
from sparsync.updates import gradient_noise

NAMES = ("accumulate_", "find", "top", "merge", "restrict", "subtract_", "scatter_", "count_from")


def using(isa):
    return mock.patch.object(native, "chosen", lambda: isa)


def forced(function, isa):
    @functools.wraps(function)
    def call(*arguments):
        with using(isa):
            return function(*arguments)

    return call


def native_backend(isa):
    return SimpleNamespace(**{name: forced(getattr(native, name), isa) for name in NAMES})


BACKENDS = {
    "door": kernels,
    **{f"native {isa}": native_backend(isa) for isa in native.instruction_sets()},
}

every_backend = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)

TINY, BIG = 1e-45, torch.finfo(torch.float32).max
AWKWARD = [0.0, -0.0, TINY, -TINY, 1.0, -1.0, BIG, -BIG, float("inf"), float("-inf"), float("nan")]
# sizes around 64-bit words and steps of 4096, and a size at which keys are sampled, not counted
SIZES = [0, 1, 63, 64, 129, 4097, (1 << 17) + 7]


def noise(n, seed=0, scale=1.0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)) * scale


def bits(n, seed=0):
    """Return random bit patterns, including denormals and all kinds of NaN."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randint(-(2**31), 2**31, (n,), generator=generator)
        .to(torch.int32)
        .view(torch.float32)
    )


def awkward(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.tensor(AWKWARD)[torch.randint(len(AWKWARD), (n,), generator=generator)]


def heavy_tail(n, seed=0):
    return noise(n, seed) ** 9


def one_hot(n, seed=0):
    x = torch.zeros(n)
    x[n // 2 : n // 2 + 1] = -3.0
    return x


def constant(n, seed=0):
    return torch.full((n,), -0.25)


def ascending(n, seed=0):
    return torch.arange(n, dtype=torch.float32)


def periodic(n, seed=0):
    """Return values that are large only on every 256th element, the stride of a sample."""
    x = noise(n, seed, 1e-6)
    x[::256] += 1.0
    return x


def largest_nan(n, seed=0):
    """Return values that include NaN with the largest possible key."""
    x = torch.full((n,), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    x[1::3] = 1.0
    return x


VECTORS = (noise, bits, awkward, heavy_tail, one_hot, constant, ascending, periodic, largest_nan)

# every small size has every pattern; the largest size only has patterns that mislead sampling
CASES = [
    (make, n)
    for make in VECTORS
    for n in SIZES
    if n < 10_000 or make in (noise, bits, periodic, largest_nan)
]


def unaligned(x, offset):
    """Return the same elements, starting at an odd address."""
    return torch.cat([x.new_zeros(offset), x, x.new_zeros(3)])[offset : offset + x.numel()]


def same(a, b):
    """Equal bits."""
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    if a.dtype == torch.float32:
        a, b = a.view(torch.int32), b.view(torch.int32)
    assert torch.equal(a, b)


def same_sums(a, b):
    """Compare bits, but treat all NaNs as equal: it is unspecified which operand's NaN is returned."""
    same(torch.where(a.isnan(), torch.nan, a), torch.where(b.isnan(), torch.nan, b))


def same_found(a, b):
    assert (a is None) == (b is None)
    if a is not None:
        same(a[0], b[0])
        same(a[1], b[1])


def thresholds(x):
    """Return keys below all others, keys above all others, and some keys that occur."""
    keys = kernels.magnitude_keys(x).sort().values
    some = keys[:: max(x.numel() // 3, 1)].tolist()
    return {-5, 0, 1, *some, *(key + 1 for key in some), (1 << 31) - 1, 1 << 31, 1 << 40}


@every_backend
def test_find(backend):
    for make, n in CASES:
        x = unaligned(make(n), n % 5)
        for key in thresholds(x):
            expected = specification.find(x, key, None)
            count = expected[0].numel()
            same_found(backend.find(x, key, None), expected)
            same_found(backend.find(x, key, count), expected)
            assert count == 0 or backend.find(x, key, count - 1) is None


@every_backend
def test_accumulate(backend):
    for make, n in CASES:
        residual, gradient = unaligned(make(n, 1), n % 5), unaligned(make(n, 2), n % 3)
        total = residual + gradient
        for key in (None, *thresholds(total)):
            for limit in (n // 4, n):
                r, g = residual.clone(), unaligned(gradient, 1)
                found = backend.accumulate_(r, g, key, limit)
                same_sums(r, total)
                same(g, residual)
                same_found(found, None if key is None else specification.find(r, key, limit))


@pytest.mark.fast(6)
@pytest.mark.parametrize("isa", native.instruction_sets())
@pytest.mark.parametrize("width", normal_levels.BITS)
def test_levels(isa, width):
    for make, n in CASES:
        for block in (8, 24, 32, 256):
            if n > 10_000 and (width, block) != (4, 256):
                continue
            given = width, block, 2.0**120
            x, sums = unaligned(make(n), n % 5), unaligned(noise(n, 1), n % 3)
            with using("torch"):
                raw = normal_levels.quantise(x, *given)
                normal_levels.decode_(more := sums.clone(), raw, *given[:2], -1.0)
                normal_levels.decode_(mean := sums.clone(), raw, *given[:2], 3.0, keep=False)
            with using(isa):
                same(normal_levels.quantise(x, *given), raw)
                normal_levels.decode_(sums, unaligned(raw, 1), *given[:2], -1.0)
                normal_levels.decode_(x, raw, *given[:2], 3.0, keep=False)
            same_sums(sums, more)
            same_sums(x, mean)


@pytest.mark.parametrize("isa", native.instruction_sets())
def test_moments(isa):
    for (make, n), share in product(CASES, (0.25, 0.9)):
        state = {
            "exp_avg": unaligned(make(n), n % 5),
            "exp_avg_sq": unaligned(noise(n, 1).square() * (noise(n, 4) < 1), n % 3),
            "step": torch.tensor(7.0),
        }
        weights = torch.nn.Parameter(unaligned(noise(n, 2), n % 7))
        adam = torch.optim.AdamW([weights])
        adam.state[weights], weights.grad = state, torch.ones(n)
        found = []
        for chosen in ("torch", isa):
            with using(chosen), torch.no_grad():
                before = weights.clone()
                gradient_noise.correct(adam, {weights: share}, 4)
                found.append(weights.detach().clone())
                weights.copy_(before)
        same_sums(*found)


@every_backend
def test_top(backend):
    for make, n in CASES:
        x = unaligned(make(n), n % 7)
        nnz = int((x != 0).sum())
        for k in {-1, 0, 1, 2, n // 100, n // 3, nnz - 1, nnz, n, n + 5}:
            same(backend.top(x, k), specification.top(x, k))


@pytest.mark.fast(2)
@every_backend
def test_count_from(backend):
    for make, n in CASES:
        values = unaligned(make(n), n % 3)
        keys = torch.tensor(sorted(t for t in thresholds(values) if 0 <= t < 1 << 31))
        many = torch.arange(-5, 1 << 32, 19_999_999)  # also keys reached by no value, or by all
        uneven = torch.cat([many, keys, keys + 1]).sort().values
        mine = kernels.magnitude_keys(values).long()
        for some in (keys, keys.int(), keys[:0], keys.repeat_interleave(3), many, uneven):
            expected = [int((mine >= key).sum()) for key in some]
            counts = backend.count_from(values, some)
            assert (counts.tolist(), counts.dtype) == (expected, torch.int64)


def streams_of(make, size, count, density):
    streams = []
    for rank in range(count):
        generator = torch.Generator().manual_seed(rank)
        indices = (torch.rand(size, generator=generator) < density).nonzero().flatten()
        streams.append((indices, make(indices.numel(), rank)))
    return streams


@every_backend
@pytest.mark.parametrize(
    ("size", "density"),
    [(0, 1.0), (1, 1.0), (1000, 0.0), (1000, 1.0), (70_001, 0.01), (70_001, 1.0)],
)
def test_merge_subtract_and_scatter(backend, size, density):
    some = (torch.rand(size, generator=torch.Generator().manual_seed(9)) < 0.3).nonzero().flatten()
    for make in VECTORS if size * density < 10_000 else (bits, awkward):
        for count in (1, 2, 3):
            streams = streams_of(make, size, count, density)
            for among in (None, unaligned(some, 1), some[:0]):
                merged = backend.merge(streams, size, among)
                expected = specification.merge(streams, size, among)
                same(merged[0], expected[0])
                same_sums(merged[1], expected[1])
        dense, expected = unaligned(make(size, 9), 3), make(size, 9)
        assert backend.subtract_(dense, *streams[0]) is dense
        same_sums(dense, specification.subtract_(expected, *streams[0]))
        assert backend.scatter_(dense, *streams[0]) is dense
        same(dense, specification.scatter_(expected, *streams[0]))


@every_backend
def test_merge_of_few_entries_far_apart(backend):
    size = 1 << 50
    places = torch.tensor([0, 65_535, 65_536, 1 << 33, (1 << 33) + 1, size - 1])
    streams = [(places, torch.arange(1.0, 7.0)), (places[2:4], torch.tensor([-3.0, 1.0]))]
    indices, values = backend.merge([*streams, (places[:0], torch.ones(0))], size)
    assert indices.tolist() == [0, 65_535, 1 << 33, (1 << 33) + 1, size - 1]
    assert values.tolist() == [1.0, 2.0, 5.0, 5.0, 6.0]
    among = torch.tensor([65_535, 65_536, 70_000, 1 << 33, size - 1])
    indices, values = backend.merge(streams, size, among)
    assert indices.tolist() == [65_535, 1 << 33, size - 1] and values.tolist() == [2.0, 5.0, 6.0]


@every_backend
def test_merge_keeps_the_order_of_the_streams(backend):
    streams = [(torch.tensor([5]), torch.tensor([v])) for v in (1e8, 1.0, -1e8, 1.0)]
    assert backend.merge(streams, 6)[1].tolist() == [1.0]
    streams[1], streams[2] = streams[2], streams[1]
    assert backend.merge(streams, 6)[1].tolist() == [2.0]


@every_backend
@pytest.mark.parametrize("size", [1, 100, 50_000, 1 << 45])
def test_restrict(backend, size):
    for n, m in [(0, 0), (0, 5), (5, 0), (1, 1), (300, 3000), (5000, 200)]:
        generator = torch.Generator().manual_seed(n + m)
        pool = torch.randint(size, (max(n, m, 1) * 2,), generator=generator)
        indices, among = (
            torch.unique(pool[torch.randint(pool.numel(), (count,), generator=generator)])
            for count in (n, m)
        )
        positions = backend.restrict(unaligned(indices, 1), unaligned(among, 2))
        members = set(among.tolist())
        assert positions.tolist() == [i for i, v in enumerate(indices.tolist()) if v in members]


@pytest.mark.parametrize("isa", native.instruction_sets())
def test_threads_change_nothing(isa, monkeypatch):
    monkeypatch.setattr(native, "_ELEMENTS_PER_THREAD", 64)
    backend, n = native_backend(isa), 100_001
    x, g = heavy_tail(n), noise(n, 1)
    key = int(kernels.magnitude_keys(x).sort().values[n // 2])
    expected = specification.find(x, key, None)
    count = expected[0].numel()
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        for limit in (None, count, n):
            same_found(backend.find(x, key, limit), expected)
        assert backend.find(x, key, count - 1) is None
        same(backend.top(x, n // 100), specification.top(x, n // 100))
        for limit in (0, n // 9, n):
            r, h = x.clone(), g.clone()
            found = backend.accumulate_(r, h, key, limit)
            same(torch.cat([r, h]), torch.cat([x + g, x]))
            same_found(found, specification.find(r, key, limit))
        r, h = x.clone(), g.clone()
        assert backend.accumulate_(r, h) is None
        same(torch.cat([r, h]), torch.cat([x + g, x]))
        dense = backend.scatter_(r, expected[0], expected[1])
        same(dense, specification.scatter_(h, *expected))


@pytest.mark.skipif(native.EXTENSION is None, reason="installed without a C++ compiler")
@pytest.mark.parametrize("start", [0, 2**31 - 50, 2**32 - 50, 2**45])
def test_deal_and_undeal(start):
    indices = start + torch.randperm(5000, generator=torch.Generator().manual_seed(0)).sort().values
    for world_size in (1, 2, 3, 7, 8, 64):
        dealt, expected = (k.deal(indices, world_size) for k in (native, specification))
        assert torch.equal(dealt[0], expected[0]) and torch.equal(dealt[1], expected[1])
        assert dealt[2] == expected[2]
        back = native.undeal(dealt[1], 0, world_size)
        assert torch.equal(back, specification.undeal(dealt[1], 0, world_size))
