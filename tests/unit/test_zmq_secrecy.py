"""What somebody reads who listens on the wire: with keys, nothing; without, everything."""

import socket
import threading

import pytest
import torch

from sparsync.transports.zmq import make_curve_keys

from .zmq_group import RAW, meet, together

EVERY_PROTOCOL = 0x0003  # ETH_P_ALL
SECRET = b"gradients tell what a model was trained on. " * 4


class Listener:
    """Everything that crosses the loopback interface, as root can record it."""

    def __init__(self):
        try:
            self.socket = socket.socket(
                socket.AF_PACKET, socket.SOCK_RAW, socket.htons(EVERY_PROTOCOL)
            )
        except (AttributeError, PermissionError) as error:
            pytest.skip(f"no packets can be recorded here: {error}")
        self.socket.bind(("lo", 0))
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
        self.socket.settimeout(0.1)
        self.heard, self.stopped = bytearray(), threading.Event()
        self.thread = threading.Thread(target=self._listen)
        self.thread.start()

    def _listen(self):
        while not self.stopped.is_set():
            try:
                self.heard += self.socket.recv(1 << 16)
            except TimeoutError:
                continue

    def stop(self):
        self.stopped.set()
        self.thread.join()
        self.socket.close()
        return bytes(self.heard)


@pytest.mark.parametrize("encrypted", [False, True])
def test_the_bytes_on_the_wire_are_readable_only_without_keys(encrypted, tmp_path):
    options = {}
    if encrypted:
        make_curve_keys(tmp_path, 2)
        options["curve_keys"] = tmp_path

    def program(comm):
        payload = torch.frombuffer(bytearray(SECRET), dtype=torch.uint8)
        if comm.rank == 0:
            comm.isend(payload, 1, "p", RAW).wait()
        else:
            receiving = comm.irecv(0, len(SECRET), "p", RAW)
            receiving.wait()
            assert bytes(receiving.result.tolist()) == SECRET
        meet(comm)

    listener = Listener()
    try:
        together(program, 2, **options)
    finally:
        heard = listener.stop()
    assert len(heard) > len(SECRET)  # it did listen
    assert (SECRET in heard) != encrypted
    assert (SECRET[:16] in heard) != encrypted
