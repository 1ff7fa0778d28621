"""Run the body of a test on every rank of a group; tests of one file share the started processes."""

import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sparsync.cli.launch import RankError, launch
from tests.tables import refused as refused

Start = tuple[int, bool]  # ranks, by mpiexec
Call = tuple[str, dict[str, Any]]  # a test, and its parameters
TIMEOUT = 60.0  # seconds that gloo waits


def on_ranks(world_size: int, *, mpi: bool = False) -> Callable[[Callable[..., None]], Any]:
    """Run a test on every rank of gloo or MPI; the test may take a ``folder`` that all ranks see.

    A file's tests with the same number of ranks run one after the other in the same processes,
    which end at the first failure.
    """

    def decorate(body: Callable[..., None]) -> Any:
        def test(together: "Together", **given: Any) -> None:
            together.check((world_size, mpi), (body.__name__, given))

        first = inspect.signature(test).parameters["together"]
        own = [p for p in inspect.signature(body).parameters.values() if p.name != "folder"]
        test.__signature__ = inspect.Signature([first, *own])  # type: ignore[attr-defined]
        test.__name__, test.__module__, test.__doc__ = body.__name__, body.__module__, body.__doc__
        test.body, test.start = body, (world_size, mpi)  # type: ignore[attr-defined]
        test.pytestmark = getattr(body, "pytestmark", [])  # type: ignore[attr-defined]
        return pytest.mark.gloo(test)

    return decorate


class Together:
    """The selected tests of one file, and the outcomes of tests that have already run."""

    def __init__(self, request: pytest.FixtureRequest, folders: pytest.TempPathFactory) -> None:
        self.module, self.folders = request.module.__name__, folders
        self.calls: dict[Start, list[Call]] = {}
        self.errors: dict[Start, str] = {}
        self.skipped: dict[Start, dict[int, str]] = {}
        for item in request.session.items:
            function = getattr(item, "function", None)
            if getattr(item, "module", None) is request.module and hasattr(function, "start"):
                given = dict(item.callspec.params) if hasattr(item, "callspec") else {}
                self.calls.setdefault(function.start, []).append((function.__name__, given))

    def check(self, start: Start, call: Call) -> None:
        """Run all tests that share a start, unless they have already run; fail if this one failed."""
        calls = self.calls[start]
        if start not in self.errors:
            folder, (ranks, mpi) = str(self.folders.mktemp("ranks")), start
            try:
                skipped = launch(play, ranks, self.module, calls, folder, timeout=TIMEOUT, mpi=mpi)
                self.errors[start], self.skipped[start] = "", skipped
            except RankError as error:
                self.errors[start] = str(error)
        if error := self.errors[start]:
            failed = min(map(int, re.findall(r"RuntimeError: test (\d+) of", error)), default=0)
            own = calls.index(call)
            assert own < failed, error if own == failed else f"not run: {calls[failed]} failed"
        elif reason := self.skipped[start].get(calls.index(call)):
            pytest.skip(reason)


def play(module: str, calls: list[Call], folder: str) -> dict[int, str]:
    """Run tests on this rank; return the reasons of those that skip themselves, as all ranks do."""
    skipped = {}
    for number, (name, given) in enumerate(calls):
        body = getattr(importlib.import_module(module), name).body
        if "folder" in inspect.signature(body).parameters:
            own = Path(folder, str(number))
            own.mkdir(exist_ok=True)
            given = {**given, "folder": own}
        try:
            body(**given)
        except pytest.skip.Exception as reason:
            skipped[number] = str(reason)
        except Exception as error:
            raise RuntimeError(f"test {number} of this file, {name}({given}), failed") from error
    return skipped


@pytest.fixture(scope="module")
def together(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Together:
    """Provide the fixture that ``on_ranks`` needs; the conftest of a folder imports it."""
    return Together(request, tmp_path_factory)


# ---- helpers for the bodies
# ------------------------------------------------------------------------------


def gathered(mine: Any) -> list[Any]:
    """Return every rank's object."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def same_everywhere(tensor: torch.Tensor, group: Any = None) -> bool:
    """Return whether all ranks of a group have the same bits."""
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, tensor.contiguous(), group=group)
    return all(torch.equal(theirs, tensor) for theirs in everyone)
