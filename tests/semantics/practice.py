"""Define the tests that run on two ranks for every integration, and the rows of ``docs/semantics.md``."""

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
        section: the page's section that contains the practice.
        name: the first cell of its row.
        cells: by column, "works. ...", "refused. ..." or "untested. ..."; absent if the practice
            does not exist in this column. A cell that is proved by a test in a different folder ends
            with "(tests/FILE.py::NAME)".
        file: the module of the test.
        test: name of the test in ``file``; empty if tests in different folders prove all cells.
    """

    section: str
    name: str
    cells: dict[str, str]
    file: str
    test: str = ""


PRACTICES: list[Practice] = []


def section(file: str, title: str) -> Callable[..., Any]:
    """Return a decorator that turns a function of a column into a test on two ranks for each column.

    The decorator is called with the practice's name and the cells by column. ``local`` is the default
    for the cells of all columns except ``attach``, and ``everywhere`` for the cells of all columns.
    For the columns in ``slow``, the test is marked as slow.
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
