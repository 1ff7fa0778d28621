"""Every cell of the matrix holds, and the page says what the matrix says."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from sparsync.bench.launch import launch
from sparsync.correction import Correction
from sparsync.integrations.checks import check_optimizer
from sparsync.units import plan_units

from . import programs
from .cases import CASES
from .page import page
from .table import TABLE, cells

ROOT = Path(__file__).parents[2]
HERE = [cell for cell in cells() if "::" not in cell[2]]
ELSEWHERE = sorted({proof for _, _, proof in cells() if "::" in proof})


@pytest.fixture(scope="module")
def said():
    """Run every proof of this folder once, in one start of two ranks."""
    proofs = list(dict.fromkeys((column, proof) for _, column, proof in HERE))
    return launch(programs.run, 2, proofs, timeout=120.0)


@pytest.mark.gloo
@pytest.mark.parametrize(("row", "column", "proof"), HERE)
def test_the_cell_holds(said, row, column, proof):
    assert said[column, proof] == ""


@pytest.mark.parametrize("proof", ELSEWHERE)
def test_the_proof_is_there(proof):
    path, _, name = proof.partition("::")
    tree = ast.parse((ROOT / path).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_case_and_every_proof_is_in_the_matrix():
    named = {proof for _, _, proof in cells()}
    assert {f"case {name}" for name in CASES} <= named
    written = {
        f"{file}.{name}"
        for file, module in programs.MODULES.items()
        for name, thing in vars(module).items()
        if getattr(thing, "__module__", "") == module.__name__
        if isinstance(thing, type(page)) and not name.startswith("_")
        if thing.__annotations__ == {"return": "None"}
    }
    assert written <= named, sorted(written - named)


def test_names_are_unique_and_every_row_says_something_of_attach():
    rows = [row for rows in TABLE.values() for row in rows]
    assert len({row.name for row in rows}) == len(rows)
    assert all(row.attach.proof and row.attach.verdict != "not applicable" for row in rows)


def test_the_page_is_up_to_date():
    assert (ROOT / "docs" / "semantics.md").read_text() == page(), (
        "run: python -m tests.semantics.page > docs/semantics.md"
    )


def test_units_hold_one_device():
    named = [
        (str(i), torch.zeros(4, device="meta" if i % 2 else "cpu")) for i in range(4)
    ]  # no second device is here: this one cannot compute, but is another
    units = plan_units(named)
    assert [(u.device.type, [s.name for s in u.slots]) for u in units] == [
        ("cpu", ["0", "2"]),
        ("meta", ["1", "3"]),
    ]


@pytest.mark.parametrize("name", ["Adafactor", "Adagrad", "RMSprop", "Rprop", "Adadelta", "NAdam"])
def test_optimizers_with_second_moments_are_warned_of(name):
    optimizer = getattr(torch.optim, name)([torch.nn.Parameter(torch.zeros(2))])
    with pytest.warns(UserWarning, match=rf"{name} divides by its second moment"):
        check_optimizer(optimizer, Correction(), sparse=True)
