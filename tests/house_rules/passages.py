"""Draw random passages of prose, for readers to rate as native, clear or hard to read.

    python -m tests.house_rules.passages --seed 34 [--count 60]

A passage is a docstring, a block of comment lines, or a paragraph or list item of a page.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHORTEST = 60  # characters of a passage
CODE = ("src", "papers/src", "benchmarks", "tests")
PAGES = ("README.md", "CONTRIBUTING.md", "docs", "papers/README.md", "benchmarks/README.md")
GENERATED = {"semantics.md"}


def of_code(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and text of every docstring and every block of comment lines."""
    text = file.read_text()
    for node in ast.walk(ast.parse(text)):
        documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, documented) and (found := ast.get_docstring(node)):
            yield node.body[0].lineno, found
    block: list[str] = []
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        line = token.line.lstrip()
        alone = (
            token.type == tokenize.COMMENT and line.startswith("#") and not line.startswith("# --")
        )
        if not alone:
            continue
        if token.start[0] != last + 1 and block:
            yield last - len(block) + 1, "\n".join(block)
            block = []
        block.append(token.string)
        last = token.start[0]
    if block:
        yield last - len(block) + 1, "\n".join(block)


def of_page(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and text of every paragraph and list item; skip tables and code."""
    inside, block, start = False, list[str](), 0
    for number, line in enumerate([*file.read_text().splitlines(), ""], 1):
        if line.lstrip().startswith("```"):
            inside = not inside
        prose = (
            not inside
            and line.strip()
            and not line.lstrip().startswith(("#", "|", "```", "!", "<"))
        )
        if block and (not prose or line.lstrip().startswith(("- ", "* "))):
            yield start, "\n".join(block)
            block = []
        if prose:
            start = start if block else number
            block.append(line)


def drawn(seed: int, count: int) -> list[str]:
    """Return random passages with their places; every passage is equally likely."""
    found = []
    for folder in CODE:
        for file in sorted((ROOT / folder).rglob("*.py")):
            found += [(file, *one) for one in of_code(file)]
    for page in PAGES:
        files = [ROOT / page] if (ROOT / page).is_file() else sorted((ROOT / page).rglob("*.md"))
        for file in (one for one in files if one.name not in GENERATED):
            found += [(file, *one) for one in of_page(file)]
    long = [one for one in found if len(one[2]) >= SHORTEST]
    chosen = random.Random(seed).sample(long, count)
    return [f"{file.relative_to(ROOT)}:{line}\n{text}\n" for file, line, text in chosen]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=60)
    given = parser.parse_args()
    for number, passage in enumerate(drawn(given.seed, given.count), 1):
        print(f"---- {number}. {passage}")
