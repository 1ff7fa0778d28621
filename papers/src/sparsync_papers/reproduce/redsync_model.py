"""Predict speedups and the parts of a step with RedSync's own cost model (Figures 7 to 10)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from sparsync.collectives.costs import WORD_BYTES
from sparsync.published.redsync.cost_model import equation_2
from sparsync_papers.reproduce import (
    Comparison,
    Outcome,
    Panel,
    Points,
    Row,
    Settings,
    Table,
    artifact,
    joined,
)
from sparsync_papers.reproduce.redsync_phases import (
    DENSITY,
    MASK,
    MOMENTUM_MASK,
    QUANTISED_RGC,
    RGC,
    STAGES,
    Machine,
    Model,
    lstm,
    model_of,
    predicted_phases,
    resnet50,
)

_BACKWARD = 2 / 3  # share of the computation behind which a CNN can hide communication
_EFFICIENCY = 0.4  # share of peak speed reached in training (assumed: cuDNN's usual third to half)
_SCHEMES = ("SGD", RGC.name, QUANTISED_RGC.name)
_DIFFERS = (
    "A model, not a measurement: equations 1 and 2 layer by layer, kernels of 10 us, 3/4 of the GPU's "
    "memory bandwidth, computation at 40 % of its peak; the backward pass of CNNs hides "
    "communication, not selection and unpacking. Network of section 6.1, density 0.1 %."
)


@dataclass(frozen=True)
class Platform:
    """A machine on which the paper's measurements were made."""

    name: str  # name of the machine
    machine: Machine  # network and GPU
    flops: float  # a GPU's peak operations per second in single precision (data sheets)
    ranks: tuple[int, ...]  # numbers of GPUs in the figures
    peak: float  # GB/s of an allreduce (section 6.1)


DAINT = Platform("Piz Daint", Machine(), 9.3e12, (2, 4, 8, 16, 32, 64, 128), 1.5)
# 3/4 of a Titan V's 652 GB/s
MURADIN = Platform("Muradin", Machine(beta=1 / 3.5e9, memory=1 / 490e9), 14.9e12, (2, 4, 8), 3.5)


@dataclass(frozen=True)
class Training:
    """A model, and the amount of computation in one step."""

    make: Callable[[], Model]  # returns the sizes of its layers
    gflops: float  # GFLOPs of a forward pass with one sample (Table 1)
    batch: int  # samples per GPU (Table 1)
    # whether communication runs during the backward pass, as for CNNs (section 5.5)
    overlaps: bool = True

    @property
    def model(self) -> Model:
        """The sizes of the model's layers."""
        return self.make()

    def seconds(self, platform: Platform) -> float:
        """Return the computation time in seconds; backward takes twice as long as forward."""
        return 3e9 * self.gflops * self.batch / (_EFFICIENCY * platform.flops)

    def step(self, platform: Platform, ranks: int, scheme: str) -> float:
        """Return the duration of a step in seconds, with "SGD", "RGC" or "quantised RGC"."""
        computed = self.seconds(platform)
        hidden = _BACKWARD * computed if self.overlaps else 0.0
        machine = platform.machine
        if scheme == "SGD":
            whole = equation_2(ranks, alpha=machine.alpha, beta=machine.beta)
            exchanged = whole.seconds(WORD_BYTES * sum(self.model.sizes))
            return computed + max(exchanged - hidden, 0.0)
        chosen = RGC if scheme == RGC.name else QUANTISED_RGC
        stages = predicted_phases(self.model, chosen, ranks, machine)
        gpu = sum(seconds for stage, seconds in stages.items() if stage != "communicate")
        return computed + gpu + max(stages["communicate"] - hidden, 0.0)


def _convolutional(name: str, key: str) -> Callable[[], Model]:
    return partial(model_of, name, key, MOMENTUM_MASK)


IMAGENET = (
    Training(_convolutional("AlexNet", "alexnet"), 0.72, 32),
    Training(_convolutional("VGG-16", "vgg16_imagenet"), 15.5, 32),
    Training(resnet50, 8.22, 32),
)
TEXT = (Training(lstm, 2.52, 5, overlaps=False),)
_WIKI = partial(model_of, "LSTM 2 x 1500, Wiki2", "lstm_wikitext2", MASK)
SMALL = (
    Training(_convolutional("VGG-16, CIFAR-10", "vgg16_cifar10"), 0.31, 64),
    Training(_WIKI, 2.52, 5, overlaps=False),
)


# model, number of GPUs, and the speedups of RGC and quantised RGC over SGD in the text (None: not
# stated)
_FIGURE_7 = (
    ("VGG-16", 128, 1.42, 1.71),
    ("AlexNet", 16, None, 1.68),
    ("AlexNet", 32, None, 2.31),
    ("AlexNet", 64, None, 1.68),
    ("AlexNet", 128, 0.94, 1.17),
    ("LSTM 2 x 1500", 2, 4.28, None),
    ("LSTM 2 x 1500", 4, 4.72, None),
    ("LSTM 2 x 1500", 8, 4.12, None),
    ("LSTM 2 x 1500", 32, 1.47, 1.76),
    ("ResNet-50", 128, None, 0.66),
)
_FIGURE_8 = (("VGG-16", 8, 1.55, 1.64), ("AlexNet", 8, 1.96, 2.26), ("ResNet-50", 8, 0.83, 0.85))
_FIGURE_9 = (
    ("VGG-16, CIFAR-10", 8, 1.16, 1.24),
    ("LSTM 2 x 1500", 8, 2.11, 2.06),
    ("LSTM 2 x 1500, Wiki2", 8, 2.11, 2.06),
)
_Speedups = tuple[tuple[str, int, float | None, float | None], ...]


def _rows(platform: Platform, trainings: tuple[Training, ...], settings: Settings) -> Table:
    ranks = settings.pick(platform.ranks, platform.ranks[:2])
    rows = Table()
    for training in settings.track(trainings):
        alone = training.seconds(platform)
        for p in ranks:
            base = training.step(platform, p, "SGD")
            for scheme in _SCHEMES:
                seconds = training.step(platform, p, scheme)
                rows.append(
                    {
                        "model": training.model.name,
                        "P": p,
                        "scheme": scheme,
                        "ms": 1e3 * seconds,
                        "over SGD": base / seconds,
                        "over one GPU": p * alone / seconds,
                    }
                )
    return rows


def _compare(speedups: _Speedups, figure: str, rows: Table) -> list[Comparison]:
    """Check whether the exchange that is faster here, sparse or dense, is also faster in the text."""
    comparisons = []
    for model, ranks, *stated in speedups:
        mine = rows.where({"model": model, "P": ranks})
        if not mine:  # a quick run omits some world sizes
            continue
        found = mine.column("over SGD")[1:]  # the speedups of RGC and quantised RGC
        pairs = [(a, b) for a, b in zip(stated, found, strict=True) if a]
        far = any(not 0.5 < ours / theirs < 2 for theirs, ours in pairs)
        says = ", ".join(f"{x:g}" if x else "-" for x in stated)
        why = "the modelled exchange, limited only by latency and bandwidth, takes less than was measured"
        what = f"{model}, {ranks} GPUs: RGC, quantised over SGD"
        ours = ", ".join(f"{x:.2f}" for x in found)
        same, remark = all((mine > 1) == (theirs > 1) for theirs, mine in pairs), why if far else ""
        where = f"section 6.4, {figure}"
        comparisons.append(Comparison(what, says, where, ours, same, why, remark))
    return comparisons


def _used(platform: Platform) -> Row:
    bandwidth = {"bandwidth, GB/s": platform.peak, "efficiency": _EFFICIENCY}
    return {"density, %": 100 * DENSITY, **bandwidth, "seeds": 0}


@artifact(
    "redsync-fig7",
    "gains for VGG-16, AlexNet and LSTM, less on more GPUs; a loss for ResNet-50: 0.66 x",
    minutes=0.1,
)
def figure_7(settings: Settings) -> Outcome:
    """Speedup of RGC on Piz Daint, up to 128 GPUs (model)."""
    rows = _rows(DAINT, (*IMAGENET, *TEXT), settings)
    vgg = rows.points("P", "over one GPU", {"model": "VGG-16", "scheme": "RGC"})
    efficiency = [y / x for x, y in vgg]
    says = '"the speedup curve is a concave curve shape"'
    concave = Comparison(
        "speedup over the number of GPUs",
        says,
        "section 6.4",
        f"VGG-16, RGC: {100 * efficiency[0]:.0f} to {100 * efficiency[-1]:.0f} % of the ideal",
        efficiency == sorted(efficiency, reverse=True),
        "computation hides communication at these sizes",
    )
    panels = []
    for name in dict.fromkeys(str(row["model"]) for row in rows):
        series = rows.curves("P", "over one GPU", "scheme", {"model": name})
        panels.append(Panel(name, "GPUs", "times one GPU", series, log="xy"))
    comparisons = [*_compare(_FIGURE_7, "Figure 7", rows), concave]
    return Outcome(rows, comparisons, _used(DAINT), _DIFFERS, panels)


@artifact("redsync-fig8-9", "gains for all but ResNet-50, which loses: 0.83 x", minutes=0.1)
def figures_8_9(settings: Settings) -> Outcome:
    """Speedup of RGC on 8 GPUs of one server (model)."""
    whole = settings.pick(MURADIN, replace(MURADIN, ranks=(8,)))
    rows = _rows(whole, (*IMAGENET, *TEXT, *SMALL), settings)
    bars: dict[str, Points] = {
        scheme: [
            (model.replace(", ", ",\n"), over)
            for model, curve in rows.curves("P", "over SGD", "model", {"scheme": scheme}).items()
            for p, over in curve
            if p == max(whole.ranks)
        ]
        for scheme in _SCHEMES[1:]
    }
    panel = Panel("8 GPUs of Muradin", "", "times SGD", bars, kind="bars", log="y", level=1.0)
    comparisons = [*_compare(_FIGURE_8, "Figure 8", rows), *_compare(_FIGURE_9, "Figure 9", rows)]
    return Outcome(rows, comparisons, _used(MURADIN), _DIFFERS, [panel])


@artifact(
    "redsync-fig10",
    "unpacking P messages layer by layer takes most of a step of ResNet-50 at scale",
    minutes=0.1,
)
def figure_10(settings: Settings) -> Outcome:
    """Shares of a step's time over the number of GPUs (model)."""
    image, text = resnet50(), lstm()
    rows = Table()
    panels = []
    for model in settings.track((image, text)):
        shares: dict[str, list[tuple[float | str, float]]] = {stage: [] for stage in STAGES}
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
                if scheme is RGC:
                    for stage in STAGES:
                        shares[stage].append((p, 100 * stages[stage] / together))
        title = f"{model.name}, {RGC.name}"
        panels.append(Panel(title, "GPUs", "share of the step, %", {**shares}, kind="stacks"))
    unpack = [y for _, y in rows.points("P", "unpack, %", {"model": image.name, "P": 128})]
    plain, quantised = rows.curves("P", "ms", "scheme", {"model": text.name}).values()
    first = next((x for (x, a), (_, b) in zip(plain, quantised, strict=True) if b < a), 0.0)
    comparisons = [
        Comparison(
            "unpack in a step of ResNet-50, 128 GPUs: RGC, quantised",
            "69 and 67 %",
            "section 6.4",
            f"{joined(unpack, '.0f')} %",
            min(unpack) > 50,
            "less",
        ),
        Comparison(
            "LSTM: quantised RGC is faster from",
            '"more than 16 GPUs"',
            "section 6.4",
            f"{first:g} GPUs",
            16 <= first <= 32,
            "searching on every step has a different cost here",
        ),
    ]
    return Outcome(
        rows,
        comparisons,
        {"density, %": 100 * DENSITY, "bandwidth, GB/s": 1.5, "seeds": 0},
        "A model of one step's overhead, without computation; `benchmarks/redsync_phases.py` simulates "
        "the same messages and finds the same times.",
        panels,
    )
