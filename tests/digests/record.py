"""Record digests of what the library computes, or check that it still computes the same bits.

::

    python -m tests.digests.record [--check] [NAME ...]   # rows whose name holds a NAME; default: all
    python -m tests.digests.record --write [NAME ...]

The digests are those of one kind of machine and one version of PyTorch: noise and products of matrices
may have other last bits elsewhere.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from . import gradients, others, ranks, subject

_ONE_PROCESS = ("bytes:", "calls:", "linear:", "models:", "selected:")  # rows without real ranks
FILE = Path(__file__).with_name("digests.json")

Table = Mapping[str, Mapping[str, str]]


def main() -> int:
    """Write or check the rows that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of the names of rows; default: all rows")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--write", action="store_true", help="record")
    what.add_argument(
        "--check", action="store_true", help="compare with what is recorded (default)"
    )
    parser.add_argument("--sim-only", action="store_true", help="start no processes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    made = simulated(arguments.names)
    wrong = []
    if not arguments.sim_only:
        theirs = real(arguments.names)
        repeated = {name: row for name, row in theirs.items() if " over " in name}
        made |= {name: row for name, row in theirs.items() if name not in repeated}
        wrong = _differences({**known, **made}, repeated, "not as on virtual ranks: ")
    if arguments.write:
        kept = {n: row for n, row in known.items() if arguments.names or arguments.sim_only}
        FILE.write_text(_text({**kept, **made}))
    else:
        wrong += _differences(known, made)
    print("".join(f"{line}\n" for line in wrong), end="")
    seconds = time.monotonic() - started
    print(f"{len(made)} rows, {len(wrong)} differences, {seconds:.0f} s", file=sys.stderr)
    return 1 if wrong else 0


def simulated(names: list[str]) -> dict[str, dict[str, str]]:
    """Compute the rows that need one process."""
    table: dict[str, Callable[[], dict[str, str]]] = {**gradients.rows(), **others.rows()}
    return {name: make() for name, make in table.items() if _wanted(name, names)}


def real(names: list[str]) -> dict[str, dict[str, str]]:
    """Compute the rows of real processes, in one start per number of them and one of ``mpiexec``.

    "ROW over TRANSPORT" is a row of virtual ranks again: it is compared with that, and not recorded.
    """
    table: dict[str, dict[str, str]] = {}
    if names and all(part.startswith(_ONE_PROCESS) for part in names):
        return table
    table.update(subject.launch(ranks.rows, ranks.RANKS, timeout=60.0))
    table.update(subject.launch(ranks.averaged, 3, "zmq", timeout=60.0))
    if _has_mpi():
        table.update(subject.launch(ranks.averaged, ranks.RANKS, "mpi", timeout=60.0, mpi=True))
    else:
        print("no MPI here: nothing was compared over mpi", file=sys.stderr)
    return {name: row for name, row in table.items() if _wanted(name, names)}


def _has_mpi() -> bool:
    """Tell whether MPI can be loaded; in a process of its own, for loading initialises it."""
    try:
        subject.mpiexec_command(ranks.RANKS)
    except subject.ConfigurationError:
        return False
    loading = [sys.executable, "-c", "import mpi4py.MPI"]
    return subprocess.run(loading, capture_output=True, check=False).returncode == 0


def _wanted(name: str, names: list[str]) -> bool:
    return not names or any(part in name for part in names)


def _differences(known: Table, made: Table, why: str = "") -> list[str]:
    lines = []
    for name, row in sorted(made.items()):
        recorded = known.get(name.partition(" over ")[0], {})
        keys = row if why else {*recorded, *row}
        wrong = [key for key in sorted(keys) if recorded.get(key) != row.get(key)]
        if wrong:
            lines.append(f"{name}: {why}{', '.join(wrong) if recorded else 'not recorded'}")
    return lines


def _text(table: Table) -> str:
    """Return JSON with one row per line."""
    lines = (f"{json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(table.items()))
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main())
