"""Define tests that run on two ranks for every integration, and give rows of ``docs/semantics.md``."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.on_ranks import on_ranks

__all__ = ["COLUMNS", "ELSEWHERE", "PRACTICES", "Practice", "section"]

COLUMNS = ("attach", "updates", "UpdateSpace", "averaging")
ELSEWHERE = re.compile(r" \((tests/\S+)::(\w+)\)$")


@dataclass
class Practice:
    """A practice of training scripts.

    Attributes:
        section: its section of the page.
        name: its row of the page.
        cells: by column, "works. ...", "refused. ..." or "untested. ..."; absent if the practice
            does not exist there. A cell that a test in another folder proves ends with
            "(tests/FILE.py::NAME)".
        file: the module of the test.
        test: name of the test; empty if tests in other folders prove all cells.
    """

    section: str
    name: str
    cells: dict[str, str]
    file: str
    test: str = ""


PRACTICES: list[Practice] = []


def section(file: str, title: str) -> Callable[..., Any]:
    """Return a decorator that runs a function of the column as a test on two ranks, once per column.

    The decorator takes the practice's name and the cells by column. ``local`` is the cell of every
    column except ``attach``, and ``everywhere`` of every column, unless a column has its own cell.
    Tests of the columns in ``slow`` are slow.
    """

    def practice(
        name: str,
        *,
        local: str = "",
        everywhere: str = "",
        slow: tuple[str, ...] = (),
        **cells: str,
    ) -> Any:
        local = local or everywhere
        shared = dict.fromkeys(COLUMNS[1:], local) | {"attach": everywhere} | cells
        row = Practice(title, name, {c: shared[c] for c in COLUMNS if shared.get(c)}, file)
        PRACTICES.append(row)

        def decorate(scenario: Callable[[str], None]) -> Any:
            row.test = scenario.__name__
            columns = [
                pytest.param(column, marks=[pytest.mark.slow] if column in slow else [])
                for column, said in row.cells.items()
                if not ELSEWHERE.search(said)
            ]
            return on_ranks(2)(pytest.mark.parametrize("column", columns)(scenario))

        return decorate

    return practice
