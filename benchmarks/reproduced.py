"""Show the papers' conclusions next to ours, from the files that ``sparsync reproduce`` wrote.

sparsync reproduce --all --out DIR          (an hour on two cores)
python benchmarks/reproduced.py DIR         (writes reproduced.md; artifacts not in DIR keep their rows)
python benchmarks/reproduced.py --count     (counts the answers in the reports of this folder)
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
from collections import Counter
from pathlib import Path

import torch

from sparsync_papers.reproduce.catalogue import ARTIFACTS
from sparsync_papers.reproduce.report import evidence

FOLDER = Path(__file__).parent
REPORT = Path(__file__).with_suffix(".md")
COLUMNS = ("artifact", "what", "paper", "ours", "same conclusion?", "seeds, steps")
ANSWER = COLUMNS.index("same conclusion?")
OLD = "1, -"  # the value for rows that were written before the column existed
OURS = re.compile(r"\(not in the paper\)")


def cells_of(line: str) -> list[str]:
    """Return the cells of a Markdown table row, or nothing for any other line."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")] if "|" in line else []


def lines_of(artifact: dict) -> list[str]:
    """Return a row per conclusion."""
    rows = []
    for compared in artifact["comparisons"]:
        stated, same = compared["stated"], compared["same"]
        cells = (
            f"`{artifact['name']}`",
            stated["what"],
            f"{stated['says']} ({stated['where']})",
            compared["ours"],
            ("yes" if same else "**no**") + (f": {compared['why']}" if compared["why"] else ""),
            evidence(artifact.get("seeds", 1), artifact.get("steps")),
        )
        rows.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return rows


def kept(text: str) -> dict[str, list[str]]:
    """Return the rows of an earlier report, by artifact."""
    rows: dict[str, list[str]] = {}
    for line in text.splitlines():
        cells = cells_of(line)
        if len(cells) > ANSWER and cells[0].startswith("`"):
            cells = [*cells[: ANSWER + 1], *(cells[ANSWER + 1 :] or [OLD])]
            rows.setdefault(cells[0].strip("`"), []).append(f"| {' | '.join(cells)} |")
    return rows


def count(text: str) -> Counter[str]:
    r"""Count a report's answers to "same conclusion?": yes, no, and rows that are not from the papers.

    Example:
        >>> count("| what | same conclusion? |\n|---|---|\n| a | yes |\n| b | **no**: short |")
        Counter({'yes': 1, 'no': 1})
    """
    found: Counter[str] = Counter()
    column = None
    for line in text.splitlines():
        cells = cells_of(line)
        if not cells:
            column = None
        elif "same conclusion?" in cells:
            column = cells.index("same conclusion?")
        elif column is not None and len(cells) > column:
            answer = re.match(r"yes|no", cells[column].strip("*"))
            if answer is not None:
                ours = any(OURS.search(cell) for cell in cells)
                found[f"{answer[0]}, of this project alone" if ours else answer[0]] += 1
    return found


def report(artifacts: list[dict], before: dict[str, list[str]]) -> str:
    """Return the report: new rows for artifacts that were run, the rows of ``before`` for all others."""
    new = {artifact["name"]: lines_of(artifact) for artifact in artifacts}
    names = [artifact.name for artifact in ARTIFACTS]
    lines = [line for name in names for line in new.get(name, before.get(name, []))]
    found = count("\n".join([f"| {' | '.join(COLUMNS)} |", *lines]))
    here = [name for name in names if name in new or name in before]
    old = [name for name in here if name not in new]
    missing = [name for name in names if name not in here]
    minutes = sum(artifact["seconds"] for artifact in artifacts) / 60
    head = [
        "# The papers, reproduced",
        "",
        "`sparsync reproduce --all --out DIR`, then `python benchmarks/reproduced.py DIR`: "
        f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}; {len(here)} "
        f"artifacts, alongside other work. **{found['yes']} of {found['yes'] + found['no']} conclusions "
        "agree with the papers'**; for the others, the table gives the reason. Rows about this project's "
        "own algorithms, which the papers do not have, are not counted. `docs/reproducing.md` explains "
        "what the kinds of evidence are worth; here, small models train for hundreds of steps. *Seeds, "
        "steps*: what an answer rests on; -: no training of so many steps.",
        "",
        f"Run last, in {minutes:.0f} minutes: {', '.join(sorted(new)) or 'none'}. "
        f"Rows of an earlier run: {', '.join(old) or 'none'}."
        + (f" Not run: {', '.join(missing)}." if missing else ""),
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{'---|' * len(COLUMNS)}",
    ]
    return "\n".join(head + lines) + "\n"


def print_counts() -> None:
    """Print the counts for every report in this folder, and their sum."""
    whole: Counter[str] = Counter()
    for path in sorted(FOLDER.glob("*.md")):
        found = count(path.read_text("utf-8"))
        if found:
            whole += found
            print(f"{path.name}: {found['yes']} of {found['yes'] + found['no']}")
    told = ", ".join(f"{name}: {number}" for name, number in sorted(whole.items()))
    print(f"the papers' conclusion: {whole['yes']} of {whole['yes'] + whole['no']} ({told})")


def main() -> None:
    """Read the result files in the catalogue's order; write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", help="of sparsync reproduce --out")
    parser.add_argument("--count", action="store_true", help="only count the answers")
    arguments = parser.parse_args()
    if arguments.count:
        print_counts()
        return
    if arguments.folder is None:
        parser.error("give the folder of sparsync reproduce --out, or --count")
    files = [arguments.folder / f"{artifact.name}.json" for artifact in ARTIFACTS]
    artifacts = [json.loads(file.read_text("utf-8")) for file in files if file.exists()]
    before = kept(REPORT.read_text("utf-8")) if REPORT.exists() else {}
    REPORT.write_text(report(artifacts, before), encoding="utf-8")


if __name__ == "__main__":
    main()
