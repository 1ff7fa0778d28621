"""A world of one: the same algorithms, no peer, no message."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from sparsync.transports.base import Communicator, Operation
from sparsync.transports.framing import Framing

__all__ = ["SoloCommunicator"]


@final
class SoloCommunicator(Communicator):
    """The communicator of a single process without ``torch.distributed``."""

    def __init__(self) -> None:
        super().__init__(rank=0, world_size=1, device=torch.device("cpu"))

    def start_send(self, payload: Tensor, dest: int, phase: str, framing: Framing) -> Operation:
        """Never reached: there is no rank to send to (``isend`` refuses first)."""
        raise AssertionError("a world of one sends nothing")

    def start_recv(self, source: int, capacity: int, phase: str, framing: Framing) -> Operation:
        """Never reached: there is no rank to receive from (``irecv`` refuses first)."""
        raise AssertionError("a world of one receives nothing")
