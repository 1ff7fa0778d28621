"""Hosts of actors on threads: no wake-up is lost."""

import pytest
from torch.distributed import HashStore

from sparsync.errors import PeerError
from sparsync.transports.actors import Actor
from sparsync.transports.zmq import ZmqCommunicator
from sparsync.transports.zmq.host import ZmqHost


class Idle(Actor):
    def receive(self, source, payload):
        raise AssertionError

    tick = lose = receive


class Racing(ZmqHost):
    """Its actor fails at the very moment at which ``ask`` registers a wait."""

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
        return self._mesh.advance(seconds)  # a world of one has nobody to receive from

    def fail(self):
        raise PeerError("the actor failed")


def test_a_failure_while_a_wait_begins_ends_the_wait():
    comm = ZmqCommunicator(0, 1, store=HashStore())
    host = Racing(Idle(), comm, comm.mesh, comm.irecv_any)
    waiting = host.ask(lambda reply: None, lambda: "rank 0, step 0: phase 'average'")
    with pytest.raises(PeerError, match="the actor failed"):
        waiting.poll(0)
