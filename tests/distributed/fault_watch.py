"""A communicator that counts its operations by step and phase, and lets something happen at one."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from sparsync.transports.actors import Actor, Host
from sparsync.transports.communicator import Communicator, ReduceOp
from sparsync.transports.driver import Operation
from sparsync.transports.ledger import Framing

Moment = tuple[int, str, int]  # step, phase, number of the operation in it
ACTOR = "actor"  # the phase of what a companion sends, whenever it does


class Watched(Communicator):
    """Passes everything on; ``happen`` is called before the operation at ``moment``.

    Attributes:
        seen: operations by step and phase.
    """

    def __init__(
        self, inner: Communicator, moment: Moment | None = None, happen: Callable[[], None] = list
    ) -> None:
        super().__init__(inner.rank, inner.world_size, inner.device)
        self.inner, self.moment, self.happen = inner, moment, happen
        self.ledger, self.pads, self.tag = inner.ledger, inner.pads, inner.tag
        self.seen: Counter[tuple[int, str]] = Counter()

    def note(self, phase: str) -> None:
        """Count an operation that is about to begin."""
        place = self.ledger.step, phase
        if self.moment is not None:
            step, wanted, _ = self.moment
            late = (
                phase == ACTOR and self.ledger.step >= step
            )  # nobody knows in which step it sends
            if wanted == phase and (late or (*place, self.seen[place]) == self.moment):
                self.happen()
        self.seen[place] += 1

    def channel(self, tag: int) -> Communicator:
        twin = Watched(self.inner.channel(tag), self.moment, self.happen)
        twin.seen = self.seen
        return twin

    def isend(self, payload: Tensor, dest: int, phase: str, framing: Framing) -> Operation:
        self.note(phase)
        return self.inner.isend(payload, dest, phase, framing)

    def irecv(self, source: int, capacity: int, phase: str, framing: Framing) -> Operation:
        self.note(phase)
        return self.inner.irecv(source, capacity, phase, framing)

    def start_send(self, payload: Tensor, dest: int, phase: str, framing: Framing) -> Operation:
        self.note(phase)  # of a subgroup
        return self.inner.start_send(payload, dest, phase, framing)

    def start_recv(self, source: int, capacity: int, phase: str, framing: Framing) -> Operation:
        self.note(phase)  # of a subgroup
        return self.inner.start_recv(source, capacity, phase, framing)

    async def allreduce(self, tensor: Tensor, phase: str, op: ReduceOp = "sum") -> Tensor:
        self.note(phase)
        return await self.inner.allreduce(tensor, phase, op)

    async def alltoallv(
        self, payloads: Sequence[Tensor], capacities: Sequence[int], phase: str, framing: Framing
    ) -> list[Tensor]:
        self.note(phase)
        return await self.inner.alltoallv(payloads, capacities, phase, framing)

    @property
    def now(self) -> float:
        return self.inner.now

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        with self.inner.stage(name):
            yield

    def work(self, nbytes: int, *, dense: bool = False) -> Operation:
        return self.inner.work(nbytes, dense=dense)

    def host(self, actor: Actor) -> Host:
        host = self.inner.host(actor)
        send = host.send

        def noted(dest: int, payload: Tensor) -> None:
            self.note(ACTOR)
            send(dest, payload)

        host.send = noted  # type: ignore[method-assign]
        return host

    def close(self) -> None:
        super().close()
        self.inner.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
