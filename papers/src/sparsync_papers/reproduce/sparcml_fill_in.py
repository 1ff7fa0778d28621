"""SparCML, Figures 1 and 7: the density of a sum of sparse vectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsync import kernels
from sparsync.cli.workloads.stdlib_text import ByteText, ByteTransformer
from sparsync.cli.workloads.workload import Draw
from sparsync.collectives.costs import expected_union
from sparsync_papers.reproduce import Comparison, Outcome, Panel, Settings, Table, artifact

_RANKS = (1, 2, 4, 8, 16, 32, 64)
_DENSITIES = (0.001, 0.01, 0.05, 0.1)
_STEPS = 200  # training steps
_EARLY = 10  # "early in training" is after a tenth of the steps
_OF_SUM = "density of the sum, %"
_DENSE = 0.5  # density above which indices and values take more bytes than all n values
_SIZE = 512  # N of Figure 7
_ENTRIES = (1, 8, 32, 128)  # number of entries per rank, out of N


def gradients(steps: Sequence[int], ranks: int, *, batch_size: int = 8) -> Iterator[list[Tensor]]:
    """Train the demo's transformer on one rank; at each of ``steps``, yield a gradient for each rank."""
    text, model = ByteText.of_standard_library(), ByteTransformer(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def backward(step: int, rank: int) -> None:
        tokens, targets = text.batch(Draw(0, step, rank, ranks, batch_size))
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


@artifact(
    "sparcml-fig1",
    "at 5 to 10 % per rank the sum over many ranks is dense, and sending it sparse saves nothing",
    minutes=1.0,
    steps=_STEPS,
)
def figure_1(settings: Settings) -> Outcome:
    """Density of a sum of sparse gradients over the number of ranks."""
    ranks, steps = settings.pick(_RANKS, _RANKS[:3]), settings.steps_or(_STEPS, 1)
    stages = steps // _EARLY, steps
    most, size = max(ranks), 0
    rows = Table()
    for stage, flat in zip(settings.track(stages), gradients(stages, most), strict=True):
        size = flat[0].numel()
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

    def curve(stage: int, density: float) -> list[tuple[float, float]]:
        where = {"after steps": stage, "density of a rank, %": 100 * density}
        return rows.points("P", _OF_SUM, where)

    panels = []
    for stage in stages:
        series = {f"{100 * d:g} % per rank": curve(stage, d) for d in _DENSITIES}
        title = f"after {stage} steps"
        panels.append(Panel(title, "ranks P", _OF_SUM, series, log="xy", level=100 * _DENSE))
    early, late = (curve(stage, _DENSITIES[-1])[-1][1] / 100 for stage in stages)
    comparisons = [
        Comparison(
            "5 to 10 % per rank, summed over many ranks",
            '"can cause the reduced vector to become dense"',
            "section 3 and Figure 1, read from the text",
            f"{100 * late:.0f} % at 10 % per rank and P = {most}",
            late > _DENSE,
            "ranks select the same entries more often with this model",
        ),
        Comparison(
            "the same early and late in training",
            '"Results are consistent across training stages"',
            "Figure 1, caption",
            f"{100 * early:.0f} % after {stages[0]} steps, {100 * late:.0f} % after {stages[1]}",
            late < 1.25 * early,
            "in the first steps the same few entries are large on all ranks; the paper's first stage is "
            "a whole epoch",
        ),
    ]
    return Outcome(
        rows,
        comparisons,
        {"n": size, "windows per rank": 8, "ranks": most, "steps": max(stages)},
        "A byte transformer on Python's sources, not ResNet-20 on CIFAR-10; single gradients without "
        "error feedback.",
        panels,
    )


@artifact("sparcml-fig7", "the result grows with P and k towards N, below P k", minutes=0.1)
def figure_7(settings: Settings) -> Outcome:
    """Sizes of sums of uniformly random supports."""
    draws, ranks = settings.pick(200, 5), settings.pick(_RANKS, _RANKS[:3])
    generator = torch.Generator().manual_seed(settings.seed)
    rows = Table()
    for k in settings.track(_ENTRIES):
        for p in ranks:
            drawn = [_union_of_drawn(k, p, generator) for _ in range(draws)]
            formula = expected_union(k, _SIZE, p)
            rows.append(
                {"k": k, "P": p, "formula": formula, "drawn": sum(drawn) / draws, "P k": p * k}
            )
    off = max(abs(drawn / formula - 1) for formula, drawn in rows.points("formula", "drawn"))
    bounded = all(formula <= most + 1e-9 for formula, most in rows.points("formula", "P k"))
    series = {f"k = {k}": rows.points("P", "formula", {"k": k}) for k in _ENTRIES}
    comparisons = [
        Comparison(
            "size of the reduced result, uniform supports",
            "N sum_i (-1)^(i-1) C(P, i) (k / N)^i",
            "appendix B.1 and Figure 7",
            f"drawn supports are within {100 * off:.1f} % of it",
            off < 0.5 / draws**0.5,
            "the deviation is more than chance explains",
        ),
        Comparison(
            "bound on it", "at most P k", "appendix B.1", "never exceeded", bounded, "an error"
        ),
    ]
    return Outcome(
        rows,
        comparisons,
        {"N": _SIZE, "draws": draws},
        "The curve is a closed form; supports of exactly k entries are drawn (the paper draws each entry "
        "on its own).",
        [Panel("expected entries of the sum, N = 512", "ranks P", "entries", series, log="xy")],
    )


def _union_of_drawn(k: int, ranks: int, generator: torch.Generator) -> int:
    """Return the number of entries in the sum of ``ranks`` vectors with k random positions each."""
    chosen = torch.rand(ranks, _SIZE, generator=generator).topk(k, dim=1).indices
    hit = torch.zeros(_SIZE, dtype=torch.bool)
    hit[chosen.flatten()] = True
    return int(hit.sum())
