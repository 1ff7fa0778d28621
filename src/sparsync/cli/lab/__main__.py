"""Check whether the lab works here: ``python -m sparsync.cli.lab RATE`` ends with 0, or says why not."""

from __future__ import annotations

import argparse
import sys

from sparsync.cli.app import exit_code
from sparsync.cli.lab import Lab, ensure_privileges, parse_rate


def _build(rate: str, *, ranks: int = 2) -> None:
    """Build a lab and take it away again: only that shows what the kernel has and allows."""
    parse_rate(rate)
    ensure_privileges()
    with Lab(ranks, rate):
        pass


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m sparsync.cli.lab", description=__doc__)
    parser.add_argument("rate", help="of every link, as 200mbit")
    arguments = parser.parse_args()
    sys.exit(exit_code(lambda: _build(arguments.rate)))
