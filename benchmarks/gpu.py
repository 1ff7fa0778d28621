"""Run every part of sparsync that needs a GPU: first check correctness, then measure times.

    make gpu                                  (20 minutes at most; an NVIDIA GPU and torch for CUDA)
    make gpu GPU_PYTHON=python3               (with that Python's installed packages; needs no network)
    python benchmarks/gpu.py --rehearse       (a minute, without a GPU: tiny sizes, Triton's interpreter)

Each part runs in a separate process, so a part that breaks its CUDA context affects no other.  The tables
go to benchmarks/gpu.md, and as JSON next to it; a rehearsal writes neither, unless --json names a file.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gpu_parts import PARTS, ROOT, Row, say

TOTAL_SECONDS = 1200
NEEDED = ("triton", "pytest", "hypothesis", "typer", "rich", "zmq")


def missing() -> str | None:
    """Return a line that names a missing requirement, or None."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is not built for CUDA; install one that is (pytorch.org)"
    if not torch.cuda.is_available():
        return "torch finds no NVIDIA GPU; nvidia-smi lists those that the driver knows"
    absent = [name for name in NEEDED if not _installed(name)]
    return f"not installed: {', '.join(absent)}" if absent else None


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def run_part(name: str, rehearse: bool, seconds: float) -> Row:
    """Run a part in its own process group, which ends with the part."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.json")
        command = [sys.executable, __file__, "--part", name, "--json", str(out)]
        process = subprocess.Popen(
            [*command, *["--rehearse"] * rehearse], cwd=ROOT, start_new_session=True
        )
        started = time.perf_counter()
        try:
            code = process.wait(max(seconds, 1))
            reason = None if code == 0 else f"ended with {code}"
        except subprocess.TimeoutExpired:
            reason = f"did not end within {seconds:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        done = json.loads(out.read_text()) if out.exists() else {"rows": []}
    return {"failed": reason, "seconds": round(time.perf_counter() - started, 1)} | done


def be_part(name: str, rehearse: bool, out: Path) -> int:
    """Run a part in this process; write its rows as they come, and the reason if it fails."""
    rows: list[Row] = []
    try:
        for row in PARTS[name][0](rehearse):
            rows.append(row)
            out.write_text(json.dumps({"rows": rows}))
    except Exception as error:
        text = f"{type(error).__name__}: {error}".strip()
        out.write_text(json.dumps({"rows": rows, "failed": text[-4000:]}))
        sys.stderr.write(f"{text}\n")
        return 1
    return 0


def about() -> Row:
    """Return the machine's name and the versions of its software."""
    known: Row = {"torch": torch.__version__, "Python": platform.python_version()}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        known |= {"GPU": properties.name, "GiB": round(properties.total_memory / 2**30, 1)}
        known |= {
            "CUDA": torch.version.cuda,
            "capability": f"{properties.major}.{properties.minor}",
        }
    if _installed("triton"):
        known["Triton"] = importlib.import_module("triton").__version__
    return known


def report(results: dict[str, Row], machine: Row) -> str:
    """Return the page."""
    named = ", ".join(f"{name} {value}" for name, value in machine.items())
    lines = ["# On a GPU", "", f"`make gpu` (benchmarks/gpu.py). {named}.", ""]
    for part, result in results.items():
        first = (PARTS[part][0].__doc__ or "").splitlines()[0]
        lines += [f"## {part.replace('_', ' ')}", "", f"{first} ({result['seconds']:.0f} s)", ""]
        if result["failed"]:
            lines += [f"**FAILED**: {result['failed'].splitlines()[-1]}", ""]
        columns = list(dict.fromkeys(name for row in result["rows"] for name in row))
        if columns:
            rows = [[_cell(row.get(name)) for name in columns] for row in result["rows"]]
            table = [columns, ["---"] * len(columns), *rows]
            lines += [f"| {' | '.join(row)} |" for row in table] + [""]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return (
        f"{value:.3g}"
        if isinstance(value, float)
        else f"{value:,}"
        if isinstance(value, int)
        else value
    )


def main() -> int:
    """Run all parts, or one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, tiny")
    parser.add_argument("--json", type=Path, help="default: benchmarks/gpu.json")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rehearse:
        # Triton and the driver read these at their first use
        os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    elif lacking := missing():
        sys.stderr.write(f"make gpu: {lacking}\n")
        return 1
    else:
        os.environ.pop("TRITON_INTERPRET", None)
    if options.part:
        return be_part(options.part, options.rehearse, options.json)
    results: dict[str, Row] = {}
    until = time.monotonic() + TOTAL_SECONDS
    for name in options.only.split(","):
        say(f"{name} ...")
        left = min(PARTS[name][1], until - time.monotonic())
        results[name] = run_part(name, options.rehearse, left)
        outcome = (results[name]["failed"] or f"{len(results[name]['rows'])} rows").splitlines()[-1]
        say(f"{name}: {outcome}, {results[name]['seconds']} s")
    page = report(results, machine := about())
    path = options.json or (None if options.rehearse else ROOT / "benchmarks/gpu.json")
    if path is not None:
        path.write_text(json.dumps({"machine": machine, "parts": results}, indent=1) + "\n")
    if not options.rehearse and set(results) == set(PARTS):
        (ROOT / "benchmarks/gpu.md").write_text(page)
    sys.stdout.write(page)
    return int(any(result["failed"] for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
