"""How a rank takes part in a group that changes: it asks for quorums, meets, fetches and recovers.

torchft's manager says who is there; ``members`` says what becomes of the open step.
"""

from __future__ import annotations

import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import wait
from contextlib import suppress
from typing import Any, Final, final

import torch

from sparsync.elastic.catch_up import CatchUp, Rates
from sparsync.elastic.group import Quorum, group_of
from sparsync.elastic.members import Members, Verdict
from sparsync.elastic.notice import Notice
from sparsync.elastic.turns import Turns
from sparsync.errors import (
    CheckpointError,
    CommunicationError,
    ConfigurationError,
    DeadlineError,
    PeerError,
)
from sparsync.feedback.facts import number_of, set_up_digest
from sparsync.feedback.reducer import Reducer
from sparsync.handle import Handle
from sparsync.messages import say
from sparsync.options import Options
from sparsync.state import packed, unpacked
from sparsync.transports.driver import Operation, run
from sparsync.transports.ledger import Raw

__all__ = ["Attendance", "ElasticHandle", "check_options"]

_PATIENCE: Final = 600.0  # seconds without a quorum after which training ends
_PAUSE: Final = 0.2  # seconds between questions for one
_RETURN: Final = 60.0  # seconds that ranks without the weights wait for one that has them
_EXACT: Final = 2**53
_LOOK: Final = 100  # steps between comparisons of the weights, which take a pass over them
_EXTRAS: Final = 2**26  # bytes of the schedulers and the like that a rank takes over


def check_options(options: Options, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse what is not for ranks that come and go.

    Raises:
        ConfigurationError: names it.
    """
    carried = options.transport
    for what, there in {
        "correction=": options.correction is not None,
        "Compression(schedule=...)": options.compression.schedule is not None,
        "Transport(hierarchy=...)": carried.hierarchy is not None,
        "Transport(world=...)": carried.world is not None,
        "Monitoring(sentinel=...)": options.monitoring.sentinel is not None,
    }.items():
        if there:
            raise ConfigurationError(f"{what} is not for elastic=; omit one of them")
    given = [f"{name}=..." for name, value in carried.sockets.items() if value is not None]
    if carried.name != "auto":
        given = [repr(carried.name), *given]
    if given:
        raise ConfigurationError(
            f"Transport({', '.join(given)}) is not for elastic=; give these to make_manager() instead"
        )
    if not optimizers:
        raise ConfigurationError(
            "elastic= needs the optimizer, whose state a rank that joins takes over; give it, too"
        )


def _numbers(rates: Rates) -> list[list[tuple[str, str]]]:
    """Return the rates that are numbers, without their last bits, in which schedulers may differ."""

    def text(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            value = value.tolist()
        if isinstance(value, list | tuple):
            return " ".join(map(text, value))
        return f"{value:.12g}" if isinstance(value, int | float) else ""

    return [[(key, text(its[key])) for key in sorted(its)] for one in rates for its in one]


@final
class Attendance:
    """One rank's part in the quorums of a ``torchft.Manager``.

    Args:
        weights: returns a digest of the weights that are equal on all ranks.
        rates: returns the optimizers' present rates, which must be as well.
        settings: further ones that must be equal on all ranks.

    Attributes:
        met: the roll was called for the open step already.
        catch_up: what this rank fetches, while it is behind.
        offered: a copy of this rank's state is being served.
        extras: what the donor has told when this rank caught up in the open step.
        last_step: the number of the group that exchanged the last step, its contributors, and if this
            rank is one.
    """

    def __init__(
        self,
        manager: Any,
        reducer: Reducer,
        weights: Callable[[], str],
        rates: Callable[[], Rates],
        **settings: object,
    ) -> None:
        self.weights, self.rates = weights, rates
        self.manager, self.group, self.reducer = manager, group_of(manager), reducer
        self.members = Members(reducer, number_of(weights()), set_up_digest(reducer, **settings))
        self.met = self.offered = self._asked = self._joined = False
        self._since = 0  # the step from which on this rank contributes
        self.catch_up: CatchUp | None = None
        self.extras: dict[str, Any] | None = None
        self.last_step = (0, 0, False)

    # ---- quorums -----------------------------------------------------------------------------------

    def ask(self) -> None:
        """Ask for a quorum, and do not wait, unless the open step has one."""
        if not self._asked and not self.met:
            with suppress(Exception):  # it is asked for again when it is needed
                self.manager.start_quorum(allow_heal=False)
                self._asked = True

    def ready(self) -> None:
        """Wait for the open step's quorum; if it is another one than before, meet."""
        if not self.met:
            quorum = self._quorum()
            if quorum.number != self.members.attempt:
                self._meet(quorum)
        self.met = False
        if self.catch_up is not None and self.members.behind:
            try:
                self.members.ready = self.catch_up.done
            except PeerError:
                assert self.group.quorum is not None
                self._fetch(self.group.quorum, self.members.first)

    def persist(
        self,
        failure: CommunicationError,
        attempt: Callable[[], Coroutine[Operation, None, None]],
        missed: Callable[[], bool],
    ) -> bool:
        """Exchange the open step again until a group has all of it.

        ``missed`` is called when the others have gone on without this rank, and says if ``attempt`` can
        take part in their step.

        Returns:
            Whether the step can be committed.
        """
        failed: CommunicationError | None = failure
        while failed is not None:
            verdict = self.recover(failed)
            failed, self.met = None, False
            if self.reducer.comm.rank in verdict.stale and not missed():
                self.met = True
                return False
            if self.reducer.comm.rank in verdict.commits:
                self.met = True
                return True
            try:
                run(attempt())
            except CommunicationError as error:
                failed = error
        return True

    def recover(self, error: CommunicationError) -> Verdict:
        """Give the exchange up, and meet whoever is left."""
        return self._meet(self._again(error))

    def end(self, copy: Callable[[], memoryview]) -> bytearray | None:
        """Wait until all have applied the last step, and those that are behind have a copy.

        Returns:
            Another rank's copy, if this one was behind.
        """
        members, reached = self.members, self.reducer.step
        while not members.left:
            if self.reducer.step < reached:
                place = self.reducer.comm.ledger.place(reached - 1)
                raise PeerError(
                    f"{place}: the others do it again without this rank, which has applied it "
                    "alone; take the weights from one of them"
                )
            try:
                if run(members.end(whole=self._has_copy())):
                    break
                self.offer(copy)
                time.sleep(_PAUSE)
            except CommunicationError as error:
                self.recover(error)
                self.met = True
        if not members.behind or self.catch_up is None or self.catch_up.copy is None:
            return None
        members.behind = False
        return self.catch_up.copy[1]

    def _has_copy(self) -> bool:
        """Tell whether this rank has the last weights, or a copy of them; let it be fetched."""
        if not self.members.behind:
            return True
        catch_up, quorum = self.catch_up, self.group.quorum
        assert catch_up is not None and quorum is not None
        with suppress(PeerError):  # it does not come: once more
            if catch_up.since >= self.reducer.step:
                return catch_up.done
        self._fetch(quorum, self.members.first)
        return False

    def _quorum(self) -> Quorum:
        """Wait for a quorum.

        Raises:
            DeadlineError: none for ten minutes.
        """
        until, said = time.monotonic() + _PATIENCE, False
        while True:
            began = time.monotonic()
            try:
                if not self._asked:
                    self.manager.start_quorum(allow_heal=False)
                self._asked = False
                self.manager.wait_quorum()
                if self.group.quorum is not None and self.manager.errored() is None:
                    return self.group.quorum
                reason = str(self.manager.errored()).splitlines()[0]
            except Exception as error:  # whatever torchft and its server raise
                reason = (str(error) or type(error).__name__).splitlines()[0]
                self.manager._quorum_future = None  # else the error comes back for ever
            if time.monotonic() > until:
                raise DeadlineError(
                    f"{self.reducer.place}: there was no quorum for {_PATIENCE:g} s ({reason}); is "
                    "the lighthouse there, and are as many ranks as it wants?"
                )
            if not said:
                said = True
                say(
                    f"{self.reducer.place}: no quorum yet ({reason}); training waits, and "
                    "nothing is lost"
                )
            # not after a long wait: a quorum may be made that counts on this rank
            time.sleep(max(began + _PAUSE - time.monotonic(), 0))

    def _again(self, error: CommunicationError) -> Quorum:
        """Give the exchange up, let the others do so, too, and return the next quorum."""
        self.group.comm.give_up()
        with suppress(Exception):  # it counts failures, and asks for another quorum
            self.manager.report_error(error)
            self.manager.should_commit()
        self._asked = False
        return self._quorum()

    def _meet(self, quorum: Quorum) -> Verdict:
        """Call the roll of a quorum, or of the next one that holds.

        Ranks without the weights wait for those that have them, whose heartbeats may only be late.
        """
        until = time.monotonic() + _RETURN
        while True:
            self.group.comm.regroup(quorum.rank, quorum.number, quorum.endpoints)
            try:
                rolling = self.members.call_the_roll(quorum.number, quorum.names, quorum.serial)
                verdict = run(rolling)
                break
            except CommunicationError as error:
                quorum = self._again(error)
            except CheckpointError as error:
                if time.monotonic() > until:
                    raise
                time.sleep(_PAUSE)
                quorum = self._again(PeerError(str(error)))
        stale = quorum.rank in verdict.stale
        known = self.catch_up is not None and self.catch_up.donor in quorum.names
        if (stale or (self.members.behind and not known)) and not self.members.idle:
            self._fetch(quorum, verdict.donor)
        if known and self.catch_up is not None:
            self.members.donor = quorum.names.index(self.catch_up.donor)
        return verdict

    # ---- a step ------------------------------------------------------------------------------------

    async def agree(self, told: Callable[[], dict[str, Any]]) -> None:
        """Vote, and hand over what is ``told`` to those whose gradients count from the next step on."""
        members, comm = self.members, self.reducer.channel("roll")
        await members.deal()
        compared = members.counts and not members.idle
        members.facts = [compared, *(self._numbers() if compared else (0, 0, 0)), self._since]
        await members.vote()
        self._check_alike()
        self._joined = bool(members.newcomers)
        if self.offered and not members.fetching:
            self.group.copies.drop()
            self.offered = False
        for rank, donor in members.newcomers.items():
            framing = Raw("control", variable=True)
            if donor == comm.rank:
                raw = torch.frombuffer(packed(told()), dtype=torch.uint8)
                await comm.isend(raw, rank, "extras", framing)
            elif rank == comm.rank:
                raw = await comm.irecv(donor, _EXTRAS, "extras", framing)
                self.extras = unpacked(raw.numpy())

    def _numbers(self) -> tuple[float, ...]:
        """Return a digest of this rank's rates, its learning rate, and now and then one of weights."""
        present = self.rates()
        rates, lr = number_of(repr(_numbers(present))), float(present[0][0].get("lr") or 0)
        # between two looks at the weights, also after every rank that joins
        looks = self._joined or self.reducer.step % _LOOK == 0
        weights = number_of(self.weights()) if looks else 0
        # numbers of 64 bits, of which float64 holds 53
        return rates % _EXACT, lr, weights % _EXACT

    def _check_alike(self) -> None:
        """Refuse rates and weights that are not those of the rank that has contributed for longest.

        Of several, the lowest holds; ranks that do not contribute yet do not compare.

        Raises:
            ConfigurationError: on the rank that differs; the others go on without it.
        """
        me, told = self.reducer.comm.rank, self.members.told.tolist()
        if not told[me][0]:
            return
        counted = [rank for rank, (counts, *_) in enumerate(told) if counts]
        first = min(counted, key=lambda rank: (told[rank][-1], rank))
        _, rates, lr, weights, _ = told[me]
        _, its_rates, its_lr, its_weights, _ = told[first]
        place = f"rank {me}, {self.reducer.place}"
        if rates != its_rates:
            raise ConfigurationError(
                f"{place}: the learning rate is {lr:g} here and {its_lr:g} on rank {first}, or other "
                "rates differ; name what sets them on all ranks, as in sync.carry(scheduler=scheduler): "
                "a rank that joins then goes on with the others' schedule"
            )
        if weights and its_weights and weights != its_weights:
            raise ConfigurationError(
                f"{place}: the weights are not those of rank {first}; is everything between backward() "
                "and the optimizer's step equal on all ranks, and in sync.carry() if it has a state?"
            )

    def close(self, step: int, *, applied: bool) -> bool:
        """Go on to the step after ``step``; tell whether this rank has caught up with it."""
        members = self.members
        self.last_step = members.attempt, members.contributors, members.counts
        arrived = members.committed(step, still=not self.met, applied=applied)
        if arrived:
            self._since = step + 1
        else:
            self.extras = None
        with suppress(Exception):  # torchft's manager counts the step, and no more
            self.manager.should_commit()
            batches = self.manager.batches_committed()
            self.manager.load_state_dict({"step": self.reducer.step, "batches_committed": batches})
        return arrived

    # ---- copies ------------------------------------------------------------------------------------

    def offer(self, copy: Callable[[], memoryview]) -> None:
        """Serve a copy of the state before the open step, if a rank wants one and this has it."""
        members = self.members
        if self.group.copies.wanted.is_set() and not (members.behind or members.idle):
            self.offered = True
            self.group.copies.offer(self.reducer.step, copy())

    def _fetch(self, quorum: Quorum, donor: int) -> None:
        """Begin to fetch a copy of the donor's state."""
        if self.catch_up is not None:
            self.catch_up.stop()
        endpoint, timeout = quorum.copies[donor], self.group.comm.timeout
        self.catch_up = CatchUp(quorum.names[donor], endpoint, timeout, self.reducer.step)
        self.members.donor, self.members.ready = donor, False

    def withdraw(self) -> None:
        """Leave without training on."""
        if self.catch_up is not None:
            self.catch_up.stop()
            self.catch_up = None
        self.members.withdraw()


class ElasticHandle(Handle):
    """The handle of a model whose ranks come and go, whatever they exchange."""

    attendance: Attendance
    _gone = False  # this rank has left between two steps, and the program may not know yet

    def _attend(self, attendance: Attendance) -> None:
        """Take part from now on; watch for SIGTERM until ``close``."""
        self.attendance = attendance
        self._carried: dict[str, Any] = {}
        self.on_close.callback(attendance.group.copies.close)
        self._turns = Turns()
        me = weakref.ref(self)

        def begin() -> bool:
            if (sync := me()) is not None:
                sync.leave()
            return sync is not None

        def leave(seconds: float) -> str:
            sync = me()
            return "" if sync is None else sync._leave_within(seconds)

        self._notice = Notice(begin, leave)
        self.on_close.callback(self._notice.close)

    @property
    def left(self) -> bool:
        """Whether this rank has left, and is to end."""
        return self.attendance.members.left

    @property
    def last_step(self) -> tuple[int, int, bool]:
        """The number of the group that exchanged the last step, its contributors, and if this is one."""
        return self.attendance.last_step

    def carry(self, **named: Any) -> None:
        """Name what a rank that joins takes over, too, as ``scheduler=scheduler``.

        Anything with ``state_dict()`` and ``load_state_dict()``, small, and of plain values and tensors.
        """
        for name, one in named.items():
            if not hasattr(one, "state_dict") or not hasattr(one, "load_state_dict"):
                raise ConfigurationError(
                    f"{name} is {type(one).__name__}; give what has state_dict() and load_state_dict()"
                )
        self._carried |= named

    def leave(self) -> None:
        """Leave with the next two steps, of which the first deals the residual to others; see ``left``.

        SIGTERM calls it, and ends the process when it has left: in the others' steps, if this rank is in
        none.
        """
        self.attendance.members.leaving = True

    def _leave_within(self, seconds: float) -> str:
        """Take part in the others' steps until this rank has left, as soon as it is in none of its own.

        Returns:
            A line that says why it has not; nothing if it has left, or has met nobody yet.
        """
        until, members = time.monotonic() + seconds, self.attendance.members
        if not self._turns.begin_leaving(seconds):
            why = "a step of its own was under way"
        elif self.left or not members.attempt:
            self._turns.end_leaving()
            return ""
        elif why := self._held_up():
            self._turns.end_leaving()
        else:
            why = self._leave_alone(until)
        rest = (
            "the others have its residual" if members.spent else "what it had not delivered is lost"
        )
        return why and (
            f"this rank has not left within {seconds:g} s of SIGTERM ({why}); it ends, and {rest}"
        )

    def _leave_alone(self, until: float) -> str:
        """Leave on the engine's thread; steps wait until that is over, however long this waits.

        Returns:
            Why it has not left; nothing if it has.
        """

        def job() -> None:
            self.attendance.withdraw()
            self._take_part()
            self._gone = True

        try:
            leaving = self._engine.submit(job)
        except ConfigurationError as error:
            self._turns.end_leaving()
            return str(error)
        leaving.add_done_callback(lambda _: self._turns.end_leaving())
        if not wait([leaving], max(until - time.monotonic(), 0)).done:
            return "the others did not take the three steps of that"
        if leaving.cancelled():
            return "its handle was closed"
        failure = leaving.exception()
        return "" if failure is None else (str(failure) or type(failure).__name__).splitlines()[0]

    def _held_up(self) -> str:
        """Say why this rank cannot leave without steps of its own, if so."""
        return "another rank fetches its weights" if self.attendance.offered else ""

    @abstractmethod
    def _take_part(self) -> None:
        """Do the others' steps without training until this rank has left; on the engine's thread."""

    def _ask(self) -> None:
        """Ask for the next step's quorum, unless this rank leaves."""
        self._turns.unless_leaving(self.attendance.ask)

    def stats(self) -> dict[str, Any]:
        """Return plain numbers; "elastic" has the present members, changes, and what was lost."""
        return {**super().stats(), "elastic": self.attendance.members.state()}

    def _check_here(self) -> None:
        """Refuse another step of a rank that has left; look who handles SIGTERM now."""
        self._notice.watch()
        if self.left:
            raise PeerError("this rank has left; end it, or start another one")
        if self.attendance.members.idle:  # averages were not applied here
            raise PeerError(
                "this rank was leaving, and something went wrong; end it, or start another one"
            )

    def _told(self) -> dict[str, Any]:
        """Return the states that a rank takes over when it has caught up."""
        return {f"carried {name}": one.state_dict() for name, one in self._carried.items()}

    def _take_over(
        self, extras: dict[str, Any], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        """Take over learning rates and the like, and the states that ``_told`` returned."""
        for one, groups in zip(optimizers, extras["present"], strict=True):
            for group, its in zip(one.param_groups, groups, strict=True):
                group.update(its)
        for name, one in self._carried.items():
            if f"carried {name}" in extras:
                one.load_state_dict(extras[f"carried {name}"])

    def _end_of_leaving(self) -> None:
        """End the process if it was SIGTERM that asked for it."""
        if self._notice.came:
            self._notice.pass_on()
