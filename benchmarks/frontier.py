"""Bytes against loss under AdamW and Muon: every method on one task, tuned alike, on measured links.

    python benchmarks/frontier.py --task gpt-1m --steps 300     (long; resumes)
    python benchmarks/frontier.py --task gpt-1m --lab 100mbit   (then: seconds and bytes on real links)
    python benchmarks/frontier.py --report                      (only writes what is there)

A method tries every learning rate, then each value of its own two knobs, with the first seed; the best
settings are run with the other seeds.  In the lab (Linux, root) the best settings are run for a few
steps.  Every finished run is a line of ``frontier/results.jsonl`` and is not made again; the report,
``frontier.md`` and ``frontier.png``, reads nothing else.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from frontier.methods import METHODS
from frontier.report import write_report
from frontier.results import Results
from frontier.tasks import TASKS
from frontier.training import Run
from rich.console import Console

from sparsync.cli.launch import RankError
from sparsync.cli.network import Connection

HERE = Path(__file__).parent


def main() -> None:
    """Run what is missing, then write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", default="gpt-1m", help=f"several with commas: {', '.join(TASKS)}")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seeds", default="1,2,3", help="the first one tunes")
    parser.add_argument("--rates", help="learning rates (default: the task's)")
    parser.add_argument("--batch", type=int, help="samples per rank and step (default: the task's)")
    parser.add_argument("--optimizers", default="adamw,muon")
    parser.add_argument("--methods", default=",".join(METHODS), help="rows (default: all)")
    parser.add_argument("--rates-only", action="store_true", help="leave the knobs as they are")
    parser.add_argument("--lab", help="measure on links of this rate, e.g. 100mbit")
    parser.add_argument("--lab-steps", type=int, default=20, help="at least, in whole periods")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--out", type=Path, default=HERE / "frontier.md")
    arguments = parser.parse_args()
    if arguments.lab:
        Connection(lab=arguments.lab).prepare()
    results = Results(arguments.out.with_suffix("") / "results.jsonl")
    failed = []
    for name in () if arguments.report else arguments.methods.split(","):
        for task in arguments.task.split(","):
            rates = [float(rate) for rate in (arguments.rates or "").split(",") if rate]
            rates = rates or list(TASKS[task].rates)
            seeds = [int(seed) for seed in arguments.seeds.split(",")]
            for kind in arguments.optimizers.split(","):
                if kind not in METHODS[name].optimizers:
                    continue
                run = Run(
                    task=task,
                    steps=arguments.steps,
                    ranks=arguments.ranks,
                    batch=arguments.batch or TASKS[task].batch,
                    method=name,
                    optimizer=kind,
                    lr=rates[0],
                    seed=seeds[0],
                )
                try:
                    if arguments.lab:
                        results.time(run, arguments.lab, arguments.lab_steps, rates)
                    else:
                        results.tune(run, rates, seeds, knobs=not arguments.rates_only)
                except RankError as error:  # the other rows are worth their time
                    failed.append(f"{task} {name} {kind}: {error}")
                    Console(stderr=True).print(failed[-1], markup=False)
    write_report(results.rows, arguments.out)
    Console().print(f"wrote {arguments.out}", *(f"failed: {one}" for one in failed), sep="\n")


if __name__ == "__main__":
    main()
