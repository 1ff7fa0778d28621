"""Measure bytes and loss of all methods with AdamW and Muon, with the same tuning for each.

    python benchmarks/frontier.py --task gpt-1m --steps 300     (long; resumes)
    python benchmarks/frontier.py --task gpt-1m --lab 100mbit   (then seconds and bytes on real
    links)
    python benchmarks/frontier.py --report                      (only writes the report)

With the first seed, a method tries every learning rate, then each value of its two knobs; the best
settings are run with the other seeds. In the lab (Linux, root), the best settings are run for a few
steps.  Every finished run is a line of ``frontier/results.jsonl`` and is not repeated; the report,
``frontier.md`` and ``docs/images/frontier.png``, is made from these lines alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path

from frontier.methods import METHODS
from frontier.report import MARKERS, write_report
from frontier.results import Results
from frontier.tasks import TASKS
from frontier.training import Run
from rich.console import Console

from sparsync.cli.launch import RankError
from sparsync.cli.network_choice import Connection

HERE = Path(__file__).parent
OUT = HERE / "frontier.md"
PICTURE = HERE.parent / "docs" / "images" / "frontier.png"


def names(known: Mapping[str, object]) -> Callable[[str], list[str]]:
    """Return a parser of comma-separated names."""

    def read(text: str) -> list[str]:
        given = text.split(",")
        if unknown := sorted(set(given) - set(known)):
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose of {', '.join(known)}")
        return given

    return read


def numbers(kind: Callable[[str], float]) -> Callable[[str], list[float]]:
    """Return a parser of comma-separated numbers."""
    return lambda text: [kind(number) for number in text.split(",")]


def main() -> None:
    """Make the missing runs, then write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    tasks, rows, kinds = names(TASKS), names(METHODS), names(MARKERS)
    parser.add_argument("--task", type=tasks, default=["gpt-1m"], help=f"of {', '.join(TASKS)}")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seeds", type=numbers(int), default=[1, 2, 3], help="the first one tunes")
    parser.add_argument("--rates", type=numbers(float), help="learning rates (default: the task's)")
    parser.add_argument("--batch", type=int, help="samples per rank and step (default: the task's)")
    parser.add_argument("--optimizers", type=kinds, default=list(MARKERS))
    parser.add_argument("--methods", type=rows, default=list(METHODS), help="(default: all)")
    parser.add_argument("--rates-only", action="store_true", help="leave the knobs as they are")
    parser.add_argument("--lab", help="measure on links of this rate, e.g. 100mbit")
    parser.add_argument("--lab-steps", type=int, default=20, help="at least, in whole periods")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    if given.lab:
        Connection(lab=given.lab).prepare()
    results, failed = Results(given.out.with_suffix("") / "results.jsonl"), []
    for task, method, kind in product(given.task, given.methods, given.optimizers):
        if given.report or kind not in METHODS[method].optimizers:
            continue
        rates, batch = given.rates or TASKS[task].rates, given.batch or TASKS[task].batch
        seed, lr = given.seeds[0], rates[0]
        run = Run(task, given.steps, given.ranks, batch, method, kind, lr, seed)
        try:
            if given.lab:
                results.time(run, given.lab, given.lab_steps)
            else:
                results.tune(run, rates, given.seeds, knobs=not given.rates_only)
        except RankError as error:  # continue with the other rows
            failed.append(f"failed: {task} {method} {kind}: {error}")
            Console(stderr=True).print(failed[-1], markup=False)
    drawn = PICTURE if given.out == OUT else given.out.with_suffix(".png")
    written = write_report(results.rows, given.out, drawn)
    said = f"wrote {given.out}" if written else "no report: dense AdamW is not among the runs"
    Console().print(said, *failed, sep="\n", markup=False)


if __name__ == "__main__":
    main()
