"""Test the native forwarder between sockets, because network devices need privileges."""

import contextlib
import os
import random
import socket
import sys
import threading
import time
from ipaddress import IPv4Address

import pytest

from sparsync.kernels.native import EXTENSION

MISSING = EXTENSION is None or sys.platform != "linux"
pytestmark = pytest.mark.skipif(MISSING, reason="no native kernels, or not Linux")

NETWORK = int(IPv4Address("10.77.0.0"))
AT_ONCE = (1e9, 0.0, 0.0, 0.0, 1.0)  # bytes per second, delay, jitter, loss, queue in seconds
OFFLOAD = 10  # bytes before a frame


@contextlib.contextmanager
def forwarding(ups, downs):
    """Yield the ranks' ends."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in ups]
    stop, end = os.pipe()
    for device, own in pairs:
        device.setblocking(False)
        own.settimeout(0.5)
    devices = [device.fileno() for device, _ in pairs]
    arguments = devices, ups, downs, NETWORK, stop
    thread = threading.Thread(target=EXTENSION.forward, args=arguments)
    thread.start()
    try:
        yield [own for _, own in pairs]
    finally:
        os.close(end)
        thread.join()
        os.close(stop)
        for pair in pairs:
            for each in pair:
                each.close()


def frame(dest, payload=b"", segment=0):
    """Return an Ethernet frame with an IPv4 header, as read from a device with IFF_VNET_HDR."""
    address = (NETWORK + 1 + dest).to_bytes(4, "big")
    offload = bytes([0, bool(segment), 0, 0, *segment.to_bytes(2, "little"), 0, 0, 0, 0])
    return offload + bytes(12) + b"\x08\x00" + b"\x45" + bytes(15) + address + payload


def received(end):
    found = []
    with contextlib.suppress(TimeoutError):
        while True:
            found.append(end.recv(70_000))
    return found


def test_packets_arrive_unchanged_where_they_are_addressed_to():
    with forwarding([AT_ONCE] * 3, [AT_ONCE] * 3) as ends:
        packets = [frame(dest, bytes([dest]) * 100) for dest in (1, 2, 1)]
        for packet in packets:
            ends[0].send(packet)
        assert received(ends[1]) == [packets[0], packets[2]]
        assert received(ends[2]) == [packets[1]]


def test_a_packet_takes_its_time_on_both_wires():
    up, down = (10_000.0, 0.03, 0.0, 0.0, 1.0), (20_000.0, 0.05, 0.0, 0.0, 1.0)
    with forwarding([up, AT_ONCE], [AT_ONCE, down]) as ends:
        packet = frame(1, bytes(1_000 - 34))
        started = time.perf_counter()
        ends[0].send(packet)
        ends[0].send(packet)
        assert [ends[1].recv(2_000) for _ in range(2)] == [packet] * 2
        # two frames take 0.2 s on the slower wire, less a millisecond of credit; one frame takes
        # 0.05 s on the other wire
        assert 0.325 < time.perf_counter() - started < 0.45


def test_several_segments_take_the_time_of_their_headers_too():
    rate = (10_000.0, 0.0, 0.0, 0.0, 1.0)
    tcp = bytes(12) + b"\x50" + bytes(7)
    with forwarding([rate, AT_ONCE], [AT_ONCE] * 2) as ends:
        started = time.perf_counter()
        ends[0].send(frame(1, tcp + bytes(500), segment=10))  # 50 frames of 64 bytes
        ends[1].recv(2_000)
        assert 0.315 < time.perf_counter() - started < 0.45


def test_losses_are_the_same_in_every_run():
    lossy = (1e9, 0.0, 0.0, 0.3, 1.0)
    runs = []
    for _ in range(2):
        with forwarding([lossy, AT_ONCE], [AT_ONCE] * 2) as ends:
            numbers = []
            for number in range(100):
                ends[0].send(frame(1, bytes([number])))
                if number % 5 == 4:  # a socket holds few
                    numbers += self_paced(ends[1])
            numbers += [packet[-1] for packet in received(ends[1])]
        runs.append(numbers)
    assert runs[0] == runs[1] == sorted(set(runs[0]))
    assert 50 < len(runs[0]) < 90


def self_paced(end):
    """Wait a moment; return everything that has arrived."""
    end.settimeout(0.01)
    found = [packet[-1] for packet in received(end)]
    end.settimeout(0.5)
    return found


def test_of_several_segments_single_ones_are_lost():
    """The other segments arrive as if sent alone, with correct numbers, lengths and checksums."""
    lossy = (1e9, 0.0, 0.0, 0.3, 1.0)
    payload = bytes(range(250))  # 25 segments
    header = b"\0\1\0\2" + (1_000).to_bytes(4, "big") + bytes(4) + b"\x50\x19" + bytes(6)
    with forwarding([lossy, AT_ONCE], [AT_ONCE] * 2) as ends:
        ends[0].send(frame(1, header + payload, segment=10))
        arrived = received(ends[1])
    parts = {}
    for packet in arrived:
        ip, tcp = packet[OFFLOAD + 14 :], packet[OFFLOAD + 34 :]
        number = int.from_bytes(tcp[4:8], "big") - 1_000
        parts[number] = tcp[20:]
        assert number % 10 == 0 and tcp[20:] == payload[number : number + len(tcp) - 20]
        assert int.from_bytes(ip[2:4], "big") == len(ip)
        words = [int.from_bytes(ip[i : i + 2], "big") for i in range(0, 20, 2)]
        assert sum(words) % 0xFFFF == 0 and words[2] == number // 10
        assert bool(tcp[13] & 9) == (number + len(tcp) - 20 == 250)
        assert packet[1] == (len(tcp) > 30)  # still several
    assert 100 < sum(map(len, parts.values())) < 240
    assert len(parts) > 2


def test_what_would_wait_too_long_is_dropped():
    slow = (10_000.0, 0.0, 0.0, 0.0, 0.15)
    with forwarding([slow, AT_ONCE], [AT_ONCE] * 2) as ends:
        for _ in range(9):
            ends[0].send(frame(1, bytes(1_000 - 34)))
        assert len(received(ends[1])) == 2  # the third would wait for 0.199 s


def test_nonsense_is_dropped():
    draw = random.Random(0)
    with forwarding([AT_ONCE] * 2, [AT_ONCE] * 2) as ends:
        good = frame(1, b"good")
        another = good[:22] + b"\x86\xdd" + good[24:]
        for packet in (b"x", bytes(44), frame(2), frame(-1), good[:40], another):
            ends[0].send(packet)
        assert received(ends[1]) == []
        for size in range(200):  # segments with any header
            ends[0].send(frame(1, draw.randbytes(size % 60), segment=1 + size % 7))
            assert ends[1].recv(2_000)
        ends[0].send(good)
        assert received(ends[1]) == [good]


def test_devices_without_wires_are_refused():
    with pytest.raises(ValueError, match="a device needs two wires"):
        EXTENSION.forward([0], [], [], NETWORK, 0)
