"""Time training steps with many small parameters, with ``attach`` relative to plain DDP.

    python benchmarks/small_parameters.py [CASE]    (6 minutes; writes benchmarks/small_parameters.md)

Two ranks communicate over loopback, without a slow link. The same two processes train the models of
a row alternately, for two steps each; updates are exchanged after the second step. Figures are
medians of wall-clock time, or ratios of medians. The figures in parentheses are for processor time,
which other jobs on the machine disturb less. The excess over 1 is the cost of the exchange, which
does not pay off without a slow link, and of the Python code per parameter. If a CASE (a substring of
its name) is given, its results are only printed.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync.cli.launch import launch

RANKS = 2
SECONDS = 15  # duration of a row, unless FEWEST turns take longer
TURNS, FEWEST = 20, 4
WARM = 2  # untimed turns: DDP rebuilds its buckets in the second step
WIDTH, LAYERS, WORDS, TOKENS, BATCH = 64, 24, 512, 64, 4


class Chain(nn.Module):
    """Parameters of one size, with two operations each."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(0.1 * torch.randn(size) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs."""
        for part in self.parts:
            x = torch.tanh(x + part)
        return x


class Transformer(nn.Module):
    """A narrow transformer with 24 layers and 292 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, norm=nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs."""
        return self.head(self.layers(self.words(x)))


# name -> count and size of parameters (None for the transformer), and unit_bytes
CASES: dict[str, tuple[tuple[int, int] | None, int | None]] = {
    "1,000 x 8": ((1_000, 8), None),
    "3,000 x 8": ((3_000, 8), None),
    "10,000 x 100": ((10_000, 100), None),
    f"transformer of {LAYERS} layers": (None, None),
    "1,000 x 8, each a unit": ((1_000, 8), 1),
}
SGD = "SGD: gradients"
ADAM = "AdamW: updates"
WITHIN, PLAIN = f"{ADAM}, in DDP", f"{ADAM}, plain module"
# variant -> the variant with which it is compared
WAYS = {
    SGD: "SGD: DDP",
    WITHIN: "AdamW: DDP",
    PLAIN: "AdamW: DDP",
}


def stepper(way: str, shape: tuple[int, int] | None, unit_bytes: int | None) -> Callable[[], None]:
    """Return a training step."""
    torch.manual_seed(0)
    model: nn.Module = Transformer() if shape is None else Chain(*shape)
    if way != PLAIN:
        model = DistributedDataParallel(model)
    kind = torch.optim.SGD if way.startswith("SGD") else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-3)
    if way in WAYS:
        compression = sparsync.Compression(unit_bytes=unit_bytes)
        given = [optimizer] if way.startswith(ADAM) else []
        sparsync.attach(model, *given, compression=compression)
    generator = torch.Generator().manual_seed(dist.get_rank())
    words = torch.randint(WORDS, (BATCH, TOKENS), generator=generator)
    x = words if shape is None else torch.randn(shape[1], generator=generator)

    def step() -> None:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()

    return step


def measure(
    shape: tuple[int, int] | None, unit_bytes: int | None
) -> dict[str, tuple[float, float]]:
    """Return rank 0's median wall-clock and processor seconds per step for every variant."""
    ways = dict.fromkeys([*WAYS.values(), *WAYS])
    steps = {way: stepper(way, shape, unit_bytes) for way in ways}
    spent: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    begin = 0.0
    for number in range(WARM + TURNS):
        if number == WARM:
            begin = time.perf_counter()
        for way, step in steps.items():
            dist.barrier()
            began = time.perf_counter(), time.process_time()
            step()
            step()
            if number >= WARM:
                ended = time.perf_counter(), time.process_time()
                spent[way].append(((ended[0] - began[0]) / 2, (ended[1] - began[1]) / 2))
        enough = number + 1 >= WARM + FEWEST and time.perf_counter() - begin > SECONDS
        late = torch.tensor(float(enough))
        dist.broadcast(late, 0)
        if late:
            break
    return {
        way: (median(t for t, _ in its), median(t for _, t in its)) for way, its in spent.items()
    }


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "case", nargs="?", default="", help="part of a name: only these, and only printed"
    )
    wanted = parser.parse_args().case
    lines = [
        "# A training step with many small parameters, relative to plain DDP's",
        "",
        f"`python benchmarks/small_parameters.py`: {RANKS} ranks, no slow link, {os.cpu_count()} cores, "
        f"{platform.machine()}, torch {torch.__version__}, k = 1%; medians, measured in turn; ratios of "
        f"processor time in parentheses. The load was {os.getloadavg()[0]:.1f} before. The transformer: "
        f"width {WIDTH}, {BATCH} x {TOKENS} tokens.",
        "",
        "| parameters | " + " | ".join(f"{way}, ms" for way in dict.fromkeys(WAYS.values())),
        "|---|" + "---:|" * (len(set(WAYS.values())) + len(WAYS)),
    ]
    lines[-2] += " | " + " | ".join(f"{way}, x" for way in WAYS) + " |"
    for name, case in CASES.items():
        if wanted in name:
            found = launch(measure, RANKS, *case, timeout=300.0)
            cells = [f"{1e3 * found[way][0]:.1f}" for way in dict.fromkeys(WAYS.values())]
            pairs = [(found[way], found[plain]) for way, plain in WAYS.items()]
            cells += [f"{own[0] / its[0]:.2f} ({own[1] / its[1]:.2f})" for own, its in pairs]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
    if not wanted:
        Path(__file__).with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
