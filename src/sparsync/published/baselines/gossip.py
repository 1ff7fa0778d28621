"""Gossip schemes, which average with a few ranks after each step, or in the background (AD-PSGD)."""

from __future__ import annotations

import random
import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from sparsync.averaging.averager import (
    Accompanied,
    Averager,
    Companion,
    Staleness,
    at_least_1,
    mean,
    open_message,
    values_in,
)
from sparsync.errors import PeerError, check_numbers
from sparsync.kernels import divide_
from sparsync.transports.actors import Reply
from sparsync.transports.communicator import Communicator, bytes_of
from sparsync.transports.ledger import Raw

__all__ = ["AdPsgd", "Dpsgd", "Exponential", "Graph", "Ring", "Sgp", "SgpState", "exchange"]

# bytes before the values in a message: SGP's weight, or the kind and step of AD-PSGD's messages
_WORD: Final = 8
_HEAD: Final = struct.Struct("<II")
_ASK, _REPLY = 0, 1


class Graph(ABC):
    """A directed graph over the ranks, which may change every step; each rank computes its own edges."""

    @abstractmethod
    def neighbours(self, rank: int, world_size: int, step: int) -> list[int]:
        """Return the ranks to which ``rank`` sends; they are distinct and exclude ``rank``."""

    def sources(self, rank: int, world_size: int, step: int) -> list[int]:
        """Return the ranks from which ``rank`` receives; by default, this examines all P ranks."""
        return [r for r in range(world_size) if rank in self.neighbours(r, world_size, step)]


@final
class Ring(Graph):
    """A ring: ranks send to both neighbours on every step; of two ranks, each has one neighbour."""

    def neighbours(self, rank: int, world_size: int, step: int) -> list[int]:
        """Return ``rank + 1``, then ``rank - 1``, so that each rank receives from one rank at a time."""
        both = dict.fromkeys([(rank + 1) % world_size, (rank - 1) % world_size])
        return [neighbour for neighbour in both if neighbour != rank]


@final
class Exponential(Graph):
    """The directed exponential graph: hops of 1, 2, 4, ... ranks; each step uses the next few of these.

    After any ceil(log2 P) steps, information from every rank has reached all other ranks.  If ``count``,
    the number of hops per step, is 1 and P is a power of two, all ranks then hold exactly the mean.

    Example:
        >>> [Exponential().neighbours(0, 8, step) for step in range(4)], Exponential(2).sources(0, 8, 0)
        ([[1], [2], [4], [1]], [7, 6])

    References: Assran et al., `Stochastic Gradient Push <https://arxiv.org/abs/1811.10792>`_,
    ICML 2019, appendix A.
    """

    def __init__(self, count: int = 1) -> None:
        at_least_1("Exponential", neighbours=count)
        self.count = count

    def neighbours(self, rank: int, world_size: int, step: int) -> list[int]:
        """Return the ranks at the end of this step's hops."""
        return [(rank + hop) % world_size for hop in self._hops(world_size, step)]

    def sources(self, rank: int, world_size: int, step: int) -> list[int]:
        """Return the ranks whose hops in this step lead to ``rank``."""
        return [(rank - hop) % world_size for hop in self._hops(world_size, step)]

    def _hops(self, world_size: int, step: int) -> list[int]:
        kinds = (world_size - 1).bit_length()  # 2^0, 2^1, ... below P
        count = min(self.count, kinds)
        return [1 << (step * count + i) % kinds for i in range(count)]


async def exchange(
    comm: Communicator, graph: Graph, message: Tensor, step: int, phase: str
) -> list[Tensor]:
    """Exchange ``message``, `[m]`, with the neighbours.

    Return the received messages and this rank's own, in rank order.
    """
    payload = bytes_of(message)
    sources = graph.sources(comm.rank, comm.world_size, step)
    dests = graph.neighbours(comm.rank, comm.world_size, step)
    receiving = {s: comm.irecv(s, payload.numel(), phase, Raw("value")) for s in sources}
    sending = [comm.isend(payload, d, phase, Raw("value")) for d in dests]
    messages = {comm.rank: message}
    for source, operation in receiving.items():
        messages[source] = (await operation).to(message.device).view(message.dtype)
    for operation in sending:
        await operation
    # add the messages in rank order, so that sums do not depend on the order of arrival
    return [messages[rank] for rank in sorted(messages)]


@final
class Dpsgd(Averager):
    """Averages each rank's model with the models of its two neighbours on a ring, with equal weights.

    Args:
        mixing_steps: number of such averages per step (WAGMA-SGD, section 5.2, also tries two).

    Cost: per step, a rank sends ``2 mixing_steps`` messages and receives as many, each the size of the
    model; with two ranks, half as many.
    State: none.
    Differs from the paper: averages always come after the update; the paper allows either order.

    Example:
        >>> with Dpsgd(nn.Linear(2, 1), mixing_steps=2) as averager: averager.step()

    References: Lian et al., `D-PSGD <https://arxiv.org/abs/1705.09056>`_, NeurIPS 2017.
    """

    def __init__(
        self, model: nn.Module | None = None, *, mixing_steps: int = 1, **binding: Any
    ) -> None:
        at_least_1("Dpsgd", mixing_steps=mixing_steps)
        self.mixing_steps = mixing_steps
        super().__init__(model, **binding)

    global_period = None

    def effective_group_size(self, world_size: int) -> int:
        """Return 3: a rank and its neighbours on the ring."""
        return min(world_size, 3)

    async def average(self, comm: Communicator, vector: Tensor, step: int) -> Tensor:
        """Return the mean of this rank's model and its neighbours' models."""
        for _ in range(self.mixing_steps):
            models = await exchange(comm, Ring(), vector, step, "gossip")
            vector = divide_(sum(models[1:], start=models[0].clone()), len(models))
        return vector


@dataclass(frozen=True)
class SgpState:
    """The push-sum weight w of one rank; all ranks' weights add up to ``world_size``."""

    weight: float = 1.0


@final
class Sgp(Averager):
    """Stochastic Gradient Push: ranks push shares of a numerator x and a weight w; the model is x / w.

    An update of the model ``z = x / w`` is added to x unscaled: ``x = w z + (model - z)``.  The mean of
    x over the ranks thus changes by the mean of the updates, regardless of the weights.

    Args:
        neighbours: number of ranks to which a rank sends per step, on the directed exponential graph.
        graph: a graph to use instead of the exponential one; it must stay connected.

    Cost: per step, a rank sends ``neighbours`` messages and receives as many, each the size of the model
    plus 8 bytes.
    State: ``weight``; ``memory`` holds the last model z if w is not 1 (never on the exponential graph).
    Differs from the paper: the exchange does not overlap the computation.

    Example:
        >>> with Sgp(nn.Linear(2, 1), neighbours=2) as averager: averager.step()

    References: Assran et al., `Stochastic Gradient Push <https://arxiv.org/abs/1811.10792>`_,
    ICML 2019, Algorithm 1.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        neighbours: int = 1,
        graph: Graph | None = None,
        **binding: Any,
    ) -> None:
        self.neighbours = neighbours
        self.graph = graph or Exponential(neighbours)
        self.state = SgpState()
        super().__init__(model, **binding)

    global_period = None

    def effective_group_size(self, world_size: int) -> int:
        """Return the number of models whose shares a rank adds up, including its own."""
        return 1 + len(self.graph.neighbours(0, world_size, 0))

    async def average(self, comm: Communicator, vector: Tensor, step: int) -> Tensor:
        """Return z after this step's pushes."""
        # As in Algorithm 1, x and w are divided into neighbours + 1 equal shares: one for each
        # neighbour, and one for this rank.  The columns of the mixing matrix thus add up to 1, and the
        # sums of x and of w over the ranks never change.
        share = 1 / (1 + len(self.graph.neighbours(comm.rank, comm.world_size, step)))
        # the weight before the values has 8 bytes, so that the values stay aligned
        weight = torch.tensor([share * self.state.weight], dtype=torch.float64, device="cpu").to(
            vector.device
        )
        parts = [bytes_of(part) for part in (weight, share * self._x(vector))]
        messages = await exchange(comm, self.graph, torch.cat(parts), step, "gossip")
        total, weight_total = torch.zeros_like(vector), 0.0
        for message in messages:
            weight_total += message[:_WORD].view(torch.float64).item()
            total += message[_WORD:].view(vector.dtype)
        return self._keep(weight_total, divide_(total, weight_total))

    async def conclude(self, comm: Communicator, vector: Tensor, step: int) -> Tensor:
        """Return the sum of all x over the sum of all w, which is world_size; reset the weights to 1."""
        return self._keep(1.0, await mean(comm, self._x(vector)))

    def _x(self, vector: Tensor) -> Tensor:
        """Return the numerator x after the update that turned z into this vector."""
        # the update is vector - z, so x = w z + (vector - z) = vector + (w - 1) z
        z = self.memory.get("model")
        return vector if z is None else vector + (self.state.weight - 1) * z

    def _keep(self, weight: float, z: Tensor) -> Tensor:
        # at w = 1, x is the vector itself, so no copy of the model is needed
        self.state = SgpState(weight)
        self.memory = {} if weight == 1 else {"model": z}
        return z


@final
class AdPsgd(Accompanied):
    """Averages pairs of models in the background; no rank waits for a rank that is computing.

    After each local step, a rank continues with the model that its agent holds at that time.  The agent
    requests an average from a random partner's agent, unless its previous request is still pending.

    Cost: per step, a rank requests at most one exchange of n elements and, on average, answers as many.
    Memory: 3 n.   State: the last model taken from the agent.
    Differs from the paper: any rank may send requests to any other, because agents answer immediately and
    cannot deadlock; the graph need not be bipartite.  Exchanges start once per step, whereas the paper
    starts as many as possible.

    Example:
        >>> with AdPsgd(nn.Linear(2, 1)) as averager: averager.step()

    References: Lian et al., Asynchronous Decentralized Parallel SGD, ICML 2018; WAGMA-SGD, IEEE TPDS
    2021, section 2.2.
    """

    def __init__(self, model: nn.Module | None = None, *, seed: int = 0, **binding: Any) -> None:
        check_numbers("AdPsgd", {"seed": "int"}, {"seed": seed})
        self.seed = seed
        super().__init__(model, **binding)

    staleness: Staleness = "unbounded"  # a partner answers with whatever model it has
    global_period = None

    def effective_group_size(self, world_size: int) -> int:
        """Return 2: a rank and its partner."""
        return min(world_size, 2)

    async def begin(self, comm: Communicator, vector: Tensor, step: int) -> None:
        """Start the agent with the initial model."""
        self.memory["taken"] = vector.cpu()
        self._agent = _PairAgent(self.memory["taken"], self.seed, step)
        self._run(comm, self._agent)

    async def average(self, comm: Communicator, vector: Tensor, step: int) -> Tensor:
        """Pass the local step's change to the agent; return the agent's current model."""
        return await self._take(vector, step, ask=True)

    async def conclude(self, comm: Communicator, vector: Tensor, step: int) -> Tensor:
        """Wait until no exchange is in progress; return the mean of all models."""
        await self._take(vector, step, ask=False)
        agent = self._agent
        await self._ask(step, agent.rest)
        # After the barrier, no rank has a pending request.  An exchange in flight would have changed
        # only one of its two models, and the mean of all models would be wrong.
        await comm.barrier()
        self.memory["taken"] = final = await mean(comm, agent.model)
        self._host.call(lambda: setattr(agent, "model", final))
        return final.to(vector.device)

    async def _take(self, vector: Tensor, step: int, *, ask: bool) -> Tensor:
        change = vector.cpu() - self.memory["taken"]
        taken: Tensor = await self._ask(
            step, lambda reply: self._agent.update(change, step, reply, ask=ask)
        )
        self.memory["taken"] = taken
        return taken.to(vector.device)


@final
class _PairAgent(Companion):
    """Holds a rank's model, and averages it with one partner at a time.

    The requesting agent sends x and receives the partner's y.  It adds (y - x) / 2 to its current model,
    and the partner adds (x - y) / 2 to its own, so the sum of all models never changes.  The step of an
    average is the requesting rank's step.
    """

    def __init__(self, model: Tensor, seed: int, step: int) -> None:
        super().__init__()
        self.model, self.seed = model, seed
        self._asked: Tensor | None = None  # the model sent in the pending request
        self._idle: Reply | None = None
        self._count = 0  # exchanges requested
        self._step = step - 1  # the last local step that the model contains

    def update(self, change: Tensor, step: int, reply: Reply, *, ask: bool) -> None:
        """Add a local step's change and reply with the model; with ``ask``, also request an average."""
        self.model = self.model + change
        if ask:
            self._step = step
        if ask and self._asked is None and self.host.world_size > 1:
            self._count += 1
            draw = random.Random(f"{self.seed} {self.host.rank} {self._count}")
            hop = 1 + draw.randrange(self.host.world_size - 1)
            self._partner = (self.host.rank + hop) % self.host.world_size
            self._asked = self.model
            self.post(self._partner, _HEAD.pack(_ASK, step), self.model)
        self.answer(reply, self.model)

    def rest(self, reply: Reply) -> None:
        """Reply once this rank has no pending request."""
        if self._asked is None:
            self.answer(reply, None)
        else:
            self._idle = reply

    def receive(self, source: int, payload: Tensor) -> None:
        """Answer a partner's request, or apply its answer."""
        self.ledger.received("average", payload.numel())
        (kind, step), body = open_message(payload, _HEAD)
        theirs = values_in(body, self.model.numel(), self.model.dtype)
        if kind == _ASK:
            mine = self.model
            self.model = mine + (theirs - mine) / 2
            self.participation.note(max(step - self._step, 0), 2)
            # apply this half of the average before replying, because the partner may conclude as soon as
            # it gets the reply
            self.post(source, _HEAD.pack(_REPLY, step), mine)
            return
        if kind != _REPLY or self._asked is None:
            raise PeerError(
                f"rank {self.host.rank}, local step {self._step}, phase 'average': rank {source} sent "
                f"a message of kind {kind} that this rank did not ask for; do all ranks run the same "
                "version of sparsync?"
            )
        self.model = self.model + (theirs - self._asked) / 2
        self.participation.note(0, 2)
        self._asked = None
        if self._idle is not None:
            idle, self._idle = self._idle, None
            self.answer(idle, None)

    def tick(self) -> None:
        """Do nothing, because no deadline is ever set."""

    def lose(self, peer: int, reason: str) -> None:
        """Raise an error if an answer from the lost rank is pending."""
        if self._asked is not None and peer == self._partner:
            raise self.failure(peer, self._step, reason)
