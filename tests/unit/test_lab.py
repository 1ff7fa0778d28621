import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsync.cli import forwarder
from sparsync.cli import lab as kernel
from sparsync.cli.lab import (
    Lab,
    LabError,
    default_burst,
    ensure_privileges,
    local_address,
    local_traffic,
    parse_rate,
)
from sparsync.cli.lab_links import Link, describe_links, parse_links
from sparsync.cli.launch import launch
from sparsync.errors import ConfigurationError
from tests.tables import cases, refused, refuses

MBIT, GBIT = 10**6, 10**9


@cases(
    ("100mbit", 100 * MBIT),
    ("1gbit", GBIT),
    ("1.5gbit", 1_500 * MBIT),
    ("512kbit", 512_000),
    (" 200 Mbit/s ", 200 * MBIT),
    ("100gbit", 100 * GBIT),
)
def test_rates_are_read(text, bits):
    assert parse_rate(text) == bits


@cases("", "fast", "100", "mbit", "-1gbit", "0mbit", "1tbit", "1e3mbit", "101gbit", "99kbit")
def test_other_rates_are_refused_in_one_line(text):
    with refused(repr(text), "100mbit"):
        parse_rate(text)


@cases(
    ("100mbit", [Link(100 * MBIT, 100 * MBIT)] * 2),
    ("1mbit:2mbit, 80 ms", [Link(MBIT, 2 * MBIT, 0.08)] * 2),
    ("1gbit,20ms,0.1%,500us", [Link(GBIT, GBIT, 0.02, 0.0005, 0.001)] * 2),
    ("1gbit,1s;1=5mbit", [Link(GBIT, GBIT, 1.0), Link(5 * MBIT, 5 * MBIT, 1.0)]),
    ("1gbit;0=1mbit:2mbit,1ms,2%", [Link(MBIT, 2 * MBIT, 0.001, 0, 0.02), Link(GBIT, GBIT)]),
)
def test_links_are_read(text, links):
    assert parse_links(text, 2) == tuple(links)


@refuses(
    ("20ms", "rate '20ms' is not"),
    ("1gbit,fast", "cannot read 'fast'; write the rtt like 20ms"),
    ("1gbit,1ms,0.1", "cannot read '0.1'; write the loss like 0.1%"),
    ("1gbit,1ms,0%,1%", "cannot read '1%'; write the jitter like 2ms"),
    ("1gbit,1ms,0%,1ms,1ms", "has 5 parts; RATE"),
    ("1gbit,1ms,100%", "a loss of 100%; give less"),
    ("1gbit,11s", "an RTT of 11 s; give at most 10 s"),
    ("1gbit,1ms,0%,2ms", "a jitter of 0.002 s; give at most the RTT, 0.001 s"),
    ("1gbit;1gbit", "link '1gbit' belongs to none of 2 ranks; write RANK=RATE"),
)
def test_other_links_are_refused_in_one_line(text):
    parse_links(text, 2)


def test_two_wires_lose_what_was_asked_for():
    delay, jitter, loss = Link(MBIT, MBIT, 0.08, 0.004, 0.19).one_wire
    assert (delay, jitter) == (0.02, 0.001)
    assert loss == pytest.approx(0.1)


@cases(
    ({}, None),
    ({"lab": "1gbit,20ms"}, "1gbit,20ms"),
    ({"lab": "1gbit", "loss": "1%"}, "1gbit,0ms,1%"),
    ({"up": "1mbit", "down": "2mbit", "jitter": "1ms"}, "1mbit:2mbit,0ms,0%,1ms"),
    ({"lab": "1gbit", "link": ["0=1mbit", "1=2mbit"]}, "1gbit;0=1mbit;1=2mbit"),
)
def test_options_describe_links(options, text):
    names = ("lab", "up", "down", "rtt", "loss", "jitter", "link")
    assert describe_links(**(dict.fromkeys(names) | options)) == text


def test_what_the_forwarder_needs_is_named(monkeypatch):
    monkeypatch.setattr(forwarder, "EXTENSION", None)
    with pytest.raises(ConfigurationError, match=r"need netem.*install a C\+\+ compiler"):
        forwarder.Forwarder([], [], "10.0.0.0", 0.1)
    monkeypatch.setattr(forwarder, "_DEVICE", "/dev/there/is/none")
    with pytest.raises(ConfigurationError, match=r"cannot open /dev/there/is/none .*module tun"):
        forwarder.open_device("eth0")


@given(st.integers(100_000, 100 * GBIT))
def test_the_burst_covers_the_timer_and_the_first_window(rate):
    burst = default_burst(rate)
    assert burst >= 16_384
    assert burst == 16_384 or abs(burst * 8 / rate - 1e-3) < 1e-6


@given(st.integers(1, 1000))
def test_ranks_have_addresses_of_their_own(ranks):
    lab = Lab(ranks, "1gbit")
    addresses = [lab.address(rank) for rank in range(ranks)]
    assert len(set(addresses)) == ranks
    assert all(0 <= int(part) <= 255 for a in addresses for part in a.split("."))


@given(st.integers(1, 1000), st.integers(100, 10**8))
def test_the_sizes_of_a_lab_fit_each_other(ranks, rate):
    lab = Lab(ranks, f"{rate}kbit")
    assert 1_514 <= lab.segment_bytes <= min(lab.burst_bytes, 65_536)
    assert lab.queue_bytes >= lab.burst_bytes + ranks * lab.send_buffer_bytes
    assert lab.send_buffer_bytes >= 1000 * rate * 0.02 / 8 - 1


@cases(
    ({"ranks": 0}, "ranks is 0; give a whole number from 1 to 1000"),
    ({"ranks": 1001}, "ranks is 1001"),
    ({"ranks": 2.0}, "ranks is 2.0"),
    ({"links": "1 furlong"}, "'1 furlong'"),
    ({"links": "1gbit;2=1mbit"}, "link '2=1mbit' belongs to none of 2 ranks; .*of rank 0 to 1"),
    ({"links": [Link(MBIT, MBIT)]}, "1 links for 2 ranks; give one for each"),
    ({"carrier": "pigeon"}, "unknown carrier 'pigeon'; choose auto, tbf, netem, forwarder"),
    ({"links": "1gbit,20ms", "carrier": "tbf"}, "tbf neither delays nor loses packets; choose"),
)
def test_a_lab_refuses(change, words):
    arguments = {"ranks": 2, "links": "1gbit"} | change
    with pytest.raises(ConfigurationError, match=words):
        Lab(**arguments)


@pytest.mark.parametrize("call", [lambda lab: lab.traffic(), lambda lab: lab.seat(0)])
def test_a_lab_that_is_not_open_says_so(call):
    with pytest.raises(ConfigurationError, match=r"not open; use it inside `with Lab"):
        call(Lab(2, "1gbit"))


def test_a_lab_that_does_not_fit_its_ranks_is_refused(monkeypatch):
    with pytest.raises(ConfigurationError, match="a lab of 3 ranks for 2 processes"):
        launch(local_address, 2, lab=Lab(3, "1gbit"))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match="inside a launcher's rank; start one process"):
        launch(local_address, 2, lab=Lab(2, "1gbit"))


def test_outside_there_is_no_address_and_no_traffic(monkeypatch):
    monkeypatch.delenv("SPARSYNC_LAB_ADDRESS", raising=False)
    assert local_address() is None
    assert local_traffic() is None


# ---- commands -------------------------------------------------------------------------------------


def test_a_failing_command_is_shown_with_what_it_said():
    with pytest.raises(LabError) as caught:
        kernel._run_command("ls /there/is /nothing")
    message = str(caught.value)
    assert message.startswith("lab: 'ls /there/is /nothing' failed with exit code 2: ")
    assert "No such file" in message
    assert "\n" not in message
    with pytest.raises(LabError, match="'false' failed with exit code 1: nothing on stderr"):
        kernel._run_command("false")


def test_a_command_has_a_deadline(monkeypatch):
    monkeypatch.setattr(kernel, "_COMMAND_SECONDS", 0.1)
    with pytest.raises(LabError, match=r"'sleep 60' did not end within 0.1 s"):
        kernel._run_command("sleep 60")


def test_a_missing_tool_names_its_package(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(kernel, "_ALSO_IN", str(tmp_path))
    with pytest.raises(
        ConfigurationError, match="the command 'ip' was not found; install the package iproute2"
    ):
        kernel._find_tool("ip")
    tool = tmp_path / "tc"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    assert kernel._find_tool("tc") == str(tool)


# ---- privileges -----------------------------------------------------------------------------------


def test_other_systems_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    for call in (ensure_privileges, Lab(2, "1gbit").__enter__):
        with pytest.raises(ConfigurationError, match="darwin has no network namespaces"):
            call()


@pytest.fixture
def nobody(monkeypatch, tmp_path):
    """Act as a process without privileges; record the commands that would have replaced it."""
    executed, unshare = [], tmp_path / "unshare"
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(sys, "orig_argv", ["python", "-W", "error", "train.py", "--lab", "1gbit"])
    monkeypatch.setattr(kernel, "_find_tool", lambda name, **_: str(tmp_path / name))
    monkeypatch.setattr(kernel, "_may_create", lambda: False)
    monkeypatch.setattr(kernel.os, "execv", lambda path, words: executed.append(words))

    def does(script):
        unshare.write_text(f"#!/bin/sh\n{script}\n")
        unshare.chmod(0o755)
        return executed

    monkeypatch.setattr(kernel.shutil, "which", lambda name, **_: name)
    return does


@cases(
    ("printf 'unshare: failed: not\\npermitted' >&2; exit 1", "not permitted"),
    ("exec sleep 60", "did not end within 0.5 s; killed"),
)
def test_a_kernel_that_forbids_it_gives_one_line(script, reason, nobody, monkeypatch):
    monkeypatch.setattr(kernel, "_COMMAND_SECONDS", 0.5)
    executed = nobody(script)
    with refused("may not make network namespaces (", f"{reason}); run as root"):
        ensure_privileges()
    assert not executed


def test_a_kernel_that_allows_it_executes_the_same_command_again(nobody):
    executed = nobody("exit 0")
    ensure_privileges()
    (words,) = executed
    assert words[0].endswith("/unshare") and words[1] == "--map-root-user"
    assert words[2:] == [sys.executable, "-W", "error", "train.py", "--lab", "1gbit"]


def test_an_error_inside_a_namespace_reaches_the_caller(monkeypatch):
    def refuse(name, *_):
        raise PermissionError(f"{name}: Operation not permitted")

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(kernel, "_call", refuse)
    assert not kernel._may_create()
    with pytest.raises(ConfigurationError, match=r"\(unshare: Operation not permitted\)"):
        Lab(2, "1gbit").__enter__()
