"""Read the tables in ``docs/algorithms.md``, and turn mentions of papers into links."""

from __future__ import annotations

import re
from pathlib import Path
from types import MappingProxyType

__all__ = ["PAPERS", "ROOT", "algorithm_rows", "linked", "scheme_rows", "table_row"]

ROOT = Path(__file__).parents[2]
_TABLES = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")

PAPERS = MappingProxyType(
    {
        "1-bit Adam": "https://arxiv.org/abs/2102.02888",
        "AD-PSGD": "https://arxiv.org/abs/1710.06952",
        "Asynchronous Decentralized Parallel SGD": "https://arxiv.org/abs/1710.06952",
        "D-PSGD": "https://arxiv.org/abs/1705.09056",
        "DiLoCo": "https://arxiv.org/abs/2311.08105",
        "Eager-SGD": "https://arxiv.org/abs/1908.04207",
        "Gaussian-k": "https://arxiv.org/abs/1911.08772",
        "Ok-Topk": "https://doi.org/10.1145/3503221.3508399",
        "Qsparse-local-SGD": "https://arxiv.org/abs/1906.02367",
        "RedSync": "https://arxiv.org/abs/1808.04357",
        "SGP": "https://arxiv.org/abs/1811.10792",
        "SparCML": "https://arxiv.org/abs/1802.08021",
        "SparDL": "https://arxiv.org/abs/2304.00737",
        "SparseLoCo": "https://arxiv.org/abs/2508.15706",
        "Stich": "https://arxiv.org/abs/1805.09767",
        "Taming unbalanced training workloads": "https://arxiv.org/abs/1908.04207",
        "WAGMA-SGD": "https://arxiv.org/abs/2005.00124",
        "gTop-k": "https://arxiv.org/abs/1901.04359",
    }
)
"""The papers' addresses, by the names that docstrings use."""

_TAKEN = re.compile(r"`[^`]*`|\[[^\]]*\]\([^)]*\)|https?://\S+")


def linked(text: str) -> str:
    """Turn the first mention of every paper into a link.

    Example:
        >>> linked("SparCML, section 8.1")
        '[SparCML](https://arxiv.org/abs/1802.08021), section 8.1'
    """
    for name in sorted(PAPERS, key=len, reverse=True):
        if PAPERS[name] in text:
            continue
        taken = [match.span() for match in _TAKEN.finditer(text)]
        for found in re.finditer(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text):
            if not any(start <= found.start() < end for start, end in taken):
                link = f"[{name}]({PAPERS[name]})"
                text = text[: found.start()] + link + text[found.end() :]
                break
    return text


def algorithm_rows() -> dict[str, list[str]]:
    """Return the row of every preset (origin, volume, remark), by preset name."""
    found = re.findall(r"^\| `([\w-]+)` \|(.*)\|$", _TABLES, flags=re.MULTILINE)
    rows, last = {}, ""
    for name, rest in found:
        origin, *more = _cells(rest)
        last = origin.replace("the same", last)  # "the same" refers to the row above
        rows[name] = [last, *more]
    return rows


def scheme_rows() -> dict[str, list[str]]:
    """Return every scheme's row (origin, models sent, who waits), by name.  Schemes may share a row."""
    section = _TABLES.split("## Averages of models")[1].split("\n## ")[0]
    return {
        name: _cells(rest)
        for names, rest in re.findall(r"^\| ([^|]*`[^|]*)\|(.*)\|$", section, flags=re.MULTILINE)
        for name in re.findall(r"`([\w-]+)`", names)
    }


def table_row(*cells: object) -> str:
    r"""Return a row of a Markdown table.

    Example:
        >>> table_row("a|b", 1)
        '| a\\|b | 1 |'
    """
    return f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in cells)} |"


def _cells(row: str) -> list[str]:
    # the generated pages lie one folder deeper
    return [re.sub(r"\]\((?=\w+\.md)", "](../", cell.strip()) for cell in row.split("|")]
