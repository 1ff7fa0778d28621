"""How a rank takes part in a group that changes: it asks for quorums, meets, fetches and recovers.

torchft's manager says which ranks are there; ``members`` decides about the open step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Final, final

import torch

from sparsync.algorithm import Algorithm
from sparsync.console import say
from sparsync.elastic.catch_up import CatchUp, Rates
from sparsync.elastic.group import Quorum, group_of
from sparsync.elastic.members import Members, Verdict
from sparsync.errors import (
    CheckpointError,
    CommunicationError,
    ConfigurationError,
    DeadlineError,
    PeerError,
)
from sparsync.feedback.agreed_setup import number_of, set_up_digest
from sparsync.feedback.reducer import Reducer
from sparsync.options import Options
from sparsync.sparse import Vector
from sparsync.state import packed, unpacked
from sparsync.transports.driver import Operation, run
from sparsync.transports.ledger import Raw

__all__ = ["Attendance", "check_options", "summing"]

_PATIENCE: Final = 600.0  # seconds without a quorum after which training ends
_PAUSE: Final = 0.2  # seconds between requests for one
_RETURN: Final = 60.0  # seconds that ranks without the weights wait for one that has them
_EXACT: Final = 2**53  # integers below this are exact in float64, in which votes travel
_LOOK: Final = 100  # steps between comparisons of the weights, which take a pass over them
_EXTRAS: Final = 2**26  # most bytes of the schedulers and the like that a rank takes over


def check_options(options: Options, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse options that are not for ranks that come and go.

    Raises:
        ConfigurationError: names the option.
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
    # the manager's group has opened its sockets before ``attach``
    given = [f"{name}=..." for name, value in carried.sockets.items() if value is not None]
    if carried.name != "auto":
        given = [repr(carried.name), *given]
    if given:
        raise ConfigurationError(
            f"Transport({', '.join(given)}) is not for elastic=; give these to make_manager() instead"
        )
    if not optimizers:
        raise ConfigurationError(
            "elastic= needs the optimizer, whose state a rank that joins takes over; give it to attach"
        )


def _numbers(rates: Rates) -> list[list[tuple[str, str]]]:
    """Return the rates that are numbers, without their last bits, in which schedulers may differ."""

    def text(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            value = value.tolist()
        if isinstance(value, list | tuple):
            return " ".join(map(text, value))
        # functions and other objects have no text that is equal on all ranks
        return f"{value:.12g}" if isinstance(value, int | float) else ""

    return [[(key, text(its[key])) for key in sorted(its)] for one in rates for its in one]


def summing(algorithm: Algorithm) -> Algorithm:
    """Return an algorithm that only sums, for ``Attendance.commit`` divides.

    Not all ranks have gradients in a total: one that is behind, or leaves, takes part without.
    """
    return replace(algorithm, average=False)


@final
class Attendance:
    """One rank's part in the quorums of a ``torchft.Manager``.

    Args:
        manager: torchft's.
        reducer: of a ``summing`` algorithm, and ``changing``.
        weights: returns a digest of the weights that are equal on all ranks.
        rates: returns the optimizers' present rates, which must be equal as well.
        average: divide totals by the number of ranks whose gradients are in them.
        settings: further settings that must be equal on all ranks.

    Attributes:
        catch_up: the fetch of another rank's state, while this rank is behind.
        offered: a copy of this rank's state is being served.
        last_step: the number of the group that exchanged the last step, its number of contributors, and
            whether this rank is one.
    """

    def __init__(
        self,
        manager: Any,
        reducer: Reducer,
        weights: Callable[[], str],
        rates: Callable[[], Rates],
        *,
        average: bool,
        **settings: object,
    ) -> None:
        self._average = average
        self.weights, self.rates = weights, rates
        self.manager, self.group, self.reducer = manager, group_of(manager), reducer
        self.members = Members(reducer, number_of(weights()), set_up_digest(reducer, **settings))
        self.offered = self._asked = self._joined = False
        self._met = False  # the roll was called for the open step already
        self._outside = False  # see ``outside_steps``
        self._since = 0  # the step from which on this rank contributes
        self.catch_up: CatchUp | None = None
        self._donor, self._ready = (
            0,
            False,
        )  # of ``catch_up``: the donor's number, and whether it is here
        # the donor's further states, once this rank has caught up
        self._extras: dict[str, Any] | None = None
        self.last_step = (0, 0, False)

    # ---- quorums -----------------------------------------------------------------------------------

    def ask(self) -> None:
        """Ask for a quorum without waiting for it, unless the open step has one."""
        # torchft asks on a thread of its own, so the answer comes while the forward pass runs
        if not self._asked and not self._met:
            with suppress(Exception):  # ``_quorum`` asks again when a quorum is needed
                self.manager.start_quorum(allow_heal=False)
                self._asked = True

    def ready(self) -> None:
        """Wait for the open step's quorum; if it is not the one of the last step, meet."""
        # after a failure the roll may have been called for this step already
        if not self._met:
            quorum = self._quorum()
            if quorum.number != self.members.attempt:
                self._meet(quorum)
        self._met = False
        if self.catch_up is not None and self.members.behind:
            # before the vote, which tells the others that this rank counts from the next step on
            try:
                self._ready = self.catch_up.done and not self._outside
            except PeerError:
                assert self.group.quorum is not None
                self._fetch(self.group.quorum, self.members.first)

    def join(self) -> None:
        """Meet the others before the open step, for which no quorum is asked again."""
        self.ready()
        self._met = True

    @contextmanager
    def outside_steps(self) -> Iterator[None]:
        """Return a context in which this rank takes part in an exchange outside of its loop's steps.

        It does not catch up in that one, after which its loop does not step the schedulers that it would
        take over.
        """
        self._outside = True
        try:
            yield
        finally:
            self._outside = False

    def persist(
        self,
        failure: CommunicationError,
        attempt: Callable[[], Coroutine[Operation, None, None]],
        missed: Callable[[], bool],
    ) -> bool:
        """Exchange the open step again until a group has all of it.

        ``missed`` is called when the others have gone on without this rank; it returns whether
        ``attempt`` can take part in their step.

        Returns:
            Whether the step can be committed.
        """
        failed: CommunicationError | None = failure
        while failed is not None:
            verdict = self.recover(failed)
            # True only where no attempt follows: then the rows of the roll hold for the next step, whose
            # quorum is here already; after an attempt those of its votes do
            failed, self._met = None, False
            if self.reducer.comm.rank in verdict.stale and not missed():
                self._met = True
                return False
            if self.reducer.comm.rank in verdict.commits:
                self._met = True
                return True
            try:
                run(attempt())
            except CommunicationError as error:
                failed = error
        return True

    def recover(self, error: CommunicationError) -> Verdict:
        """Give the exchange up, and meet the ranks that are left."""
        return self._meet(self._again(error))

    def end(self, copy: Callable[[], memoryview]) -> bytearray | None:
        """Wait until all have applied the last step, and those that are behind have fetched a copy.

        Returns:
            Another rank's copy, if this one was behind.
        """
        members, reached = self.members, self.reducer.step
        while not members.left:
            # a roll has taken this rank back: it has left its training loop, and cannot do the step again
            if self.reducer.step < reached:
                place = self.reducer.comm.ledger.place(reached - 1)
                raise PeerError(
                    f"{place}: the others do this step again without this rank, which has applied it "
                    "alone; take the weights from one of them"
                )
            try:
                if run(members.end(whole=self._has_copy())):
                    break
                self.offer(copy)
                time.sleep(_PAUSE)
            except CommunicationError as error:
                self.recover(error)
                self._met = True
        if not members.behind or self.catch_up is None or self.catch_up.copy is None:
            return None
        members.caught_up()
        return self.catch_up.copy[1]

    def _has_copy(self) -> bool:
        """Tell whether this rank has the last weights, or a copy of them; if not, fetch one."""
        if not self.members.behind:
            return True
        catch_up, quorum = self.catch_up, self.group.quorum
        assert catch_up is not None and quorum is not None
        with suppress(PeerError):  # the copy does not come: fetch another one
            # ``end`` returns the copy as it is, without repeating steps: it has to be of the last one
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
                # torchft catches errors of ``reconfigure``, and only notes them
                reason = str(self.manager.errored()).splitlines()[0]
            except Exception as error:  # of any type that torchft and its server raise
                reason = (str(error) or type(error).__name__).splitlines()[0]
                # ``start_quorum`` (torchft-nightly 2026.10.26) begins with the result of the last future:
                # one that has failed would raise the same error again for ever
                self.manager._quorum_future = None
            if time.monotonic() > until:
                raise DeadlineError(
                    f"{self.reducer.place}: there was no quorum for {_PATIENCE:g} s ({reason}); check "
                    "that the lighthouse runs, and that as many ranks as it waits for are there"
                )
            if not said:
                said = True
                say(
                    f"{self.reducer.place}: no quorum yet ({reason}); training waits, and "
                    "nothing is lost"
                )
            # no pause after a long wait: the quorum that is formed now may count on this rank
            time.sleep(max(began + _PAUSE - time.monotonic(), 0))

    def _again(self, error: CommunicationError) -> Quorum:
        """Give the exchange up, let the others do the same, and return the next quorum."""
        # first of all: the others may wait for this rank's messages until their deadline
        self.group.comm.give_up()
        # torchft counts failed steps, and the lighthouse makes a new quorum after one even where its
        # members are the same; whatever becomes of the report, a quorum is needed
        with suppress(Exception):
            self.manager.report_error(error)
            self.manager.should_commit()
        self._asked = (
            False  # a quorum that was asked for before the failure is that of the broken group
        )
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
                # a rank that stands still, or whose heartbeats are late, has the weights and comes back
                if time.monotonic() > until:
                    raise
                time.sleep(_PAUSE)
                quorum = self._again(PeerError(str(error)))
        stale = quorum.rank in verdict.stale
        # a fetch outlives changes of the group, whose ranks have other numbers then, but not its donor
        known = self.catch_up is not None and self.catch_up.donor in quorum.names
        if (stale or (self.members.behind and not known)) and not self.members.idle:
            self._fetch(quorum, verdict.donor)
        if known and self.catch_up is not None:
            self._donor = quorum.names.index(self.catch_up.donor)
        return verdict

    # ---- a step ------------------------------------------------------------------------------------

    async def agree(self, told: Callable[[], dict[str, Any]]) -> None:
        """Vote, and send the states of ``told`` to ranks whose gradients count from the next step on."""
        members, comm = self.members, self.reducer.channel("roll")
        # before the vote: a share that does not arrive lets the attempt fail, as any other message
        await members.deal()
        compared = members.counts and not members.idle
        facts = [compared, *(self._numbers() if compared else (0, 0, 0)), self._since]
        await members.vote(facts, donor=self._donor, ready=self._ready)
        self._check_alike()
        self._joined = bool(members.newcomers)
        # ranks that fetch count for nothing in the open step: copies stay until there is none
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
                self._extras = unpacked(raw.numpy())

    def _numbers(self) -> tuple[float, ...]:
        """Return a digest of the rates, the learning rate, and now and then a digest of the weights."""
        present = self.rates()
        rates, lr = number_of(repr(_numbers(present))), float(present[0][0].get("lr") or 0)
        # at intervals, and in the step after a rank has joined; 0 in between
        looks = self._joined or self.reducer.step % _LOOK == 0
        weights = number_of(self.weights()) if looks else 0
        # numbers of 64 bits, of which float64 holds 53
        return rates % _EXACT, lr, weights % _EXACT

    def _check_alike(self) -> None:
        """Refuse rates and weights that are not those of the rank that has contributed for longest.

        Of several such ranks, the lowest holds; ranks that do not contribute yet do not compare.

        Raises:
            ConfigurationError: on the rank that differs; the others go on without it.
        """
        me, told = self.reducer.comm.rank, self.members.told.tolist()
        if not told[me][0]:
            return
        # The longest, not the majority: newcomers with a schedule of their own may be many, and it is
        # they who are to end.
        counted = [rank for rank, (counts, *_) in enumerate(told) if counts]
        first = min(counted, key=lambda rank: (told[rank][-1], rank))
        _, rates, lr, weights, _ = told[me]
        _, its_rates, its_lr, its_weights, _ = told[first]
        place = f"rank {me}, {self.reducer.place}"
        if rates != its_rates:
            raise ConfigurationError(
                f"{place}: the learning rate is {lr:g} here and {its_lr:g} on rank {first}, or other "
                "rates differ; name their scheduler on all ranks, as in sync.carry(scheduler=scheduler): "
                "a rank that joins then goes on with the others' schedule"
            )
        if weights and its_weights and weights != its_weights:
            raise ConfigurationError(
                f"{place}: the weights are not those of rank {first}; do the same on all ranks between "
                "backward() and the optimizer's step, and name objects that have a state in sync.carry()"
            )

    def commit(self, *, propagate_nonfinite: bool = False) -> list[Vector]:
        """Commit the open step; return the averages over the ranks whose gradients are in them."""
        averages = self.reducer.commit(propagate_nonfinite=propagate_nonfinite)
        contributors = self.members.contributors
        if contributors > 1 and self._average:
            for average in averages:
                average.divide_(contributors)
        return averages

    def close(self, step: int, *, applied: bool) -> bool:
        """Go on to the step after ``step``; tell whether this rank has caught up with it."""
        members = self.members
        self.last_step = members.attempt, members.contributors, members.counts
        # ``still``: the rows of the votes hold; after a roll this rank goes on by those of the roll
        arrived = members.committed(step, still=not self._met, applied=applied)
        if arrived:
            self._since = step + 1
        else:
            self._extras = None
        # Only for torchft's own count of steps, from which its quorums tell ranks that lag.  The number
        # is set to this library's: a rank that has joined would never reach the others' by counting.
        with suppress(Exception):
            self.manager.should_commit()
            batches = self.manager.batches_committed()
            self.manager.load_state_dict({"step": self.reducer.step, "batches_committed": batches})
        return arrived

    def arrival(self) -> tuple[dict[str, Any], CatchUp] | None:
        """Return, once, the donor's further states and the fetch, if this rank has caught up."""
        extras, catch_up = self._extras, self.catch_up
        if extras is None or catch_up is None:
            return None
        self._extras = self.catch_up = None
        return extras, catch_up

    # ---- copies ------------------------------------------------------------------------------------

    def offer(self, copy: Callable[[], memoryview]) -> None:
        """Serve a copy of the state before the open step, if a rank wants one and this has it."""
        members = self.members
        # the optimizers of idle ranks do not step any more: a copy of them would be old
        if self.group.copies.wanted.is_set() and not (members.behind or members.idle):
            self.offered = True
            self.group.copies.offer(self.reducer.step, copy())

    def _fetch(self, quorum: Quorum, donor: int) -> None:
        """Begin to fetch a copy of the donor's state."""
        if self.catch_up is not None:
            self.catch_up.stop()
        endpoint, timeout = quorum.copies[donor], self.group.comm.timeout
        self.catch_up = CatchUp(quorum.names[donor], endpoint, timeout, self.reducer.step)
        self._donor, self._ready = donor, False

    def withdraw(self) -> None:
        """Leave without training on."""
        if self.catch_up is not None:
            self.catch_up.stop()
            self.catch_up = None
        self._ready = False
        self.members.withdraw()
