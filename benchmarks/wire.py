"""Compare the packed wire format with coo and with the entropy, in bytes, time and accuracy.

    python benchmarks/wire.py        (half a minute; writes benchmarks/wire.md)

Sizes and errors are the same on every machine; times are the best of many calls on one thread.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Iterable
from math import log2
from pathlib import Path
from time import perf_counter

import torch

from sparsync import SparseVector
from sparsync.kernels import native, packing
from sparsync.wire import Codec, Coo, Packed

SIZE = 14_728_266  # parameters of VGG-16 for CIFAR-10
DENSITIES = (0.001, 0.01, 0.02)
RANKS = 8
CODECS: dict[str, Codec[SparseVector]] = {
    "coo": Coo(),
    "packed, fp32": Packed("fp32"),
    "packed, bf16": Packed("bf16"),
    "packed, int8": Packed("int8"),
}
BLOCKS = (32, 128, 512)


def entries(density: float, size: int, tail: float = 0.0) -> SparseVector:
    """Draw ``size`` normal values times log-normal factors of spread ``tail``; return the largest."""
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(size, generator=generator)
    if tail:
        dense *= torch.exp(tail * torch.randn(size, generator=generator))
    threshold = dense[:: max(size // 1_000_000, 1)].abs().quantile(1 - density)
    indices = (dense.abs() >= threshold).nonzero().flatten()
    return SparseVector(indices, dense[indices], size)


def nanoseconds(call: Callable[[], object], nnz: int, *, repeats: int) -> float:
    """Return the best time of a call per entry."""
    best = float("inf")
    for _ in range(repeats):
        start = perf_counter()
        call()
        best = min(best, perf_counter() - start)
    return best / nnz * 1e9


def table(head: list[str], lines: Iterable[list[str]]) -> str:
    """Format a Markdown table with right-aligned numbers."""
    rule = ["---", *("---:" for _ in head[1:])]
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, rule, *lines])


def index_table() -> str:
    """Compare the bits per index with the entropy of the positions."""
    lines = []
    for p in DENSITIES:
        nnz = round(p * SIZE)
        bound = -log2(p) - (1 - p) / p * log2(1 - p)
        taken = packing.index_bits(nnz, SIZE) / nnz
        low = packing.low_bits(nnz, SIZE)
        ratios = [f"{taken / bound:.3f}", f"{32 / taken:.2f}"]
        lines.append([f"{p:.1%}", *ratios, f"{taken:.2f}", f"{bound:.2f}", str(low)])
    head = ["density", "over the entropy", "coo over it", "bits", "entropy", "low bits"]
    return table(head, lines)


def size_table() -> str:
    """Compare whole messages of one rank's region."""
    lines = []
    for name, codec in CODECS.items():
        line = [name]
        for p in DENSITIES:
            size = SIZE // RANKS
            nnz = round(p * size)
            nbytes = codec.nbytes(nnz, size)
            line.append(f"{Coo().nbytes(nnz, size) / nbytes:.2f} ({8 * nbytes / nnz:.2f})")
        lines.append(line)
    return table(["coo over it (bits per entry)", *(f"{p:.1%}" for p in DENSITIES)], lines)


def time_table(size: int, *, repeats: int) -> str:
    """Time whole calls, including Python."""
    vector = entries(0.01, size)
    assert vector.nnz > 0
    lines = []
    base = 0.0
    for name, codec in CODECS.items():
        payload = codec.encode(vector).payload

        def encode(codec: Codec[SparseVector] = codec) -> object:
            return codec.encode(vector)

        def decode(codec: Codec[SparseVector] = codec, payload: torch.Tensor = payload) -> object:
            return codec.decode(payload, size)

        times = [nanoseconds(call, vector.nnz, repeats=repeats) for call in (encode, decode)]
        base = base or sum(times)
        milliseconds = sum(times) * vector.nnz * 1e-6
        lines.append(
            [name, f"{base / sum(times):.2f}", *(f"{t:.2f}" for t in times), f"{milliseconds:.3f}"]
        )
    head = ["codec", "coo's time over it", "encode ns/entry", "decode ns/entry", "both, ms"]
    return f"{vector.nnz:,} entries of {size:,}:\n\n{table(head, lines)}"


def error_table() -> str:
    """Compare rounding errors, relative to the Euclidean norm of the message."""
    lines = []
    codecs = {"bf16": Packed("bf16")}
    codecs |= {f"int8, blocks of {b}": Packed("int8", block=b) for b in BLOCKS}
    inputs = {tail: entries(0.01, SIZE // RANKS, tail) for tail in (0.0, 1.0, 2.0)}
    for name, codec in codecs.items():
        line = [name]
        for vector in inputs.values():
            error = codec.encode(vector).decoded.values - vector.values
            line.append(f"{(error.norm() / vector.values.norm()).item():.1e}")
        line.append(f"{8 * codec.nbytes(vector.nnz, vector.size) / vector.nnz:.2f}")
        lines.append(line)
    head = ["values", "normal", "log-normal, spread 1", "log-normal, spread 2", "bits per entry"]
    return table(head, lines)


def report() -> str:
    """Measure all tables and return the page."""
    kernels = "torch" if native.chosen() == "torch" else "native"
    return f"""# The packed wire format

Made by `python benchmarks/wire.py`: {platform.machine()}, one thread, {kernels} kernels; n = {SIZE:,}.

## Bits of an index (Elias-Fano)

*Entropy* is that of a support in which every element is present with this probability.

{index_table()}

## A whole message

The region of one of {RANKS} ranks, including headers and scales; bits per entry in brackets.

{size_table()}

## Time

Best of many whole calls of `encode` and `decode` at 1 %. Times depend on the machine, so compare ratios.
coo checks less and does not round.

{time_table(SIZE, repeats=30)}

{time_table(SIZE // RANKS, repeats=200)}

## Error of rounding

|x - decoded| / |x| over the largest 1 % of normal values times log-normal factors; the caller keeps
the difference in the residual. The errors are far below 1, as error feedback requires.

{error_table()}
"""


def main() -> None:
    """Measure, then write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.write_text(report(), encoding="utf-8")
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
