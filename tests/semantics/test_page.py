"""Check that the page agrees with the tests."""

from pathlib import Path

import pytest

from .page import page
from .practice import ELSEWHERE, PRACTICES

ROOT = Path(__file__).parents[2]
FOUND = [ELSEWHERE.search(said) for row in PRACTICES for said in row.cells.values()]


def test_the_page_is_up_to_date():
    written = (ROOT / "docs" / "semantics.md").read_text()
    assert written == page(), "run: python -m tests.semantics.page > docs/semantics.md"


@pytest.mark.parametrize(("path", "name"), sorted({match.groups() for match in FOUND if match}))
def test_proofs_in_other_folders_exist(path, name):
    assert f"\ndef {name}(" in (ROOT / path).read_text()


def test_names_are_unique_and_every_row_has_attach():
    assert len({row.name for row in PRACTICES}) == len(PRACTICES)
    assert all("attach" in row.cells for row in PRACTICES)
