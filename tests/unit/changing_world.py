"""A world whose ranks die, join, leave and stall between any two messages, at random moments.

Messages between two members arrive in the order sent; some of the last messages of a dying member
never arrive. A member that stalls, or whose links are cut, is absent: the others give up on it, and
it gets no quorum until it returns. The next event (an arrival, a member's next move, a death, a
birth, an absence) is drawn at random.
"""

import argparse
import gc
import random
import sys
import time
from collections import Counter, defaultdict, deque
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, reduce
from multiprocessing import get_context
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import torch

from sparsync.cost import auto
from sparsync.elastic.members import Members, _attempt_of, rest_of
from sparsync.errors import CommunicationError, NonFiniteGradientError, PeerError
from sparsync.feedback.reducer import Reducer
from sparsync.presets import PRESETS, resolve
from sparsync.transports.communicator import Communicator, rounds
from sparsync.transports.driver import Finished, Operation, Task, run
from sparsync.transports.groups import SoloCommunicator
from sparsync.units import plan_units

GIVE_UP, DEATH, TIMEOUT = "give up", "death", "timeout"
CHANCES = {"change": 0.004, "leaving": 0.03, "broken": 0.01, "absence": 0.004, "alone": 0.01}
MOST = 30_000  # limit on events of a world; most take a few hundred


class Withdrawn(Exception):
    """A member has ended, and the others repeat its last step without it."""


class Waiting(Operation):
    """A message, or a quorum, that has not arrived yet."""

    def __init__(self, why=""):
        self.error, self.why = None, why

    def wait(self):
        raise AssertionError("only the world resumes")

    def __await__(self):
        if not self.done:
            yield self
        if self.error is not None:
            raise self.error
        return self.result

    def end(self, result=None, error=None):
        self.result, self.error, self.done = result, error, True


class Ends(Communicator):
    """A member's handle on its current group.

    The handle carries whole tensors instead of bytes, and keeps no ledger, so worlds are cheap.
    """

    def __init__(self, world, member):
        super().__init__(0, 1, torch.device("cpu"))
        self.world, self.member = world, member
        self.job, self.ends, self.past = 0, [member], set()
        self.boxes, self.waits, self.early = defaultdict(deque), {}, []
        self.broken, self.gone, self.silent = "", set(), set()
        self.handles = {}
        self.shared = self  # of all channels

    # ---- what has arrived --------------------------------------------------------------------------

    def regroup(self, rank, job, ends):
        self.past.add(self.job)
        self.rank, self.world_size, self.job, self.ends = rank, len(ends), job, ends
        self.boxes.clear()
        self.waits.clear()
        self.silent.clear()
        self.handles.clear()
        self.broken = ""
        early, self.early = self.early, []
        for message in early:
            self.take(*message)

    def give_up(self):
        for end in self.ends:
            self.world.post(self.member, end, (self.job, None, GIVE_UP))

    def take(self, source, job, tag, payload):
        """Record the arrival of a message."""
        if job is not None and job != self.job:
            if job not in self.past:
                self.early.append((source, job, tag, payload))
        elif payload is DEATH or payload is TIMEOUT:
            (self.gone if payload is DEATH else self.silent).add(source)
            self.fail(lambda key: key[0] == source, f"{payload} of {source}")
        elif payload is GIVE_UP:
            self.broken = f"{source} has given up"
            self.fail(lambda _: True, self.broken)
        elif (source, tag) in self.waits:
            self.waits.pop((source, tag)).end(payload)
        else:
            self.boxes[source, tag].append(payload)

    def fail(self, which, why):
        for key in [key for key in self.waits if which(key)]:
            self.waits.pop(key).end(error=PeerError(f"{self.member}: {why}"))

    # ---- a communicator ----------------------------------------------------------------------------

    def channel(self, tag):
        if tag not in self.handles:
            self.handles[tag] = super().channel(tag)
        return self.handles[tag]

    def stage(self, name, nothing=nullcontext()):  # noqa: B008 (it has no state)
        return nothing

    def isend(self, payload, dest, phase, framing):
        return self.start_send(payload.clone(), dest, phase, framing)

    def irecv(self, source, capacity, phase, framing):
        return self.start_recv(source, capacity, phase, framing)

    def start_send(self, payload, dest, phase, framing):
        me = self.shared
        self.world.post(me.member, me.ends[dest], (me.job, self.tag, payload))
        return Finished()

    def start_recv(self, source, capacity, phase, framing):
        me = self.shared
        operation, key = Waiting(f"{phase} of rank {source}"), (me.ends[source], self.tag)
        if me.boxes[key]:
            operation.end(me.boxes[key].popleft())
        elif me.broken or key[0] in me.gone or key[0] in me.silent:
            operation.end(error=PeerError(f"{me.member}: {me.broken or key[0]}"))
        else:
            assert key not in me.waits
            me.waits[key] = operation
        return operation

    async def allgather(self, tensor, phase):
        return await self.allgatherv(tensor, (), phase, None)

    async def allgatherv(self, payload, capacities, phase, framing, *, ring=False):
        """Send the same messages as other transports, but unpacked."""
        ranks, me = self.world_size, self.rank
        blocks = [payload.clone()]
        for skip, count in [(1, 1)] * (ranks - 1) if ring else reversed(list(rounds(ranks))):
            source, dest = (me - 1, me + 1) if ring else (me + skip, me - skip)
            receiving = self.start_recv(source % ranks, 0, phase, framing)
            self.start_send(blocks[-1:] if ring else blocks[:count], dest % ranks, phase, framing)
            blocks += [block.clone() for block in await receiving]
        return [blocks[(me - r if ring else r - me) % ranks] for r in range(ranks)]

    async def allreduce(self, tensor, phase, op="sum", *, in_place=False):
        combine = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[op]
        total = reduce(combine, await self.allgather(tensor, phase))
        return tensor.copy_(total) if in_place else total


class Account(NamedTuple):
    """A member's part in an attempt at a step, recorded in case the step is committed."""

    accumulated: np.ndarray
    total: np.ndarray
    rest: np.ndarray  # the undelivered part
    gained: np.ndarray  # mass dealt to it by leaving members
    deals: bool  # whether the rest goes to other members
    lost: np.ndarray  # rounded away

    @property
    def kept(self):
        """The member's residual at the beginning of the next step."""
        return self.gained if self.deals else self.rest + self.gained

    @property
    def change(self):
        """The change to the residual if the attempt is applied."""
        return self.kept - self.accumulated if np.isfinite(self.total).all() else 0.0


class Member:
    """A rank, with its reducer and weights, from birth to death."""

    def __init__(self, world, number, weights):
        self.world, self.number, self.weights = world, number, weights
        self.ends = Ends(world, number)
        given = self.ends, world.units, world.algorithm, world.density
        self.reducer = Reducer(*given, changing=True)
        self.members = Members(self.reducer, start=int(weights.sum()) + 1)
        self.met = self.left = False
        self.other = torch.tensor([number])  # what is not exchanged
        self.caught_up = False  # whether it has the last weights, which it has not computed
        self.ready = False  # whether it has the weights of some step, and all averages since
        self.whole = number < world.ranks  # it has had the weights
        self.granted = 0  # its last group, even if it does not know it yet
        self.outside = None  # its group before it was away, until it has met the others again
        self.copied, self.log = None, []  # the step of the copied weights, and averages since
        self.swapped = 0.0  # change of the residual at the last roll, due to another past
        self.last = (-1, 0)  # the last step closed on this member, and the applied attempt
        # the residual with which this member must begin its next step
        self.before = np.zeros(world.size, np.float32)

    def __str__(self):
        waits, members = self.world.tasks[self.number].waits_for.why, self.members
        return f"{self.number}, step {self.reducer.step}, {members.state()}: {waits}"

    @property
    def residual(self):
        """A copy of the residual between steps."""
        residual = self.reducer.residuals[0]
        if residual.empty:
            return np.zeros(self.world.size, np.float32)
        return residual.accumulated.numpy().copy()

    @property
    def is_outside(self):
        """Whether the member was absent and has not met the others since."""
        return self.outside is not None

    @property
    def knows(self):
        """Whether others can copy the weights from it."""
        members = self.members
        kept_from = members.behind or members.leaving or self.left or self.is_outside
        return self.whole and not kept_from

    async def live(self):
        while self.reducer.step < self.world.steps and not self.left:
            await self.step()
        while not self.left:
            try:
                if await self.members.end(whole=self.has_last_weights()):
                    last = self.world.weights.get(self.world.steps)
                    equal = self.members._spent or np.array_equal(self.weights, last)
                    assert equal, "replicas differ at the end"
                    await self.members.equalise({"other": self.other})
                    self.members.caught_up()
                    if self.members._those_at_the_end() is not None:
                        self.world.others.add(self.other.item())
                        assert len(self.world.others) == 1, "replicas differ beyond their weights"
                    return
            except CommunicationError:
                await self.recover()
                if self.reducer.step < self.world.steps:
                    raise Withdrawn from None

    def has_last_weights(self):
        """Return whether this member has the last weights; otherwise, it may get them at any call."""
        last = self.world.weights.get(self.world.steps)
        if self.members.behind and last is not None and self.world.rng.random() < 0.4:
            self.weights, self.caught_up = last, True
        return self.caught_up or not self.members.behind

    async def meet(self, job, ends):
        while True:
            self.ends.regroup(ends.index(self.number), job, ends)
            try:
                was = self.reducer.step
                verdict = await self.members.call_the_roll(job, ends, job)
            except CommunicationError:
                self.ends.give_up()
                job, ends = await self.world.ask(self, failed=True)
                continue
            world, step, stale = self.world, verdict.step - 1, self.ends.rank in verdict.stale
            if job == len(world.groups) - 1 and step >= 0:
                commits = self.ends.rank in verdict.commits
                world.hold(step, self.members._prepared if commits else self.attempt_of(step))
            if stale:
                self.copied, self.log, self.ready = None, [], False
                self.adopt(was)
                self.before = self.before + self.swapped
            if self.is_outside and job > self.outside:
                world.returned["stale" if stale else "current"] += 1
                self.outside = None
            return verdict

    def adopt(self, was):
        """Adopt the others' history up to this open step."""
        world, (step, attempt) = self.world, self.last
        holds = self.attempt_of(step)
        self.swapped = 0.0
        if holds is not None and holds != attempt and step < was:
            self.swapped = world.change_of(self, step, holds) - world.change_of(self, step, attempt)
            world.forks += np.any(world.change_of(self, step, attempt))
            self.last = step, holds
        if self.reducer.step > was:
            self.last = was, self.attempt_of(was)

    def attempt_of(self, step):
        return _attempt_of(step, self.members._past, self.reducer.step)

    async def recover(self):
        self.ends.give_up()
        self.met = True
        return await self.meet(*await self.world.ask(self, failed=True))

    async def step(self):
        world, reducer, members = self.world, self.reducer, self.members
        if not self.met:
            job, ends = await world.ask(self, failed=False)
            if job != members.attempt:
                await self.meet(job, ends)
        self.met = False
        if reducer.step >= world.steps:
            return
        step, gradient = reducer.step, world.gradient()
        if members.idle:
            pass
        elif members.behind:
            self.fetch(step)
        elif world.rng.random() < world.leaving and world.can_spare(self):
            if (step + self.number) % 2:
                members.leave()
            else:
                members.withdraw()
                world.withdrawn += 1
        if not members.counts or members.idle:
            gradient.zero_()
        before = self.residual
        near(before, self.before, "a gradient was lost, or counted twice")
        accumulated = before + gradient.numpy()
        broken = members.counts and world.rng.random() < world.broken
        if broken:
            gradient[3] = torch.nan
        reducer.accumulate(0, 0, gradient)
        while True:
            try:
                await reducer.exchange(0)
                await reducer.share()
                await members.deal()
                world.prepared(self, accumulated)
                await members.vote(ready=self.ready)
                break
            except CommunicationError:
                verdict = await self.recover()
                if self.ends.rank in verdict.commits:
                    break
                if self.ends.rank in verdict.stale:
                    kept = before if broken else accumulated  # the residual if nothing is delivered
                    kept = world.meanwhile(self, step, before, kept)
                    self.before = kept + self.swapped
                    return
                self.met = False
        self.commit(step, before)

    def fetch(self, step):
        """Copy the weights of this step if any member has them; the copy arrives some time later."""
        if self.copied is None and step in self.world.weights:
            self.copied, self.log = step, []
        elif self.copied is not None and self.world.rng.random() < 0.4:
            self.ready = True

    def commit(self, step, before):
        reducer, members, applied = self.reducer, self.members, True
        try:
            (average,) = (average.to_dense().numpy().copy() for average in reducer.commit())
        except NonFiniteGradientError:
            reducer.skip()
            applied, average = False, np.zeros(self.world.size, np.float32)
        arrived = members.committed(step, still=not self.met, applied=applied)
        if members.behind or arrived:
            self.log.append(average)
        else:
            self.weights = self.weights - average
        if arrived:
            self.whole = True
            self.weights = self.world.weights[self.copied]
            for one in self.log:
                self.weights = self.weights - one
        self.before, self.swapped = self.residual, 0.0
        self.last = step, members._past[-1][1]
        if not applied:
            near(self.before, before, "a refused step has changed a residual")
        self.world.committed(self, step, applied=applied)
        self.left = members.left
        self.world.may_lose(self)


@cache
def prepared(name):
    """Return a preset that delivers sums; if it measures the machine, it does so first."""
    return replace(run(resolve(name).on(SoloCommunicator())), average=False)


def ranked(size, ranks, *given, k, ranking=auto.ranking, known={}, **named):  # noqa: B006
    """Return a cached ranking of ``auto``, which would otherwise take most of a world's time."""
    key = size, ranks, k
    if key not in known:
        known[key] = ranking(size, ranks, *given, k=k, **named)
    return known[key]


class World:
    """The members, their messages, and the requests for a quorum.

    Args:
        change: probability of a death, and of a birth, at every message and move.
        absence: probability of an absence.
        alone: probability of an absence that begins once a member has committed, perhaps before the
            others.
        leaving: probability, per step, that a member wants to leave.
        broken: probability of NaN in a gradient.
    """

    def __init__(self, seed, algorithm, ranks=4, size=48, steps=8, density=0.1, **chances):
        chances = {**CHANCES, **chances}
        assert chances.keys() == CHANCES.keys(), chances
        vars(self).update(chances)
        self.ranks = ranks
        self.rng, self.size, self.steps, self.density = random.Random(seed), size, steps, density
        self.algorithm = prepared(algorithm)
        self.units = plan_units([("w", torch.zeros(size))])
        self.generator, self.gradients = torch.Generator().manual_seed(seed), []
        self.links = defaultdict(deque)  # (source, destination) -> messages in flight
        self.busy = []  # links with messages that may arrive
        self.members, self.tasks, self.born, self.changes = {}, {}, 0, 0
        self.away = {}  # members that are away -> whether they stall
        self.back = 0.0  # probability, at every message and move, that an absent member returns
        self.severed = {}  # members that were cut off -> the last group whose messages are lost
        self.returned = Counter()
        self.forks = 0  # steps that were taken back
        self.withdrawn = 0  # members that have left without training on
        self.standing = ()  # the last group that has committed
        self.over = False  # whether a member has reached the end
        self.others = set()  # what members hold at the end that is not exchanged
        self.asked, self.groups = {}, [()]  # members that ask for a quorum; the groups by number
        self.weights = {0: np.zeros(size, np.float32)}  # by step, of all members not behind
        # by step and attempt: accounts, committed members, and the resulting weights; by step: the
        # valid attempt
        self.accounts, self.committers = {}, defaultdict(list)
        self.reached, self.attempts = {}, {}
        for _ in range(ranks):
            self.bear(0.0)

    def gradient(self):
        if not self.gradients:
            many = torch.randint(-8, 9, (32, self.size), generator=self.generator)
            self.gradients = list(many.float())
        return self.gradients.pop()

    def one_of(self, several):
        return several[int(self.rng.random() * len(several))]

    # ---- what happens ------------------------------------------------------------------------------

    def run(self):
        """Run until all members have finished; return the number of group changes."""
        with patch.object(auto, "ranking", ranked):
            for _ in range(MOST):
                self.grant()
                if not self.tasks:
                    return self.changes
                self.happen()
        raise AssertionError("there is no end")

    def happen(self):
        chance, change = self.rng.random(), self.change
        if chance < 2 * change + self.absence:
            spared = [n for n, one in self.members.items() if self.can_spare(one)]
            if chance < change and spared:
                self.kill(self.one_of(spared))
                self.changes += 1
            elif change <= chance < 2 * change and self.can_bear():
                self.bear(7.0)
                self.changes += 1
            elif chance >= 2 * change and (present := [n for n in spared if n not in self.away]):
                self.lose(self.one_of(present))
                self.changes += 1
        here = ((number, task) for number, task in self.tasks.items() if not self.away.get(number))
        ready = [number for number, task in here if task.ended or task.waits_for.done]
        if self.away and (not (ready or self.busy) or self.rng.random() < self.back):
            self.find(self.one_of(list(self.away)))
        elif self.busy and (not ready or self.rng.random() < 0.5):
            self.deliver(int(self.rng.random() * len(self.busy)))
        elif ready:
            self.move(self.one_of(ready))
        else:
            assert not self.members, [str(member) for member in self.members.values()]

    def deliver(self, place):
        source, dest = key = self.busy[place]
        link = self.links[key]
        message = link.popleft()
        if not link:
            self.busy[place] = self.busy[-1]
            self.busy.pop()
        self.members[dest].ends.take(~source if source < 0 else source, *message)

    def move(self, number):
        task = self.tasks[number]
        try:
            if not task.ended:
                task.resume()
        except Withdrawn:
            self.kill(number)
            return
        if task.ended:
            self.over = self.over or not self.members[number].left
            self.changes += self.members[number].left
            self.kill(number, last_words=True)

    def bear(self, weight):
        member = Member(self, self.born, np.full(self.size, weight, np.float32))
        self.members[self.born], self.tasks[self.born] = member, Task(member.live())
        self.tasks[self.born].resume()
        self.born += 1

    def can_bear(self):
        """Return whether fresh weights can no longer win (in the first step, the majority's win)."""
        all_ahead = all(one.reducer.step > 0 for one in self.members.values() if one.whole)
        return all_ahead and len(self.members) < 6

    def can_spare(self, member):
        """Return whether any other member has weights."""
        return any(other.knows for other in self.members.values() if other is not member)

    def kill(self, number, *, last_words=False):
        """End a member; unless it ends by itself, some of its last messages do not arrive."""
        self.tasks.pop(number).program.close()
        del self.members[number]
        self.asked.pop(number, None)
        self.away.pop(number, None)
        for other in self.members:
            if not last_words:
                self.drop(number, other)
            self.links[number, other].append((None, None, DEATH))
        for key in [key for key in self.links if key[1] == number]:
            del self.links[key]
        self.sort()

    def drop(self, source, dest):
        """Lose some of the last messages."""
        link = self.links[source, dest]
        for _ in range(self.rng.randint(0, len(link))):
            link.pop()

    def sort(self):
        """Return the links on which messages may arrive."""
        self.busy = [
            key
            for key, link in self.links.items()
            if link and (key[0] < 0 or not (key[0] in self.away or key[1] in self.away))
        ]

    def post(self, source, dest, message):
        if dest not in self.members or dest == source:
            return
        if self.severed and message[0] <= max(self.severed.get(end, 0) for end in (source, dest)):
            return
        link = self.links[source, dest]
        link.append(message)
        if len(link) == 1 and not (source in self.away or dest in self.away):
            self.busy.append((source, dest))

    # ---- absences ----------------------------------------------------------------------------------

    def lose(self, number):
        """Stall a member or cut it off; no message arrives, and eventually all others give up on it.

        Messages in flight are late, or some of them and all later ones in that group are lost.
        """
        rng, member = self.rng, self.members[number]
        member.outside, self.away[number] = member.granted, rng.random() < 0.5
        self.back = self.one_of((0.05, 0.01, 0.003))
        severed = rng.random() < 0.5
        for other in self.members:
            for source, dest in ((number, other), (other, number)) if other != number else ():
                if severed:
                    self.drop(source, dest)
                group = self.members[dest].granted
                self.links[~source, dest].append((group, None, TIMEOUT))
        if severed:
            self.severed[number] = len(self.groups) - 1
        self.sort()

    def may_lose(self, member):
        """Make a member that has committed absent, with some probability."""
        drawn = self.rng.random() < self.alone and member.number not in self.away
        if drawn and self.can_spare(member) and not member.left:
            self.lose(member.number)
            self.changes += 1

    def find(self, number):
        """Let a member return."""
        del self.away[number]
        self.sort()

    # ---- quorums -----------------------------------------------------------------------------------

    async def ask(self, member, *, failed):
        operation = self.asked[member.number] = Waiting("quorum")
        operation.failed = failed
        return await operation

    def grant(self):
        """Grant a quorum once all present members have asked; make a new one if anything has changed."""
        members = self.members.values()
        if self.over and all(one.is_outside or not one.members.attempt for one in members):
            for number in list(self.members):  # no member with weights is left
                self.kill(number)
        if len(self.asked) < len(self.members) - len(self.away):
            return
        asked = {number: one for number, one in self.asked.items() if number not in self.away}
        if not asked or len(asked) < len(self.members) - len(self.away):
            return
        if not asked.keys() & self.standing and self.members.keys() & self.standing:
            return  # wait until one of these returns
        ends = self.rng.sample(sorted(asked), len(asked))
        failed = any(operation.failed for operation in asked.values())
        if failed or set(self.groups[-1]) != set(ends):
            self.groups.append(tuple(ends))
        for number, operation in asked.items():
            del self.asked[number]
            self.members[number].granted = len(self.groups) - 1
            operation.end((len(self.groups) - 1, list(self.groups[-1])))

    # ---- invariants ----------------------------------------------------------------------------

    def prepared(self, member, accumulated):
        """Record a member's part in an attempt, in case the attempt is committed."""
        reduced, members = member.reducer.reduced[0], member.members
        gained = np.zeros(self.size, np.float32)
        for _, where, values in members._dealt:
            gained[where] += values.numpy()
        total = reduced.total.to_dense().numpy().copy()
        rest = rest_of(member.reducer.residuals[0], reduced.delivered).numpy()
        lost = 0.0 if reduced.lost is None else reduced.lost.to_dense().numpy().copy()
        account = Account(accumulated, total, rest, gained, members.deals, lost)
        key = member.reducer.step, members.attempt
        self.accounts.setdefault(key, {})[member.number] = account

    def committed(self, member, step, *, applied):
        """Check that a single group committed a step, with all members prepared and nothing lost."""
        attempt = member.members._past[-1][1]
        if step not in self.attempts or member.members.attempt == len(self.groups) - 1:
            self.hold(step, attempt)
        by = self.committers[step, attempt]
        holds = self.attempts[step] == attempt  # otherwise, others have repeated the step
        if holds:
            self.standing = self.groups[attempt]
        accounts = self.accounts[step, attempt]
        assert set(accounts) == set(self.groups[attempt]), "somebody had not prepared"
        mine = accounts[member.number]
        if not applied:
            by.append(member.number)
            if not member.members.behind or step in self.weights:
                here = member.weights if not member.members.behind else self.weights[step]
                self.reached[step, attempt] = here
                if holds:
                    self.weights[step + 1] = here
            return
        if not by:
            self.check_law(accounts.values())
        near(member.before, mine.kept, "a residual is wrong")
        by.append(member.number)
        if not member.members.behind:
            known = self.reached.setdefault((step, attempt), member.weights)
            if holds:
                self.weights[step + 1] = known
            assert np.array_equal(member.weights, known), "replicas differ"

    def hold(self, step, attempt):
        """Adopt the history in which this attempt has committed the step."""
        former = self.attempts.get(step, attempt)
        self.attempts[step] = attempt
        if former == attempt:
            return
        self.weights.pop(step + 1, None)
        if (step, attempt) in self.reached:
            self.weights[step + 1] = self.reached[step, attempt]

    def change_of(self, member, step, attempt):
        """Return the change to a member's residual if an attempt is applied."""
        account = self.accounts.get((step, attempt), {}).get(member.number)
        return 0.0 if account is None else account.change

    def check_law(self, accounts):
        """Check that an attempt loses nothing, not even the residuals of members that leave with it."""
        acc, totals, rests, gains, lasts, lost = zip(*accounts, strict=True)
        assert all(np.array_equal(total, totals[0]) for total in totals), "totals differ"
        near(sum(acc), totals[0] + sum(rests) + sum(lost), "the law")
        left = [rest for rest, last in zip(rests, lasts, strict=True) if last]
        if len(left) < len(rests):
            zeros = np.zeros(self.size, np.float32)
            near(sum(gains), sum(left, zeros), "a residual was lost by leaving")

    def meanwhile(self, member, step, before, kept):
        """Return the required residual of a returning member whose open step was this one.

        If the others have applied the step, the residual depends on the member's part in it;
        otherwise, the member has ``kept`` all of its gradient.
        """
        account = self.accounts.get((step, member.attempt_of(step)), {}).get(member.number)
        if account is None:
            return kept
        return kept + account.change if np.isfinite(account.total).all() else before


def near(found, expected, what):
    """Compare exactly unless values are quantised, because gradients are whole numbers."""
    assert (np.abs(found - expected) <= 2e-2 + 1e-5 * np.abs(expected)).all(), what


# ---- many worlds ---------------------------------------------------------------------------------------


def world_of(seed, name):
    """Return a world with more events than the worlds in the tests.

    Four ranks and six steps find the most violations per second; with fewer ranks or steps,
    violations are far rarer.
    """
    return World(seed, name, steps=6, change=0.006, absence=0.008, alone=0.05)


def play(job):
    """Run the worlds of a preset with some seeds; return the number of changes and the violations."""
    name, seeds = job
    changes, seen, violations = 0, Counter(), []
    for seed in seeds:
        world = world_of(seed, name)
        try:
            changes += world.run()
        except Exception as error:  # an assertion of the world, or an error of the library
            why = str(error) or type(error).__name__
            violations.append(f"{name}, seed {seed}: {why}")
        seen += world.returned + Counter(forks=world.forks)
    gc.collect()
    return name, len(seeds), changes, seen, violations


def start():
    """Set up a process for ``play``; it never collects the cycles that members and worlds form."""
    torch.set_num_threads(1)
    gc.freeze()
    gc.disable()


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.unit.changing_world")
    parser.add_argument("presets", nargs="+", choices=[*PRESETS, "all"], metavar="PRESET|all")
    parser.add_argument("first", type=int, help="first seed")
    parser.add_argument("last", type=int, help="the one after the last")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    given = parser.parse_args()
    names = list(PRESETS) if "all" in given.presets else given.presets
    seeds, at_once = range(given.first, given.last), 20
    jobs = [(name, seeds[i : i + at_once]) for name in names for i in range(0, len(seeds), at_once)]
    played, violations, said = {name: [0, 0, Counter()] for name in names}, [], time.monotonic()
    with get_context("spawn").Pool(given.jobs, start) as pool:
        for name, count, changes, seen, found in pool.imap(play, jobs):
            done = played[name]
            done[0], done[1], done[2] = done[0] + count, done[1] + changes, done[2] + seen
            violations += found
            for violation in found:
                print(violation, flush=True)
            if done[0] == len(seeds):
                print(
                    f"{name}: {len(seeds)} orders, {done[1]} changes of the group, returned: "
                    f"{done[2]['current']} current, {done[2]['stale']} stale, "
                    f"{done[2]['forks']} after a step that it had applied alone",
                    flush=True,
                )
            if time.monotonic() > said + 5:
                said = time.monotonic()
                print(f"{name}: {done[0]} of {len(seeds)}", file=sys.stderr)
    sys.exit(f"{len(violations)} violations" if violations else 0)


if __name__ == "__main__":
    main()
