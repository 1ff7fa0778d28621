"""Communicate over gloo in groups that change; each change makes a new gloo group outside torch's."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    ProcessGroupGloo,
    TCPStore,
)

from sparsync.errors import DeadlineError, PeerError, WireFormatError, first_line
from sparsync.transports.communicator import Communicator, check_timeout
from sparsync.transports.driver import Finished, Operation
from sparsync.transports.ledger import Framing
from sparsync.transports.process_group import NEVER, break_off

__all__ = ["GlooCommunicator"]

# bytes of the length prefix of a message, if the receiver does not know the length
_LENGTH: Final = 8


@final
class GlooCommunicator(Communicator):
    """One rank of a changing group over gloo, like ``ZmqCommunicator(changing=True)`` over ZeroMQ.

    Nothing is encrypted, and peers are trusted: a message that exceeds the receive buffer ends the
    process.  Collectives are inherited from ``Communicator``, because gloo's native ones would continue
    in their threads after a rank has disconnected.

    Args:
        host: address of this rank, which listens on the interface with this address.
        store: the store that this process serves, for groups in which it is rank 0.
        timeout: seconds that any wait may take.

    Attributes:
        endpoint: this rank's address, for the lists given to ``regroup``.
    """

    tags = NEVER

    def __init__(self, host: str, store: TCPStore, timeout: float) -> None:
        super().__init__(0, 1, torch.device("cpu"))
        self.timeout = check_timeout(timeout)
        self.endpoint = f"{host}:{store.port}"
        self._gloo_device = ProcessGroupGloo.create_device(hostname=host.strip("[]"))
        # keep the connection to the store of the previous group's rank 0: torch resolves the address for
        # every new connection, which may take seconds
        self._own, self._last = store, dict[str, TCPStore]()
        self.group = _Group(partial(self._meet, 0, 0, [self.endpoint]))

    def regroup(self, rank: int, job: int, endpoints: list[str]) -> None:
        """Leave the current group for a new one; waits in the former group end with an error.

        The ranks of the new group rendezvous in its rank 0's store when the first message is sent or
        received.  Channels must be created again.
        """
        # close connections before the new group's rendezvous: peers that still wait in the former group
        # could not join it otherwise
        self.give_up()
        self.rank, self.world_size = rank, len(endpoints)
        self.group = _Group(partial(self._meet, rank, job, endpoints))

    def give_up(self) -> None:
        """End this rank's waits in its group, and other ranks' waits for this rank."""
        self.group.close(self.world_size)

    def abort(self) -> None:
        """End this rank's waits, and refuse new ones."""
        super().abort()
        self.give_up()

    def close(self) -> None:
        """Leave the group."""
        super().close()
        self.give_up()

    def _meet(self, rank: int, job: int, endpoints: list[str]) -> Any:
        """Create gloo's group directly, because ``new_group`` needs a default group of all ranks."""
        place, seconds = endpoints[0], timedelta(seconds=self.timeout)
        store = self._own if place == self.endpoint else self._last.pop(place, None)
        self._last.clear()
        if store is None:
            host, _, port = place.rpartition(":")
            store = TCPStore(host.strip("[]"), int(port), None, False, seconds, False)
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout, options._threads, options._devices = seconds, 1, [self._gloo_device]
        # the prefix contains the job's number: ranks that read an earlier group's keys would connect to
        # outdated addresses
        made = ProcessGroupGloo(
            PrefixStore(f"sparsync/{job}", store), rank, len(endpoints), options
        )
        self._last[place] = store  # keep the store only once it has answered
        return made

    def start_send(self, payload: Tensor, dest: int, phase: str, framing: Framing) -> Operation:
        """Send the payload, prefixed by its length if the receiver does not know it."""
        payload = payload.contiguous()
        # Send length and payload as one message, because two messages would need a second call on both
        # sides.  If the receive buffer is longer than the message, gloo fills only its start and does
        # not report the length.
        if framing.variable:
            payload = torch.cat(
                [torch.tensor([payload.numel()], device="cpu").view(torch.uint8), payload]
            )
        if payload.numel() == 0:
            return Finished()
        where = f"send to rank {dest} in phase '{phase}'"
        return _Call(self, where, lambda gloo: gloo.send([payload], dest, self.tag))

    def start_recv(self, source: int, capacity: int, phase: str, framing: Framing) -> Operation:
        """Receive into a buffer of ``capacity`` bytes."""
        before = _LENGTH if framing.variable else 0
        buffer = torch.empty(before + capacity, dtype=torch.uint8, device="cpu")
        if buffer.numel() == 0:
            return Finished(buffer)

        def finish() -> Tensor:
            length = int(buffer[:before].view(torch.int64)) if before else capacity
            if not 0 <= length <= capacity:
                raise WireFormatError(
                    f"rank {source} claims {length} bytes in phase '{phase}', where at most {capacity} "
                    "can be; the sender is corrupt or hostile"
                )
            self.ledger.received(phase, length)
            return buffer[before : before + length]

        where = f"message from rank {source} in phase '{phase}'"
        return _Call(self, where, lambda gloo: gloo.recv([buffer], source, self.tag), finish)


@final
class _Group:
    """A gloo group, which ``meet`` creates on first use."""

    def __init__(self, meet: Callable[[], Any]) -> None:
        self._meet, self._over = meet, False
        self._gloo: Any = None

    def met(self) -> Any:
        """Return the group; create it on first use.

        Raises:
            RuntimeError: ranks have not arrived in time, or the group is closed.
        """
        if self._over:
            raise RuntimeError("this rank has given the step up")
        if self._gloo is None:
            # a failed rendezvous is not repeated: its keys stay in the store, and would mislead a second
            # one for the same job
            self._over = True
            self._gloo = self._meet()
            self._over = False
        return self._gloo

    def close(self, size: int) -> None:
        """Close all connections."""
        gloo, self._gloo, self._over = self._gloo, None, True
        if gloo is not None:
            break_off(gloo, size)


@final
class _Call(Operation):
    """A message in flight."""

    def __init__(
        self,
        comm: GlooCommunicator,
        where: str,
        start: Callable[[Any], Any],
        finish: Callable[[], Tensor | None] = lambda: None,
    ) -> None:
        self._where = f"rank {comm.rank}, {comm.ledger.place()}: {where}"
        comm.check_open()
        self._timeout, self._finish = comm.timeout, finish
        self._work = self._named(lambda: start(comm.group.met()))

    def wait(self) -> None:
        self._named(lambda: self._work.wait(timedelta(seconds=self._timeout)))
        self.result, self.done = self._finish(), True

    def _named(self, call: Callable[[], Any]) -> Any:
        """Convert a torch error into one that names rank, phase and step."""
        try:
            return call()
        except RuntimeError as error:
            # gloo has no error class for timeouts, but its texts contain "Timed out", "timed out" or
            # "timeout"
            line = first_line(error).partition(". This is ")[0]
            late = "imed out" in line or "timeout" in line
            raise (DeadlineError if late else PeerError)(
                f"{self._where} failed: the peer is gone, broke off, or needs more than "
                f"{self._timeout:g} s; raise timeout= if it is only slow ({line})"
            ) from error
