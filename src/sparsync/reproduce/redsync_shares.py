"""RedSync, Figures 5 and 10: bandwidth of an allreduce, and where a step goes, by its own cost model."""

from __future__ import annotations

from collections.abc import Sequence

from sparsync.planning import costs
from sparsync.planning.cost import WORD_BYTES
from sparsync.reproduce.base import (
    Artifact,
    Outcome,
    Panel,
    Row,
    Settings,
    Stated,
    number,
    points,
)
from sparsync.reproduce.redsync_phases import (
    DENSITY,
    QUANTISED_RGC,
    RGC,
    STAGES,
    lstm,
    predicted_phases,
    resnet50,
)
from sparsync.reproduce.redsync_steps import DAINT, MURADIN

__all__ = ["FIGURE_10", "FIGURE_5"]

_KILOBYTES = tuple(2**power for power in range(4, 19, 2))
_UNPACKING = Stated(
    "unpack in a step of ResNet-50, 128 GPUs: RGC, quantised",
    "69 and 67 %",
    "section 6.4",
    (69, 67),
)
_CROSSING = Stated(
    "LSTM: quantised RGC is faster from", '"more than 16 GPUs"', "section 6.4", (16,)
)
_PEAKS = (
    (DAINT, Stated("peak of an allreduce, Piz Daint", "1.5 GB/s", "section 6.1", (1.5,))),
    (MURADIN, Stated("peak of an allreduce, Muradin", "3.5 GB/s", "section 6.1", (3.5,))),
)
_LESS = Stated(
    "its dependence on the number of GPUs, Piz Daint", '"less affected"', "section 6.1, Figure 5"
)


def _figure_10(settings: Settings) -> Outcome:
    rows: list[Row] = []
    for model in settings.track((resnet50(), lstm())):
        for scheme in (RGC, QUANTISED_RGC):
            for p in DAINT.ranks:
                stages = predicted_phases(model, scheme, p)
                together = sum(stages.values())
                rows.append(
                    {
                        "model": model.name,
                        "scheme": scheme.name,
                        "P": p,
                        **{f"{stage}, ms": 1e3 * stages[stage] for stage in STAGES},
                        "ms": 1e3 * together,
                        "unpack, %": 100 * stages["unpack"] / together,
                    }
                )
    shares = [
        number(row, "unpack, %") for row in rows if row["model"] == "ResNet-50" and row["P"] == 128
    ]
    most = min(shares) > 50
    text = [row for row in rows if row["model"] == "LSTM 2 x 1500"]
    plain, quantised = (
        points(text, "P", "ms", {"scheme": s}) for s in (RGC.name, QUANTISED_RGC.name)
    )
    first = next((x for (x, a), (_, b) in zip(plain, quantised, strict=True) if b < a), 0.0)
    comparisons = [
        _UNPACKING.beside(
            " and ".join(f"{share:.0f}" for share in shares) + " %", most, "" if most else "less"
        ),
        _CROSSING.beside(
            f"{first:g} GPUs",
            16 <= first <= 32,
            "" if 16 <= first <= 32 else "searching on every step costs another time here",
        ),
    ]
    return Outcome(
        rows,
        comparisons,
        {"density, %": 100 * DENSITY, "bandwidth, GB/s": 1.5},
        "A model of one step's overhead, without computation; `benchmarks/redsync_phases.py` simulates "
        "the same messages and comes to the same times.",
        _shares(rows),
    )


def _shares(rows: Sequence[Row]) -> list[Panel]:
    """Draw the share of every stage over the number of GPUs, of RGC."""
    return [
        Panel(
            f"{model}, {RGC.name}",
            "GPUs",
            "share of the step, %",
            {
                stage: [
                    (x, 100 * y / whole)
                    for (x, y), (_, whole) in zip(
                        points(rows, "P", f"{stage}, ms", {"model": model, "scheme": RGC.name}),
                        points(rows, "P", "ms", {"model": model, "scheme": RGC.name}),
                        strict=True,
                    )
                ]
                for stage in STAGES
            },
            kind="stacks",
        )
        for model in ("ResNet-50", "LSTM 2 x 1500")
    ]


def _figure_5(settings: Settings) -> Outcome:
    rows: list[Row] = []
    for platform, _ in _PEAKS:
        alpha, beta = platform.machine.alpha, platform.machine.beta
        for p in platform.ranks:
            for size in _KILOBYTES:
                seconds = costs.dense(size * 1024 // WORD_BYTES, p).seconds(alpha, beta)
                bandwidth = 2 * (p - 1) / p * size * 1024 / seconds
                rows.append(
                    {"machine": platform.name, "P": p, "KB": size, "GB/s": 1e-9 * bandwidth}
                )
    settings.advance(1)
    comparisons = []
    for platform, stated in _PEAKS:
        most = max(number(row, "GB/s") for row in rows if row["machine"] == platform.name)
        near = abs(most / stated.numbers[0] - 1) < 0.05
        text = "given to the model: the latency's share is what is shown" if near else "not reached"
        comparisons.append(stated.beside(f"{most:.2f} GB/s", near, text))
    large = [
        number(row, "GB/s") for row in rows if row["machine"] == "Piz Daint" and row["KB"] == 2**16
    ]
    spread = max(large) / min(large) - 1
    comparisons.append(
        _LESS.beside(
            f"{100 * spread:.1f} % between 2 and 128 GPUs at 64 MB",
            spread < 0.1,
            "" if spread < 0.1 else "latency of many rounds",
        )
    )
    panels = [
        Panel(
            platform.name,
            "KB",
            "GB/s",
            {
                f"{p} GPUs": points(rows, "KB", "GB/s", {"machine": platform.name, "P": p})
                for p in (platform.ranks[0], platform.ranks[-1])
            },
            log="x",
        )
        for platform, _ in _PEAKS
    ]
    return Outcome(
        rows,
        comparisons,
        {"latency, us": 1.5},
        "A model: S / t 2 (n - 1) / n with the time of Rabenseifner's allreduce (Equation 2), not of MPI "
        "and NCCL; latency 1.5 us is ours.",
        panels,
    )


FIGURE_5 = Artifact(
    "redsync-fig5",
    "RedSync",
    "bandwidth of an allreduce between GPUs (model)",
    "peaks of 1.5 and 3.5 GB/s, hardly dependent on the number of GPUs",
    0.1,
    _figure_5,
)
FIGURE_10 = Artifact(
    "redsync-fig10",
    "RedSync",
    "where a step goes over the number of GPUs (model)",
    "unpacking P messages layer by layer takes most of a step of ResNet-50 at scale",
    0.1,
    _figure_10,
)
