import os
import subprocess
import sys

import pytest

from sparsync import errors
from tests.tables import cases


@cases(
    ("ConfigurationError", (ValueError,)),
    ("WireFormatError", (ValueError,)),
    ("CheckpointError", (OSError,)),
    ("NonFiniteGradientError", (ArithmeticError,)),
    ("CommunicationError", (RuntimeError,)),
    ("PeerError", (errors.CommunicationError, RuntimeError)),
    ("DisagreementError", (errors.PeerError,)),
    ("DeadlineError", (errors.CommunicationError, TimeoutError)),
    ("DeadlockError", (errors.CommunicationError,)),
)
def test_errors_are_caught_by_their_own_and_by_the_usual_names(name, parents):
    error = getattr(errors, name)
    assert all(issubclass(error, parent) for parent in (errors.SparsyncError, *parents))


def test_the_drawn_tree_names_every_error():
    assert all(name in errors.__doc__ for name in errors.__all__ if name.endswith("Error"))


SPEAK = """
import os, sys
from sparsync.console import say
say("one")
say("two")
"""


LATER = [pytest.param(broken, marks=pytest.mark.slow) for broken in ("closed since", "full")]


@pytest.mark.fast(1)
@cases("closed", "no reader", *LATER)
def test_no_message_is_worth_a_job(broken):
    before = "import sys; sys.stderr.close()" if broken == "closed since" else ""
    reader, writer = os.pipe()
    os.close(reader)
    err = {"no reader": writer, "full": os.open("/dev/full", os.O_WRONLY)}.get(broken)
    line = [sys.executable, "-c", before + SPEAK]
    closes = ["bash", "-c", 'exec "$@" 2>&-', "-"] if broken == "closed" else []
    ended = subprocess.run([*closes, *line], stderr=err, timeout=60, check=False)
    os.close(writer)
    assert ended.returncode == 0
