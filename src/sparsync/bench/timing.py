"""Clocks: a common start for all ranks, and what ``residual.add_(gradient)`` takes beside it."""

from __future__ import annotations

import time
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["StartLine", "seconds_of_add"]

_NANOSECONDS = 1e9


@final
class StartLine:
    """Lets all ranks start at the same moment.

    On one machine the ranks agree on a moment of the clock that they share, a little ahead, and
    sleep until then: out of a barrier they would come one after the other, milliseconds apart where
    they outnumber the cores, and that would be taken for communication.  Elsewhere it is a barrier.

    Args:
        group: of all ranks, not the one that is measured.
        one_machine: the ranks share a clock.
        ahead: seconds from the last arrival to the start; long enough for the agreement to reach
            everyone (ours: 15 times what gloo takes among 8 ranks on 2 cores).
    """

    def __init__(self, group: dist.ProcessGroup, *, one_machine: bool, ahead: float = 0.05) -> None:
        self.group, self.one_machine, self.ahead = group, one_machine, ahead

    def wait(self) -> float:
        """Return this rank's start, by ``time.perf_counter``; every rank calls it.

        It is the agreed moment; or, where the agreement came too late, when it came.
        """
        if not self.one_machine:
            dist.barrier(group=self.group)
            return time.perf_counter()
        moment = torch.tensor([round((time.perf_counter() + self.ahead) * _NANOSECONDS)])
        dist.all_reduce(moment, op=dist.ReduceOp.MAX, group=self.group)
        start = max(int(moment) / _NANOSECONDS, time.perf_counter())
        time.sleep(max(start - time.perf_counter(), 0.0))
        return start

    def elapsed(self, starts: Tensor, ends: Tensor) -> float:
        """Return the seconds from the start of all ranks to the end of the last.

        Args:
            starts: `[P]`, every rank's start in nanoseconds.
            ends: `[P]`, every rank's end, likewise.
        """
        if self.one_machine:
            return float(ends.max() - starts.max()) / _NANOSECONDS
        return float((ends - starts).max()) / _NANOSECONDS


def seconds_of_add(size: int, line: StartLine, *, repetitions: int = 10) -> list[float]:
    """Time ``residual.add_(gradient)`` on this rank, while all ranks do it; float32.

    Args:
        size: number of elements n.
        line: where each repetition starts.
        repetitions: how often; one more before them is not timed.
    """
    residual, gradient = torch.zeros(size), torch.ones(size)
    seconds = []
    for _ in range(repetitions + 1):
        start = line.wait()
        residual.add_(gradient)
        seconds.append(time.perf_counter() - start)
    return seconds[1:]
