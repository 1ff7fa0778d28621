"""Run the tests that need a GPU (marked ``gpu``), and rehearse `make gpu` without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sparsync.kernels import magnitude_keys, normal_levels, packing
from sparsync.kernels import reference as spec
from sparsync.updates.fragments import rotate_

from .strategies import palette

PROGRAM = Path(__file__).parents[2] / "benchmarks/gpu.py"
MISSING = not torch.cuda.is_available()
gpu = [pytest.mark.gpu, pytest.mark.skipif(MISSING, reason="needs a CUDA device")]


def results(device):
    """Return the specification's results on ordinary and awkward floats."""
    generator = torch.Generator().manual_seed(0)
    awkward, n = torch.tensor(palette(torch.float32)), 5000
    mixed = awkward[torch.randint(len(awkward), (n,), generator=generator)]
    for x in (torch.randn(n, generator=generator).to(device), mixed.to(device)):
        indices, values = spec.find(x, int(magnitude_keys(torch.tensor([0.5]))), None)
        yield from (indices, values, spec.top(x, 700))
        yield spec.count_from(x, magnitude_keys(values).sort().values)
        yield from spec.merge([(indices, values), (indices[:9], values[:9])], n)
        yield packing.pack_indices(indices, n)
        for form in (packing.BF16, packing.INT8):
            packed = packing.pack_values(x, form, 128)
            yield from (packed, packing.unpack_values(packed, n, form, 128))
        for bits in normal_levels.BITS:
            raw, sums = normal_levels.quantise_plainly(x, bits, 64, 2.0**120), torch.ones_like(x)
            normal_levels.decode_plainly_(sums, raw, bits, 64, 3.0)
            yield from (raw, sums)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu), "cpu"])
def test_the_specification_is_the_same_on_every_device(device):
    for mine, expected in zip(results(device), results("cpu"), strict=True):
        mine = mine.cpu()
        nan = expected.isnan()
        assert (mine.dtype, mine.shape) == (expected.dtype, expected.shape)
        assert torch.equal(mine.isnan(), nan)
        raw = (x.masked_fill(nan, 0).view(torch.uint8) for x in (mine, expected))
        assert torch.equal(*raw)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_vectors_may_have_more_than_2_31_elements():
    from sparsync.kernels import triton

    n = (1 << 31) + 3000
    if torch.cuda.mem_get_info()[0] < 16 * n:
        pytest.skip("needs 32 GiB of free memory on the device")
    places = torch.tensor([5, (1 << 31) - 1, 1 << 31, n - 1], device="cuda")
    values = torch.tensor([1.0, 2.0, 3.0, 4.0], device="cuda")
    x = triton.scatter_(torch.empty(n, device="cuda"), places, values)
    for found in (triton.find(x, 1, None), triton.accumulate_(x, torch.zeros_like(x), 1, 10)):
        assert torch.equal(found[0], places) and torch.equal(found[1], values)
    assert torch.equal(triton.top(x, 2), places[2:])
    decoded = torch.zeros_like(x)
    normal_levels.decode_(decoded, normal_levels.quantise(x, 1, 512, 2.0**120), 1, 512)
    assert bool((decoded[places] > 0).all())
    triton.subtract_(x, places, values)
    assert not x.any()


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu), "cpu"])
def test_a_transform_loses_nothing_at_any_precision_of_matrix_products(device):
    """TF32 keeps 10 bits, so that 4e-4 of the largest element would be lost on every exchange."""
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(device)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        back = rotate_(rotate_(x.clone(), 64), 64, back=True)
    finally:
        torch.set_float32_matmul_precision(before)
    assert (back - x).abs().max() < 2e-6


# ---- make gpu -------------------------------------------------------------------------------------


def run(*options):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, PROGRAM, *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_without_a_gpu_one_line_says_what_is_missing():
    done = run()
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("make gpu: torch ") and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_the_run_can_be_rehearsed_without_a_gpu(tmp_path):
    page = PROGRAM.with_suffix(".md")
    before = page.read_bytes() if page.exists() else None
    done = run("--rehearse", "--json", tmp_path / "rows.json")
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads((tmp_path / "rows.json").read_text())["parts"]
    assert all(part["rows"] and not part["failed"] for part in parts.values())
    names = {"contracts", "one_rank", "attach", "nccl", "selection", "transfer", "updates"}
    assert set(parts) == names
    assert (page.read_bytes() if page.exists() else None) == before
