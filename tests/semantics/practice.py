"""Tests that run in two ranks for every integration, and are rows of ``docs/semantics.md``."""

from __future__ import annotations

import importlib
import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch.distributed as dist

__all__ = ["COLUMNS", "ELSEWHERE", "PRACTICES", "Practice", "run", "section"]

COLUMNS = ("attach", "LocalUpdates", "UpdateSpace", "averaging")
ELSEWHERE = re.compile(r" \((tests/\S+)::(\w+)\)$")


@dataclass
class Practice:
    """Something that training scripts do.

    Attributes:
        section: of the page.
        name: as a row of the page.
        cells: by column, "works. ...", "refused. ..." or "untested. ..."; none where the practice does
            not exist. A cell that a test of another folder proves ends with "(tests/FILE.py::NAME)".
        file: the module of the test.
        test: its name; empty if other folders prove all cells.
    """

    section: str
    name: str
    cells: dict[str, str]
    file: str
    test: str = ""


PRACTICES: list[Practice] = []


def section(file: str, title: str) -> Callable[..., Any]:
    """Return a decorator that makes a function of the column a test in two ranks, once per column.

    It takes the practice's name and the cells by column; ``local`` stands for every column but
    ``attach``, ``everywhere`` for all, unless given apart.
    """

    def practice(name: str, *, local: str = "", everywhere: str = "", **cells: str) -> Any:
        local = local or everywhere
        shared = dict.fromkeys(COLUMNS[1:], local) | {"attach": everywhere} | cells
        row = Practice(title, name, {c: shared[c] for c in COLUMNS if shared.get(c)}, file)
        PRACTICES.append(row)

        def decorate(scenario: Callable[[str], None]) -> Any:
            here = [column for column, said in row.cells.items() if not ELSEWHERE.search(said)]
            row.test = scenario.__name__

            @pytest.mark.gloo
            @pytest.mark.parametrize("column", here)
            def test(errors: Any, column: str) -> None:
                assert errors[file, row.test, column] == ""

            test.__module__, test.__name__ = file, row.test
            test.scenario = scenario  # type: ignore[attr-defined]
            return test

        return decorate

    return practice


def run(wanted: Sequence[tuple[str, str, str]]) -> dict[tuple[str, str, str], str]:
    """Run scenarios of (module, test, column) in a rank; return the errors of all ranks."""
    errors = {}
    for module, test, column in wanted:
        mine = ""
        try:
            getattr(importlib.import_module(module), test).scenario(column)
        except BaseException:
            mine = f"rank {dist.get_rank()}: {traceback.format_exc()}"
        everyone: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        errors[module, test, column] = "".join(everyone)
    return errors
