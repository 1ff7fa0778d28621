"""Test the Triton kernels, compiled on a GPU if there is one, otherwise interpreted."""

import importlib
import importlib.util
import math
import os
import re
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsync.errors import WireFormatError
from sparsync.feedback.reducer import Reducer
from sparsync.kernels import magnitude_keys, moves, normal_levels, packing
from sparsync.kernels import reference as spec
from sparsync.kernels.keys import key_range
from sparsync.presets import resolve
from sparsync.transports.sim import simulate
from sparsync.updates import OUTER_SETTINGS, OuterStep, gradient_noise
from sparsync.updates.outer_engine import OuterEngine
from sparsync.updates.weights import ModelWeights
from tests.draws import noise
from tests.fresh import run_python
from tests.tables import cases

from .far_device import FAR, far, far_device, launches, passes, waits
from .strategies import dense_tensors, palette

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# the interpreter computes in NumPy, which warns of overflows and NaN
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@contextmanager
def interpreting():
    """Make Triton interpret kernels without a GPU, both when it is imported and when it runs."""
    with pytest.MonkeyPatch.context() as environment:
        if DEVICE == "cpu":
            environment.setenv("TRITON_INTERPRET", "1")
        yield


@pytest.fixture(scope="module", autouse=True)
def interpreter():
    with interpreting():
        yield


def load():
    """Import the backend, or skip all tests."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton: pip install 'sparsync[triton]'", allow_module_level=True)
    new_numpy = np.lib.NumpyVersion(np.__version__) >= "2.4.0"
    if DEVICE == "cpu" and new_numpy and metadata.version("triton").startswith("3.3."):
        # it makes an int of an array with one element, which NumPy no longer does
        reason = "Triton 3.3 (of torch 2.7) interprets with NumPy < 2.4"
        pytest.skip(reason, allow_module_level=True)
    with interpreting():
        module = importlib.import_module("sparsync.kernels.triton")
    if DEVICE == "cpu" and type(module._positions).__name__ != "InterpretedFunction":
        # not a reason to skip: in the usual order of tests, nothing imports Triton earlier
        raise RuntimeError("something imported Triton before, for a GPU; run this file by itself")
    return module


def on(*tensors):
    """Move tensors to the backend's device; return one tensor, or a tuple of several."""
    moved = tuple(t.to(DEVICE) for t in tensors)
    return moved[0] if len(moved) == 1 else moved


def identical(mine, expected):
    """Assert equal shape, dtype and bits, except that any NaN equals any other NaN."""
    assert (mine.dtype, mine.shape) == (expected.dtype, expected.shape)
    if mine.is_floating_point():
        nan = mine.isnan()
        assert torch.equal(nan, expected.isnan())
        mine, expected = (x.masked_fill(nan, 0).view(torch.int32) for x in (mine, expected))
    assert torch.equal(mine, expected)


triton = load()
few = settings(max_examples=20)  # the interpreter takes milliseconds for a launch
# sizes around one block, and several blocks, the last of which is not full
SIZES = [0, 1, triton.BLOCK, 2 * triton.BLOCK + 900]
BIG = SIZES[-1]
LARGEST_KEY, _ = key_range(torch.float32)


def vectors(n):
    """Return vectors of n elements: ordinary, with ties and awkward floats, constant, and zero."""
    generator = torch.Generator().manual_seed(n)
    awkward = torch.tensor(palette(torch.float32))
    mixed = awkward[torch.randint(len(awkward), (n,), generator=generator)]
    return on(torch.randn(n, generator=generator), mixed, torch.ones(n), torch.zeros(n))


def key_of(value):
    return int(magnitude_keys(torch.tensor([value])))


def identical_found(mine, expected):
    assert (mine is None) == (expected is None)
    if expected is not None:
        identical(mine[0], expected[0])
        identical(mine[1], expected[1])


def stream(n, seed):
    """Return most of the indices below n, ascending, with small integers as values."""
    generator = torch.Generator().manual_seed(seed)
    indices = (torch.rand(n, generator=generator) < 0.7).nonzero().flatten()
    return on(indices, torch.randint(-2, 3, indices.shape, generator=generator).float())


# ---- selection ------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", SIZES)
def test_accumulate_swaps_and_finds_like_the_specification(n):
    for x in vectors(n):
        for key in (None, 0, key_of(0.5), LARGEST_KEY):
            mine, expected = (x.clone(), x.flip(0).clone()), (x.clone(), x.flip(0).clone())
            given = {"key": key, "limit": n // 2}
            identical_found(
                triton.accumulate_(*mine, **given), spec.accumulate_(*expected, **given)
            )
            identical(mine[0], expected[0])
            identical(mine[1], x)


@pytest.mark.parametrize("n", SIZES)
def test_find_equals_the_specification(n):
    for x in vectors(n):
        for key in (-1, 1, key_of(1.0), LARGEST_KEY):
            for limit in (None, 0, n):
                identical_found(triton.find(x, key, limit), spec.find(x, key, limit))
        identical_found(triton.find(x[3:], 1, None), spec.find(x[3:], 1, None))  # unaligned


@pytest.mark.fast(2)
@pytest.mark.parametrize("n", SIZES)
def test_top_equals_the_specification(n):
    for x in vectors(n):
        for k in {0, 1, 700, n + 5}:
            identical(triton.top(x, k), spec.top(x, k))


@few
@given(dense_tensors(dtype=torch.float32), st.integers(-1, 40))
def test_top_equals_the_specification_on_any_floats(x, k):
    identical(triton.top(on(x), k), spec.top(on(x), k))


def test_top_is_exact_where_keys_differ_in_the_lowest_digit_alone():
    keys = torch.arange(0x3F800000, 0x3F800000 + 300, dtype=torch.int32).flip(0)
    x = on(keys.view(torch.float32))
    for k in (1, 44, 45, 299):
        assert triton.top(x, k).tolist() == list(range(k))


def test_few_programs_count_many_blocks(monkeypatch):
    monkeypatch.setattr(triton, "_COUNTING_PROGRAMS", 2)
    for x in vectors(5 * triton.BLOCK + 1):
        identical(triton.top(x, 3000), spec.top(x, 3000))


# ---- sets and sums --------------------------------------------------------------------------------


def test_merge_equals_the_specification():
    streams = [stream(BIG, seed) for seed in range(4)]
    empty = on(torch.empty(0, dtype=torch.int64), torch.empty(0))
    streams.append(on(torch.tensor([0, 1]), torch.tensor([math.nan, -math.inf])))
    for some in ([empty, *streams, empty], [empty], streams[:1]):
        for within in (None, stream(BIG, 7)[0]):
            merged = triton.merge(some, BIG, within), spec.merge(some, BIG, within)
            for mine, expected in zip(*merged, strict=True):
                identical(mine, expected)


def test_merge_adds_in_the_order_given():
    at = torch.tensor([4])
    parts = [on(at, torch.tensor([v])) for v in (1e8, 1.0, -1e8, 3.0)]
    assert triton.merge(parts, 5)[1].tolist() == [3.0]  # 1e8 swallows 1
    assert triton.merge([parts[0], parts[2], parts[1], parts[3]], 5)[1].tolist() == [4.0]


@pytest.mark.parametrize("kernel", ["subtract_", "scatter_"])
def test_in_place_kernels_equal_the_specification(kernel):
    dense = vectors(BIG)[1]
    indices, values = stream(BIG, 2)
    for many in (len(indices), 1, 0):
        mine, expected = dense.clone(), dense.clone()
        returned = getattr(triton, kernel)(mine, indices[:many], values[:many])
        identical(mine, getattr(spec, kernel)(expected, indices[:many], values[:many]))
        assert returned is mine


# ---- packing --------------------------------------------------------------------------------------


FORMS = [packing.BF16, packing.INT8, packing.FP32]
SHAPES = [(0, 5000), (1, 1), (1, 1 << 32), (10, 10), (3, 11), (3, 12)]
SHAPES += [(2500, 10_000), (5000, 1 << 32)]
PACKED = [(3, 11), (40, 50), (60, 4000), (5, 1 << 32)]


def ascending(nnz, size, seed=0):
    """Return about ``nnz`` ascending indices below ``size``, including the first and the last."""
    generator = torch.Generator().manual_seed(seed)
    drawn = (torch.rand(nnz, generator=generator, dtype=torch.float64) * size).long()
    return torch.cat([drawn, torch.tensor([0, size - 1][:nnz], dtype=torch.int64)]).unique()


def awkward(n):
    """Return ordinary values, random bits, denormals whose scale underflows, and nonfinite values."""
    generator = torch.Generator().manual_seed(n)
    bits = torch.randint(-(2**31), 2**31, (n,), generator=generator).int()
    special = [0.0, -0.0, 1e-45, -1e-45, 1e-43, 3.4e38, -3.4e38, math.inf, -math.inf, math.nan]
    ordinary = torch.randn(n, generator=generator)
    return torch.cat([ordinary, bits.view(torch.float32), torch.tensor(special), 1e-43 * ordinary])


@pytest.mark.parametrize(("nnz", "size"), SHAPES)
def test_indices_are_packed_like_the_specification(nnz, size):
    indices = on(ascending(nnz, size))
    packed = triton.pack_indices(indices, size)
    identical(packed, packing.pack_indices(indices, size))
    identical(triton.unpack_indices(packed, len(indices), size), indices)
    shifted = torch.cat([packed[:0].new_zeros(3), packed])[3:]  # a message has values before them
    identical(triton.unpack_indices(shifted, len(indices), size), indices)


@few
@given(st.integers(1, 3000), st.data())
def test_any_indices_come_back(size, data):
    drawn = data.draw(st.sets(st.integers(0, size - 1), max_size=60))
    indices = on(torch.tensor(sorted(drawn), dtype=torch.int64))
    packed = triton.pack_indices(indices, size)
    identical(packed, packing.pack_indices(indices, size))
    identical(triton.unpack_indices(packed, len(indices), size), indices)


def outcome(unpack, *arguments):
    try:
        return unpack(*arguments).tolist()
    except WireFormatError as error:
        return str(error)


@few
@given(st.sampled_from(PACKED), st.integers(0), st.integers(1, 255))
def test_corrupt_indices_are_refused_like_by_the_specification(case, at, flipped):
    nnz, size = case
    indices = on(ascending(nnz, size))
    packed = triton.pack_indices(indices, size)
    packed[at % len(packed)] ^= flipped
    expected = outcome(packing.unpack_indices, packed, len(indices), size)
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
        identical(packed, packing.pack_values(values, form, block))
        unpacked = triton.unpack_values(packed, len(values), form, block)
        identical(unpacked, packing.unpack_values(packed, len(values), form, block))


@few
@given(
    st.sampled_from(FORMS), st.integers(1, 50), st.integers(1, 9), st.integers(0, 3), st.randoms()
)
def test_any_bytes_are_some_values(form, nnz, block, offset, random):
    raw = random.randbytes(offset + packing.value_bytes(nnz, form, block))
    packed = on(torch.tensor(list(raw), dtype=torch.uint8))[offset:]
    unpacked = triton.unpack_values(packed, nnz, form, block)
    identical(unpacked, packing.unpack_values(packed, nnz, form, block))


LIMIT = 2.0**120
WIDTHS = pytest.mark.parametrize("width", normal_levels.BITS)


def weights(n):
    """Return vectors as in ``vectors``, plus denormal ones and ones near the largest float."""
    first, *others = vectors(n)
    return [first, *others, first * 1e-40, first * 1e38]


def at_odd_byte(raw):
    return torch.cat([raw[:1], raw])[1:]


def quantised(x, width, block, more=None):
    """Return the bytes of x, or of x + more, which the kernel writes from an odd address on."""
    middle = normal_levels.SCALE_BYTES * -(-x.numel() // block)
    length = middle - -x.numel() * width // 8
    raw = torch.full((length + 1,), 255, dtype=torch.uint8, device=x.device)[1:]
    levels = width, block, LIMIT, *normal_levels._tables(width, x.device)
    backend().quantise_(raw[:middle], raw[middle:], x, more, levels)
    return raw


def backend():
    return importlib.import_module("sparsync.kernels.triton_levels")


@pytest.mark.fast(2)
@WIDTHS
@cases(*(pytest.param(b, marks=pytest.mark.slow) for b in (8, 64)), 512)
def test_levels_equal_the_specification(block, width):
    for n in (0, 1, 8, 1027):
        for x in weights(n):
            more = x.flip(0)
            raw = normal_levels.quantise_plainly(x, width, block, LIMIT)
            identical(quantised(x, width, block), raw)
            sums = normal_levels.quantise_plainly(x + more, width, block, LIMIT)
            identical(quantised(x, width, block, more), sums)


def codes_of(x, width, block):
    raw = normal_levels.quantise_plainly(x, width, block, LIMIT)
    middle = normal_levels.SCALE_BYTES * -(-x.numel() // block)
    return normal_levels.Codes(raw[:middle], raw[middle:], x.numel(), width, block)


@pytest.fixture
def dispatched(monkeypatch):
    """Send float32 to Triton wherever it is, and everything to the specification within ``alike``."""
    for module in normal_levels, moves, gradient_noise:
        monkeypatch.setattr(module, "backend_of", lambda *_: triton)


def alike(like, call, *given, **named):
    """Assert that a call writes into a tensor what it writes with the specification."""
    mine, expected = like.clone(), like.clone()
    call(mine, *given, **named)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(normal_levels, "backend_of", lambda *_: spec)
        call(expected, *given, **named)
    identical(mine, expected)


@pytest.mark.fast(3)
@WIDTHS
@pytest.mark.parametrize("block", [8, pytest.param(512, marks=pytest.mark.slow)])
@pytest.mark.parametrize("count", [0, pytest.param(1, marks=pytest.mark.slow), 3])
def test_sums_and_differences_of_messages_equal_the_specification(width, block, count, dispatched):
    for n in (0, 1, 3 * block + 5):
        rows = weights(n)
        for at, x in enumerate(rows):
            chosen = [rows[(at + i) % len(rows)] for i in range(1 + count)]
            message, *less = (codes_of(row, width, block) for row in chosen)
            # all ways for the first values, and one for each of the others: the interpreter is slow
            ways = slice(None) if at == 0 else slice(at % 3, at % 3 + 1)
            # all elements, and a run that starts at a block
            for start in {0, n // block * block}:
                into, plus = x[start:].flip(0), rows[0][start:]
                differences = (True, -1.0, plus), (True, -3.0, None), (False, 3.0, None)
                for keep, divisor, more in differences[ways]:
                    given = start, less, divisor
                    alike(into, message.add_difference_, *given, keep=keep, plus=more)
                for own in ((), (plus,), (plus, into))[ways]:
                    own = [one.clone() for one in own]
                    alike(torch.ones_like(into), message.sum_to_, [message, *less], start, *own)


@WIDTHS
def test_any_codes_are_some_levels(width, dispatched):
    generator, n, block = torch.Generator().manual_seed(width), 1000, 8
    scales = torch.randn(n // block, generator=generator).abs().bfloat16().view(torch.uint8)
    codes = torch.randint(256, (-(-n * width // 8),), generator=generator, dtype=torch.uint8)
    raw = at_odd_byte(on(torch.cat([scales, codes])))
    mine, expected = (on(torch.full((n,), -0.0)) for _ in range(2))
    normal_levels.decode_(mine, raw, width, block)
    normal_levels.decode_plainly_(expected, raw, width, block)
    identical(mine, expected)


def test_blocks_of_other_sizes_and_messages_that_differ_take_the_specification(dispatched):
    x = on(noise(72))
    first, second = codes_of(x, 1, 8), codes_of(x, 2, 8)
    for one, less in ((codes_of(x, 1, 24), ()), (first, (second,))):
        alike(torch.zeros_like(x), one.add_difference_, 0, less, 1.0, keep=False)


# ---- moves and moments ----------------------------------------------------------------------------


KINDS = [torch.float32, torch.bfloat16, torch.float16]
LENGTHS = [0, 1, triton.BLOCK + 9]


@pytest.mark.fast(6)
@pytest.mark.parametrize("dtype", [None, *KINDS])
@pytest.mark.parametrize("stored", [None, *KINDS])
def test_moves_equal_the_specification(dtype, stored, dispatched, monkeypatch):
    plain = moves.move_plainly_
    for n in LENGTHS:
        ordinary, mixed, *_ = vectors(n)
        # values halfway between two bf16 numbers, some of them also between two fp16 numbers
        halfway = torch.arange(n, dtype=torch.int32) % 4096 << 16 | 0x38008000
        pairs = [(ordinary, ordinary * 1.01), (on(halfway.view(torch.float32)), mixed)]
        pairs += [(mixed, ordinary), (mixed, mixed.flip(0))]
        for shared, own in pairs:
            values = None if stored is None else own.to(stored)
            for withheld in (None, mixed.flip(0), ordinary * 0.01):
                mine, expected = torch.empty_like(shared), torch.empty_like(shared)
                given = shared, withheld, values
                plain(expected, *given, dtype=dtype)
                with monkeypatch.context() as patch:
                    patch.setattr(moves, "move_plainly_", None)  # which the kernel replaces
                    moves.move_(mine, *given, dtype=dtype)
                identical(mine, expected)


def test_other_moves_take_the_specification(dispatched, monkeypatch):
    first, second = on(noise(2, 50))
    fused = importlib.import_module("sparsync.kernels.triton_moves")
    monkeypatch.setattr(fused, "move_", None)
    for weights, shown in ((second.double(), 1.0), (second, 0.75), (second.repeat(2)[::2], 1.0)):
        mine, expected = torch.empty_like(first), torch.empty_like(first)
        moves.move_(mine, first, second, weights, shown=shown)
        moves.move_plainly_(expected, first, second, weights, shown=shown)
        identical(mine, expected)


def test_lengthened_steps_equal_the_specification(dispatched):
    numbers = 1000 * 0.3, 1000.0, 1e-8, -1e-3
    for n in LENGTHS:
        for first in vectors(n):
            for second in (first.square(), first.flip(0).square() * 1e-40):
                mine, expected = first.flip(0).clone(), first.flip(0).clone()
                gradient_noise._lengthen(first, second, mine, numbers)
                gradient_noise._lengthen_plainly(first, second, expected, numbers)
                identical(mine, expected)


def test_lengthened_rows_equal_the_specification(dispatched):
    for rows, columns in ((5, 300), (1, 1), (3, 1), (0, 4), (4, 0), (700, 3)):
        first, *others = (one.view(rows, columns) for one in vectors(rows * columns))
        factors = on(torch.linspace(0.3, 1.2, rows)[:, None])
        for second in (first.square(), *(other.square() for other in others)):
            mine, expected = first.flip(0).clone(), first.flip(0).clone()
            numbers = 1.1, 1.1, 1e-8, -1e-3
            gradient_noise._lengthen_rows(first, second, mine, factors, numbers)
            gradient_noise._lengthen_plainly(first, second, expected, (factors, *numbers[1:]))
            identical(mine, expected)


# ---- the exchange of AdamW's updates, on the stand-in for a GPU ---------------------------------------


RANKS, EXCHANGES = 2, 3
NO_GPU = pytest.mark.skipif(DEVICE == "cuda", reason="counts on the stand-in, beside no GPU")


def exchanged(device, dtype, bits, on_host):
    """Exchange updates a few times; return weights and residuals, and the counts of the last exchange."""
    counts = {}

    def parameter(number, size):
        made = noise(size, seed=number).to(dtype)
        return torch.nn.Parameter(far(made) if device == FAR else made)

    async def program(comm):
        model = torch.nn.Module()
        for number, size in enumerate((4096, 513, 2000, 7)):
            model.register_parameter(f"p{number}", parameter(number, size))
        model.register_buffer("mean", torch.full((3,), 1 / 3, device=device))
        algorithm = resolve("quantised", bits=bits, block=512)
        default = {**OUTER_SETTINGS["updates"], "algorithm": algorithm}
        settings = OuterStep(**{**default, "period": 1, "warmup_steps": 0})
        trained = dict(model.named_parameters())
        weights = ModelWeights(model, trained, True)
        layout = settings.plan(weights.read(slice(0, None)), trained, rest=weights.rest)
        chosen = await settings.chosen.on(comm)
        reducer = Reducer(comm, layout.units, chosen, settings.density, on_host=on_host)
        engine = OuterEngine(settings, layout, reducer, weights)
        for step in range(EXCHANGES):
            with torch.no_grad():
                for number, p in enumerate(trained.values()):
                    move = noise(*p.shape, seed=100 * step + 10 * comm.rank + number)
                    p += (0.01 * move).to(device, dtype)
            await comm.allgather(torch.zeros(1), "all have moved")
            for counter in (launches, passes, waits) if comm.rank == 0 else ():
                counter.clear()
            await comm.allgather(torch.zeros(1), "nothing is counted")
            await engine.advance(step)
            engine.count()
            await comm.allgather(torch.zeros(1), "all have exchanged")
            if comm.rank == 0:
                floats = 4 * RANKS * sum(unit.size for unit in layout.units)
                counts["passes"] = {name: nbytes / floats for name, nbytes in passes.items()}
                counts.update(launches=Counter(launches), waits=Counter(waits))
            await comm.allgather(torch.zeros(1), "everything is counted")
        tensors = [p.detach() for p in trained.values()]
        kept = [residual.accumulated for residual in reducer.residuals]
        return [x.cpu() for x in (*tensors, *kept, engine.memory["shared"])]

    return [x for results in simulate(program, RANKS).results for x in results], counts


def compare_exchanges(dtype, bits, on_host):
    """Check that the device computes what the CPU does; return its counts."""
    expected, _ = exchanged(torch.device("cpu"), dtype, bits, on_host=False)
    with far_device(triton=True):
        computed, counts = exchanged(FAR, dtype, bits, on_host)
    for mine, one in zip(computed, expected, strict=True):
        assert torch.equal(mine, one)
    return counts


def documented():
    """Return ``docs/kernels.md``'s table of passes: by row, the numbers for 32-bit and 16-bit models."""
    text = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text()
    section = text.partition("## Passes of an exchange")[2].partition("\n## ")[0]
    found = re.findall(r"^\| `?([\w ]+)`? \|.*\| ([\d.]+) \| ([\d.]+) \|$", section, re.MULTILINE)
    return {name: (float(wide), float(narrow)) for name, wide, narrow in found}


@pytest.mark.fast(1)
@NO_GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_exchange_of_updates_takes_as_many_passes_as_is_documented(dtype):
    counts = compare_exchanges(dtype, 1, on_host=True)
    table, found = documented(), dict(counts["passes"])
    rows = {name: found.pop(name, 0.0) for name in table if name != "other operations"}
    rows["other operations"] = sum(found.values())
    column = 0 if dtype == torch.float32 else 1
    for name, passed in rows.items():
        assert table[name][column] == pytest.approx(passed, abs=0.051), (name, rows, found)
    # one launch for each region decoded for the average and for the residual, and one for each sum
    assert counts["launches"]["_decode_levels"] == RANKS * (2 * RANKS + 1)
    assert counts["launches"]["_quantise"] == RANKS * RANKS


@pytest.mark.fast(1)
@NO_GPU
@pytest.mark.parametrize("bits", [2, 3, 8])
def test_updates_in_more_bits_are_computed_alike_on_a_device(bits):
    compare_exchanges(torch.float32, bits, on_host=False)


# ---- the backend as a whole -----------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_the_host_waits_for_nothing_but_lengths():
    residual, gradient = on(torch.ones(BIG), torch.ones(BIG))
    indices, values = stream(BIG, 3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        triton.accumulate_(residual, gradient)
        triton.subtract_(residual, indices, values)
        triton.scatter_(residual, indices, values)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_without_triton_the_backend_can_be_imported():
    use = "from sparsync.kernels import triton; assert not triton.installed()"
    assert run_python(f"import sys; sys.modules['triton'] = None; {use}").returncode == 0


@pytest.mark.slow
def test_every_kernel_compiles_for_a_gpu(tmp_path):
    program = Path(__file__).with_name("triton_programs.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, program], env=environment, check=True, timeout=300)
