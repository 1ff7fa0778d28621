"""Hosts of actors on threads: no wake-up is lost."""

import threading

import pytest

from sparsync.errors import PeerError
from sparsync.transports.actors import Actor, ThreadHost


class Idle(Actor):
    def receive(self, source, payload):
        raise AssertionError

    tick = lose = receive


class Racing(ThreadHost):
    """Its actor fails at the very moment at which ``ask`` registers a wait."""

    def __init__(self):
        self.go, self.waits = threading.Event(), []
        super().__init__(Idle(), 0, 2, timeout=60)
        self._thread.start()

    @property
    def _asked(self):
        return self.waits

    @_asked.setter
    def _asked(self, waits):
        if waits:
            self.go.set()
            self._thread.join()
        self.waits = waits

    def take(self, seconds):
        self.go.wait()
        raise PeerError("the actor failed")

    def send(self, dest, payload):
        raise AssertionError

    def deaths(self):
        return []

    def wake(self):
        pass

    leave = wake


def test_a_failure_while_a_wait_begins_ends_the_wait():
    waiting = Racing().ask(lambda reply: None, lambda: "rank 0, step 0: phase 'average'")
    with pytest.raises(PeerError, match="the actor failed"):
        waiting.poll(0)
