"""Test WAGMA's agent with messages delivered by hand, and the hosts that run agents on threads."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from sparsync.errors import ConfigurationError, PeerError
from sparsync.published.baselines.eager import EagerSgd
from sparsync.published.wagma.agents import Agent, Header, Kind, finish_of, round_of
from sparsync.published.wagma.scheme import ModelRounds
from sparsync.transports.actors import Actor, Host
from sparsync.transports.groups import SoloCommunicator, Subgroup
from sparsync.transports.zmq import ZmqCommunicator
from sparsync.transports.zmq.host import ZmqHost
from tests.tables import refused


class Hand(Host):
    """A host that keeps an agent's messages until the test delivers them."""

    now = 0.0

    def __init__(self, rank, world_size):
        self.rank, self.world_size, self.sent = rank, world_size, []

    def send(self, dest, payload):
        self.sent.append((dest, payload))

    def call(self, function):
        raise NotImplementedError

    ask = close = call


def make(world_size, group_size=None, grouping="wait-avoiding", **options):
    agents = []
    for rank in range(world_size):
        model = torch.zeros(4)
        rounds = ModelRounds(model, group_size or world_size, None, grouping)
        agents.append(Agent(rounds, world_size, 0, model, **options))
        agents[-1].meet(Hand(rank, world_size))
    return agents


def deliver(agents, *, lost=lambda source, dest, kind: False):
    """Deliver all messages, including replies; return the kinds of all messages."""
    kinds = []
    while any(agent.host.sent for agent in agents):
        for source, agent in enumerate(agents):
            batch, agent.host.sent = agent.host.sent, []
            for dest, payload in batch:
                kind = Header.cut(payload)[0].kind
                kinds.append(kind)
                if not lost(source, dest, kind):
                    agents[dest].receive(source, payload)
    return kinds


def arrive(agent, step, value):
    told = []
    model = torch.full((4,), float(value))
    agent.arrive(round_of(step), model, lambda answer: told.append(answer[0]))
    return told


def test_who_begins_an_ended_round_anew_is_given_its_result():
    """Rank 1 ends the round; rank 0, which missed its last message, restarts it and gets the result."""
    agents = make(2, deadline=1.0)
    first, second = arrive(agents[0], 0, 1), arrive(agents[1], 0, 3)
    deliver(agents, lost=lambda source, dest, kind: dest == 0 and kind == Kind.DATA)
    assert len(first) == 0 and len(second) == 1
    agents[0]._drop()  # as a change of the present ranks does
    agents[0]._advance()
    assert Kind.RESULT in deliver(agents)
    assert torch.equal(first[0].result.total, second[0].result.total)
    assert first[0].result.models == 2


@pytest.mark.parametrize("deadline", [None, 1.0])
@pytest.mark.parametrize("late", [False, True])
def test_a_finish_that_another_rank_has_passed_fails_on_both(late, deadline):
    """Rank 0 is in ``finish`` after one step, and rank 1 in its second step, in either order."""
    agents = make(2, deadline=deadline)
    arrive(agents[0], 0, 1), arrive(agents[1], 0, 3)
    deliver(agents)

    def finish():
        agents[0].arrive(finish_of(1, -1), torch.ones(4), lambda answer: None)
        deliver(agents)

    def step():
        arrive(agents[1], 1, 5)
        deliver(agents)

    first, last = (finish, step) if late else (step, finish)
    first()  # and if rank 1 is first, rank 0 takes part in its round
    words = "in finish() after 1 local steps, but others have done 2; the ranks are not in the same"
    with refused(words, error=PeerError):
        last()
    failed = 1 if late else 0
    told = [message for dest, message in agents[failed].host.sent if dest == 1 - failed]
    with refused(words, error=PeerError):
        agents[1 - failed].receive(failed, told[-1])


@pytest.mark.parametrize("world_size", [2, 5])
def test_messages_of_a_round_begin_it_where_its_word_is_lost(world_size):
    agents = make(world_size)
    seen = arrive(agents[0], 0, 5)
    dest = next(dest for dest, _ in agents[0].host.sent)
    deliver(agents, lost=lambda source, d, kind: d == dest and kind == Kind.ACTIVATE)
    assert len(seen) == 1, "a member that got no word takes part by the round's own messages"


@pytest.mark.parametrize("root", [0, 3])
def test_word_goes_down_the_tree_once(root):
    agents = make(5)
    arrive(agents[root], 0, 1)
    assert deliver(agents).count(Kind.ACTIVATE) == 4  # every other rank is notified once


def test_who_comes_back_is_given_the_last_model_that_all_had():
    """The model returned is not the last average of a group, because other groups never saw that one."""
    agents = make(2, deadline=1.0)
    arrive(agents[0], 0, 1), arrive(agents[1], 0, 3)
    deliver(agents)
    arrive(agents[0], 1, 5)
    agents[0].host.sent.clear()  # rank 1 is away
    for agents[0].host.now in (0.5, 1.0):
        agents[0].tick()
    assert [peer for peer, _, _ in agents[0].left_out] == [1]
    agents[0].host.sent.clear()
    agents[1].post(0, Header(Kind.PING, 0, round_of(1)).pack())
    deliver(agents)
    (welcome,) = arrive(agents[1], 1, 7)
    assert welcome.resumes and welcome.result.total.tolist() == [0.0] * 4


def test_the_average_of_a_group_that_waits_is_no_model_of_all():
    """Without a global average in the meantime, a returning rank gets the initial model."""
    agents = make(4, 2, "synchronous", deadline=1.0)
    for rank, agent in enumerate(agents):
        arrive(agent, 0, rank)
    deliver(agents)
    assert {agent.version for agent in agents} == {round_of(1)}
    agents[0].post(3, Header(Kind.PING, 0, round_of(1)).pack())
    for agent in agents[:3]:
        arrive(agent, 1, 5)
    for now in (0.5, 1.0, 1.5, 2.0, 2.5):
        for agent in agents[:3]:
            agent.host.now = now
            agent.tick()
        deliver(agents, lost=lambda source, dest, kind: 3 in (source, dest))
    agents[3].post(0, Header(Kind.PING, 0, round_of(1)).pack())
    deliver(agents)
    (welcome,) = arrive(agents[3], 1, 7)
    assert welcome.resumes and welcome.result.total.tolist() == [0.0] * 4


def test_a_second_actor_ends_the_first():
    closed = []

    class Comm:
        def __init__(self):
            self.companions = {}

        def host(self, actor):
            return SimpleNamespace(close=lambda: closed.append(actor))

    comm = Comm()
    EagerSgd()._run(comm, "first")
    assert closed == []
    EagerSgd()._run(comm, "second")
    assert closed == ["first"]
    with pytest.raises(
        ConfigurationError,
        match="Subgroup cannot run this scheme's companion; use zmq, torch or mpi",
    ):
        EagerSgd()._run(Subgroup(SoloCommunicator(), [0]), "third")


class Idle(Actor):
    def receive(self, source, payload):
        raise AssertionError

    tick = lose = receive


class Racing(ZmqHost):
    """A host whose actor fails exactly when ``ask`` registers a wait."""

    waits = ()

    @property
    def _asked(self):
        return self.waits

    @_asked.setter
    def _asked(self, waits):
        if waits:
            self.call(self.fail)
            self._thread.join()
        self.waits = waits

    def _take(self, seconds):
        return self._mesh.advance(seconds)  # a world of one has no rank to receive from

    def fail(self):
        raise PeerError("the actor failed")


def test_a_failure_while_a_wait_begins_ends_the_wait():
    comm = ZmqCommunicator(0, 1, store=HashStore())
    host = Racing(Idle(), comm)
    waiting = host.ask(lambda reply: None, lambda: "rank 0, step 0: phase 'average'")
    with pytest.raises(PeerError, match="the actor failed"):
        waiting.poll(0)
