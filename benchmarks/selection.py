"""Measure the cost of selecting 0.1 % of a residual, by size and selector (RedSync, Figure 3).

    python benchmarks/selection.py        (10 minutes, 3 GB; writes selection.md and selection.png)

For each input, this is equivalent to ``sparsync bench --selectors --plot
benchmarks/selection.png``.
"""

from __future__ import annotations

import argparse
import io
import platform
from pathlib import Path

import torch
from rich.console import Console

from sparsync.cli.bench.selection_time import (
    DEFAULT_SIZES,
    SELECTOR_INPUTS,
    SelectorSettings,
    bench_selectors,
    parse_sizes,
    selector_tables,
    write_plot,
)
from sparsync.kernels import native

WIDTH = 88  # characters


def main() -> None:
    """Measure all inputs, plot the figure's input, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    parser.add_argument("--sizes", default=DEFAULT_SIZES)
    arguments = parser.parse_args()
    sizes = parse_sizes(arguments.sizes)
    shown = io.StringIO()
    for kind in SELECTOR_INPUTS:
        rows = bench_selectors(SelectorSettings(sizes, input=kind))
        assert all(row.correct for row in rows), f"{kind}: not the k largest"
        Console(file=shown, width=WIDTH).print(selector_tables(rows))
        if kind == SELECTOR_INPUTS[0]:
            write_plot(rows, arguments.out.with_suffix(".png"))
    text = "\n".join(line.rstrip() for line in shown.getvalue().strip().splitlines())
    arguments.out.write_text(
        f"""# The cost of selection

`python benchmarks/selection.py --sizes {arguments.sizes}`, torch {torch.__version__},
{platform.machine()} ({native.chosen()}), one thread. Only the thread's own time counts, without waiting
for a core. Other programs' use of caches and memory still slows the rows that read most, so run it on a
quiet machine. RedSync's Figure 3 has 64 KB to 512 MB; density 0.1 %. "uniform" is the figure's input;
"residual" is the residual after 20 rounds of error feedback. A small gradient is added between two calls.
"binary search, 1 of 5" searches on one of 5 calls and reuses the threshold on the other four; its time is
the mean of the five. "exact + x.add_, fused" is this project's default: it collects candidates while
accumulating, then selects exactly among them. Its time includes the accumulation, which all others need
in addition (`x.add_(gradient)`). The last row is the lower bound, a single read.

![milliseconds per call over the size of the residual](selection.png)

```
{text}
```
""",
        encoding="utf-8",
    )
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
