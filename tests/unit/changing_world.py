"""A world whose ranks die, come and leave between any two messages, in an order drawn from a seed.

Messages between two members arrive in the order sent; of one that dies, some of the last never do.  What
happens next (an arrival, a member's next move, a death, a birth) is drawn at random.
"""

import random
import sys
from collections import defaultdict, deque
from dataclasses import replace
from functools import cache

import torch

from sparsync.elastic.members import Members
from sparsync.errors import CommunicationError, NonFiniteGradientError, PeerError
from sparsync.feedback.reducer import Reducer
from sparsync.presets import resolve
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import Finished, Operation, Task, run
from sparsync.transports.groups import SoloCommunicator
from sparsync.units import plan_units

GIVE_UP, DEATH = "give up", "death"


class Waiting(Operation):
    """A message, or a quorum, that has not come yet."""

    def __init__(self, why=""):
        self.error, self.why = None, why

    def wait(self):
        raise AssertionError("only the world resumes")

    def __await__(self):
        yield from super().__await__()
        if self.error is not None:
            raise self.error
        return self.result

    def end(self, result=None, error=None):
        self.result, self.error, self.done = result, error, True


class Ends(Communicator):
    """A member's handle on its present group."""

    def __init__(self, world, member):
        super().__init__(0, 1, torch.device("cpu"))
        self.world, self.member = world, member
        self.job, self.ends, self.past = 0, [member], set()
        self.boxes, self.waits, self.early = defaultdict(deque), {}, []
        self.broken, self.gone = "", set()
        self.shared = self  # of all channels

    def regroup(self, rank, job, ends):
        self.past.add(self.job)
        self.rank, self.world_size, self.job, self.ends = rank, len(ends), job, ends
        self.boxes.clear()
        self.waits.clear()
        self.broken = ""
        early, self.early = self.early, []
        for message in early:
            self.take(*message)

    def give_up(self):
        for end in self.ends:
            self.world.post(self.member, end, (self.job, None, GIVE_UP))

    def take(self, source, job, tag, payload):
        """Something has arrived."""
        if job is not None and job != self.job:
            if job not in self.past:
                self.early.append((source, job, tag, payload))
        elif payload is DEATH:
            self.gone.add(source)
            self.fail(lambda key: key[0] == source, f"{source} is gone")
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

    def start_send(self, payload, dest, phase, framing):
        me = self.shared
        self.world.post(me.member, me.ends[dest], (me.job, self.tag, payload.clone()))
        return Finished()

    def start_recv(self, source, capacity, phase, framing):
        me = self.shared
        operation, key = Waiting(f"{phase} of rank {source}"), (me.ends[source], self.tag)
        if me.boxes[key]:
            operation.end(me.boxes[key].popleft())
        elif me.broken or key[0] in me.gone:
            operation.end(error=PeerError(f"{me.member}: {me.broken or key[0]}"))
        else:
            assert key not in me.waits
            me.waits[key] = operation
        return operation


class Member:
    """A rank: its reducer, its weights, and its life."""

    def __init__(self, world, number, weights):
        self.world, self.number, self.weights = world, number, weights
        self.ends = Ends(world, number)
        self.reducer = Reducer(self.ends, world.units, world.algorithm, world.density)
        self.members = Members(self.reducer, start=int(weights.sum()) + 1)
        self.met = self.left = False
        self.whole = number < world.ranks  # it has had the weights
        self.copied, self.log = None, []  # the step of the copied weights, and averages since
        self.before = torch.zeros(world.size)  # the residual that it must begin its next step with

    def __str__(self):
        waits, members = self.world.tasks[self.number].waits_for.why, self.members
        return f"{self.number}, step {self.reducer.step}, {members.state()}: {waits}"

    async def live(self):
        while self.reducer.step < self.world.steps and not self.left:
            await self.step()
        while not self.left:
            try:
                if await self.members.end(whole=self.has_last_weights()):
                    assert self.members.left or torch.equal(
                        self.weights, self.world.weights[self.world.steps]
                    ), "replicas differ at the end"
                    return
            except CommunicationError:
                await self.recover()

    def has_last_weights(self):
        """Fetch them, sooner or later."""
        last = self.world.weights.get(self.world.steps)
        if self.members.behind and last is not None and self.world.rng.random() < 0.4:
            self.weights, self.members.behind = last.clone(), False
        return not self.members.behind

    async def meet(self, job, ends):
        while True:
            self.ends.regroup(ends.index(self.number), job, ends)
            try:
                verdict = await self.members.call_the_roll(job, ends)
            except CommunicationError:
                self.ends.give_up()
                job, ends = await self.world.ask(self, failed=True)
                continue
            if self.ends.rank in verdict.stale:
                self.copied, self.log = None, []
            return verdict

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
        step, residual, gradient = reducer.step, reducer.residuals[0], world.gradient()
        if members.behind:
            self.fetch(step)
        elif world.rng.random() < world.leaving and world.can_spare(self):
            members.leaving = True
        if not members.counts:
            gradient.zero_()
        before = torch.zeros(world.size) if residual.empty else residual.accumulated.clone()
        near(before, self.before, "a gradient was lost, or counted twice")
        self.before = accumulated = before + gradient  # of which nothing is delivered yet
        if members.counts and world.rng.random() < world.broken:
            gradient[3] = torch.nan
        reducer.accumulate(0, 0, gradient)
        while True:
            try:
                await reducer.exchange(0)
                await reducer.share()
                await members.deal()
                world.prepared(self, accumulated)
                await members.vote()
                break
            except CommunicationError:
                verdict = await self.recover()
                if self.ends.rank in verdict.commits:
                    break
                if self.ends.rank in verdict.stale:
                    return
                self.met = False
        self.commit(step, before)

    def fetch(self, step):
        """Copy the weights of this step, if anybody has them, and some time later be ready."""
        if self.copied is None and step in self.world.weights:
            self.copied, self.log = step, []
        elif self.copied is not None and self.world.rng.random() < 0.4:
            self.members.ready = True

    def commit(self, step, before):
        reducer, members, applied = self.reducer, self.members, True
        try:
            (average,) = (average.to_dense().clone() for average in reducer.commit())
        except NonFiniteGradientError:
            reducer.skip()
            applied, average = False, torch.zeros(self.world.size)
        arrived = members.committed(step, still=not self.met, applied=applied)
        if members.behind or arrived:
            self.log.append(average)
        else:
            self.weights = self.weights - average
        if arrived:
            self.whole = True
            self.weights = self.world.weights[self.copied].clone()
            for one in self.log:
                self.weights -= one
        residual = reducer.residuals[0]
        self.before = (
            torch.zeros(self.world.size) if residual.empty else residual.accumulated.clone()
        )
        if not applied:
            near(self.before, before, "a refused step has changed a residual")
        self.world.committed(self, step, applied=applied)
        self.left = members.left


@cache
def prepared(name):
    """Return a preset that delivers sums; some look at the machine before."""
    return replace(run(resolve(name).on(SoloCommunicator())), average=False)


class World:
    """The members, their messages, and who is asked for a quorum."""

    def __init__(
        self, seed, algorithm, ranks=4, size=48, steps=8, change=0.004, leaving=0.03, broken=0.01
    ):
        self.ranks = ranks
        self.rng, self.size, self.steps, self.density = random.Random(seed), size, steps, 0.1
        self.algorithm = prepared(algorithm)
        self.units = plan_units([("w", torch.zeros(size))])
        self.change, self.leaving = change, leaving  # per message or move; per step
        self.broken = broken  # gradients that hold NaN, of all
        self.generator = torch.Generator().manual_seed(seed)
        self.links = defaultdict(deque)  # (source, destination) -> what is under way
        self.members, self.tasks, self.born, self.changes = {}, {}, 0, 0
        self.over = False  # somebody has reached the end
        self.asked, self.groups = {}, [()]  # who asks for a quorum; the groups by number
        self.weights = {0: torch.zeros(size)}  # by step, of all that are not behind
        self.accounts, self.attempts = {}, {}
        for _ in range(ranks):
            self.bear(torch.zeros(size))

    def gradient(self):
        return torch.randint(-8, 9, (self.size,), generator=self.generator).float()

    # ---- what happens ------------------------------------------------------------------------------

    def run(self):
        """Play until all members are at the end; return how often the group has changed."""
        rng = self.rng
        while self.grant() or self.tasks:
            ready = [n for n, task in self.tasks.items() if task.ended or task.waits_for.done]
            links = [key for key, link in self.links.items() if link]
            assert ready or links, [str(member) for member in self.members.values()]
            chance = rng.random()
            if chance < self.change:
                spared = [n for n, one in self.members.items() if self.can_spare(one)]
                if spared:
                    self.kill(rng.choice(spared))
                    self.changes += 1
            elif chance < 2 * self.change and len(self.members) < 6 and 1 in self.weights:
                self.bear(torch.full((self.size,), 7.0))
                self.changes += 1
            elif links and (not ready or rng.random() < 0.5):
                source, dest = rng.choice(links)
                self.members[dest].ends.take(source, *self.links[source, dest].popleft())
            else:
                task = self.tasks[number := rng.choice(ready)]
                if not task.ended:
                    task.resume()
                if task.ended:
                    self.over = self.over or not self.members[number].left
                    self.changes += self.members[number].left
                    self.kill(number, last_words=True)
        return self.changes

    def bear(self, weights):
        member = Member(self, self.born, weights)
        self.members[self.born], self.tasks[self.born] = member, Task(member.live())
        self.tasks[self.born].resume()
        self.born += 1

    def can_spare(self, member):
        """Whether somebody has weights without it."""
        return any(
            other.whole and not (other.members.behind or other.members.leaving or other.left)
            for other in self.members.values()
            if other is not member
        )

    def kill(self, number, *, last_words=False):
        """End a member; some of what it has sent last does not arrive, unless it ends by itself."""
        self.tasks.pop(number).program.close()
        del self.members[number]
        self.asked.pop(number, None)
        for other in self.members:
            link = self.links[number, other]
            for _ in range(0 if last_words else self.rng.randint(0, len(link))):
                link.pop()
            link.append((None, None, DEATH))
        for key in [key for key in self.links if key[1] == number]:
            del self.links[key]

    def post(self, source, dest, message):
        if dest in self.members and dest != source:
            self.links[source, dest].append(message)

    async def ask(self, member, *, failed):
        operation = self.asked[member.number] = Waiting("quorum")
        operation.failed = failed
        return await operation

    def grant(self):
        """Give a quorum once all have asked; a new number if anything has changed or failed."""
        if self.over and not any(one.members.attempt for one in self.members.values()):
            for number in list(self.members):  # nobody is left to learn from
                self.kill(number)
        if self.asked and set(self.asked) == set(self.members):
            ends = self.rng.sample(sorted(self.asked), len(self.asked))
            failed = any(operation.failed for operation in self.asked.values())
            if failed or set(self.groups[-1]) != set(ends):
                self.groups.append(tuple(ends))
            asked, self.asked = self.asked, {}
            for operation in asked.values():
                operation.end((len(self.groups) - 1, list(self.groups[-1])))

    # ---- what must hold ----------------------------------------------------------------------------

    def prepared(self, member, accumulated):
        """Keep the account of a member's part in an attempt, should it be committed."""
        reduced, members = member.reducer.reduced[0], member.members
        rest = member.reducer.residuals[0].after(reduced.delivered)
        rounded = torch.zeros(self.size) if reduced.lost is None else reduced.lost.to_dense()
        gained = torch.zeros(self.size)
        for _, where, values in members._dealt:
            gained[where] += values
        account = (
            accumulated,
            reduced.total.to_dense().clone(),
            rest,
            gained,
            members.deals,
            rounded,
        )
        key = member.reducer.step, members.attempt
        self.accounts.setdefault(key, {})[member.number] = account

    def committed(self, member, step, *, applied):
        """A step is committed by one group; all of it was prepared; nothing is lost in it."""
        attempt = member.members._past[-1][1]
        former, by = self.attempts.get(step, (attempt, []))
        if former != attempt:  # those that had committed it have died, or have nothing in it
            alive = [number for number in by if number in self.members]
            assert not alive, "two groups committed one step"
            self.weights.pop(step + 1, None)
            by = []
        self.attempts[step] = attempt, [*by, member.number]
        accounts = self.accounts[step, attempt]
        assert set(accounts) == set(self.groups[attempt]), "somebody had not prepared"
        if not applied:
            self.weights[step + 1] = (
                member.weights if not member.members.behind else self.weights[step]
            )
            return
        acc, totals, rests, gains, lasts, lost = zip(*accounts.values(), strict=True)
        assert all(torch.equal(total, totals[0]) for total in totals), "totals differ"
        near(sum(acc), totals[0] + sum(rests) + sum(lost), "the law")
        left = [rest for rest, last in zip(rests, lasts, strict=True) if last]
        if len(left) < len(rests):
            near(sum(gains), sum(left, torch.zeros(self.size)), "a residual was lost by leaving")
        _, _, rest, gained, last, _ = accounts[member.number]
        near(member.before, gained if last else rest + gained, "a residual is wrong")
        if not member.members.behind:
            known = self.weights.setdefault(step + 1, member.weights)
            assert torch.equal(member.weights, known), "replicas differ"


def near(found, expected, what):
    """Gradients are whole numbers, and so are residuals, unless values are quantised."""
    assert torch.allclose(found, expected, atol=2e-2, rtol=1e-5), what


if __name__ == "__main__":
    torch.set_num_threads(1)
    name, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    changes = sum(World(seed, name, steps=6).run() for seed in range(first, last))
    print(f"{name}: {last - first} orders, {changes} changes of the group, no violation")
