import sys

import pytest

from sparsync.cli import app as cli
from sparsync.cli import network

from .wire_messages import BACKENDS, using


@pytest.fixture(params=BACKENDS)
def each_backend(request):
    """Run the test once per backend of the packing kernels."""
    with using(request.param):
        yield request.param


@pytest.fixture
def command(monkeypatch, capsys):
    """Run ``sparsync`` in 80 columns where starting a rank is an error; code, output and errors."""

    def launch(*_args, **_options):
        raise AssertionError("ranks were started")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["sparsync", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return stopped.value.code, *capsys.readouterr()

    monkeypatch.setattr(network, "launch", launch)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("RANK", raising=False)
    return run
