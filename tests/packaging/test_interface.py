"""The public interface is listed in a file, so that every change to it is visible and deliberate."""

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


def test_the_types_of_all_public_names_can_be_read_at_run_time():
    """In a fresh process, because a type that another test has imported would be found by chance."""
    code = """
import inspect, typing, sparsync
for name in sparsync.__all__:
    thing = getattr(sparsync, name)
    own = vars(thing).values() if inspect.isclass(thing) else [thing]
    for one in own:
        function = getattr(one, "fget", None) or getattr(one, "__func__", one)
        if inspect.isfunction(function):
            print(name, function.__name__, len(typing.get_type_hints(function)))
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert "attach attach 12" in done.stdout.splitlines()
