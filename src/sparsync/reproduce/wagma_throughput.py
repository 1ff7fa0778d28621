"""Throughput of the averaging schemes in virtual time: what WAGMA's Figures 4, 7 and 10 stand on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from types import MappingProxyType

import torch

from sparsync.averaging.base import Averager
from sparsync.averaging.gossip import exchange
from sparsync.averaging.graphs import Exponential
from sparsync.averaging.schemes import SCHEMES
from sparsync.transports.sim import Links, SimCommunicator, simulate
from sparsync.workloads.delays import HeavyTail, RandomRanks
from sparsync.workloads.lengths import LinesWorkload

__all__ = [
    "ALPHA",
    "BETA",
    "COMPUTE",
    "LATE",
    "ROWS",
    "SETTINGS",
    "SIZE",
    "TAIL",
    "TARGETS",
    "TRANSFORMER_COMPUTE",
    "VARIANTS",
    "Scheme",
    "Setting",
    "Target",
    "Work",
    "ideal_seconds",
    "step_seconds",
    "translated",
]

# Section 5.2, 64 ranks, nobody delayed, steps per second.  AD-PSGD hides its communication, so its step
# is computation; what local SGD's takes longer is one allreduce of 2 n (P - 1) / P elements.
_LOCAL_RATE, _ADPSGD_RATE = 1.52, 1.61
_RESNET, _TRANSFORMER, _NAVIGATION = 25_559_081, 61_362_176, 8_476_421  # parameters (5.2 to 5.4)
COMPUTE = 1 / _ADPSGD_RATE  # seconds of ResNet-50's step
BETA = (1 / _LOCAL_RATE - COMPUTE) / (2 * 4 * _RESNET * 63 / 64)  # seconds per byte
ALPHA = 2e-6  # seconds per message: a hop of such a network (ours)
TRANSFORMER_COMPUTE = (
    0.27  # seconds of a mean batch (ours): 2,700 of at most 8,192 tokens, 10,000 a second
)
LATE = RandomRanks(2, 0.32)  # section 5.2
TAIL = HeavyTail(1.7, 43.5)  # section 5.4
SIZE = 8192  # elements of the simulated vector; beta is scaled so that it takes as long as the real one

Work = Callable[[int, int, int, int], float]  # step, rank, world_size, seed -> seconds


@dataclass(frozen=True)
class Setting:
    """A figure: its model, its ranks, and what each step costs whom.

    Attributes:
        title: of its picture.
        parameters: of the paper's model, which is what messages take.
        ranks: world sizes.
        period: steps between WAGMA's global averages, tau.
        work: seconds that a rank computes at a step.
    """

    title: str
    parameters: int
    ranks: tuple[int, ...]
    period: int
    work: Work

    def links(self, size: int) -> Links:
        """Return links on which so many elements take as long as the paper's model."""
        return Links(ALPHA, BETA * self.parameters / size)


@dataclass(frozen=True)
class Scheme:
    """A scheme with its options; "P" and "tau" stand for the setting's.

    Attributes:
        name: in ``SCHEMES``.
        options: of it.
        barrier: steps between barriers, which are not the scheme's own; 0: none.

    Example:
        >>> wagma = Scheme("wagma", {"group_size": "P"}).make(SETTINGS["fig4"], 16)
        >>> wagma.group_size, wagma.sync_period
        (16, 10)
    """

    name: str
    options: Mapping[str, int | str | bool] = field(default_factory=dict)
    barrier: int | str = 0

    def make(self, setting: Setting, ranks: int) -> Averager:
        """Make the averager of a rank."""
        options = {name: _number(value, setting, ranks) for name, value in self.options.items()}
        return SCHEMES[self.name](**options)


def _number(value: int | str, setting: Setting, ranks: int) -> int | str:
    return {"P": ranks, "tau": setting.period}.get(str(value), value)


def _delayed(compute: float, step: int, rank: int, world_size: int, seed: int) -> float:
    """Return computation, and 320 ms for two ranks of every step."""
    return compute + LATE.seconds(step, rank, world_size, seed)


def translated(lines: LinesWorkload, step: int, rank: int, world_size: int, seed: int) -> float:
    """Return the seconds of a translator's batch, which are as the length of its bucket's lines."""
    return TRANSFORMER_COMPUTE * lines.relative_cost(seed=seed, step=step, rank=rank)


SETTINGS: Mapping[str, Setting] = MappingProxyType({
    "fig4": Setting(
        "Figure 4: ResNet-50, two random ranks 320 ms late",
        _RESNET, (4, 8, 16, 32, 64, 128, 256), 10, partial(_delayed, COMPUTE),
    ),
    "control": Setting(
        "Control: ResNet-50, nobody late", _RESNET, (64,), 10, lambda *place: COMPUTE
    ),
    "half": Setting(
        "Half the batch: ResNet-50, two random ranks 320 ms late",
        _RESNET, (64,), 10, partial(_delayed, COMPUTE / 2),
    ),
    "fig7": Setting(
        "Figure 7: Transformer, lines in length buckets",
        _TRANSFORMER, (4, 8, 16, 32, 64), 8, partial(translated, LinesWorkload()),
    ),
    "fig10": Setting(
        "Figure 10: navigation, heavy tail from 1.7 to 43.5 s",
        _NAVIGATION, (16, 32, 64, 128, 256, 512, 1024), 8, TAIL.seconds,
    ),
})  # fmt: skip

ROWS: Mapping[str, Scheme] = MappingProxyType({
    "WAGMA": Scheme("wagma", {"sync_period": "tau"}),
    "AD-PSGD": Scheme("adpsgd"),
    "eager-SGD, solo": Scheme("eager-solo"),
    "eager-SGD, majority": Scheme("eager-majority"),
    "SGP, 1 neighbour": Scheme("sgp", {"neighbours": 1}),
    "SGP, 2 neighbours": Scheme("sgp", {"neighbours": 2}),
    "SGP, 4 neighbours": Scheme("sgp", {"neighbours": 4}),
    "D-PSGD": Scheme("dpsgd"),
    "local SGD, H = 1": Scheme("local", {"period": 1}),
    "Allreduce-SGD": Scheme("allreduce"),
    "local SGD, H = tau": Scheme("local", {"period": "tau"}),
})  # fmt: skip

_WHOLE = MappingProxyType({"sync_period": "tau", "group_size": "P"})
_LOCAL, _SGP_2, _SGP_4 = "local SGD, H = 1", "SGP, 2 neighbours", "SGP, 4 neighbours"
_MEETS, _EAGER_MEETS = ", barrier every step", "eager-SGD, majority, barrier every tau steps"
_S_P, _S_P_WAITS = "WAGMA, S = P", "WAGMA, S = P, waits for its group"
# settings that the paper's runs may have had: at one or two points only
VARIANTS: Mapping[str, Scheme] = MappingProxyType({
    _S_P: Scheme("wagma", _WHOLE),
    _S_P_WAITS: Scheme("wagma", {**_WHOLE, "grouping": "synchronous"}),
    _EAGER_MEETS: Scheme("eager-majority", barrier="tau"),
    f"D-PSGD{_MEETS}": Scheme("dpsgd", barrier=1),
    f"{_SGP_2}{_MEETS}": Scheme("sgp", {"neighbours": 2}, barrier=1),
    f"{_SGP_4}{_MEETS}": Scheme("sgp", {"neighbours": 4}, barrier=1),
})  # fmt: skip


@dataclass(frozen=True)
class Target:
    """WAGMA's throughput over another's, as the paper states it.

    Attributes:
        figure: key of ``SETTINGS``.
        ranks: P.
        ratio: of throughputs.
        rows: the other, and behind it how else the paper's run of it may have been.
    """

    figure: str
    ranks: int
    ratio: float
    rows: tuple[str, ...]


TARGETS = (
    Target("fig4", 64, 1.25, (_LOCAL,)),
    Target("fig4", 64, 1.25, (_SGP_2, f"{_SGP_2}{_MEETS}")),
    Target("fig4", 64, 1.26, ("Allreduce-SGD",)),
    Target("fig4", 64, 1.23, ("D-PSGD", f"D-PSGD{_MEETS}")),
    Target("fig4", 64, 1.13, ("eager-SGD, majority", "eager-SGD, solo", _EAGER_MEETS)),
    Target("fig4", 64, 1.24, (_S_P, _S_P_WAITS)),
    Target("fig4", 256, 1.37, (_LOCAL,)),
    Target("half", 64, 1.45, (_SGP_2,)),
    Target("half", 64, 1.54, (_LOCAL,)),
    Target("half", 64, 1.63, ("Allreduce-SGD",)),
    Target("fig7", 16, 1.39, (_LOCAL,)),
    Target("fig7", 16, 1.48, (_SGP_2, f"{_SGP_2}{_MEETS}")),
    Target("fig7", 16, 1.10, ("AD-PSGD",)),
    Target("fig7", 16, 1.28, (_S_P, _S_P_WAITS)),
    Target("fig10", 1024, 2.33, (_LOCAL,)),
    Target("fig10", 1024, 1.88, ("D-PSGD", f"D-PSGD{_MEETS}")),
    Target("fig10", 1024, 2.10, (_SGP_4, f"{_SGP_4}{_MEETS}")),
)


async def _wait_for_all(comm: SimCommunicator) -> None:
    """Do as ``comm.barrier``, in fewer operations of this machine: word from all in log2 P hops."""
    for hop in range((comm.world_size - 1).bit_length()):
        await exchange(comm, Exponential(), torch.zeros(1, dtype=torch.uint8), hop, "barrier")


def step_seconds(
    setting: Setting, scheme: Scheme, ranks: int, *, steps: int, seed: int = 0
) -> float:
    """Return the virtual seconds of a step, the mean over steps and ranks.

    The mean over ranks, since some of an asynchronous scheme are ahead when the first has ended: in a
    longer run they would not end so far apart.  The others end together.

    Args:
        setting: computation, delays and network.
        scheme: what averages.
        ranks: P.
        steps: of the run; for schemes with a global average a multiple of tau.
        seed: of the delays.
    """
    every = int(_number(scheme.barrier, setting, ranks))

    async def program(comm: SimCommunicator) -> float:
        averager, vector = scheme.make(setting, ranks), torch.zeros(SIZE)
        await averager.begin(comm, vector, 0)
        for step in range(steps):
            await comm.compute(setting.work(step, comm.rank, ranks, seed))
            vector = await averager.average(comm, vector, step)
            if every and (step + 1) % every == 0:
                await _wait_for_all(comm)
        return comm.now

    return fmean(simulate(program, ranks, links=setting.links(SIZE)).results) / steps


def ideal_seconds(setting: Setting, ranks: int, *, steps: int, seed: int = 0) -> float:
    """Return a step's mean computation: nobody waits, nothing is sent."""
    return fmean(
        setting.work(step, rank, ranks, seed) for step in range(steps) for rank in range(ranks)
    )
