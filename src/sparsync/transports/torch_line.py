"""The messages of an actor over gloo, point to point: a thread per peer and direction."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final, final

import torch
import torch.distributed as dist
from torch import Tensor

from sparsync.transports.actors import Line

__all__ = ["TorchLine"]

_HEAD: Final = 3  # tags: lengths, then bodies
_BODY: Final = 4
_FAREWELL: Final = 5.0  # seconds; a thread left in gloo may abort the process at its exit


@final
class TorchLine(Line):
    """Carries an actor's messages over a process group of its own.

    gloo's waits cannot be interrupted and a group is lost when one times out, so threads wait, without
    end: one per peer receives, one sends.  A peer's death ends its threads and no others.

    Args:
        group: used by nobody else.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._inbox: SimpleQueue[tuple[int, Tensor] | None] = SimpleQueue()
        self._ended: SimpleQueue[tuple[int, str]] = SimpleQueue()
        self._outboxes: dict[int, SimpleQueue[Tensor | None]] = {}
        self._threads: list[threading.Thread] = []
        rank = dist.get_rank(group)
        for peer in range(dist.get_world_size(group)):
            if peer != rank:
                self._outboxes[peer] = SimpleQueue()
                self._start(self._send_all, peer)
                self._start(self._receive_all, peer)

    def send(self, dest: int, payload: Tensor) -> None:
        """Queue a message."""
        self._outboxes[dest].put(payload)

    def take(self, seconds: float) -> tuple[int, Tensor] | None:
        """Take the next message."""
        try:
            if seconds > 0:
                return self._inbox.get(timeout=seconds)
            while (message := self._inbox.get_nowait()) is None:
                pass  # a wake
            return message
        except Empty:
            return None

    def deaths(self) -> list[tuple[int, str]]:
        """Return the peers whose connection has ended."""
        found = {}
        while not self._ended.empty():
            peer, reason = self._ended.get()
            found[peer] = reason
        return list(found.items())

    def wake(self) -> None:
        """Put nothing into the inbox."""
        self._inbox.put(None)

    def close(self) -> None:
        """Send what is queued and a farewell, and wait a while for the peers' own."""
        for outbox in self._outboxes.values():
            outbox.put(None)
        until = time.monotonic() + _FAREWELL
        for thread in self._threads:
            thread.join(timeout=max(until - time.monotonic(), 0.0))

    def _start(self, work: Callable[[int], None], peer: int) -> None:
        thread = threading.Thread(
            target=work, args=(peer,), name=f"sparsync-peer-{peer}", daemon=True
        )
        thread.start()
        self._threads.append(thread)

    def _send_all(self, peer: int) -> None:
        outbox = self._outboxes[peer]
        try:
            while True:
                payload = outbox.get()
                size = -1 if payload is None else payload.numel()
                dist.send(torch.tensor([size]), group=self._group, group_dst=peer, tag=_HEAD)
                if payload is None:
                    return
                dist.send(payload, group=self._group, group_dst=peer, tag=_BODY)
        except (RuntimeError, ValueError) as error:  # ValueError: the group was destroyed
            self._end(peer, error)

    def _receive_all(self, peer: int) -> None:
        head = torch.empty(1, dtype=torch.int64)
        try:
            while True:
                dist.recv(head, group=self._group, group_src=peer, tag=_HEAD)
                if int(head) < 0:
                    self._ended.put((peer, "it has closed its communicator"))
                    self.wake()
                    return
                body = torch.empty(int(head), dtype=torch.uint8)
                dist.recv(body, group=self._group, group_src=peer, tag=_BODY)
                self._inbox.put((peer, body))
        except (RuntimeError, ValueError) as error:  # ValueError: the group was destroyed
            self._end(peer, error)

    def _end(self, peer: int, error: Exception) -> None:
        self._ended.put((peer, f"its connection ended ({str(error).splitlines()[0][:80]})"))
        self.wake()
