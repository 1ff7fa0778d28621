"""Collect doctests only from modules with examples: importing the others takes every worker seconds."""

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path):
    """Leave out the collector of doctests, which imports a module without examples for nothing."""
    collectors = yield
    if file_path.suffix == ".py" and ">>> " not in file_path.read_text("utf-8"):
        return [one for one in collectors if type(one).__name__ != "DoctestModule"]
    return collectors
