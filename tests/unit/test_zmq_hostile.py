"""Test that foreign bytes at the port are dropped and counted, and nothing hangs."""

import random
import socket
import time
import zlib

import pytest
import torch
import zmq

from sparsync.errors import PeerError, WireFormatError
from sparsync.sparse import SparseVector
from sparsync.transports.driver import run
from sparsync.transports.zmq import make_curve_keys
from sparsync.transports.zmq.mailbox import APART, HEADER_BYTES, HELLO, Header
from sparsync.transports.zmq.peers import host_and_port
from sparsync.wire import Coo, Packed
from sparsync.wire.codec import MessageFraming

from .zmq_group import RAW, UP_TO, exchange, fails, meet, message, together


def header(flags=0, source=1, job=None, tag=0, sequence=0, length=1, comm=None):
    number = zlib.crc32(b"p")
    job = comm.mesh.job if job is None else job
    return Header(flags, source, job, tag, number, 0, -1, sequence, length).pack()


HOSTILE = {
    "malformed": lambda c: [
        [b""],
        [b"sz"],
        [b"x" * HEADER_BYTES],
        [header(comm=c)],  # a byte short
        [header(comm=c) + b"ab"],
        [header(comm=c), b"a"],  # claims to be in one frame
        [header(flags=APART, comm=c)],
        [header(flags=APART, comm=c) + b"a", b"a"],
        [header(flags=APART, comm=c), b"a", b"b"],
        [header(flags=APART, length=2**63, comm=c), b"a"],
        [b"a", b"b", b"c", b"d"],
    ],
    "of another job": lambda c: [[header(job=c.mesh.job ^ 1, comm=c) + b"a"]],
    "from an unknown rank": lambda c: [
        [header(source=2, comm=c) + b"a"],
        [header(source=2**32 - 1, comm=c) + b"a"],
        [header(source=0, comm=c) + b"a"],  # itself
        [header(flags=HELLO, source=9, length=0, comm=c)],
    ],
}


@pytest.mark.parametrize("reason", sorted(HOSTILE))
def test_messages_that_are_not_ours_are_dropped_and_counted(reason):
    def program(comm):
        exchange(comm)
        if comm.rank == 0:
            with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
                address, _, word = comm.mesh.endpoints[0].partition(" ")
                stranger.plain_username, stranger.plain_password = b"rank", word.encode()
                stranger.connect(address)
                frames = HOSTILE[reason](comm)
                for parts in frames:
                    stranger.send_multipart(parts)
                until = time.monotonic() + 5
                while comm.dropped[reason] < len(frames) and time.monotonic() < until:
                    comm.mesh.advance(0.05)
            assert dict(comm.dropped) == {reason: len(frames)}
        meet(comm)
        exchange(comm)

    together(program, 2)


@pytest.mark.parametrize("encrypted", [False, True])
def test_garbage_at_the_port_harms_nobody(encrypted, tmp_path):
    if encrypted:
        make_curve_keys(tmp_path, 2)
    noise = random.Random(0).randbytes(70_000)
    greeting = b"\xff" + b"\0" * 8 + b"\x7f\x03\0NULL".ljust(54, b"\0")
    ready = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x04PUSH"
    too_long = b"\x02" + b"\x7f" + b"\xff" * 7 + b"x" * 100
    throws = [b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", noise, greeting, greeting + noise]
    throws += [greeting + ready + too_long, greeting + ready + noise, b"\xff" * 10_000]

    def program(comm):
        exchange(comm)
        if comm.rank == 0:
            host, port = host_and_port(comm.mesh.address)
            for data in throws * 3:
                with socket.create_connection((host, port), timeout=5) as stranger:
                    stranger.sendall(data)
            comm.mesh.advance(0.1)
        meet(comm)
        exchange(comm)
        comm.mesh.advance(0.06)
        lost = dict(comm.lost)
        meet(comm)
        return lost

    keys = tmp_path if encrypted else None
    assert together(program, 2, curve_keys=keys) == [{}, {}]


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("codec", [Coo(), Packed("fp32")])
def test_a_message_that_claims_fewer_entries_than_it_has_is_refused(codec, ring):
    """Its bytes stay; those left over belong to no other message."""
    vector = SparseVector(torch.tensor([1, 2, 5, 9]), torch.tensor([1.0, 2.0, 3.0, 4.0]), 10)

    def program(comm):
        payload = codec.encode(vector).payload.clone()
        if comm.rank == 1:
            payload[4] -= 1  # the count of entries
            comm.isend(payload, 0, "p", UP_TO).wait()
        else:
            gathering = comm.allgatherv(payload, [99, 99], "p", MessageFraming(codec), ring=ring)
            with pytest.raises(WireFormatError, match=f"of {payload.numel()}"):
                codec.decode(run(gathering)[1], 10)
        meet(comm)

    together(program, 2)


def test_a_lost_message_is_noticed():
    def program(comm):
        exchange(comm)
        if comm.rank:
            comm.mesh.links[0].next_sequence(0)
            comm.isend(message(1), 0, "p", RAW).wait()
        else:
            text = fails(PeerError, comm.irecv(1, 1, "p", RAW))
            assert "its message 2 arrived where 1 was due" in text
        meet(comm)

    together(program, 2)


@pytest.mark.parametrize("broken", [b"", b"sz", b"XX" + bytes(54), b"sz\x01" + bytes(53)])
def test_a_header_of_another_kind_is_refused(broken):
    with pytest.raises(ValueError, match=r"sparsync did not send it|not with 737a and version 2"):
        Header.parse(broken)


def test_the_header_is_these_bytes():
    header = Header(APART, 3, 0x0102030405060708, 9, 0xAABBCCDD, 5, 7, 6, 16)
    raw = header.pack()
    assert raw.hex(" ", 4) == (
        "737a0202 03000000 08070605 04030201 09000000 ddccbbaa "
        "05000000 00000000 07000000 00000000 06000000 00000000 10000000 00000000"
    )
    assert Header.parse(raw) == header
