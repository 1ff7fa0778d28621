"""Measure up to which fraction of delta a sparse sum pays off (SparCML, section 5.1).

    python benchmarks/streams.py        (half a minute; writes benchmarks/streams.md)

"Summing sparse vectors is computationally more expensive than summing dense vectors.  Thus, in
practice, delta should be even smaller": this script measures by how much, on this machine.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

from sparsync.reduction import combine
from sparsync.sparse import DenseVector, SparseVector, Vector
from sparsync.wire import StreamCodec

SIZE = 1_000_000
PARTS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # fractions of delta
RATES = {"10 Gbit/s": 1e10, "1 Gbit/s": 1e9, "100 Mbit/s": 1e8}
REPEATS = 7


def delta(size: int, value_bytes: int, index_bytes: int = 4) -> int:
    """Return the largest number of entries at which sparse is no longer than dense, ``N i / (c + i)``."""
    return size * value_bytes // (index_bytes + value_bytes)


def operand(nnz: int, seed: int) -> SparseVector:
    """Return a vector with this many entries at random positions."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randperm(SIZE, generator=generator)[:nnz].sort().values
    return SparseVector(indices, torch.randn(nnz, generator=generator), SIZE)


def best(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the shortest time of each call; calls take turns."""
    seconds = dict.fromkeys(calls, float("inf"))
    for _ in range(REPEATS):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    return seconds


def measure() -> list[tuple[float, int, dict[str, float], dict[str, int]]]:
    """Measure a hop (encode, decode, sum) in both forms, for results with several fractions of delta."""
    codec, most = StreamCodec(factor=None), delta(SIZE, value_bytes=4)
    rows = []
    for part in PARTS:
        nnz = round(part * most / 2)
        one, other = operand(nnz, 1), operand(nnz, 2)
        dense = [DenseVector(v.to_dense()) for v in (one, other)]

        def hop(mine: Vector, theirs: Vector) -> Vector:
            message = codec.encode(theirs).payload
            return combine(mine, codec.decode(message, SIZE))

        calls: dict[str, Callable[[], object]] = {
            "sparse": lambda one=one, other=other, hop=hop: hop(one, other),
            "dense": lambda dense=dense, hop=hop: hop(dense[0], dense[1]),
            "sum, sparse": lambda one=one, other=other: combine(one, other),
            "sum, dense": lambda dense=dense: combine(dense[0], dense[1]),
        }
        nbytes = {
            "sparse": codec.encode(one).payload.numel(),
            "dense": codec.encode(dense[0]).payload.numel(),
        }
        rows.append((part, nnz, best(calls), nbytes))
    return rows


def break_even(rows: list[tuple[float, int, dict[str, float], dict[str, int]]], rate: float) -> str:
    """Return the largest fraction of delta up to which the sparse hop is faster."""
    worth = 0.0
    for part, _, seconds, nbytes in rows:
        over = {form: seconds[form] + nbytes[form] * 8 / rate for form in ("sparse", "dense")}
        if over["sparse"] > over["dense"]:
            break
        worth = part
    return f"{worth:g}"


def main() -> None:
    """Measure, then write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure()
    lines = [
        f"| {part:g} | {nnz:,} | {s['sum, sparse'] / s['sum, dense']:.2f} "
        f"| {s['sparse'] / s['dense']:.2f} | {b['sparse'] / b['dense']:.2f} |"
        for part, nnz, s, b in rows
    ]
    factors = "\n".join(f"| {name} | {break_even(rows, rate)} |" for name, rate in RATES.items())
    arguments.out.write_text(
        f"""# Sparse streams: when to switch to dense

`python benchmarks/streams.py`, torch {torch.__version__}, {platform.machine()}, one thread; {SIZE:,}
float32 elements, two operands at random places. Delta = N i / (c + i) = {delta(SIZE, 4):,} entries:
where coo takes as many bytes as a dense message. Sparse over dense:

| entries of both, over delta | of each | time of the sum | of a hop's work | bytes |
|---|---|---|---|---|
{chr(10).join(lines)}

In a hop, one operand is encoded, decoded and added to the other. Including the wire's time for one
message, the sparse hop is faster up to this fraction of delta (`StreamCodec(factor=...)`;
the largest measured fraction below the first one that is slower):

| wire | factor |
|---|---|
{factors}

The default is 1.0, because bytes decide on the networks that this library is meant for. The results
depend on the machine.
""",
        encoding="utf-8",
    )
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
