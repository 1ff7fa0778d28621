"""Give all machines the same property-test examples, threads and Ctrl-C handling."""

import gc
import multiprocessing
import os
import signal
import sys
from collections import defaultdict
from multiprocessing import forkserver

import pytest
import torch
from hypothesis import settings

settings.register_profile(
    "repeatable", derandomize=True, deadline=None, database=None, max_examples=40
)
settings.load_profile("repeatable")
torch.set_num_threads(1)  # the vectors are small; more threads only wait for each other
if not torch.cuda.is_available():
    # Triton decides on import whether it interprets, and any test may import it before the kernels'
    # tests do
    os.environ.setdefault("TRITON_INTERPRET", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # shells start background jobs with SIGINT ignored, and processes that tests interrupt would
    # inherit this
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keep the million objects of a collection, which stay, out of every garbage collection."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before cases are selected by their marks
def pytest_collection_modifyitems(items):
    """Of a test's cases, leave as many as its mark ``fast`` says, spread evenly; the others are slow."""
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("fast") and not item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for all_of_one in cases.values():
        (count,) = all_of_one[0].get_closest_marker("fast").args
        kept = {at * len(all_of_one) // count for at in range(count)}
        for at, item in enumerate(all_of_one):
            if at not in kept:
                item.add_marker(pytest.mark.slow)


def pytest_runtest_setup(item):
    """Fork all ranks from one warm server, whichever test is the first to start some.

    A process has one fork server, which imports what is named before it starts; ``launch`` names less.
    """
    if item.get_closest_marker("gloo"):
        multiprocessing.set_forkserver_preload(["tests.distributed.warm"])
        forkserver.ensure_running()


@pytest.fixture
def command(monkeypatch, capsys):
    """Run ``sparsync`` in 80 columns, without starting ranks; return its exit code, output and errors."""
    from sparsync.cli import app as cli  # after the settings above
    from sparsync.cli import network_choice

    def launch(*_args, **_options):
        raise AssertionError("ranks were started")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["sparsync", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return stopped.value.code, *capsys.readouterr()

    monkeypatch.setattr(network_choice, "launch", launch)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("RANK", raising=False)
    return run
