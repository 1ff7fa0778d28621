"""SparCML, Figures 1 and 7: how dense a sum of sparse vectors becomes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsync import kernels
from sparsync.collectives.density import expected_union
from sparsync.reproduce.base import (
    Artifact,
    Comparison,
    Outcome,
    Panel,
    Row,
    Settings,
    Stated,
    number,
    points,
)
from sparsync.workloads.byte_transformer import ByteTransformer
from sparsync.workloads.text import ByteText

__all__ = ["FIGURE_1", "FIGURE_7", "gradients", "union_densities"]

_RANKS = (1, 2, 4, 8, 16, 32, 64)
_DENSITIES = (0.001, 0.01, 0.05, 0.1)
_STAGES = (20, 200)  # steps of training: early and late
_OF_SUM = "density of the sum, %"
_DENSE = 0.5  # of n, from where indices and values take more bytes than all values
_SIZE = 512  # N of Figure 7
_ENTRIES = (1, 8, 32, 128)  # of N, per rank

_BECOMES_DENSE = Stated(
    "5 to 10 % per rank, summed over many ranks",
    '"can cause the reduced vector to become dense"',
    "section 3 and Figure 1, read from the text",
)
_CONSISTENT = Stated(
    "the same early and late in training",
    '"Results are consistent across training stages"',
    "Figure 1, caption",
)
_EXPECTED = Stated(
    "size of the reduced result, uniform supports",
    "N sum_i (-1)^(i-1) C(P, i) (k / N)^i",
    "appendix B.1 and Figure 7",
)
_AT_MOST = Stated("bound on it", "at most P k", "appendix B.1")


def gradients(steps: Sequence[int], ranks: int, *, batch_size: int = 8) -> Iterator[list[Tensor]]:
    """Train the demo's transformer on one rank; yield, after so many steps, a gradient per rank.

    Args:
        steps: ascending.
        ranks: number of flat gradients, each of another batch.
        batch_size: windows per rank.
    """
    text, model = ByteText.of_standard_library(), ByteTransformer(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def backward(step: int, rank: int) -> None:
        tokens, targets = text.batch(seed=0, step=step, rank=rank, batch_size=batch_size)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]

    done = 0
    for upto in steps:
        for step in range(done, upto):
            backward(step, 0)
            optimizer.step()
        done, flat = upto, []
        for rank in range(ranks):
            backward(upto, rank)
            grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
            flat.append(torch.cat(grads))
        yield flat


def union_densities(
    flat: Sequence[Tensor], density: float, ranks: Sequence[int]
) -> dict[int, float]:
    """Return the density of the sum of the first P ranks' top-k entries, for every P in ``ranks``.

    Example:
        >>> union_densities([torch.tensor([3.0, 1.0]), torch.tensor([1.0, 3.0])], 0.5, (1, 2))
        {1: 0.5, 2: 1.0}
    """
    size = flat[0].numel()
    hit, found = torch.zeros(size, dtype=torch.bool), {}
    for summed, gradient in enumerate(flat, start=1):
        hit[kernels.top(gradient, round(density * size))] = True
        if summed in ranks:
            found[summed] = int(hit.sum()) / size
    return found


def _figure_1(settings: Settings) -> Outcome:
    ranks, stages = settings.pick(_RANKS, _RANKS[:3]), settings.pick(_STAGES, (0, 1))
    rows: list[Row] = []
    size = 0
    for stage, flat in zip(stages, gradients(stages, max(ranks)), strict=True):
        size = flat[0].numel()
        settings.advance(len(stages))
        for density in _DENSITIES:
            for p, dense in union_densities(flat, density, ranks).items():
                uniform = expected_union(round(density * size), size, p) / size
                rows.append(
                    {
                        "after steps": stage,
                        "density of a rank, %": 100 * density,
                        "P": p,
                        _OF_SUM: 100 * dense,
                        "uniform supports, %": 100 * uniform,
                    }
                )
    return Outcome(
        rows,
        _compare(rows, max(ranks), stages),
        {"n": size, "windows per rank": 8, "ranks": max(ranks)},
        "A byte transformer on Python's sources, not ResNet-20 on CIFAR-10; single gradients without "
        "error feedback.",
        [
            Panel(
                f"after {stage} steps",
                "ranks P",
                _OF_SUM,
                {f"{100 * d:g} % per rank": _curve(rows, stage, d) for d in _DENSITIES},
                log="xy",
                level=100 * _DENSE,
            )
            for stage in stages
        ],
    )


def _curve(rows: Sequence[Row], stage: int, density: float) -> list[tuple[float, float]]:
    return points(rows, "P", _OF_SUM, {"after steps": stage, "density of a rank, %": 100 * density})


def _compare(rows: Sequence[Row], most: int, stages: Sequence[int]) -> list[Comparison]:
    early, late = (_curve(rows, stage, _DENSITIES[-1])[-1][1] / 100 for stage in stages)
    return [
        _BECOMES_DENSE.beside(
            f"{100 * late:.0f} % at 10 % per rank and P = {most}",
            late > _DENSE,
            "" if late > _DENSE else "the ranks of this model select the same entries more often",
        ),
        _CONSISTENT.beside(
            f"{100 * early:.0f} % after {stages[0]} steps, {100 * late:.0f} % after {stages[1]}",
            late < 1.25 * early,
            ""
            if late < 1.25 * early
            else "in the first steps the same few entries are large on all ranks; the paper's "
            "first stage is a whole epoch",
        ),
    ]


def _figure_7(settings: Settings) -> Outcome:
    draws, ranks = settings.pick(200, 5), settings.pick(_RANKS, _RANKS[:3])
    generator = torch.Generator().manual_seed(settings.seed)
    rows: list[Row] = []
    for k in settings.track(_ENTRIES):
        for p in ranks:
            drawn = [_union_of_drawn(k, p, generator) for _ in range(draws)]
            rows.append(
                {
                    "k": k,
                    "P": p,
                    "formula": expected_union(k, _SIZE, p),
                    "drawn": sum(drawn) / draws,
                    "P k": p * k,
                }
            )
    off = max(abs(number(r, "drawn") / number(r, "formula") - 1) for r in rows)
    bounded = all(number(r, "formula") <= number(r, "P k") + 1e-9 for r in rows)
    noise = 0.5 / draws**0.5
    series = {f"k = {k}": points(rows, "P", "formula", {"k": k}) for k in _ENTRIES}
    return Outcome(
        rows,
        [
            _EXPECTED.beside(
                f"drawn supports are within {100 * off:.1f} % of it",
                off < noise,
                "" if off < noise else "more than chance explains",
            ),
            _AT_MOST.beside("never exceeded", bounded, "" if bounded else "exceeded: an error"),
        ],
        {"N": _SIZE, "draws": draws},
        "The curve is a closed form; supports of exactly k entries are drawn beside it (the paper draws "
        "each entry on its own).",
        [Panel("expected entries of the sum, N = 512", "ranks P", "entries", series, log="xy")],
    )


def _union_of_drawn(k: int, ranks: int, generator: torch.Generator) -> int:
    """Return the entries of a sum of ``ranks`` random supports of k."""
    chosen = torch.rand(ranks, _SIZE, generator=generator).topk(k, dim=1).indices
    hit = torch.zeros(_SIZE, dtype=torch.bool)
    hit[chosen.flatten()] = True
    return int(hit.sum())


FIGURE_1 = Artifact(
    "sparcml-fig1",
    "SparCML",
    "density of a sum of sparse gradients over the number of ranks",
    "at 5 to 10 % per rank the sum over many ranks is dense, and sending it no cheaper",
    1.0,
    _figure_1,
)
FIGURE_7 = Artifact(
    "sparcml-fig7",
    "SparCML",
    "expected size of a sum of uniformly random supports",
    "the result grows with P and k towards N, below P k",
    0.1,
    _figure_7,
)
