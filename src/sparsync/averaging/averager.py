"""The base class of all schemes that average models, and the simplest scheme, local SGD."""

from __future__ import annotations

import struct
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, TypeVar, final

import torch
from torch import Tensor, nn

from sparsync.averaging.binding import Binding, BufferRule, MomentRule, NonFiniteRule
from sparsync.errors import ConfigurationError, PeerError, WireFormatError, require
from sparsync.feedback.changes import Changes
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
from sparsync.kernels import divide_
from sparsync.names import no_option, parameters_of, text_of
from sparsync.state import Stateful, fits
from sparsync.transports.actors import Actor, HostsActors, Reply
from sparsync.transports.agree import agree
from sparsync.transports.communicator import Communicator, bytes_of
from sparsync.transports.driver import run
from sparsync.transports.ledger import Ledger, Parts, Traffic

__all__ = [
    "Accompanied",
    "Averager",
    "Companion",
    "LocalSgd",
    "Participation",
    "Staleness",
    "at_least_1",
    "mean",
    "open_message",
    "values_in",
]

_CURE: Final = "load a state that this rank's state_dict() returned, into the same set-up"

A = TypeVar("A", bound="Averager")

Staleness = Literal["none", "bounded", "unbounded"]


@dataclass
class Participation:
    """Counts the averages that include this rank's model or update.

    Example:
        >>> taken = Participation()
        >>> taken.note(age=0, models=4); taken.note(age=3, models=4)
        >>> taken.averages, taken.stale, taken.oldest, taken.models
        (2, 1, 3, 8)
    """

    averages: int = 0
    stale: int = 0  # averages in which this rank's model was older than the average's step
    oldest: int = 0  # age in steps of the oldest such model
    models: int = 0  # total number of models in all these averages

    def note(self, age: int, models: int) -> None:
        """Count an average of ``models`` models; this rank's model was ``age`` steps old."""
        self.take(Participation(1, int(age > 0), age, models))

    def take(self, other: Participation) -> None:
        """Add the counts of another ``Participation``."""
        self.averages += other.averages
        self.stale += other.stale
        self.oldest = max(self.oldest, other.oldest)
        self.models += other.models


class Averager(Stateful):
    """Averages the models of all ranks after local steps; the base class of all schemes.

    A scheme implements three coroutines, ``begin``, ``average`` and ``conclude``, with the arguments
    ``(comm, vector, step)``; ``vector`` is this rank's flattened model.  If a model is given, ``step``
    and ``finish`` run the coroutines on it, and are called like PyTorch's averagers::

        averager = Wagma(model)
        for ...:
            loss.backward(); optimizer.step(); averager.step()
        averager.finish()                        # all replicas are equal

    Every scheme takes the arguments below, and its own options by name.  WAGMA-SGD (section 2, Table I)
    classifies schemes by five questions, Q1 to Q5.  One of them is whether a scheme is decentralized, as
    all schemes in this library are.  ``averaged``, ``staleness``, ``global_period`` and
    ``effective_group_size`` answer the other four.

    Args:
        model: a plain module (not DDP or FSDP), equal on all ranks; it is averaged in place.  Parameters
            that are frozen when the averager is made are not sent.  With None, only the coroutines can
            be used.
        comm: the communicator; by default ``sparsync.connect()``, which needs ``torch.distributed`` if a
            launcher started several ranks.
        buffers: what happens to floating-point buffers such as BatchNorm's statistics.  With "average",
            they are averaged with the parameters; with "local", only ``finish`` averages them.  Integer
            buffers, and buffers that hold Inf or ``torch.finfo(dtype).min`` (masks), are always local
            until ``finish``, which takes integer buffers from rank 0.  Buffers that ``state_dict`` leaves
            out (``persistent=False``) are never touched.
        optimizer: the optimizer to whose state ``moments`` applies.
        moments: what happens to tensors in the optimizer's state that have their parameter's shape.  With
            "local", each rank keeps its own tensors, even after ``finish``; with "average", they are
            averaged with the parameters; with "reset", the whole state is dropped whenever an average is
            taken.  Step counts are never sent.
        nonfinite: what to do about NaN or Inf in a rank's parameters, averaged buffers or averaged
            moments: "raise" an error on that rank, which names the tensor, or let them "spread" to
            other ranks.
        unknown: any option that the scheme does not have; refused with a list of the valid ones.

    Attributes:
        steps: number of finished local steps, which is also the 0-based number of the next ``step()``.
        memory: vectors that the algorithm keeps, each as long as the model's; saved with its state.
        resume_at: the lowest step number at which a rank continues after it was left out.
        averaged: "models", or the "updates" of the ranks' optimizers.
        participation: the averages that included this rank's model; ``stats`` has more.

    Raises:
        ConfigurationError: an option is unknown, or the model is DDP or FSDP; in later calls, the model
            has changed.
        PeerError: in the first ``step``: ranks differ in settings, tensors or initial values.

    If ``load_state_dict`` loads weights into the model before the first step, all ranks begin from these
    weights.  Later, schemes that keep ``memory`` or use stale models refuse loaded weights.
    """

    averaged: ClassVar[str] = "models"

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        comm: Communicator | None = None,
        buffers: BufferRule = "average",
        optimizer: torch.optim.Optimizer | None = None,
        moments: MomentRule = "local",
        nonfinite: NonFiniteRule = "raise",
        **unknown: Any,
    ) -> None:
        if unknown:  # the scheme passes on every option that it does not know
            named = parameters_of(type(self)).values()
            shared = [name for name in parameters_of(Averager) if name not in ("model", "unknown")]
            own = [p.name for p in named if p.kind == p.KEYWORD_ONLY]
            text = text_of(type(self), Averager)
            raise no_option(type(self).__name__, [*unknown], {*own, *shared}, text)
        self.steps = self.resume_at = 0
        self.memory: dict[str, Tensor] = {}
        self._begun = False
        self._overwritten = False  # whether the model's weights were loaded since the last step
        self._waited = 0.0  # seconds
        self.participation = Participation()
        self._before = 0, Traffic()  # steps and bytes before the first step of this process
        self._binding: Binding | None = None
        if model is not None:
            from sparsync.api import connect

            comm = comm or connect()
            self._binding = Binding(model, comm, buffers, optimizer, moments, nonfinite)
            self._changes = Changes(self._binding.trained)
            note = weakref.WeakMethod(self._note_loaded)

            def loaded(tensors: Mapping[str, Tensor]) -> None:
                if (known := note()) is not None:
                    known(tensors)

            self._hooks = self._binding.follow_loads(loaded)

    def _note_loaded(self, tensors: Mapping[str, Tensor]) -> None:
        """Record whether the weights after a load differ from the weights after the last step."""
        # Values are compared, because a script may load EMA weights for an evaluation and then restore
        # this rank's weights.  A scheme that keeps nothing between averages can continue from any
        # weights.
        self._changes.follow(tensors)
        keeps = bool(self.memory) or self.staleness != "none"
        self._overwritten = self._begun and keeps and self._changes.differ()

    # ---- an algorithm -----------------------------------------------------------------------------

    async def begin(self, comm: Communicator, vector: Tensor, step: int) -> None:
        """Prepare for local step ``step``; all ranks call this with the common initial model.

        The scheme may keep ``vector``, so the caller must not change it afterwards.
        """

    @abstractmethod
    async def average(self, comm: Communicator, vector: Tensor, step: int) -> Tensor:
        """Return the model that this rank continues with after the 0-based local step ``step``.

        ``vector``, `[n]`, is this rank's model after its optimizer step; as in ``begin``, the caller must
        not change it afterwards.  An average every p steps is due when ``(step + 1) % p == 0``.
        """

    def is_due(self, step: int) -> bool:
        """Return whether ``average`` has work to do after a local step; otherwise it is not called."""
        return True

    async def conclude(self, comm: Communicator, vector: Tensor, step: int) -> Tensor:
        """Return the model that all ranks share after ``step`` steps; by default, this is the mean."""
        # The phase is not the one that ``average`` uses, so that a rank that is one step behind cannot
        # mistake this exchange for an average.
        return await mean(comm, vector, "finish")

    def survivors(self, comm: Communicator) -> Communicator:
        """Return a communicator of the ranks that were not left out; by default, these are all ranks."""
        return comm

    # ---- the questions of WAGMA-SGD's section 2 ------------------------------------------------------

    @property
    def staleness(self) -> Staleness:
        """Whether the age of an average's models is bounded (Q3); "none": all are from the same step."""
        return "none"

    @property
    def global_period(self) -> int | None:
        """The steps between averages over all ranks, tau (Q4); None if only ``finish`` takes one."""
        return 1

    def effective_group_size(self, world_size: int) -> int:
        """Return S (Q5), the number of ranks in each non-global average; by default, all ranks."""
        return world_size

    # ---- applied to a model -----------------------------------------------------------------------

    def step(self) -> None:
        """Take an average if one is due, and wait for it; call this after ``optimizer.step()``."""
        binding = self._bound()
        if self.is_due(self.steps):
            vector = binding.read()
            started = binding.comm.now
            with binding.comm.exchange():
                averaged = run(self.average(binding.comm, vector, self.steps))
            self._waited += binding.comm.now - started
            self._count(binding.comm)
            # a scheme without a newer model returns ``vector`` itself: nothing is written or reset
            if averaged is not vector:
                binding.write_(averaged)
                binding.reset_moments()
        # a rank that was left out continues at the other ranks' step; otherwise it would delay every
        # later global average
        self.steps = max(self.steps + 1, self.resume_at)
        self._changes.remember()
        self._close_books(binding.comm)

    def _count(self, comm: Communicator) -> None:
        """Record that this rank took part in the average that was just taken."""
        size, period = self.effective_group_size(comm.world_size), self.global_period
        closes = period is not None and (self.steps + 1) % period == 0
        self.participation.note(0, comm.world_size if closes else size)

    def _close_books(self, comm: Communicator) -> None:
        comm.ledger.begin_step(self.steps)

    def finish(self) -> None:
        """Make all replicas equal; training may continue."""
        binding = self._bound()
        # count these bytes separately: bytes per step describe the algorithm, not the end of training
        with binding.comm.ledger.outside_steps():
            vector = binding.read()
            with binding.comm.exchange():
                binding.write_(run(self.conclude(binding.comm, vector, self.steps)))
                binding.reset_moments()
                run(binding.settle(self.survivors(binding.comm)))
        self._changes.remember()

    def stats(self) -> dict[str, Any]:
        """Return this rank's statistics since its process began; call it between two steps.

        ``group_size`` and ``sync_period`` are the effective S and tau.  ``averages`` counts the
        averages that included this rank's model; ``models_per_average`` is the mean number of models in
        these averages.  ``stale_share`` is the fraction of them in which this rank's model was older than
        the average's step, and ``largest_staleness`` is the model's largest age in steps.
        ``seconds_waited`` is how long ``step()`` waited for messages and other ranks.  The bytes per
        step exclude ``finish`` and the comparison of the ranks before the first step.

        Raises:
            ConfigurationError: the averager has no model.
        """
        comm, given = self._binding_of("stats").comm, self.participation
        resumed, set_up = self._before
        sent, total = comm.ledger.outside, comm.ledger.of_steps() - set_up
        steps, averages = max(self.steps - resumed, 1), max(given.averages, 1)
        return {
            "scheme": type(self).__name__,
            "local_steps": self.steps,
            "group_size": self.effective_group_size(comm.world_size),
            "sync_period": self.global_period,
            "averages": given.averages,
            "models_per_average": given.models / averages,
            "stale_contributions": given.stale,
            "stale_share": given.stale / averages,
            "largest_staleness": given.oldest,
            "seconds_waited": self._waited,
            "bytes_sent_per_local_step": total.sent / steps,
            "bytes_received_per_local_step": total.received / steps,
            "bytes_sent_by_finish": sent.sent,
            "bytes_received_by_finish": sent.received,
            "phases": {phase: t.as_dict() for phase, t in comm.ledger.by_phase().items()},
        }

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state; save it on every rank with the rank's model and optimizer."""
        memory = {name: vector.clone() for name, vector in self.memory.items()}
        kept = {"steps": self.steps, "state": super().state_dict(), "memory": memory}
        return sealed("averager", self._place() | kept)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from this rank's ``state_dict``; call it before the first ``step()``.

        The model and the optimizer must also be loaded, in any order.  The ranks' models then need not
        be equal.
        """
        self.restore(self.check(state))

    def restore(self, content: Mapping[str, Any]) -> None:
        """Restore the state from a saved state's content, which must have passed ``check``."""
        super().load_state_dict(content["state"])
        self.steps = int(content["steps"])
        self.memory = {name: vector.clone() for name, vector in content["memory"].items()}
        # the next step calls ``begin`` again, with the current model, and compares no initial values
        self._begin_again()

    def check(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Check a saved state without communicating, and return its content."""
        content = opened(state, "averager")
        self._check_left_out(content.get("left_out"))
        # Scheme and rank are checked before the other fields, so that another scheme's state is refused
        # for this reason, and not because a field is missing.
        place = {name: Exactly(value) for name, value in self._place().items()}
        check_saved(content, Fields(place, more=object), "state", _CURE)
        check_saved(content, Fields({**place, **self.kinds(content)}), "state", _CURE)
        self.parsed_state(content["state"])
        return content

    def _check_left_out(self, saved: Any) -> None:
        """Refuse the state of a run that averages a different set of buffers; name one difference."""
        here = self._place().get("left_out", [])
        other = set(here) ^ set(saved or []) if fits(saved, Sequence[str]) else set()
        for name in sorted(other):
            runs = ("this run", "the saved one") if name in here else ("the saved run", "this one")
            raise ConfigurationError(
                f"buffer '{name}' held NaN, Inf or huge numbers when {runs[0]} made its averager, which "
                f"leaves such buffers out, and did not in {runs[1]}; make the averager while the buffer "
                "holds what it held at that moment of the saved run"
            )

    def kinds(self, content: Mapping[str, Any]) -> dict[str, Kind]:
        """Return the required kind of value for every field in a saved state's content."""
        steps, vector = Common(Number(0, whole=True)), self._binding and self._binding.kind()
        memory = Fields({}, more=vector) if vector else Plain(named=True)
        return {"steps": steps, "state": object, "memory": memory}

    def _options(self) -> dict[str, Any]:
        """Return the options, by name, in which a saved state must agree with this averager."""
        own = {name for name, p in parameters_of(type(self)).items() if p.kind == p.KEYWORD_ONLY}
        held = {name: value for name, value in vars(self).items() if name in own}
        return {
            n: v for n, v in sorted(held.items()) if v is None or isinstance(v, int | float | str)
        }

    def _place(self) -> dict[str, Any]:
        place: dict[str, Any] = {"scheme": type(self).__name__, **self._options()}
        if self._binding is not None:
            comm = self._binding.comm
            place |= {"rank": comm.rank, "world_size": comm.world_size}
            place["left_out"] = self._binding.left_out
        return place

    def close(self) -> None:
        """Close the communicator, which ends its actors and threads."""
        if self._binding is not None:
            for hook in self._hooks:
                hook.remove()
            self._binding.comm.close()

    def __enter__(self: A) -> A:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Call ``finish`` unless an exception is propagating; then close."""
        try:
            # after an exception, this rank would wait in ``finish`` for ranks that are still training
            if kind is None:
                self.finish()
        finally:
            self.close()

    def _settings(self) -> dict[str, Any]:
        """Return the settings that ranks compare: all public attributes that are numbers or strings."""
        plain = {k: v for k, v in vars(self).items() if isinstance(v, int | float | str)}
        del plain["resume_at"]
        return {k: v for k, v in sorted(plain.items()) if not k.startswith("_")}

    def _bound(self) -> Binding:
        binding = self._binding_of("step")
        require(
            not self._overwritten,
            f"local step {self.steps}: weights were loaded into the model since the last step, but "
            f"{type(self).__name__} keeps the former ones for later averages; close() the averager "
            "on all ranks, load, and make a new one, or load the averager's saved state as well",
        )
        if not self._begun:
            facts = {"the averager": type(self).__name__, "its settings": self._settings()}
            with binding.comm.exchange():
                run(agree(binding.comm, facts))
                run(self.begin(binding.comm, run(binding.start()), self.steps))
            self._begun, self._before = True, (self.steps, binding.comm.ledger.of_steps())
            # Saving an ``OuterAverager`` also calls this method.  Weights that are loaded between
            # the save and the first step must be noticed.
            self._changes.remember()
        return binding

    def _begin_again(self) -> None:
        """After a load, make the next step call ``begin`` again, with the model at that time."""
        self._begun = self._overwritten = False
        # ``resume_at`` is set when an average leaves this rank out; that happened before the load
        self.resume_at = 0
        # if the state was saved before the first step, initial models are still compared
        if self._binding is not None and self.steps:
            self._binding.forget_start()

    def _binding_of(self, method: str) -> Binding:
        """Return the binding to the model; if there is none, raise an error that names ``method``."""
        if self._binding is None:
            raise ConfigurationError(
                f"{type(self).__name__} was made without a model; give it one to call {method}()"
            )
        return self._binding


def at_least_1(scheme: str, **values: int | None) -> None:
    """Refuse an option that is not an integer of at least 1.

    Example:
        >>> at_least_1("Dpsgd", mixing_steps=0)
        Traceback (most recent call last):
            ...
        sparsync.errors.ConfigurationError: Dpsgd: mixing_steps is 0; give a whole number, at least 1
    """
    for name, value in values.items():
        whole = type(value) is int and value >= 1
        require(whole, f"{scheme}: {name} is {value!r}; give a whole number, at least 1")


async def mean(comm: Communicator, vector: Tensor, phase: str = "average") -> Tensor:
    """Return the mean of a vector over all ranks."""
    return divide_(await comm.allreduce(vector, phase), comm.world_size)


@final
class LocalSgd(Averager):
    """Averages all models after every ``period`` local steps.

    With a period of 1 and plain SGD from equal models, this is equivalent to averaging gradients
    ("allreduce").

    Cost: one dense allreduce every ``period`` steps.   State: none.
    Differs from the paper: nothing.

    Example:
        >>> averager = LocalSgd(nn.Linear(2, 1), period=4)
        >>> averager.step(); averager.finish(); averager.steps
        1

    References: Li et al., WAGMA-SGD, IEEE TPDS 2021, "Allreduce-SGD", "local SGD"; Stich, ICLR 2019.
    """

    def __init__(self, model: nn.Module | None = None, *, period: int = 8, **binding: Any) -> None:
        at_least_1("LocalSgd", period=period)
        self.period = period
        super().__init__(model, **binding)

    @property
    def global_period(self) -> int:
        """The number of steps between averages."""
        return self.period

    def effective_group_size(self, world_size: int) -> int:
        """Return 1 if ranks train alone between averages, and P if the period is 1."""
        return world_size if self.period == 1 else 1

    def is_due(self, step: int) -> bool:
        """Return whether local step ``step`` is the last of a period."""
        return (step + 1) % self.period == 0

    async def average(self, comm: Communicator, vector: Tensor, step: int) -> Tensor:
        """Return the mean after the last step of a period, otherwise the model itself."""
        return await mean(comm, vector) if self.is_due(step) else vector


# ---- schemes whose actors answer peers while their ranks compute -----------------------------------


class Companion(Actor):
    """Works for a rank in the background: answers other ranks' messages, and its own rank's calls.

    With every answer, the rank also gets the statistics since the previous answer: the messages' traffic,
    and the ``Participation`` in averages.
    """

    def __init__(self) -> None:
        self.ledger, self.participation = Ledger(), Participation()

    def post(self, dest: int, head: bytes, body: Tensor | None = None) -> None:
        """Send a header and values; the header consists of whole words, so that values are aligned."""
        message = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        if body is not None:
            message = torch.cat([message, bytes_of(body)])
        parts = Parts(header=len(head), value=message.numel() - len(head))
        self.ledger.sent("average", message.numel(), parts)
        self.host.send(dest, message)

    def answer(self, reply: Reply, result: object) -> None:
        """Reply to the rank with the result that it waits for, and with the statistics."""
        # The statistics are handed over and new ones are started, so that the actor's thread and the
        # rank's thread never write to the same objects.
        books = self.ledger, self.participation
        self.ledger, self.participation = Ledger(), Participation()
        reply((result, *books))

    def failure(self, peer: int, step: int, reason: str) -> PeerError:
        """Return the error to raise if this rank waits for a peer that has died or left."""
        where = f"rank {self.host.rank}, local step {step}, phase 'average'"
        return PeerError(f"{where}: rank {peer}: {reason}")


def open_message(message: Tensor, layout: struct.Struct) -> tuple[tuple[Any, ...], Tensor]:
    """Return the fields of the header of a companion's message, and the body (a view).

    Raises:
        WireFormatError: the message is shorter than a header.

    Example:
        >>> message = torch.tensor([1, 0, 0, 0, 5, 6], dtype=torch.uint8)
        >>> open_message(message, struct.Struct("<I"))
        ((1,), tensor([5, 6], dtype=torch.uint8))
    """
    if message.numel() < layout.size:
        raise WireFormatError(
            f"a message between companions has {message.numel()} bytes, fewer than its header of "
            f"{layout.size}; it is corrupt"
        )
    return layout.unpack(bytes(message[: layout.size].tolist())), message[layout.size :]


def values_in(body: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Return the ``size`` values that are the body of a companion's message (a copy).

    Raises:
        WireFormatError: the body has a different length.

    Example:
        >>> values_in(bytes_of(torch.tensor([1.0, 2.0])), 2, torch.float32)
        tensor([1., 2.])
    """
    if body.numel() != size * dtype.itemsize:
        raise WireFormatError(
            f"a message between companions carries {body.numel()} bytes, not the {size * dtype.itemsize} "
            f"of {size} values of {dtype}; it is corrupt, or the ranks have different models"
        )
    return body.clone().view(dtype)  # a copy is aligned; a body may start at any byte


class Accompanied(Averager):
    """The base class of schemes that use a companion, which works in the background during training.

    The companion computes in host memory.  Messages are in host memory anyway, and its thread is not
    synchronised with the CUDA streams on which training writes to device memory.  So a scheme copies its
    vector to the host, keeps its ``memory`` there, and returns a model on the vector's device.
    """

    _comm: Communicator | None = None

    def _run(self, comm: Communicator, actor: Actor) -> None:
        """Run an actor alongside each rank, until the communicator is closed or gets a new actor."""
        if not isinstance(comm, HostsActors):
            raise ConfigurationError(
                f"{type(comm).__name__} cannot run this scheme's companion; use zmq, torch or mpi"
            )
        # a communicator has one actor at most, because two would receive each other's messages
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
        result, traffic, given = await self._host.ask(function, lambda: where)
        self._comm.ledger.take(traffic)
        self.participation.take(given)
        return result

    def _count(self, comm: Communicator) -> None:
        """Do nothing: averages are taken while the rank computes, so the companion counts them."""
