"""Run the ranks of a ZeroMQ group as threads of one process, each with its own sockets."""

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from sparsync.transports.ledger import Raw
from sparsync.transports.zmq import ZmqCommunicator

RAW = Raw("value")
SECONDS = 10.0  # far more than any of these takes: a hang fails instead of hanging


UP_TO = Raw("value", variable=True)


def together(program, world_size, **options):
    """Run ``program(comm)`` on every rank; raise the first error, or return all results."""
    options = {"store": HashStore(), "timeout": SECONDS, **options}
    everyone = threading.Barrier(world_size)

    def rank(number):
        with ZmqCommunicator(number, world_size, **options) as comm:
            comm.everyone = everyone  # a way to meet that sends nothing
            return program(comm)

    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(rank, number) for number in range(world_size)]
    return [future.result() for future in futures]


@contextlib.contextmanager
def forwarded(outside, inside, ports, change=lambda data: data):
    """Forward an address to the same ports of another, as a router would, and change the bytes."""

    def accept(listener):
        with contextlib.suppress(OSError):
            while True:
                one, _ = listener.accept()
                threading.Thread(
                    target=serve, args=(one, listener.getsockname()[1]), daemon=True
                ).start()

    def serve(one, port):
        with one, contextlib.suppress(OSError), socket.create_connection((inside, port)) as other:
            back = threading.Thread(target=copy, args=(other, one), daemon=True)
            back.start()
            copy(one, other)
            back.join()

    def copy(source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(change(data))
            target.shutdown(socket.SHUT_WR)

    listeners = [socket.create_server((outside, port)) for port in ports]
    for listener in listeners:
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
    yield
    for listener in listeners:
        listener.close()


def message(*values):
    return torch.tensor(values, dtype=torch.uint8)


def meet(comm):
    comm.everyone.wait(SECONDS)


def fails(kind, operation):
    with pytest.raises(kind) as caught:
        operation.wait()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def exchange(comm):
    """Send a byte to the other of two ranks, and receive one from it."""
    receiving = comm.irecv(1 - comm.rank, 1, "well", RAW)
    comm.isend(message(comm.rank), 1 - comm.rank, "well", RAW).wait()
    receiving.wait()
    assert receiving.result.tolist() == [1 - comm.rank]
