"""AD-PSGD: an agent next to the training averages with one random partner at a time."""

from __future__ import annotations

import random
from typing import Any, final

import torch
from torch import Tensor, nn

from sparsync.averaging.base import mean
from sparsync.averaging.companion import Accompanied
from sparsync.errors import PeerError
from sparsync.transports.actors import Actor, Reply
from sparsync.transports.communicator import Communicator
from sparsync.transports.ledger import Ledger, Parts

__all__ = ["AdPsgd", "PairAgent"]

_ASK, _REPLY = 0, 1
_HEAD = 8  # bytes, so that values after it are aligned


@final
class PairAgent(Actor):
    """Holds a rank's model, and averages it with one partner at a time.

    Who asks sends x and gets the partner's y: it adds (y - x) / 2 and the partner (x - y) / 2, to what
    either has by then; so the sum of all models never changes, whatever comes between.

    Args:
        model: of this rank.
        seed: of the partners.
    """

    def __init__(self, model: Tensor, seed: int) -> None:
        self.model, self.seed = model, seed
        self.ledger = Ledger()
        self._asked: Tensor | None = None  # what was sent and has no answer yet
        self._idle: Reply | None = None
        self._count = self._step = 0

    def update(self, change: Tensor, reply: Reply, *, step: int, ask: bool) -> None:
        """Add what the local step did; return the model as it is; ask a partner unless one is asked."""
        self._step = step
        self.model = self.model + change
        if ask and self._asked is None and self.host.world_size > 1:
            self._ask()
        reply((self.model, self._traffic()))

    def rest(self, reply: Reply) -> None:
        """Call ``reply`` when nothing is asked."""
        if self._asked is None:
            reply((self.model, self._traffic()))
        else:
            self._idle = reply

    def receive(self, source: int, payload: Tensor) -> None:
        """Answer a partner, or take its answer."""
        self.ledger.received("average", payload.numel())
        theirs = payload[_HEAD:].clone().view(self.model.dtype)
        if int(payload[0]) == _ASK:
            self._post(source, _REPLY, self.model)
            self.model = self.model + (theirs - self.model) / 2
            return
        assert self._asked is not None, "an answer follows a question"
        self.model = self.model + (theirs - self._asked) / 2
        self._asked = None
        if self._idle is not None:
            idle, self._idle = self._idle, None
            idle((self.model, self._traffic()))

    def tick(self) -> None:
        """Nothing is ever due."""

    def lose(self, peer: int, reason: str) -> None:
        """Fail, if its answer is waited for."""
        if self._asked is not None and peer == self._partner:
            where = f"rank {self.host.rank}, step {self._step}, phase 'average'"
            raise PeerError(f"{where}: rank {peer}: {reason}")

    def _ask(self) -> None:
        self._count += 1
        draw = random.Random(f"{self.seed} {self.host.rank} {self._count}")
        hop = 1 + draw.randrange(self.host.world_size - 1)
        self._partner = (self.host.rank + hop) % self.host.world_size
        self._asked = self.model
        self._post(self._partner, _ASK, self.model)

    def _post(self, dest: int, kind: int, vector: Tensor) -> None:
        head = torch.zeros(_HEAD, dtype=torch.uint8)
        head[0] = kind
        message = torch.cat([head, vector.contiguous().view(torch.uint8)])
        parts = Parts(header=_HEAD, value=message.numel() - _HEAD)
        self.ledger.sent("average", message.numel(), parts)
        self.host.send(dest, message)

    def _traffic(self) -> Ledger:
        ledger, self.ledger = self.ledger, Ledger()
        return ledger


@final
class AdPsgd(Accompanied):
    """Averages pairs of models in the background; no rank ever waits for one that computes.

    After each local step a rank takes its model as its agent has it by then, and the agent asks a
    random partner's agent for an average, unless the last one has not been answered yet.

    Args:
        model: as for ``Averager``.
        seed: of the partners.
        binding: the other arguments of ``Averager``.

    Cost: per step at most one exchange of n elements asked for and, on average, one answered; memory
    3 n.   State: the last model taken.
    Differs from the paper: any rank may ask any other: agents answer at once, so there is no deadlock
    and the graph need not be bipartite; exchanges are begun once per step, not as often as possible.

    Example:
        >>> with AdPsgd(nn.Linear(2, 1)) as averager: averager.step()

    References: Lian et al., Asynchronous Decentralized Parallel SGD, ICML 2018; WAGMA-SGD, IEEE TPDS
    2021, section 2.2.
    """

    def __init__(self, model: nn.Module | None = None, *, seed: int = 0, **binding: Any) -> None:
        self.seed = seed
        super().__init__(model, **binding)

    async def begin(self, comm: Communicator, vector: Tensor, step: int) -> None:
        """Start the agent."""
        self._agent = PairAgent(vector, self.seed)
        self._run(comm, self._agent)
        self.memory["taken"] = vector

    async def average(self, comm: Communicator, vector: Tensor, step: int) -> Tensor:
        """Hand over what the local step did; take the model as it is by now."""
        return await self._exchange(comm, vector, step, ask=True)

    async def conclude(self, comm: Communicator, vector: Tensor, step: int) -> Tensor:
        """Return the mean of all models, once no exchange is under way."""
        await self._exchange(comm, vector, step, ask=False)
        agent = self._agent
        comm.ledger.take((await self._ask(step, agent.rest))[1])
        await comm.barrier()  # all have their answers: nobody asks any more
        self.memory["taken"] = final = await mean(comm, agent.model)
        self._host.call(lambda: setattr(agent, "model", final))
        return final

    async def _exchange(
        self, comm: Communicator, vector: Tensor, step: int, *, ask: bool
    ) -> Tensor:
        taken, traffic = await self._ask(
            step,
            lambda reply: self._agent.update(
                vector - self.memory["taken"], reply, step=step, ask=ask
            ),
        )
        comm.ledger.take(traffic)
        self.memory["taken"] = taken
        return self.memory["taken"]
