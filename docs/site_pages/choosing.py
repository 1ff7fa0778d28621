"""Compute the decision tables of ``docs/choosing.md`` with the planner.

python docs/site_pages/choosing.py           # print them
python docs/site_pages/choosing.py --write   # put them into docs/choosing.md
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import MappingProxyType

if __name__ == "__main__":  # run as a command, this file is not part of a package
    sys.path.insert(0, str(Path(__file__).parents[1]))

from site_pages.tables import ROOT, table_row
from sparsync.cost.machine import Machine
from sparsync.cost.planner import Plan, plan
from sparsync.presets import candidates

__all__ = ["DENSITIES", "NETWORKS", "PAGE", "RANKS", "SIZES", "machine_on", "tables", "written"]

PAGE = ROOT / "docs" / "choosing.md"

# bits per second and seconds per message, for Ethernet through one switch at the usual rates
NETWORKS = MappingProxyType(
    {
        "100 Mbit/s": (100e6, 100e-6),
        "1 Gbit/s": (1e9, 50e-6),
        "10 Gbit/s": (10e9, 20e-6),
        "25 Gbit/s": (25e9, 10e-6),
        "100 Gbit/s": (100e9, 5e-6),
    }
)
RANKS = (4, 8, 32, 128)
SIZES = (
    MappingProxyType(  # parameters: a small network, the papers' VGG-16 and BERT, a language model
        {"1 M": 1_000_000, "14.7 M": 14_728_266, "134 M": 133_547_324, "1 G": 1_000_000_000}
    )
)
DENSITIES = (0.001, 0.01, 0.1)
COMPUTE = (0.0, 0.02, 0.1, 0.5, 2.0)  # seconds of a forward and backward pass
_COMPUTED_SIZE, _COMPUTED_RANKS, _COMPUTED_DENSITY = "134 M", 8, 0.01
# seconds: if ranks share cores, a wait costs a time slice of the operating system
_TURN = 5e-3

_MARKED = re.compile(r"(<!-- begin: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def machine_on(network: str, **more: float) -> Machine:
    """Return the machine for one of ``NETWORKS``, on which every rank has its own core."""
    bits, alpha = NETWORKS[network]
    return Machine(alpha=alpha, beta=8 / bits, **more)


def tables() -> dict[str, str]:
    """Return all tables, by the names in the page's markers that enclose them."""
    return {"density": _by_density(), "compute": _by_compute(), "turn": _by_turn()}


def written(page: str) -> str:
    """Return the text of the page with newly computed tables."""
    made = tables()
    return _MARKED.sub(lambda mark: f"{mark[1]}\n{made[mark[2]]}\n{mark[3]}", page)


def _cell(made: Plan, compute: float = 0.0) -> str:
    """Return the winner's name and its speed-up over dense."""
    if made.choice == "dense":
        return "**dense**"
    gain = (made.dense.seconds + compute) / (made.table[0].seconds + compute)
    return f"{made.choice} {_gain(gain)}"


def _gain(gain: float) -> str:
    return f"{gain:.{0 if gain >= 10 else 1 if gain >= 2 else 2}f}\N{NO-BREAK SPACE}x"


def _by_density() -> str:
    lines = []
    for density in DENSITIES:
        lines += ["", f"Density {100 * density:g} %:", ""]
        lines += _head("model", "network", *(f"{ranks} ranks" for ranks in RANKS))
        for label, size in SIZES.items():
            for network in NETWORKS:
                machine = machine_on(network)
                cells = [
                    _cell(plan(size, ranks, machine, candidates(), density=density))
                    for ranks in RANKS
                ]
                lines.append(table_row(label, network, *cells))
    return "\n".join(lines[1:]) + "\n"


def _by_compute() -> str:
    passes = [f"{1e3 * seconds:g} ms" if seconds else "nothing" for seconds in COMPUTE]
    lines = _head("network", *passes)
    for network in NETWORKS:
        made = [
            plan(
                SIZES[_COMPUTED_SIZE],
                _COMPUTED_RANKS,
                machine_on(network),
                candidates(),
                density=_COMPUTED_DENSITY,
                compute=seconds,
            )
            for seconds in COMPUTE
        ]
        cells = [_cell(one, seconds) for one, seconds in zip(made, COMPUTE, strict=True)]
        lines.append(table_row(network, *cells))
    return "\n".join(lines) + "\n"


def _by_turn() -> str:
    lines = _head("network", *(f"{ranks} ranks" for ranks in RANKS))
    for network in NETWORKS:
        machine = machine_on(network, turn=_TURN)
        made = [plan(SIZES["1 M"], ranks, machine, candidates(), density=0.01) for ranks in RANKS]
        lines.append(table_row(network, *map(_cell, made)))
    return "\n".join(lines) + "\n"


def _head(*titles: str) -> list[str]:
    return [table_row(*titles), table_row(*["---"] * len(titles))]


def main() -> None:
    """Print the tables, or write them into the page."""
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        return
    for table in tables().values():
        sys.stdout.write(f"{table}\n")


if __name__ == "__main__":
    main()
