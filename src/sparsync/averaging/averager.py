"""The base of the schemes that average models, and how they are applied to a model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar, final

import torch
from torch import Tensor, nn

from sparsync.averaging.binding import Binding, BufferRule, MomentRule, NonFiniteRule
from sparsync.errors import ConfigurationError, PeerError, require
from sparsync.fields import (
    Common,
    Exactly,
    Fields,
    Kind,
    Number,
    Plain,
    check_saved,
    opened,
    sealed,
)
from sparsync.state import Stateful, fits
from sparsync.transports.actors import Actor, Reply
from sparsync.transports.agree import agree
from sparsync.transports.communicator import Communicator, bytes_of
from sparsync.transports.driver import run
from sparsync.transports.ledger import Ledger, Parts

__all__ = ["Accompanied", "Averager", "Companion", "LocalSgd", "mean"]

_CURE: Final = "load a state that this rank's state_dict() returned, into the same set-up"

A = TypeVar("A", bound="Averager")


class Averager(Stateful):
    """Averages models: one flat vector per rank, after every local step.

    An algorithm is three coroutines over ``(comm, vector, step)``: ``begin``, ``average``, ``conclude``.
    With a model, ``step`` and ``finish`` apply them to it, as PyTorch's averagers do::

        averager = Wagma(model)
        for ...:
            loss.backward(); optimizer.step(); averager.step()
        averager.finish()                        # all replicas are equal

    Every scheme takes these arguments, and its own by name.

    Args:
        model: a plain module (not DDP or FSDP), equal on all ranks, averaged in place.  Parameters that
            are frozen now do not travel.  None: only the coroutines are used.
        comm: default ``sparsync.connect()``.
        buffers: floating-point buffers (BatchNorm's statistics) "average" with the parameters, or stay
            "local" until ``finish`` averages them.  Those that hold Inf (masks) and whole-numbered ones
            always stay local until then; of the latter, rank 0's are taken.  Buffers that ``state_dict``
            leaves out (``persistent=False``) are never touched.
        optimizer: the optimizer whose state ``moments`` is about.
        moments: tensors of the optimizer's state with their parameter's shape stay "local" (also after
            ``finish``), or "average" with the parameters; or "reset": all of the state is dropped
            whenever an average is taken.  Step counts never travel.
        nonfinite: NaN or Inf in a rank's parameters "raise" an error there, or "spread" to others.

    Attributes:
        steps: local steps done; the next ``step()`` has this number, 0-based.
        memory: vectors that the algorithm keeps, saved with its state.
        resume_at: the least step with which a rank goes on that was left out and came back.

    Raises:
        ConfigurationError: a DDP or FSDP model; later: a model that is no longer the same.
        PeerError: from the first ``step``: ranks differ in settings, tensors or initial values.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        comm: Communicator | None = None,
        buffers: BufferRule = "average",
        optimizer: torch.optim.Optimizer | None = None,
        moments: MomentRule = "local",
        nonfinite: NonFiniteRule = "raise",
    ) -> None:
        self.steps = self.resume_at = 0
        self.memory: dict[str, Tensor] = {}
        self._begun = False
        self._binding: Binding | None = None
        if model is not None:
            from sparsync.api import connect

            comm = comm or connect()
            self._binding = Binding(model, comm, buffers, optimizer, moments, nonfinite)

    # ---- an algorithm -----------------------------------------------------------------------------

    async def begin(self, comm: Communicator, vector: Tensor, step: int) -> None:
        """Prepare, before local step ``step``; all ranks call it with the model that all begin with.

        ``vector`` is handed over: the caller does not change it any more.
        """

    @abstractmethod
    async def average(self, comm: Communicator, vector: Tensor, step: int) -> Tensor:
        """Return the model with which this rank goes on after local step ``step``, 0-based.

        ``vector``, `[n]`, is this rank's model after its optimizer step, handed over as in ``begin``.
        An average every p steps is due when ``(step + 1) % p == 0``.
        """

    def is_due(self, step: int) -> bool:
        """Tell whether ``average`` acts after local step ``step``; otherwise the model is not read."""
        return True

    async def conclude(self, comm: Communicator, vector: Tensor, step: int) -> Tensor:
        """Return the model that all ranks share after ``step`` steps: by default the mean."""
        return await mean(comm, vector)

    def survivors(self, comm: Communicator) -> Communicator:
        """Return the ranks that have not been left out: by default all of them."""
        return comm

    # ---- applied to a model -----------------------------------------------------------------------

    def step(self) -> None:
        """Average if it is due, and wait until that is done; call it after ``optimizer.step()``."""
        binding = self._bound()
        if self.is_due(self.steps):
            vector = binding.read()
            averaged = run(self.average(binding.comm, vector, self.steps))
            # the same object: the scheme had nothing newer, so parameters and moments stay as they are
            if averaged is not vector:
                binding.write_(averaged)
                binding.reset_moments()
        # a rank that was left out goes on with the others' step, or it would keep them waiting at every
        # global average from then on
        self.steps = max(self.steps + 1, self.resume_at)
        self._close_books(binding.comm)

    def _close_books(self, comm: Communicator) -> None:
        comm.ledger.begin_step(self.steps)

    def finish(self) -> None:
        """Make all replicas equal; training may go on."""
        binding = self._bound()
        # booked apart: bytes per step are those of the algorithm, not of the end of training
        with binding.comm.ledger.outside_steps():
            vector = binding.read()
            binding.write_(run(self.conclude(binding.comm, vector, self.steps)))
            binding.reset_moments()
            run(binding.settle(self.survivors(binding.comm)))

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, to be saved on every rank with its own model and optimizer."""
        memory = {name: vector.clone() for name, vector in self.memory.items()}
        kept = {"steps": self.steps, "state": super().state_dict(), "memory": memory}
        return sealed("averager", self._place() | kept)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where this rank's ``state_dict`` was taken; before the first ``step()``.

        Also load model and optimizer, in any order; the ranks' models need not be equal then.
        """
        self.restore(self.check(state))

    def restore(self, content: Mapping[str, Any]) -> None:
        """Restore the content of a saved state that was found to fit."""
        super().load_state_dict(content["state"])
        self.steps = int(content["steps"])
        self.memory = {name: vector.clone() for name, vector in content["memory"].items()}
        # the next step begins again, with the model as it is then: no initial values are compared
        self._begun = False
        if self._binding is not None:
            self._binding.initial = None

    def check(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the content of a saved state that fits, as far as this rank alone can tell."""
        content = opened(state, "averager")
        self._check_left_out(content.get("left_out"))
        # The place comes before the fields, so that the state of another scheme is refused as such, and
        # not for the first field that it lacks.
        place = {name: Exactly(value) for name, value in self._place().items()}
        check_saved(content, Fields(place, more=object), "state", _CURE)
        check_saved(content, Fields({**place, **self.kinds(content)}), "state", _CURE)
        self.parsed_state(content["state"])
        return content

    def _check_left_out(self, saved: Any) -> None:
        """Refuse the state of a run in which other buffers are averaged, by the name of one."""
        here = self._place().get("left_out", [])
        other = set(here) ^ set(saved or []) if fits(saved, Sequence[str]) else set()
        for name in sorted(other):
            runs = ("this run", "the saved one") if name in here else ("the saved run", "this one")
            raise ConfigurationError(
                f"buffer '{name}' held NaN or Inf when {runs[0]} made its averager, which leaves such "
                f"buffers out, and was finite in {runs[1]}; make the averager with a model in which it "
                "is as it was when the saved run began"
            )

    def kinds(self, content: Mapping[str, Any]) -> dict[str, Kind]:
        """Return the kind of value that every field of a saved state's content must have."""
        steps = Common(Number(0, whole=True))
        return {"steps": steps, "state": object, "memory": Plain(named=True)}

    def _place(self) -> dict[str, Any]:
        place: dict[str, Any] = {"scheme": type(self).__name__}
        if self._binding is not None:
            comm = self._binding.comm
            place |= {"rank": comm.rank, "world_size": comm.world_size}
            place["left_out"] = self._binding.left_out
        return place

    def close(self) -> None:
        """End the agents and threads of this rank's communicator."""
        if self._binding is not None:
            self._binding.comm.close()

    def __enter__(self: A) -> A:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Finish, unless an error is on its way; close."""
        try:
            # with an error on its way, this rank would wait in ``finish`` for ranks that have not ended
            if kind is None:
                self.finish()
        finally:
            self.close()

    def _settings(self) -> dict[str, Any]:
        """Return the settings that ranks compare: public numbers and names, but no counts of a rank."""
        plain = {k: v for k, v in vars(self).items() if isinstance(v, int | float | str)}
        return {k: v for k, v in sorted(plain.items()) if not k.startswith("_")}

    def _bound(self) -> Binding:
        binding = self._binding
        if binding is None:
            raise ConfigurationError(
                f"{type(self).__name__} was made without a model; give it one to call step()"
            )
        if not self._begun:
            facts = {"the averager": type(self).__name__, "its settings": self._settings()}
            run(agree(binding.comm, facts))
            run(self.begin(binding.comm, run(binding.start()), self.steps))
            self._begun = True
        return binding


async def mean(comm: Communicator, vector: Tensor) -> Tensor:
    """Average a vector over all ranks."""
    return await comm.allreduce(vector, "average") / comm.world_size


@final
class LocalSgd(Averager):
    """Averages all models when ``(step + 1) % period == 0``.

    With a period of 1 and plain SGD from equal models this is averaging the gradients ("allreduce").

    Cost: one dense allreduce every ``period`` steps.   State: none.
    Differs from the paper: nothing.

    Example:
        >>> averager = LocalSgd(nn.Linear(2, 1), period=4)
        >>> averager.step(); averager.finish(); averager.steps
        1

    References: Li et al., WAGMA-SGD, IEEE TPDS 2021, "Allreduce-SGD", "local SGD"; Stich, ICLR 2019.
    """

    def __init__(self, model: nn.Module | None = None, *, period: int = 8, **binding: Any) -> None:
        require(period >= 1, f"LocalSgd: period is {period}; give at least 1 step")
        self.period = period
        super().__init__(model, **binding)

    def is_due(self, step: int) -> bool:
        """Tell whether the period closes with local step ``step``."""
        return (step + 1) % self.period == 0

    async def average(self, comm: Communicator, vector: Tensor, step: int) -> Tensor:
        """Return the mean when the period closes, the model itself otherwise."""
        return await mean(comm, vector) if self.is_due(step) else vector


# ---- schemes whose actors answer peers while their ranks compute -----------------------------------


class Companion(Actor):
    """An actor that books its messages; its rank takes the books over with every answer."""

    def __init__(self) -> None:
        self.ledger = Ledger()

    def post(self, dest: int, head: bytes, body: Tensor | None = None) -> None:
        """Send a head, whose whole words keep the values after it aligned, and values."""
        message = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        if body is not None:
            message = torch.cat([message, bytes_of(body)])
        parts = Parts(header=len(head), value=message.numel() - len(head))
        self.ledger.sent("average", message.numel(), parts)
        self.host.send(dest, message)

    def answer(self, reply: Reply, result: object) -> None:
        """Give a rank the result that it waits for."""
        # The books are handed over and new ones begin: the actor's thread and the rank's never write to
        # the same ledger.
        traffic, self.ledger = self.ledger, Ledger()
        reply((result, traffic))

    def failure(self, peer: int, step: int, reason: str) -> PeerError:
        """Return the error of a wait for a peer that is gone."""
        where = f"rank {self.host.rank}, local step {step}, phase 'average'"
        return PeerError(f"{where}: rank {peer}: {reason}")


class Accompanied(Averager):
    """Runs a companion next to this rank's training, and asks it.

    A companion computes in the host's memory, where its messages are: its thread knows nothing of the
    CUDA streams on which training writes the device's memory.  So a scheme copies its vector to the
    host, keeps its ``memory`` there, and returns a model on the vector's device.
    """

    _comm: Communicator | None = None

    def _run(self, comm: Communicator, actor: Actor) -> None:
        """Run an actor on all ranks, until the communicator is closed or given another one."""
        # one per communicator: two agents would take each other's messages
        old = comm.companions.pop("averaging", None)
        if old is not None:
            old.close()
        self._comm = comm
        self._host = comm.companions["averaging"] = comm.host(actor)

    async def _ask(self, step: int, function: Callable[[Reply], None]) -> Any:
        """Let the actor's thread call ``function(reply)``; return the answer.

        Raises:
            DeadlineError: the answer takes longer than the communicator's timeout.
        """
        if self._comm is None:
            raise ConfigurationError(
                f"{type(self).__name__}: call begin() before average() and conclude()"
            )
        where = f"rank {self._comm.rank}, local step {step}: phase 'average'"
        result, traffic = await self._host.ask(function, lambda: where)
        self._comm.ledger.take(traffic)
        return result
