"""Tests of the real lab: bytes cross it at its rates, and nothing is left over."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from sparsync.cli import lab as kernel
from sparsync.cli.lab import Lab, LabError
from sparsync.cli.launch import RankError, launch
from sparsync.errors import ConfigurationError
from sparsync.kernels.native import EXTENSION

from . import lab_programs as programs
from .commands import end, start


def refusal() -> str:
    """Return why this user cannot open labs on this machine, or an empty string."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    try:
        kernel._find_tool("tc")
    except ConfigurationError as error:
        return str(error)
    return "" if kernel._may_create() else "the kernel allows no network namespaces to this user"


IN_THE_LAB = pytest.mark.skipif(bool(refusal()), reason=refusal())
pytestmark = [pytest.mark.gloo, IN_THE_LAB]


def interfaces() -> list[str]:
    return [line.split(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines()]


def test_everything_crosses_the_wire_and_the_kernel_counts_it():
    elements, ranks = 1_000_000, 3
    outside = programs.namespace_of("self")
    host = interfaces()
    with Lab(ranks, "500mbit") as lab:
        assert interfaces() == host
        started = time.perf_counter()
        rows = launch(programs.seen_by_every_rank, ranks, elements, lab=lab, timeout=60.0)
        seconds = time.perf_counter() - started
        assert launch(programs.new_groups_work, ranks, lab=lab, timeout=60.0) == ranks
        counted = lab.traffic()
    assert [row[0] for row in rows] == ["10.77.0.1", "10.77.0.2", "10.77.0.3"]
    assert len({outside, *(row[1] for row in rows)}) == ranks + 1
    payload = 2 * 4 * elements * (ranks - 1) / ranks
    for (_, _, sent, received), total in zip(rows, counted, strict=True):
        assert payload <= sent <= total.sent and payload <= received <= total.received
        # headers, groups, barrier
        assert max(total.sent, total.received) <= 1.1 * payload + 100_000
    assert seconds > 8 * payload / lab.bits_per_second
    assert interfaces() == host
    assert programs.namespace_of("thread-self") == outside


@pytest.mark.alone
@pytest.mark.parametrize(
    ("rate", "seconds"),
    [("1gbit", 0.5), ("100mbit", 0.5), pytest.param("5mbit", 1.5, marks=pytest.mark.slow)],
)
def test_a_stream_gets_the_rate(rate, seconds):
    with Lab(2, rate) as lab:
        nbytes = int(lab.bits_per_second / 8 * seconds)
        with programs.connect(lab, 0, 1) as (here, there):
            for ends in ((here, there), (there, here)):
                best = programs.best([ends], nbytes, 0.93 * lab.bits_per_second)
                # at most the bucket is sent in addition to the rate
                most = lab.bits_per_second + 8 * lab.burst_bytes / seconds
                assert 0.93 * lab.bits_per_second < best < 1.03 * most


@pytest.mark.alone
def test_both_directions_get_the_rate_at_once():
    with Lab(2, "200mbit") as lab, programs.connect(lab, 0, 1) as (here, there):
        both = [(here, there), (there, here)]
        best = programs.best(both, 20_000_000, 0.9 * lab.bits_per_second)
    assert 0.9 < best / lab.bits_per_second < 1.03


@pytest.mark.alone
def test_senders_share_the_link_of_their_receiver_and_nothing_is_dropped():
    nbytes = 5_000_000
    with (
        Lab(3, "200mbit") as lab,
        programs.connect(lab, 1, 0, 5001) as one,
        programs.connect(lab, 2, 0, 5002) as other,
    ):
        before = lab.traffic()[0].received
        first = programs.achieved([one, other], nbytes)
        received = lab.traffic()[0].received - before
        best = max(first, programs.best([one, other], nbytes, 0.4 * lab.bits_per_second))
    assert 0.4 < best / lab.bits_per_second < 0.54
    assert 2 * nbytes <= received < 1.06 * 2 * nbytes  # dropped packets would be retransmitted


@pytest.mark.alone
@pytest.mark.parametrize("piece", [2**18, 2**30])
def test_a_message_that_takes_many_heartbeats_is_no_death(piece):
    """A long message is sent in many frames; sent as a single frame, it would look like a dead rank."""
    with Lab(2, "10mbit") as lab:
        call = programs.pass_a_long_message, 2, 4_000_000, 0.6, piece
        if piece == 2**18:
            assert launch(*call, lab=lab, timeout=60.0)
        else:
            with pytest.raises(RankError, match=r"gone|ended|within"):
                launch(*call, lab=lab, timeout=60.0)


# ---- links with a distance ------------------------------------------------------------------------


def needs(carrier: str) -> str:
    """Return why this machine cannot delay packets in this way, or an empty string."""
    if refusal():
        return refusal()
    if carrier == "netem":
        return "" if kernel._has_netem() else "the kernel has no netem"
    if EXTENSION is None:
        return "no native kernels"
    return "" if os.access("/dev/net/tun", os.W_OK) else "no /dev/net/tun"


@pytest.fixture(params=["forwarder", "netem"])
def carrier(request):
    if reason := needs(request.param):
        pytest.skip(reason)
    return request.param


@pytest.mark.alone
def test_a_round_trip_is_the_mean_of_two_links(carrier):
    with Lab(3, "100mbit,20ms;2=10mbit:100mbit,60ms", carrier) as lab:
        for dest, asked in ((1, 0.02), (2, 0.04)):
            with programs.connect(lab, 0, dest) as ends:
                found = programs.round_trips(*ends, 20)
            assert 0.99 * asked <= min(found) <= 1.05 * asked  # a busy machine is late, never early


@pytest.mark.alone
def test_far_links_have_rates_of_their_own_up_and_down(carrier):
    with Lab(2, "100mbit,10ms;1=10mbit:40mbit", carrier) as lab:
        with programs.connect(lab, 0, 1) as (here, there):
            for ends, rate in (((here, there), 40e6), ((there, here), 10e6)):
                best = programs.best([ends], int(rate / 8), 0.95 * rate)
                assert 0.95 < best / rate < 1.05
            sent = lab.traffic()[1].sent
        assert sent > 10e6 / 8
        assert launch(programs.new_groups_work, 2, lab=lab, timeout=60.0) == 2


@pytest.mark.alone
@pytest.mark.slow
def test_one_stream_fills_a_long_path(carrier):
    with Lab(2, "100mbit,80ms", carrier) as lab, programs.connect(lab, 0, 1) as ends:
        best = programs.best([ends], 50_000_000, 0.95 * lab.bits_per_second)
    assert 0.95 < best / lab.bits_per_second < 1.05


@pytest.mark.alone
def test_packets_are_lost_as_asked(carrier):
    count, loss = 4_000, 0.05
    with Lab(2, "100mbit,4ms,5%", carrier) as lab:
        arrived = programs.datagrams(lab, 0, 1, count, 100, 0.002)
    deviation = (count * loss * (1 - loss)) ** 0.5
    assert abs(count - len(arrived) - count * loss) < 4 * deviation
    assert arrived == sorted(set(arrived))


@pytest.mark.alone
def test_jitter_varies_the_round_trip_and_keeps_the_order(carrier):
    with Lab(2, "100mbit,40ms,0%,20ms", carrier) as lab:
        with programs.connect(lab, 0, 1) as ends:
            found = sorted(programs.round_trips(*ends, 20))
        arrived = programs.datagrams(lab, 0, 1, 500, 100, 0.001)
    assert arrived == list(range(500))
    assert found[0] > 0.02 and found[10] < 0.05  # late packets are due to a busy machine
    assert found[-1] - found[0] > 0.004


@pytest.mark.alone
def test_a_link_drops_what_would_wait_too_long(carrier):
    with Lab(2, "10mbit,20ms", carrier) as lab:
        room = lab.queue_seconds * lab.bits_per_second / 8
        arrived = programs.datagrams(lab, 0, 1, 1_000, 1_000, 0.0)
    assert room < 1_042 * len(arrived) < 500_000  # of 1 MB, in much less than a second
    assert arrived == sorted(set(arrived))


def test_nothing_is_left_of_the_forwarder():
    if reason := needs("forwarder"):
        pytest.skip(reason)
    files, threads = open_files(), threading.active_count()
    with Lab(2, "100mbit,20ms", "forwarder") as lab:
        inodes = inodes_of(lab)
        assert lab.forwarder.processor_seconds() < 10
        assert threading.active_count() == threads + 1
    assert (open_files(), threading.active_count()) == (files, threads)
    assert gone(inodes) == []


def test_ranks_meet_through_a_router_that_forwards_one_port():
    with Lab(2, "100mbit") as lab:
        found = launch(programs.meet_behind_a_router, 2, lab=lab, timeout=60.0)
    assert found == ["tcp://10.77.0.100:5000", "tcp://10.77.0.101:5000", "[2.0, 2.0, 2.0]"]


def test_ranks_meet_by_every_form_of_the_interface_variable():
    forms = ["^lo,docker0", "eth", "{v4}", "{v6}", "eth0"]
    with Lab(2, "100mbit") as lab:
        found = launch(programs.meet_on_interfaces, 2, forms, lab=lab, timeout=60.0)
    here = ["tcp://10.77.0.1", "tcp://10.77.0.2"]
    assert found == [here] * len(forms)


def test_ranks_meet_where_the_hosts_own_name_is_loopback():
    with Lab(2, "100mbit") as lab:
        assert (
            launch(programs.meet_where_hosts_names_are_loopback, 2, lab=lab, timeout=60.0) == "met"
        )


@pytest.mark.alone
def test_two_labs_do_not_meet():
    with Lab(2, "100mbit") as first, Lab(2, "50mbit") as second:
        with programs.connect(first, 0, 1):
            refused = []

            def knock():
                with pytest.raises(OSError):
                    socket.create_connection((second.address(1), programs.PORT), 1)
                refused.append(True)

            programs.in_rank(second, 0, knock).join()
            assert refused
        for lab in (first, second):
            with programs.connect(lab, 0, 1) as ends:
                best = programs.best([ends], 2_500_000, 0.9 * lab.bits_per_second)
            assert 0.9 < best / lab.bits_per_second < 1.1
            second_sent = second.traffic()[0].sent
            # the other lab's bytes are not visible here
            assert (lab is second) == (second_sent > 2_500_000)


def gone(inodes: list[int], seconds: float = 15.0) -> list[str]:
    """Wait until nothing keeps the namespaces alive; return anything that still does."""
    deadline = time.monotonic() + seconds
    while True:
        left = [holder for inode in inodes for holder in programs.holders(inode)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def inodes_of(lab: Lab) -> list[int]:
    return [Path(lab.seat(rank).namespace).stat().st_ino for rank in range(lab.ranks)]


def test_nothing_is_left_after_an_error():
    with Lab(2, "1gbit") as lab:
        inodes = inodes_of(lab)
        assert programs.holders(inodes[0])
        with pytest.raises(RankError, match="a rank failed"):
            launch(programs.fail, 2, lab=lab, timeout=60.0)
    assert gone(inodes) == []
    with pytest.raises(ConfigurationError, match="not open"):
        lab.traffic()


def test_a_lab_that_cannot_be_built_leaves_nothing(monkeypatch):
    files, lab = open_files(), Lab(3, "1gbit")
    with monkeypatch.context() as patched:
        patched.setattr(kernel, "_COMMAND_SECONDS", 1e-6)
        with pytest.raises(LabError, match=r"'ip link add .*' did not end within 1e-06 s"), lab:
            raise AssertionError
    assert open_files() == files
    with Lab(1, "1gbit") as again, pytest.raises(ConfigurationError, match="already open"):
        again.__enter__()


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_left_after_a_signal(number, tmp_path):
    far = [] if needs("forwarder") else ["100mbit,20ms"]
    process = start("-m", programs.__name__, "parent", tmp_path, "100mbit", *far)
    try:
        deadline = time.monotonic() + 60
        ranks = [tmp_path / "rank0", tmp_path / "rank1"]
        while not all(file.exists() and file.read_text() for file in ranks):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        inodes = [int(word) for word in (tmp_path / "namespaces").read_text().split()]
        assert len(inodes) == 3 * (1 + len(far)) and all(
            programs.holders(inode) for inode in inodes
        )
        process.send_signal(number)
        end(process)
        assert process.returncode != 0
    finally:
        process.kill()
    assert gone(inodes) == []
    assert not [file.name for file in ranks if programs.runs(file.read_text())]


# ---- users other than root: a lab inside a user namespace, or one clear line ------------------------

PROGRAM = ["-m", programs.__name__, "unprivileged"]
# root that can only map itself acts like an ordinary user, but can read this installation, which
# other users may not be able to read
DROPPED = ["setpriv", "--bounding-set=-all,+setfcap", "--inh-caps=-all"]
DROP = DROPPED if os.geteuid() == 0 else []
FORBID = f'echo 0 > /proc/sys/user/max_user_namespaces && exec {" ".join(DROPPED)} "$@"'


def may_have_user_namespaces():
    if not (shutil.which("setpriv") and shutil.which("unshare")):
        return False
    trial = [*DROP, "unshare", "-Urn", "true"]
    return subprocess.run(trial, capture_output=True, timeout=30).returncode == 0


AS_USER = pytest.mark.skipif(
    not may_have_user_namespaces(), reason="no setpriv or unshare, or no user namespaces"
)


@pytest.mark.slow
@AS_USER
def test_an_ordinary_user_gets_a_user_namespace():
    process = start(*PROGRAM, before=DROP, stderr=subprocess.PIPE)
    out, err = end(process, 120)
    assert process.returncode == 0, err
    pid, user, sent, first, second = out.split()
    assert int(pid) == process.pid  # the same process: executed again, not started
    assert int(user) != Path("/proc/self/ns/user").stat().st_ino
    assert int(sent) >= 400_000
    assert (first, second) == ("10.77.0.1", "10.77.0.2")


@AS_USER
def test_where_the_kernel_allows_neither_there_is_one_line():
    before = ["unshare", "-Ur", "sh", "-c", FORBID, "sh"]
    process = start(*PROGRAM, before=before, stderr=subprocess.PIPE)
    out, err = end(process, 120)
    assert process.returncode == 1 and out == ""
    line = err.splitlines()[-1]
    assert "ConfigurationError: lab: this process may not make network namespaces (" in line
    assert "run as root" in line
