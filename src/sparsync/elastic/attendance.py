"""Take part in a changing group: ask for quorums, call the roll, fetch weights, and recover.

torchft's manager determines which ranks are present (the *quorum*).  When it changes, its members *call
the roll*: each tells the others which steps it has applied, and ``members`` decides whether the open
step is applied or repeated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Final, final

import torch
from torch import Tensor

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
from sparsync.feedback.agreed_setup import number_of, set_up_digest, weights_digest
from sparsync.feedback.reducer import Reducer
from sparsync.options import Options, Transport
from sparsync.sparse import Vector
from sparsync.state import packed, unpacked
from sparsync.transports.driver import Operation, run
from sparsync.transports.ledger import Raw

__all__ = ["Attendance", "check_options", "summing"]

_PATIENCE: Final = 600.0  # seconds without a quorum after which training ends
_PAUSE: Final = 0.2  # seconds between requests for a quorum
_RETURN: Final = 60.0  # seconds that ranks without the weights wait for a rank that has them
_EXACT: Final = 2**53  # votes are sent as float64, which is exact for integers below this
_LOOK: Final = 100  # steps between comparisons of the weights, each of which takes a pass over them
# limit on the bytes of further states, e.g. of schedulers, that a joining rank takes over
_EXTRAS: Final = 2**26


def check_options(options: Options, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse options that elastic training does not support.

    Raises:
        ConfigurationError: an option is not supported; the message names it.
    """
    carried = options.transport
    for what, there in {
        "correction=": options.correction is not None,
        "Compression(schedule=...)": options.compression.schedule is not None,
        "Transport(hierarchy=...)": carried.hierarchy is not None,
        "Transport(world=...)": carried.world is not None,
        "Transport(connect_timeout=...)": carried.connect_timeout != Transport().connect_timeout,
        "Monitoring(sentinel=...)": options.monitoring.sentinel is not None,
    }.items():
        if there:
            raise ConfigurationError(f"{what} is not for elastic=; omit one of them")
    # socket options come too late here, because the manager's group opened its sockets before ``attach``
    named, usual = {"timeout": carried.timeout, **carried.sockets}, Transport()
    given = [f"{name}=..." for name, value in named.items() if value != getattr(usual, name)]
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
    """Return the numeric rates as texts, rounded, because schedulers may differ in the last bits."""

    def text(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            value = value.tolist()
        if isinstance(value, list | tuple):
            return " ".join(map(text, value))
        # the text of other objects, such as functions, may differ between ranks
        return f"{value:.12g}" if isinstance(value, int | float) else ""

    return [[(key, text(its[key])) for key in sorted(its)] for one in rates for its in one]


def summing(algorithm: Algorithm) -> Algorithm:
    """Return the algorithm with sums instead of averages; ``Attendance.commit`` divides them later.

    The divisor is the number of ranks that contribute gradients; ranks that are behind or leaving do not.
    """
    return replace(algorithm, average=False)


@final
class Attendance:
    """Represents one rank in the quorums of a ``torchft.Manager``.

    Args:
        manager: torchft's manager.
        reducer: a ``changing`` reducer with a ``summing`` algorithm.
        weights: returns a digest of the weights that are equal on all ranks.
        frozen: the parameters that no step changes; they must be equal before the first step.
        rates: returns the optimizers' current rates, which must also be equal.
        average: whether to divide totals by the number of ranks whose gradients they contain.
        settings: further settings that must be equal on all ranks.

    Attributes:
        catch_up: while this rank is behind, the fetch of a peer's state.
        offered: whether a copy of this rank's state is being served.
        last_step: the number of the group that exchanged the last step, its number of contributors, and
            whether this rank is one of them.
    """

    def __init__(
        self,
        manager: Any,
        reducer: Reducer,
        weights: Callable[[], str],
        frozen: Iterable[Tensor],
        rates: Callable[[], Rates],
        *,
        average: bool,
        **settings: object,
    ) -> None:
        self._average = average
        self.weights, self.rates = weights, rates
        self.manager, self.group, self.reducer = manager, group_of(manager), reducer
        start = number_of(weights() + weights_digest(frozen))
        self.members = Members(reducer, start, set_up_digest(reducer, **settings))
        self.offered = self._asked = self._joined = False
        self._met = False  # whether the roll was already called for the open step
        self._outside = False  # see ``outside_steps``
        self._since = 0  # the first step to which this rank contributes
        self.catch_up: CatchUp | None = None
        # the rank from which ``catch_up`` fetches the copy, and whether the copy has arrived
        self._donor, self._ready = 0, False
        # the donor's states besides weights and moments, e.g. of schedulers, once this rank has caught up
        self._extras: dict[str, Any] | None = None
        self.last_step = (0, 0, False)

    # ---- quorums -----------------------------------------------------------------------------------

    def ask(self) -> None:
        """Ask for a quorum without waiting for it, unless the open step has one."""
        # torchft asks on a separate thread, so the answer arrives during the forward pass
        if not self._asked and not self._met:
            with suppress(Exception):  # ``_quorum`` asks again when it needs the quorum
                self.manager.start_quorum(allow_heal=False)
                self._asked = True

    def ready(self) -> None:
        """Wait for the open step's quorum; call the roll if it differs from the last step's quorum."""
        # after a failure, the roll may already have been called for this step
        if not self._met:
            quorum = self._quorum()
            if quorum.number != self.members.attempt:
                self._meet(quorum)
        self._met = False
        if self.catch_up is not None and self.members.behind:
            # check this before the vote, because the vote announces whether this rank counts from the
            # next step on
            try:
                self._ready = self.catch_up.done and not self._outside
            except PeerError:
                assert self.group.quorum is not None
                self._fetch(self.group.quorum, self.members.first)

    def join(self) -> None:
        """Call the roll before the open step, which then needs no further quorum."""
        self.ready()
        self._met = True

    @contextmanager
    def outside_steps(self) -> Iterator[None]:
        """Return a context in which this rank takes part in an exchange outside of its loop's steps.

        The rank does not catch up in such an exchange.  Otherwise, it would take over its peers'
        schedulers, which the peers' loops step after the exchange, but this rank's own loop would not.
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
        """Repeat the exchange of the open step until a whole group has succeeded.

        If the other ranks have continued without this rank, ``missed`` is called.  It returns whether
        ``attempt`` can take part in their step.

        Returns:
            Whether the step can be committed.
        """
        failed: CommunicationError | None = failure
        while failed is not None:
            verdict = self.recover(failed)
            # ``_met`` becomes True only if no attempt follows.  The next step, whose quorum is already
            # known, then uses the roll's table of contributors.  After an attempt, it uses the table
            # that was sent with the votes.
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
        """Abandon the exchange, and call the roll with the remaining ranks."""
        return self._meet(self._again(error))

    def end(
        self,
        copy: Callable[[], memoryview],
        take: Callable[[bytearray], None],
        others: Callable[[], Mapping[str, Tensor]] = dict,
    ) -> None:
        """Wait until all ranks have the weights after the last step, from this step or from a copy.

        Args:
            copy: returns a copy of this rank's state.
            take: loads a copy of a peer's state.
            others: returns, by name, tensors that no step makes equal; all ranks take over the tensors of
                the first rank.
        """
        members, reached = self.members, self.reducer.step
        while not members.left:
            # if a roll has set this rank back, the rank cannot redo the step, because its training loop
            # has ended
            if self.reducer.step < reached:
                place = self.reducer.comm.ledger.place(reached - 1)
                raise PeerError(
                    f"{place}: the others do this step again without this rank, which has applied it "
                    "alone; take the weights from one of them"
                )
            try:
                if run(members.end(whole=self._has_copy())):
                    # the training thread, which waits for this thread, may have used a different stream
                    self._wait_for_gpus()
                    if (
                        members.behind
                        and self.catch_up is not None
                        and self.catch_up.copy is not None
                    ):
                        take(self.catch_up.copy[1])
                    if tensors := others():
                        run(members.equalise(tensors))
                    members.caught_up()
                    self._wait_for_gpus()
                    return
                self.offer(copy)
                time.sleep(_PAUSE)
            except CommunicationError as error:
                self.recover(error)
                self._met = True

    def _wait_for_gpus(self) -> None:
        for device in {unit.device for unit in self.reducer.units if unit.device.type == "cuda"}:
            torch.cuda.synchronize(device)

    def _has_copy(self) -> bool:
        """Return whether this rank has the last weights, or a copy of them; if not, fetch a copy."""
        if not self.members.behind:
            return True
        catch_up, quorum = self.catch_up, self.group.quorum
        assert catch_up is not None and quorum is not None
        with suppress(PeerError):  # the fetch failed; start a new one
            # ``end`` loads the copy without repeating steps, so it must be a copy of the last weights
            if catch_up.since >= self.reducer.step:
                return catch_up.done
        self._fetch(quorum, self.members.first)
        return False

    def _quorum(self) -> Quorum:
        """Wait for a quorum.

        Raises:
            DeadlineError: there was no quorum for ten minutes.
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
                # torchft catches errors of ``reconfigure``, and only records them
                reason = str(self.manager.errored()).splitlines()[0]
            except Exception as error:  # of any type that torchft and its server raise
                reason = (str(error) or type(error).__name__).splitlines()[0]
                # ``start_quorum`` (torchft-nightly 2026.10.26) first takes the result of the previous
                # future.  If that failed, every later call would raise the same error
                self.manager._quorum_future = None
            if time.monotonic() > until:
                raise DeadlineError(
                    f"{self.reducer.place}: there was no quorum for {_PATIENCE:g} s ({reason}); check "
                    "that the lighthouse runs, and that as many ranks as it waits for are running"
                )
            if not said:
                said = True
                say(
                    f"{self.reducer.place}: no quorum yet ({reason}); training waits, and "
                    "nothing is lost"
                )
            # after a long wait, ask again without a pause, because the quorum that is now forming may
            # include this rank
            time.sleep(max(began + _PAUSE - time.monotonic(), 0))

    def _again(self, error: CommunicationError) -> Quorum:
        """Abandon the exchange, make the other ranks do the same, and return the next quorum."""
        # give up first, because otherwise the other ranks may wait until their deadline for this rank's
        # messages
        self.group.comm.give_up()
        # Report the failure: the lighthouse then forms a new quorum even if its members stay the same.
        # The next quorum is requested whether or not the report succeeds
        with suppress(Exception):
            self.manager.report_error(error)
            self.manager.should_commit()
        self._asked = False  # a quorum requested before the failure belongs to the broken group
        return self._quorum()

    def _meet(self, quorum: Quorum) -> Verdict:
        """Call the roll of this quorum or, if that fails, of later quorums until a roll succeeds.

        Ranks without the weights wait for a rank that has them, because that rank may be alive although
        its heartbeats are late.

        Raises:
            DeadlineError: rolls have failed for ten minutes.
        """
        until, failing_since = time.monotonic() + _RETURN, None
        while True:
            self.group.comm.regroup(quorum.rank, quorum.number, quorum.endpoints)
            try:
                rolling = self.members.call_the_roll(quorum.number, quorum.names, quorum.serial)
                verdict = run(rolling)
                break
            except CommunicationError as error:
                now = time.monotonic()
                if failing_since is None:
                    failing_since = now
                    say(
                        f"{self.reducer.place}: the ranks present have not all met ({error}); training "
                        "waits, and nothing is lost"
                    )
                if now > failing_since + _PATIENCE:
                    raise DeadlineError(
                        f"{self.reducer.place}: the ranks present have not all met for {_PATIENCE:g} s "
                        f"({error}); end the rank that this names, and check that every rank can "
                        "reach every other"
                    ) from error
                quorum = self._again(error)
            except CheckpointError as error:
                # a rank that has the weights may return: it may only have stalled, or its heartbeats may
                # be late
                if time.monotonic() > until:
                    raise
                time.sleep(_PAUSE)
                quorum = self._again(PeerError(str(error)))
        stale = quorum.rank in verdict.stale
        # a fetch survives a change of the group if its donor is still a member, even under a new number
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
        # deal leaving ranks' residuals before the vote, so that the attempt fails if a share is lost
        await members.deal()
        compared = members.counts and not members.idle
        facts = [compared, *(self._numbers() if compared else (0, 0, 0)), self._since]
        await members.vote(facts, donor=self._donor, ready=self._ready)
        self._check_alike()
        self._joined = bool(members.newcomers)
        # keep the copies until no rank is fetching any more
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
        """Return a digest of all rates, the learning rate, and (periodically) a digest of the weights."""
        present = self.rates()
        rates, lr = number_of(repr(_numbers(present))), float(present[0][0].get("lr") or 0)
        # a digest takes a pass over the weights, so it is sent only periodically and in the step after a
        # rank has joined; otherwise, 0 is sent
        looks = self._joined or self.reducer.step % _LOOK == 0
        weights = number_of(self.weights()) if looks else 0
        # reduced modulo 2^53, because votes are sent as float64
        return rates % _EXACT, lr, weights % _EXACT

    def _check_alike(self) -> None:
        """Refuse rates and weights that differ from those of the rank that has contributed longest.

        If there are several such ranks, the lowest one decides.  Ranks that do not contribute yet are
        not compared.

        Raises:
            ConfigurationError: raised on the rank that differs; the other ranks continue without it.
        """
        me, told = self.reducer.comm.rank, self.members.told.tolist()
        if not told[me][0]:
            return
        # The rank that has contributed longest decides, not the majority: newcomers with a wrong
        # schedule must stop, even if they outnumber the others.
        counted = [rank for rank, (counts, *_) in enumerate(told) if counts]
        first = min(counted, key=lambda rank: (told[rank][-1], rank))
        _, rates, lr, weights, _ = told[me]
        _, its_rates, its_lr, its_weights, _ = told[first]
        place = f"rank {me}, {self.reducer.place}"
        if rates != its_rates:
            raise ConfigurationError(
                f"{place}: the learning rate is {lr:g} here and {its_lr:g} on rank {first}, or other "
                "rates differ; name their scheduler on all ranks, as in sync.carry(scheduler=scheduler): "
                "a rank that joins then continues the schedule of the other ranks"
            )
        if weights and its_weights and weights != its_weights:
            raise ConfigurationError(
                f"{place}: the weights differ from those of rank {first}; do the same on all ranks "
                "between "
                "backward() and the optimizer's step, and name objects that have a state in sync.carry()"
            )

    def commit(self, *, propagate_nonfinite: bool = False) -> list[Vector]:
        """Commit the open step; return averages over the ranks whose gradients are in the totals."""
        averages = self.reducer.commit(propagate_nonfinite=propagate_nonfinite)
        contributors = self.members.contributors
        if contributors > 1 and self._average:
            for average in averages:
                average.divide_(contributors)
        return averages

    def close(self, step: int, *, applied: bool) -> bool:
        """Advance to the step after ``step``; return whether this rank has caught up with it."""
        members = self.members
        self.last_step = members.attempt, members.contributors, members.counts
        # with ``still``, no roll was called, and the table of contributors came with the votes instead
        arrived = members.committed(step, still=not self._met, applied=applied)
        if arrived:
            self._since = step + 1
        else:
            self._extras = None
        # These calls only maintain torchft's own step count, by which its quorums recognise lagging
        # ranks.  The count is set to this library's step, because a rank that joined later would count
        # too few steps.
        with suppress(Exception):
            self.manager.should_commit()
            batches = self.manager.batches_committed()
            self.manager.load_state_dict({"step": self.reducer.step, "batches_committed": batches})
        return arrived

    def arrival(self) -> tuple[dict[str, Any], CatchUp] | None:
        """If this rank has just caught up, return the donor's further states and the fetch."""
        extras, catch_up = self._extras, self.catch_up
        if extras is None or catch_up is None:
            return None
        self._extras = self.catch_up = None
        return extras, catch_up

    # ---- copies ------------------------------------------------------------------------------------

    def offer(self, copy: Callable[[], memoryview]) -> None:
        """Serve a copy of the state before the open step, if a peer wants it and this rank has it."""
        members = self.members
        # the optimizers of an idle rank no longer step, so a copy of its state would be outdated
        if self.group.copies.wanted.is_set() and not (members.behind or members.idle):
            self.offered = True
            self.group.copies.offer(self.reducer.step, copy())

    def _fetch(self, quorum: Quorum, donor: int) -> None:
        """Start fetching a copy of the donor's state."""
        if self.catch_up is not None:
            self.catch_up.stop()
        endpoint, timeout = quorum.copies[donor], self.group.comm.timeout
        self.catch_up = CatchUp(quorum.names[donor], endpoint, timeout, self.reducer.step)
        self._donor, self._ready = donor, False

    def withdraw(self) -> None:
        """Leave without further training."""
        if self.catch_up is not None:
            self.catch_up.stop()
            self.catch_up = None
        self._ready = False
        self.members.withdraw()
