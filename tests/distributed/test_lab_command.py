"""``python -m sparsync.cli.lab RATE``, which `make demo` asks whether the lab works here."""

import os
import shutil
import subprocess
import sys

import pytest

from sparsync.cli.lab import Lab
from sparsync.errors import SparsyncError


def ask(rate, before=()):
    command = [*before, sys.executable, "-m", "sparsync.cli.lab", rate]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert process.stdout == ""
    return process.returncode, process.stderr


def test_it_says_nothing_where_a_lab_can_be_made():
    try:
        with Lab(2, "200mbit"):
            pass
    except SparsyncError as error:
        pytest.skip(str(error))
    assert ask("200mbit") == (0, "")


@pytest.mark.skipif(
    sys.platform == "linux" and (os.geteuid() != 0 or not shutil.which("setpriv")),
    reason="needs root and setpriv of util-linux, to give up what a lab takes",
)
def test_it_says_why_not_in_one_line():
    # root without any capability may not even make a user namespace with a root of its own
    drop = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if sys.platform == "linux" else []
    code, err = ask("200mbit", before=drop)
    assert code == 2
    assert err.startswith("error: lab: ") and "namespaces" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("rate", ["200 apples", "0mbit", ""])
def test_a_rate_that_is_none_is_refused_in_one_line(rate):
    code, err = ask(rate)
    assert code == 2
    assert err.startswith("error: rate ") and err.count("\n") == 1
