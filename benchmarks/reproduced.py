"""The papers' conclusions next to ours, from the files that ``sparsync reproduce`` wrote.

sparsync reproduce --all --out DIR        (an hour on two cores)
python benchmarks/reproduced.py DIR       (writes reproduced.md)
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path

import torch

from sparsync_papers.reproduce.catalogue import ARTIFACTS


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
        )
        rows.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return rows


def report(artifacts: list[dict]) -> str:
    """Return the document."""
    compared = [c["same"] for artifact in artifacts for c in artifact["comparisons"]]
    minutes = sum(artifact["seconds"] for artifact in artifacts) / 60
    head = [
        "# The papers, reproduced",
        "",
        "`sparsync reproduce --all --out DIR`, then `python benchmarks/reproduced.py DIR`: "
        f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}; {len(artifacts)} "
        f"artifacts, {minutes:.0f} minutes in all, alongside other work. **{sum(compared)} of "
        f"{len(compared)} conclusions agree with the papers'**; for the others, the table gives the "
        "reason. `docs/reproducing.md` explains what the kinds of evidence are worth; here, small "
        "models train for hundreds of steps with one seed.",
        "",
        "| artifact | what | paper | ours | same conclusion? |",
        "|---|---|---|---|---|",
    ]
    return "\n".join(head + [line for a in artifacts for line in lines_of(a)]) + "\n"


def main() -> None:
    """Read the existing files, in the catalogue's order."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="of sparsync reproduce --out")
    arguments = parser.parse_args()
    files = [arguments.folder / f"{artifact.name}.json" for artifact in ARTIFACTS]
    artifacts = [json.loads(file.read_text("utf-8")) for file in files if file.exists()]
    Path(__file__).with_suffix(".md").write_text(report(artifacts), encoding="utf-8")


if __name__ == "__main__":
    main()
