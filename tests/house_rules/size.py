"""Compare lines of code with their budgets: ``python -m tests.house_rules.size``.

Docstrings, comments and blank lines do not count, so explanations are free. No test depends on the
result, so there is no reason to shorten clear code.
"""

import ast
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
AIMS = {"library": 19_000, "cli": 6_200, "papers": 6_800, "tests": 25_000}  # lines
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


def lines_of_code(source: str) -> int:
    """Count the lines of a module that contain code."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {
        line
        for token in tokens
        if token.type not in LAYOUT and token.type != tokenize.ENDMARKER
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                lines -= set(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def measured() -> dict[str, int]:
    """Return the lines of code of each part."""
    cli = ROOT / "src" / "sparsync" / "cli"
    found = dict.fromkeys(AIMS, 0)
    for folder in (ROOT / "src" / "sparsync", ROOT / "papers", ROOT / "tests"):
        for path in folder.rglob("*.py"):
            part = "library" if folder.name == "sparsync" else folder.name
            found["cli" if path.is_relative_to(cli) else part] += lines_of_code(path.read_text())
    return found


if __name__ == "__main__":
    for part, count in measured().items():
        print(f"{part:8} {count:6,} lines of code; the aim is {AIMS[part]:,}")
