"""The Triton kernels for the tests: compiled where a GPU is, else interpreted on CPU tensors."""

import importlib
import importlib.util
from contextlib import contextmanager

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# the interpreter computes in NumPy, which warns where a float overflows or is NaN
numpy_warns = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@contextmanager
def interpreting():
    """Have Triton interpret kernels where there is no GPU, both when it is imported and when it runs."""
    with pytest.MonkeyPatch.context() as environment:
        if DEVICE == "cpu":
            environment.setenv("TRITON_INTERPRET", "1")
        yield


@pytest.fixture(scope="module", autouse=True)
def interpreter():
    with interpreting():
        yield


def load(name):
    """Import a module of the backend, or skip the tests that asked for it."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton: pip install 'sparsync[triton]'", allow_module_level=True)
    with interpreting():
        module = importlib.import_module(name)
    if DEVICE == "cpu" and type(module.device.positions).__name__ != "InterpretedFunction":
        # no reason to skip: in the usual order of tests nothing imports Triton before
        raise RuntimeError("something imported Triton before, for a GPU; run this file by itself")
    return module


def on(*tensors):
    """The same tensors on the backend's device, as one or as a tuple."""
    moved = tuple(t.to(DEVICE) for t in tensors)
    return moved[0] if len(moved) == 1 else moved


def identical(mine, expected):
    """Equal in shape, dtype and every bit; any NaN equals any NaN."""
    assert (mine.dtype, mine.shape) == (expected.dtype, expected.shape)
    if mine.is_floating_point():
        nan = mine.isnan()
        assert torch.equal(nan, expected.isnan())
        mine, expected = (x.masked_fill(nan, 0).view(torch.int32) for x in (mine, expected))
    assert torch.equal(mine, expected)
