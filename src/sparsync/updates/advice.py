"""What a handle that exchanges updates finds out about a training, and tells its user once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, final

import torch

from sparsync.console import say
from sparsync.transports.driver import run
from sparsync.updates.carrier import Carrier
from sparsync.updates.gradient_noise import GradientNoise
from sparsync.updates.outer_engine import OuterEngine

__all__ = ["Advice", "seconds_of_dense"]

_ADVISED: Final = 30  # steps whose mean duration is considered reliable
_NEGLIGIBLE: Final = 0.1  # an allreduce below this fraction of a step is not worth avoiding
# The user is warned if less than this fraction of the lasting part of gradients is common to all ranks,
# i.e. if the parts particular to single ranks are larger.
_AGREEING: Final = 0.5
_MEASURED: Final = 300  # steps after which the noise of gradients is considered known
# If steps are lengthened by at least this factor, the user is advised to exchange on every step.  After
# 300 steps of ``gpt-1m`` in ``benchmarks/scale.py``, it was 2.6 with 16 ranks, which ended 1.3 % above
# dense training, and 3.4 with 32 ranks, which ended 3.3 % above.
_NOISY: Final = 3.0
_PROBE: Final = 1 << 15  # float32 elements of the allreduce that is timed: 0.1 s at 10 Mbit/s


@final
class Advice:
    """Warns if gradients hardly agree; recommends a shorter period, or plain DDP, if that is better."""

    def __init__(
        self,
        outer: OuterEngine,
        carrier: Carrier,
        noise: GradientNoise | None,
        tell: Callable[[str], None] | None,
    ) -> None:
        """Create the advice for a handle; without ``tell``, DDP is never recommended."""
        self._outer, self._carrier, self._noise, self._tell = outer, carrier, noise, tell
        self._began = 0, 0.0  # local step and time at which ``begin`` was called
        self._warned = False

    def begin(self) -> None:
        """Start to measure the duration of steps."""
        self._began = self._outer.steps, time.perf_counter()

    def on_agreement(self) -> None:
        """Warn once if the ranks' data seem to differ."""
        noise = None if self._warned else self._noise
        agreement = None if noise is None else noise.agreement
        if agreement is None or agreement >= _AGREEING:
            return
        self._warned = True
        if self._outer.reducer.comm.rank == 0:
            say(
                f"the ranks' gradients hardly agree: {100 * agreement:.0f} % of their lasting "
                "part is common to all, as if their data differed; shuffle the data over ranks, or "
                "expect more loss than dense training's (docs/optimizers.md)"
            )

    def on_noise(self) -> None:
        """Recommend an exchange on every step, once, if the ranks' gradients are almost only noise."""
        noise, outer = self._noise, self._outer
        if noise is None or outer.period == 1 or outer.steps - self._began[0] != _MEASURED:
            return
        ranks = outer.reducer.comm.world_size
        factor = noise.lengthening(ranks)
        if factor >= _NOISY and outer.reducer.comm.rank == 0:
            say(
                f"a rank's gradients are almost only noise, so its steps are made {factor:.1f} times as "
                f"long to make up for the average over {ranks} ranks. An exchange on every step instead "
                f"of every {outer.period} steps stays closer to dense training's loss, at more bytes: "
                "give attach OuterStep(**OUTER_SETTINGS['updates'] | {'period': 1}), or each rank larger "
                "batches (docs/optimizers.md)"
            )

    def on_dense(self) -> None:
        """Tell the user once if plain DDP, which loses no accuracy, would be about as fast."""
        first, began = self._began
        if self._tell is None or self._outer.steps - first != _ADVISED:
            return
        seconds = (time.perf_counter() - began) / _ADVISED
        waited, dense = self._carrier.waited / _ADVISED, seconds_of_dense(self._outer)
        if dense < max(_NEGLIGIBLE * seconds, waited):
            self._tell(
                f"dense wins here: a step takes {1e3 * seconds:.1f} ms, {1e3 * waited:.1f} of "
                f"which it waits for updates; an allreduce of all gradients would take about "
                f"{1e3 * dense:.1f} ms, and plain DDP loses nothing"
            )


def seconds_of_dense(outer: OuterEngine) -> float:
    """Estimate how many seconds an allreduce of all gradients takes, from two small allreduces."""
    run(outer.settle())
    size, channel = outer.layout.end, outer.reducer.channel("weights").apart()
    # The first allreduce, of one element, gives the latency; the difference gives the seconds per
    # element. Each time is the least of three, because other load on the machine only adds time.
    best = []
    with outer.reducer.exchanging():
        for count in (1, min(size, _PROBE)):
            spent = []
            for _ in range(3):
                run(channel.barrier())
                began = time.perf_counter()
                run(channel.allreduce(torch.zeros(count, device="cpu"), "probe"))
                spent.append(time.perf_counter() - began)
            best.append(min(spent))
    return best[0] + max(best[1] - best[0], 0.0) * size / min(size, _PROBE)
