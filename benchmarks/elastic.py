"""Kill and restart ranks at random; measure the loss, and how soon killed ranks return.

Every row is a run of ``sparsync train --elastic``, which trains once without faults and once with
them. The script writes ``benchmarks/elastic.md`` and a plot.

    python benchmarks/elastic.py                 # about 3 hours; with --quick 5 minutes
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SMALL = "--workload bytes --width 64 --batch-size 4 --optimizer sgd"
PACED = "--delay random:8:0.3"  # all 8 mostly wait; otherwise, fewer would be faster on 2 cores
LARGE = "--workload bytes --width 416 --optimizer sgd --ranks 4"
ROWS = {
    "4 ranks, no slow link, a kill every 10 s": f"{SMALL} --ranks 4 --steps 1500 --kill random:10",
    "8 ranks, no slow link, a kill every 10 s": f"{SMALL} --ranks 8 --steps 800 --kill random:10",
    "8 ranks, no slow link, 0.3 s of pause in a step, a kill a minute for 30 minutes": (
        f"{SMALL} --ranks 8 --steps 4200 --kill random:60 {PACED}"
    ),
    "4 ranks, 8.6 M parameters, 100 Mbit/s, a kill a minute": (
        f"{LARGE} --steps 300 --lab 100mbit --kill random:60"
    ),
    "4 ranks, 8.6 M parameters, 100 Mbit/s, a kill a minute, AdamW, updates": (
        f"{LARGE.replace('sgd', 'adamw')} --algorithm updates --steps 300 --lab 100mbit --kill random:60"
    ),
    "4 ranks, 8.6 M parameters, 10 Mbit/s, a kill every two minutes": (
        f"{LARGE} --steps 150 --lab 10mbit --kill random:120"
    ),
}
COLUMNS = {
    "kills": "kills",
    "recovered": "recovered",
    "survivors go on after, s: median": "survivor_seconds_median",
    "most": "survivor_seconds_max",
    "killed ones contribute after, s: median": "return_seconds_median",
    "at most": "return_seconds_max",
    "throughput over fault-free": "throughput_of_fault_free",
    "of the ranks present": "throughput_of_present",
    "participation": "participation_mean",
    "lost norm": "lost_norm",
    "replicas equal": "replicas_equal",
    "held-out loss": "eval_loss",
    "fault-free": "eval_loss_fault_free",
}


def main() -> None:
    """Run the rows, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="the first row alone")
    parser.add_argument("--rows", help="numbers of the rows to run, from 1 on, with commas")
    args = parser.parse_args()
    chosen = [int(number) - 1 for number in args.rows.split(",")] if args.rows else range(len(ROWS))
    for number in [0] if args.quick else chosen:
        name, options = list(ROWS.items())[number]
        found = _run(options, HERE / "elastic" / "ranks.png" if number == 2 else None)
        print(f"{name}: {found['kills']} kills, {found['recovered']} recovered", flush=True)
        _keep(name, found)
    _write()


def _run(options: str, plot: Path | None) -> dict[str, object]:
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [sys.executable, "-m", "sparsync", "train", "--elastic", *options.split()]
        command += ["--json", out.name, *(["--plot", str(plot)] if plot else [])]
        if plot is not None:
            plot.parent.mkdir(exist_ok=True)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found: dict[str, object] = json.loads(Path(out.name).read_text())
    return found


def _keep(name: str, found: dict[str, object]) -> None:
    path = HERE / "elastic" / "results.json"
    path.parent.mkdir(exist_ok=True)
    known = json.loads(path.read_text()) if path.exists() else {}
    known[name] = {key: value for key, value in found.items() if not isinstance(value, list)}
    path.write_text(json.dumps(known, indent=1) + "\n")


def _write() -> None:
    known = json.loads((HERE / "elastic" / "results.json").read_text())
    names = [name for name in ROWS if name in known]
    lines = [
        "# Ranks that are killed and restarted",
        "",
        "`python benchmarks/elastic.py`: each run is compared with a fault-free run, one after the "
        "other on one machine, with `budgeted`, density 1 % and SGD unless stated otherwise. Ranks are "
        "killed at random by SIGKILL, and their processes are restarted at once. *Survivors go on*: "
        "the time from the kill to the first step that another group has applied. With updates, steps "
        "are local steps. *Lost norm*: the norm of the lost residuals. In columns with more kills than "
        "ranks, it is too low: it was counted by the longest-running rank alone, before the launcher "
        "combined the counts of all ranks.",
        "",
        f"| | {' | '.join(names)} |",
        f"|---|{'---:|' * len(names)}",
    ]
    for column, key in COLUMNS.items():
        cells = [_cell(known[name].get(key)) for name in names]
        lines.append(f"| {column} | {' | '.join(cells)} |")
    (HERE / "elastic.md").write_text("\n".join(lines) + "\n")


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
