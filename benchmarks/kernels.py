"""Time the CPU kernels relative to torch's ``residual.add_(gradient)`` and its other operations.

python benchmarks/kernels.py [--json FILE] [--rounds 20] [--threads 1,2]     (about a minute)

The rows of a table are measured one after the other in several rounds, and each row's best time
counts. So other programs on the machine affect all rows alike. Before every measurement, the inputs
are restored, and torch's threads get time to fall asleep, because they spin for some milliseconds
after an operation. The results are checked. The script writes the table in benchmarks/kernels.md.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from sparsync import kernels
from sparsync.kernels import native
from sparsync.kernels import reference as specification

SIZE = 14_728_266  # VGG-16 on CIFAR-10
DENSITY = 0.01
WARM_UP = 20  # steps of error feedback, in which the residual piles up below the threshold
REST = 0.01  # seconds for which torch's threads may fall asleep
RANKS = 8
BINS = 512

Rows = dict[str, Callable[[], object]]


def error_feedback(size: int, k: int) -> tuple[Tensor, Tensor]:
    """Return a residual as after some training, and the next gradient, in blocks of unequal scale."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.logspace(-1, 1, 64).repeat_interleave(-(-size // 64))[:size]
    residual = torch.zeros(size)
    for _ in range(WARM_UP):
        residual += torch.randn(size, generator=generator) * scale
        residual[kernels.top(residual, k)] = 0
    return residual, torch.randn(size, generator=generator) * scale


def measure(rows: Rows, rounds: int, restore: Callable[[], object]) -> dict[str, float]:
    """Return the best seconds of each row."""
    best = dict.fromkeys(rows, float("inf"))
    for _ in range(rounds):
        for name, run in rows.items():
            restore()
            if torch.get_num_threads() > 1:
                time.sleep(REST)
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def whole_vector(rounds: int) -> list[dict[str, object]]:
    """Measure the kernels that read all n elements, relative to ``add_``."""
    k = round(SIZE * DENSITY)
    residual, gradient = error_feedback(SIZE, k)
    r, g = residual.clone(), gradient.clone()
    ordered = kernels.magnitude_keys(residual + gradient).topk(2 * k).values.sort().values
    key_k, key_2k = int(ordered[k]), int(ordered[0])

    def select(isa: str) -> Tensor:
        with mock.patch.object(native, "chosen", lambda: isa):
            found = native.accumulate_(r, g, key_2k, 4 * k)
            return found[0][native.top(found[1], k)]

    def by_torch() -> Tensor:
        return r.add_(g).abs().topk(k).indices

    def restore() -> None:
        r.copy_(residual)
        g.copy_(gradient)

    expected = by_torch().sort().values
    for isa in native.instruction_sets():
        restore()
        assert torch.equal(select(isa), expected), isa
    assert torch.equal(kernels.top(r, k), expected)

    best, *others = native.instruction_sets()
    rows: Rows = {
        "residual.add_(gradient)": lambda: r.add_(g),
        "accumulate_": lambda: native.accumulate_(r, g),
        "accumulate_, collect k": lambda: native.accumulate_(r, g, key_k, 4 * k),
        "accumulate_, collect 2 k": lambda: native.accumulate_(r, g, key_2k, 4 * k),
        "accumulate_, collect 2 k, top": lambda: select(best),
        **{f"the same, {isa}": (lambda isa=isa: select(isa)) for isa in others},
        "top of all n": lambda: native.top(g, k),
        "scatter_ of k": lambda: native.scatter_(r, expected, residual[:k]),
    }
    seconds = measure(rows, rounds, restore)
    seconds |= measure({"add_, abs, torch.topk": by_torch}, 3, restore)
    add = seconds["residual.add_(gradient)"]
    topk = seconds["add_, abs, torch.topk"]
    return [
        {"kernel": name, "over_add": s / add, "torch_over": topk / s, "seconds": s}
        for name, s in seconds.items()
    ]


def sparse_streams(rounds: int) -> list[dict[str, object]]:
    """Measure the kernels that read about k entries, relative to torch's operations."""
    k, region = round(SIZE * DENSITY), SIZE // RANKS
    generator = torch.Generator().manual_seed(1)

    def entries(nnz: int, size: int) -> tuple[Tensor, Tensor]:
        places = torch.randperm(size, generator=generator)[:nnz].sort().values
        return places, torch.randn(nnz, generator=generator)

    streams = [entries(k // RANKS, region) for _ in range(RANKS)]
    (indices, values), (among, _) = entries(k, SIZE), entries(k, SIZE)
    dense = torch.zeros(SIZE)
    keys = kernels.magnitude_keys(values).sort().values[:: -(-k // BINS)].contiguous()
    candidates = torch.randn(2 * k, generator=generator)
    calls: dict[str, tuple[str, tuple[object, ...]]] = {
        f"merge of {RANKS} streams, k entries": ("merge", (streams, region)),
        "restrict of k to k": ("restrict", (indices, among)),
        "subtract_ of k": ("subtract_", (dense, indices, values)),
        f"count_from k, {BINS} keys": ("count_from", (values, keys)),
        "top, k of 2 k": ("top", (candidates, k)),
    }
    rows: Rows = {}
    for name, (kernel, arguments) in calls.items():
        rows[name] = partial(getattr(native, kernel), *arguments)
        rows[f"{name}, torch"] = partial(getattr(specification, kernel), *arguments)
    seconds = measure(rows, rounds, lambda: None)
    return [
        {"kernel": n, "torch_over": seconds[f"{n}, torch"] / seconds[n], "seconds": seconds[n]}
        for n in calls
    ]


def table(title: str, rows: list[dict[str, object]]) -> Table:
    """Return a table with the ratios first and the milliseconds last."""
    columns = {
        "kernel": "",
        "over_add": "over add_",
        "torch_over": "torch over it",
        "seconds": "ms",
    }
    shown = [name for name in columns if name in rows[0]]
    result = Table(title=title, title_justify="left")
    for name in shown:
        result.add_column(columns[name], justify="left" if name == "kernel" else "right")
    for row in rows:
        numbers = [row[name] * (1e3 if name == "seconds" else 1) for name in shown[1:]]
        result.add_row(row["kernel"], *(f"{n:.2f}" if n < 20 else f"{n:.0f}" for n in numbers))
    return result


def main() -> None:
    """Measure, check, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows to this file as well")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", default="1,2", help="measure with each of these")
    options = parser.parse_args()
    console, collected = Console(), {}
    head = f"n = {SIZE:,}, k = {DENSITY:.0%}; torch {torch.__version__}, {native.chosen()}"
    for threads in map(int, options.threads.split(",")):
        torch.set_num_threads(threads)
        rows = collected[f"whole vector, {threads}"] = whole_vector(options.rounds)
        console.print(table(f"{head}; threads: {threads}", rows))
    torch.set_num_threads(1)
    rows = collected["sparse streams, 1"] = sparse_streams(options.rounds)
    console.print(table(f"{head}; threads: 1", rows))
    if options.json:
        options.json.write_text(json.dumps(collected, indent=1) + "\n")


if __name__ == "__main__":
    main()
