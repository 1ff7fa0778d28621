"""One start of two ranks runs all scenarios."""

import pytest

from sparsync.cli.launch import launch

from .practice import run


@pytest.fixture(scope="session")
def errors(request):
    """Run all collected scenarios; return their errors by module, test and column."""
    tests = [i for i in request.session.items if hasattr(getattr(i, "function", None), "scenario")]
    wanted = [
        (t.function.__module__, t.function.__name__, t.callspec.params["column"]) for t in tests
    ]
    return launch(run, 2, wanted, timeout=120.0)
