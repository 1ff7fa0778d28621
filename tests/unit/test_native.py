"""Test refusals and forced instruction sets of the C++ kernels, and installs without a compiler."""

import logging
import os
import shutil
import threading
import time

import pytest
import torch

from sparsync import ConfigurationError, kernels
from sparsync.kernels import native
from sparsync.kernels import reference as specification
from tests.fresh import run_python
from tests.tables import cases, refused, refuses

built = pytest.mark.skipif(native.EXTENSION is None, reason="installed without a C++ compiler")


def test_a_machine_with_a_compiler_has_the_extension():
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    assert native.EXTENSION is not None, "built without it: make reinstalls"
    assert native.instruction_sets()[-1] == "plain"
    assert native.chosen() in (*native.instruction_sets(), "torch")


def test_make_test_asan_tests_the_sanitized_extension():
    if "SPARSYNC_SANITIZED" in os.environ:
        assert native.EXTENSION is not None
        assert native.EXTENSION.sanitized


PRINT_CHOICE = "from sparsync.kernels import native; print(native.chosen())"


@pytest.mark.parametrize("name", [*native.instruction_sets()[-1:], "torch"])
def test_the_environment_names_the_instruction_set(name):
    assert run_python(PRINT_CHOICE, SPARSYNC_KERNELS=name).stdout.strip() == name


def test_an_unknown_instruction_set_is_refused():
    complaint = run_python(PRINT_CHOICE, SPARSYNC_KERNELS="mmx").stderr.splitlines()[-1]
    assert "SPARSYNC_KERNELS is 'mmx'" in complaint
    assert "torch" in complaint


STALE = """
import sys, types
sys.modules["sparsync.kernels._native"] = old = types.ModuleType("_native")  # no interface number
old.__file__ = "_native.so"
from sparsync import kernels
"""


def test_native_kernels_of_other_sources_are_refused_in_one_line():
    complaint = run_python(STALE).stderr.splitlines()[-1]
    assert "_native.so were built from other sources" in complaint
    assert "install it again" in complaint


WITHOUT = """
import sys
sys.modules["sparsync.kernels._native"] = None  # importing it fails, as if it had not been built
import torch
from sparsync import kernels
x = torch.randn(1 << 17)
kernels.top(x[:100], 3)
print("small", file=sys.stderr)
for _ in range(3):
    print(kernels.top(x, 3).numel())
"""


def test_without_the_extension_it_works_and_says_so_once():
    process = run_python(WITHOUT, SPARSYNC_KERNELS="")
    assert process.stdout.split() == ["3"] * 3
    before, after = process.stderr.split("small")
    assert before == ""
    assert after.count("C++ compiler") == 1


def test_choosing_torch_is_no_reason_to_complain(monkeypatch, caplog):
    monkeypatch.setattr(native, "chosen", lambda: "torch")
    if native.EXTENSION is not None:
        with caplog.at_level(logging.WARNING):
            kernels.top(torch.randn(1 << 17), 3)
        assert caplog.records == []


@built
def test_float32_on_the_cpu_goes_to_the_extension_and_nothing_else_does(monkeypatch):
    monkeypatch.setattr(native, "chosen", lambda: "plain")
    monkeypatch.setattr(native, "top", lambda x, k: "native")
    monkeypatch.setattr(specification, "top", lambda x, k: "torch")
    x = torch.tensor([1.0])
    assert kernels.top(x, 1) == "native"
    assert [kernels.top(x.to(d), 1) for d in (torch.float64, torch.bfloat16)] == ["torch"] * 2


X = torch.zeros(4)


@built
@refuses(
    (lambda: native.find(X.double(), 1, None), "x is torch.float64"),
    (lambda: native.top(X[::2], 1), r"strides \(2,\).*contiguous"),
    (lambda: native.count_from(X.half(), torch.tensor([1])), "values is torch.float16"),
    (lambda: native.restrict(X, X), "indices is torch.float32.*torch.int64"),
    (lambda: native.merge([(torch.tensor([1]), X)], 4), r"\(1,\) and values \(4,\)"),
    (lambda: native.merge([(X, X)], 4, X.long()), "indices is torch.float32.*torch.int64"),
    (lambda: native.merge([], 4, X), "within is torch.float32.*torch.int64"),
    (lambda: native.subtract_(X, torch.tensor([1]), X), r"\(1,\) and values \(4,\)"),
    (lambda: native.count_from(X, torch.tensor([5, 4])), "keys must ascend"),
    error=ValueError,
)
def test_a_tensor_that_does_not_fit_is_refused(call):
    call()


BAD_INDICES = [[-1], [4], [1 << 62], [-(1 << 63)], [0, -1], [0, 4], [3, 70_000]]


@built
@pytest.mark.parametrize("indices", BAD_INDICES)
def test_an_index_outside_is_refused_before_anything_is_written(indices):
    at, values = torch.tensor(indices), torch.ones(len(indices))
    for write in (native.subtract_, native.scatter_):
        dense = torch.full((4,), 7.0)
        with pytest.raises(ConfigurationError, match="within the vector"):
            write(dense, at, values)
        assert dense.tolist() == [7.0] * 4
    with pytest.raises(ConfigurationError, match="within the vector"):
        native.merge([(torch.tensor([0]), torch.ones(1)), (at, values)], 4)
    with pytest.raises(ConfigurationError, match=r"within the vector|ascend"):
        native.merge([(torch.arange(4), torch.ones(4))], 4, at)


@built
@pytest.mark.parametrize("indices", [[2, 1], [1, 1], [70_000, 0]])
def test_scatter_refuses_indices_that_do_not_ascend(indices):
    with pytest.raises(ConfigurationError, match="ascending"):
        native.scatter_(torch.zeros(100_000), torch.tensor(indices), torch.ones(2))


@built
@cases([2, 1], [1, 1], [0, 70_000, 69_999], [70_000, 0], [0, 70_000, 70_000])
@pytest.mark.parametrize("others", [0, 1, 2])
def test_merge_refuses_streams_that_do_not_ascend(indices, others):
    streams = [(torch.tensor([5]), torch.ones(1))] * others
    streams.append((torch.tensor(indices), torch.ones(len(indices))))
    with pytest.raises(ConfigurationError, match="merge: indices of a stream must be ascending"):
        native.merge(streams, 100_000)


@built
@pytest.mark.parametrize("indices", [[1, 100], [-1, 1], [1 << 40]])
def test_merge_refuses_streams_that_leave_the_vector_outside_of_within_too(indices):
    stream = torch.tensor(indices), torch.ones(len(indices))
    with refused("merge: indices of a stream ", " within the vector"):
        native.merge([stream], 100, torch.tensor([1]))


@built
def test_streams_that_do_not_ascend_never_write_outside():
    generator = torch.Generator().manual_seed(0)
    for size in (5, 300_000):
        for _ in range(50):
            low, high = (-5, size + 5) if torch.rand((), generator=generator) < 0.5 else (0, size)
            streams = [torch.randint(low, high, (40,), generator=generator) for _ in range(3)]
            for count in (2, 3):  # two are merged by another loop
                parts = [(s, torch.ones(40)) for s in streams[:count]]
                for among in (None, streams[2]):
                    try:
                        indices, _ = native.merge(parts, size, among)
                    except ConfigurationError:
                        continue
                    assert indices.numel() <= 120
                    assert ((indices >= 0) & (indices < size)).all()


@built
def test_restrict_of_what_does_not_ascend_never_reads_outside():
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        a, b = (torch.randint(-(10**6), 10**6, (50,), generator=generator) for _ in range(2))
        try:
            positions = native.restrict(a, b)
        except ConfigurationError:
            continue
        assert positions.numel() <= 50


@built
def test_results_do_not_depend_on_the_default_dtype_or_device():
    x = torch.tensor([1.0, -3.0, 2.0])
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert kernels.find(x, 1, None)[1].dtype == torch.float32
            assert kernels.top(x, 2).tolist() == [1, 2]
            assert kernels.merge([(kernels.top(x, 2), x[1:])], 3)[1].tolist() == [-3.0, 2.0]
    finally:
        torch.set_default_dtype(torch.float32)


@built
def test_other_threads_run_while_a_kernel_does():
    x, y, calls, turns = torch.zeros(1 << 23), torch.zeros(1 << 23), [], []

    def work():
        for _ in range(15):
            start = time.perf_counter()
            native.accumulate_(x, y)
            calls.append((start, time.perf_counter()))

    worker = threading.Thread(target=work)
    worker.start()
    while worker.is_alive():
        turns.append(time.perf_counter())
        time.sleep(0)
    # if the call held the interpreter's lock, this thread could not run in the middle of it
    middles = [((3 * a + b) / 4, (a + 3 * b) / 4) for a, b in calls]
    assert sum(any(a < t < b for t in turns) for a, b in middles) >= 3
