"""Record digests of virtual ranks' results, or check that the results have the same bits.

::

    python -m tests.digests.record [--check] [NAME ...] # rows whose names contain a NAME; default: all
    python -m tests.digests.record --write [NAME ...]

Real ranks need no digests, because the tests of every transport compare them with virtual ranks.

The rows of "demo" depend on the processor: the transform is a matrix product, for which the
linear-algebra library chooses instructions by processor.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from . import gradients, others

FILE = Path(__file__).with_name("digests.json")

Table = Mapping[str, Mapping[str, str]]


def main() -> int:
    """Write or check the requested rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of the names of rows; default: all rows")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--write", action="store_true", help="record")
    what.add_argument(
        "--check", action="store_true", help="compare with what is recorded (default)"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    made = computed(arguments.names)
    wrong: list[str] = []
    if arguments.write:
        FILE.write_text(_text({**(known if arguments.names else {}), **made}))
    else:
        wrong = _differences(known, made)
    print("".join(f"{line}\n" for line in wrong), end="")
    seconds = time.monotonic() - started
    print(f"{len(made)} rows, {len(wrong)} differences, {seconds:.0f} s", file=sys.stderr)
    return 1 if wrong else 0


def computed(names: list[str]) -> dict[str, dict[str, str]]:
    """Compute the requested rows."""
    table: dict[str, Callable[[], dict[str, str]]] = {**gradients.rows(), **others.rows()}
    wanted = [name for name in table if not names or any(part in name for part in names)]
    return {name: table[name]() for name in wanted}


def _differences(known: Table, made: Table) -> list[str]:
    lines = []
    for name, row in sorted(made.items()):
        recorded = known.get(name, {})
        wrong = [k for k in sorted({*recorded, *row}) if recorded.get(k) != row.get(k)]
        if wrong:
            lines.append(f"{name}: {', '.join(wrong) if recorded else 'not recorded'}")
    return lines


def _text(table: Table) -> str:
    """Return JSON with one row per line."""
    lines = (f"{json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(table.items()))
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main())
