"""Compare the public interface with a file, so that every change is visible and deliberate."""

import importlib
from pathlib import Path

import sparsync
from tests.fresh import run_python
from tests.packaging import interface

HEAVY = {
    *("accelerate", "lightning", "matplotlib", "mpi4py", "pandas", "rich", "scipy", "sklearn"),
    *("transformers", "triton", "typer", "zmq"),
}


def test_the_interface_is_what_is_listed():
    """After a deliberate change: python -m tests.packaging.interface > tests/packaging/interface.txt."""
    assert interface.lines() == interface.FILE.read_text("utf-8").splitlines()


def test_the_names_that_are_not_promised_exist():
    for module, names in interface.UNPROMISED.items():
        assert module in interface.MODULES
        assert names < {*importlib.import_module(module).__all__}, module


def test_what_only_some_users_need_is_loaded_when_they_need_it():
    code = f"import sys, sparsync; print({HEAVY} & sys.modules.keys() or 'nothing')"
    assert run_python(code).stdout == "nothing\n"


def test_types_are_for_users_too():
    assert (Path(sparsync.__file__).parent / "py.typed").exists()
