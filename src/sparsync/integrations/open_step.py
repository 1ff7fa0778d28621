"""One open step of ``ReplicaSync``: which gradients have come, and which units are under way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import final

import torch
from torch import Tensor

from sparsync.integrations.backward import write_
from sparsync.integrations.placement import aligned, local_of
from sparsync.reducer import Reducer
from sparsync.sparse import Vector
from sparsync.transports.engine import Engine
from sparsync.units import Slot

__all__ = ["OpenStep"]


@final
class OpenStep:
    """Takes gradients out of ``parameter.grad``, so that nobody scales or clips what is under way.

    Units start in one order on all ranks, the last first, as gradients mostly come: a rank in which they
    came otherwise must not wait where its peers do not.

    Attributes:
        task: of autograd, in which the step was opened.
        came: names of parameters that had a gradient here.
        ready: complete parameters, per unit.
        launched: units under way.
        spans: begin and end of their exchanges, by the clock of the reducer's communicator.
        waited: begin and end of the training thread's wait.
        jobs: what the engine runs.
        failed: nothing is to be waited for any more.
    """

    def __init__(
        self, reducer: Reducer, engine: Engine, parameters: Mapping[str, Tensor], task: int
    ) -> None:
        self._reducer, self._engine, self._parameters = reducer, engine, parameters
        self.task = task
        self._passes: Counter[Tensor] = Counter()
        self.ready = [0] * len(reducer.units)
        self.launched: set[int] = set()
        self._order = list(reversed(range(len(reducer.units))))
        self.came: set[str] = set()
        self._taken: dict[str, Tensor] = {}
        self._gradients: list[dict[Slot, tuple[Tensor, Tensor]]] = [{} for _ in reducer.units]
        self.spans: dict[int, tuple[float, float]] = {}
        self.waited = (0.0, 0.0)
        self.jobs: list[Future[None]] = []
        self.failed = False

    def count(self, parameter: Tensor) -> int:
        """Count a backward pass that has come to a parameter; return how many have."""
        self._passes[parameter] += 1
        return self._passes[parameter]

    def next_complete(self) -> Iterator[int]:
        """Yield the units that may start: complete, and all before them in the order are under way."""
        units = self._reducer.units
        while self._order and self.ready[self._order[0]] == len(units[self._order[0]].slots):
            yield self._order[0]

    def missing(self) -> list[int]:
        """Return the units that have not started, in their order."""
        return list(self._order)

    def local_gradients(self) -> list[Tensor]:
        """Return what of the gradients lies here, where they are still in ``parameter.grad``."""
        return [local_of(p.grad) for p in self._parameters.values() if p.grad is not None]

    def launch(self, unit: int, scale: float) -> None:
        """Take and accumulate a unit's gradients, and hand it to the engine.

        Args:
            unit: the first of the order.
            scale: by which gradients are multiplied.
        """
        self._order.remove(unit)
        self.launched.add(unit)
        for slot in self._reducer.units[unit].slots:
            parameter = self._parameters[slot.name]
            local = local_of(self._take(slot.name, parameter))
            if scale != 1:
                local.mul_(scale)
            self._gradients[unit][slot] = (parameter, local)
            weights = local_of(parameter).reshape(-1)
            self._reducer.accumulate(unit, slot.start, local.reshape(-1), weights)
        if local.is_cuda:  # the engine's thread has streams of its own
            torch.cuda.current_stream(local.device).synchronize()
        self.jobs.append(self._engine.submit(self._exchange(unit)))

    def _take(self, name: str, parameter: Tensor) -> Tensor:
        """Take what is in ``parameter.grad``, of whatever backward pass: peers may add to it now."""
        if parameter.grad is None:  # not used here: peers may have, and its residual waits
            gradient = torch.zeros_like(parameter.detach())
        else:
            gradient = aligned(parameter.grad.detach(), parameter)
            parameter.grad = None
            self.came.add(name)
        self._taken[name] = gradient
        return gradient

    async def _exchange(self, unit: int) -> None:
        if self.failed:  # the group is broken: do not wait for every unit's deadline
            return
        begin = self._reducer.comm.now
        try:
            await self._reducer.exchange(unit)
        except BaseException:
            self.failed = True
            raise
        self.spans[unit] = begin, self._reducer.comm.now

    def write_(self, averages: Sequence[Vector]) -> None:
        """Write the averages into what was taken; on the engine's thread."""
        for unit, average in enumerate(averages):
            write_(average, self._reducer.units[unit], self._gradients[unit])
            device = self._reducer.units[unit].device
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    def put_back_(self, names: Collection[str]) -> None:
        """Put the averages of parameters into ``parameter.grad``, and let go of all."""
        for name, average in self._taken.items():
            if name in names:
                self._parameters[name].grad = average
        self.release()

    def release(self) -> None:
        """Let go of the gradients."""
        self._taken.clear()
        self._gradients.clear()
