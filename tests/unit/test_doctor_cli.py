"""Test arguments, checks, the page and the JSON of ``sparsync doctor``, without its ranks."""

import dataclasses
import json
import sys

import pytest

from sparsync.cli import network_choice
from sparsync.cli.doctor import machine_facts
from sparsync.cli.doctor.checks import Check, check_facts, check_links
from sparsync.cli.doctor.command import Examination, as_json, sentence
from sparsync.cli.doctor.far import bytes_in_flight, check_far, round_trip, window
from sparsync.cli.doctor.machine_facts import check_versions, local_facts, tcp_settings
from sparsync.cli.doctor.memory import check_memory
from sparsync.cost.calibrate import Calibration
from sparsync.cost.links import Clock, Link
from sparsync.cost.machine import Machine
from sparsync.errors import PeerError
from tests.tables import cases

MACHINE = Machine(alpha=90e-6, beta=8.5e-9)
FACTS = dataclasses.replace(
    local_facts("zmq"),
    **{"torch": "2.9.0", "kernels": "avx2", "built": True, "cores": 4, "threads": 1, "openmp": 1},
    **{"backends": {"torch.distributed gloo": "", "torch.distributed nccl": ""}, "loopback": False},
    **{"tcp": {}, "congestion": "bbr", "memory": None, "device_memory": None},
)


def rank(**facts):
    return dataclasses.replace(FACTS, **facts)


def calibration(beta_of=lambda source, dest: 8.5e-9, ahead=0.0):
    pairs = [(s, d) for s in range(4) for d in range(4) if s != d]
    numbers = MACHINE.as_dict()
    spread = {name: (0.9 * value, 1.1 * value) for name, value in numbers.items()}
    links = tuple(Link(s, d, 90e-6, beta_of(s, d)) for s, d in pairs)
    clocks = Clock(), *(Clock(ahead, 1e-5) for _ in range(3))
    return Calibration(MACHINE, spread, links, clocks, (256, 1024))


def examination(*checks):
    return Examination("zmq", "1gbit", (FACTS,) * 4, calibration(), checks)


@pytest.fixture
def examine(command, monkeypatch):
    """Run the command as if its ranks had reported these findings."""

    def run(found, *arguments):
        monkeypatch.setattr(network_choice, "launch", lambda *_, **__: found)
        return command("doctor", *arguments)

    return run


def test_the_page_says_what_was_found_and_what_it_means(examine):
    code, out, err = examine(examination(Check("ok", "all well")))
    assert (code, err) == (0, "")
    shown = " ".join(out.split())
    for said in (
        "torch 2.9.0",
        "4 rank(s) on 1 machine(s), zmq over links of 1gbit",
        "latency 90 µs 81 µs, 99 µs",
        "bandwidth, both ways 941 Mbit/s 856 Mbit/s, 1.05 Gbit/s",
        "ok all well",
    ):
        assert said in shown, said


def test_what_it_means():
    # 2 n (P - 1) / P words of 8.5 ns per byte take 0.751 s, 4 latencies 0.36 ms, and the sums 7.1
    # ms
    said = sentence(examination())
    assert said.startswith("4 ranks at 941 Mbit/s, 90 µs: a dense allreduce of 14.7 M parameters")
    assert "would take about 759 ms. " in said


def test_what_is_bad_comes_first_and_ends_with_1(examine):
    found = examination(Check("ok", "fine"), Check("note", "hm"), Check("bad", "wrong", "right it"))
    code, out, _ = examine(found)
    shown = " ".join(out.split())
    assert code == 1 and "bad wrong: right it note hm ok fine" in shown


def test_the_json_is_a_machine_for_the_planner(examine, tmp_path):
    path = tmp_path / "new" / "machine.json"
    found = examination(Check("ok", "fine"))
    assert examine(found, "--json", path)[0] == 0
    text = path.read_text()
    assert Machine.from_json(text) == MACHINE
    read = json.loads(text)
    assert read == json.loads(json.dumps(as_json(found)))
    assert set(read) >= {"machine", "intervals", "links", "checks", "versions"}
    versions = {"sparsync": FACTS.sparsync, "torch": "2.9.0", "python": FACTS.python}
    assert read["versions"] == versions
    assert len(read["links"]) == 12 and read["intervals"]["beta"] == [0.9 * 8.5e-9, 1.1 * 8.5e-9]


def test_no_host_is_named_unless_asked_for():
    assert local_facts("zmq").host is None
    assert local_facts("zmq", hosts=True).host


def changed(**of_rank_2):
    return [FACTS, FACTS, rank(**of_rank_2), FACTS]


@cases(
    (changed(torch="2.8.0"), "bad", "torch differs: 2.9.0, but 2.8.0 on rank 2"),
    (changed(python="3.10.1"), "note", "but 3.10.1 on rank 2"),
    (changed(kernels="plain"), "note", "native kernels differs: avx2, but plain on rank 2"),
    (changed(kernels="torch"), "note", "rank 2 without native kernels: selection is slow"),
    ([rank(torch="2.6.1")], "bad", "torch 2.6.1"),
    ([rank(backends={})], "bad", "torch has no gloo"),
    ([rank(threads=2)] * 4, "bad", "4 rank(s) with 2 thread(s)"),
    ([FACTS] * 5, "note", "5 rank(s) with 1 thread(s) each on 4 core(s)"),
    (changed(openmp=2), "note", "2 OpenMP runtimes in rank 2"),
    (changed(machine="other", loopback=True), "bad", "gloo of rank 2 listens on loopback"),
    ([rank(mpi="Open MPI v5.0", machine=m) for m in "01"], "note", "Open MPI reached"),
    ([rank(mpi="MPICH Version: 5.0.2", network=n) for n in "01"], "note", "MPICH may bypass the"),
    ([rank(backends={"torch.distributed gloo": ""})], "note", "PowerSGD"),
)
def test_what_is_known_to_go_wrong_is_said(everyone, level, said):
    checks = list(check_facts(everyone))
    assert any(check.level == level and said in check.what and check.advice for check in checks)
    assert not any(said in check.what for check in check_facts([FACTS] * 4))


def test_a_sound_group_gets_nothing_bad():
    levels = {check.level for check in check_facts([FACTS] * 4)}
    assert "bad" not in levels and "note" not in levels


def test_links_and_clocks_are_judged():
    assert [c.level for c in check_links(calibration(), [0.0] * 4)] == ["ok", "ok"]
    one_slow = calibration(lambda s, d: 8.5e-9 * (3 if (s, d) == (1, 2) else 1))
    slow = list(check_links(one_slow, [0.0] * 4))
    assert slow[0].what == "the link from rank 1 to rank 2 is 3.0 x slower than most"
    off = list(check_links(calibration(ahead=2.5), [0.0] * 4))[-1]
    assert (off.level, off.what) == ("note", "rank 1's wall clock is +2.5 s off rank 0's")
    # monotonic clocks differ and wall clocks agree, because the machines booted at different times
    assert list(check_links(calibration(ahead=2.5), [0.0, -2.5, -2.5, -2.5]))[-1].level == "ok"


def test_ranks_of_different_versions_end_with_a_clear_error():
    versions = ("0.1.0", "0.2.0", "0.1.0")
    with pytest.raises(PeerError) as caught:
        check_versions([rank(sparsync=version) for version in versions])
    assert str(caught.value) == (
        "ranks run different versions of sparsync: 0.1.0 on ranks 0, 2; 0.2.0 on rank 1; "
        "install the same everywhere"
    )


# ---- far links --------------------------------------------------------------------------------------

TCP = {"tcp_wmem": (4096, 16384, 4 << 20), "tcp_rmem": (4096, 131072, 6 << 20)}
TCP |= {"tcp_adv_win_scale": (1,), "tcp_slow_start_after_idle": (1,)}


def far(alpha, beta, *changes, controls=("bbr",) * 4):
    """Judge two or more ranks in separate network stacks with changed TCP settings."""
    changes = changes or ({}, {})
    machine = Machine(alpha=alpha, beta=beta)
    pairs = [(s, d) for s in range(len(changes)) for d in range(len(changes)) if s != d]
    ends = {"alpha": (alpha, alpha), "beta": (0.9 * beta, beta)}
    found = Calibration(machine, ends, tuple(Link(s, d, alpha, beta) for s, d in pairs))
    its = enumerate(zip(changes, controls, strict=False))
    facts = [rank(network=str(r), tcp=TCP | one, congestion=control) for r, (one, control) in its]
    return list(check_far(found, facts))


def test_buffers_that_far_links_fill_are_named_with_the_command():
    # 1 Gbit/s x 24 ms keeps 3 MB in flight, and half of 6 MiB allows 3 MiB
    (narrow,) = [check for check in far(12e-3, 8e-9) if "in flight" in check.what]
    assert narrow == Check(
        "note",
        "the links hold 3 MB in flight (rate x round trip), but TCP of ranks 0, 1 allows at most "
        "3.15 MB, which may limit the rate",
        'sysctl -w net.ipv4.tcp_wmem="4096 16384 12582912" net.ipv4.tcp_rmem="4096 131072 24117248" '
        "(then measure again)",
    )
    wide = {"tcp_wmem": (4096, 16384, 12 << 20), "tcp_rmem": (4096, 131072, 24 << 20)}
    assert not any("in flight" in check.what for check in far(12e-3, 8e-9, wide, wide))
    checks = far(12e-3, 8e-9, wide, {}, wide)
    assert any("TCP of rank 1 allows" in check.what for check in checks)


def test_starting_slowly_after_a_pause_is_said_of_far_links():
    (found,) = far(40e-3, 8e-8)
    assert found == Check(
        "note",
        "after a pause of 280 ms, TCP of ranks 0, 1 returns to slow start, which costs each exchange "
        "after a long computation several round trips of 80 ms",
        "sysctl -w net.ipv4.tcp_slow_start_after_idle=0",
    )
    off = {"tcp_slow_start_after_idle": (0,)}
    assert far(40e-3, 8e-8, off, off) == far(4e-3, 8e-8) == [], "off, or near"
    assert far(40e-3, 8e-7) == [], "a slow link would lose what is sent at once"


def test_congestion_control_that_shrinks_windows_is_named_on_far_links():
    changes, controls = [{}] * 4, ("cubic", "bbr", "reno", "")
    (found,) = far(40e-3, 8e-7, *changes, controls=controls)
    assert "TCP of ranks 0, 2 shrinks its window at a packet loss (cubic)" in found.what
    assert "net.ipv4.tcp_congestion_control=bbr" in found.advice
    assert far(1e-3, 8e-7, *changes, controls=controls) == [], "near"


def test_another_kernel_is_named():
    found = far(1e-3, 8e-9, {}, {}, {"tcp_rmem": (4096, 131072, 1 << 20)})
    assert [check.what for check in found] == [
        "net.ipv4.tcp_rmem differs: 4096 131072 6291456, but 4096 131072 1048576 on rank 2"
    ]


def test_a_kernel_that_tells_nothing_is_not_judged(tmp_path):
    assert tcp_settings(tmp_path) == {}
    silent = rank(tcp={})
    assert window(silent) is None
    ranks = [dataclasses.replace(silent, network=str(rank)) for rank in range(4)]
    assert list(check_far(calibration(), ranks)) == []
    assert list(check_far(Calibration(MACHINE, {}), [FACTS])) == []


def test_settings_are_read(tmp_path):
    (tmp_path / "tcp_wmem").write_text("4096\t16384\t4194304\n")
    (tmp_path / "tcp_adv_win_scale").write_text("-2\n")
    (tmp_path / "tcp_rmem").write_text("garbled")
    found = tcp_settings(tmp_path)
    assert found == {"tcp_wmem": (4096, 16384, 4 << 20), "tcp_adv_win_scale": (-2,)}


@pytest.mark.parametrize(("scale", "mib"), [(1, 3), (2, 4), (-2, 1.5), (0, 4)])
def test_the_part_of_a_buffer_that_is_window(scale, mib):
    assert window(rank(tcp=TCP | {"tcp_adv_win_scale": (scale,)})) == mib * (1 << 20)


def test_ranks_that_share_a_network_stack_have_no_far_links():
    slow = Machine(alpha=40e-3, beta=8e-9)
    links = Link(0, 1, 40e-3, 8e-9), Link(1, 0, 40e-3, 8e-9)
    found = Calibration(slow, {"beta": (8e-9, 8e-9)}, links)
    assert list(check_far(found, [rank(tcp=TCP)] * 2)) == []


def test_bytes_in_flight_are_of_the_farthest_pair():
    ends = (0, 1, 1e-3), (1, 0, 1e-3), (2, 0, 0.05), (0, 2, 0.03)
    links = tuple(Link(*end, 8e-9) for end in ends)
    found = Calibration(MACHINE, {"beta": (6e-9, 8e-9)}, links)
    assert round_trip(found) == pytest.approx(0.08)
    assert bytes_in_flight(found) == pytest.approx(10e6)


# ---- memory -----------------------------------------------------------------------------------------

GB = 10**9


def ranks_with(memory, device=None, count=2):
    return [rank(memory=memory, device_memory=device)] * count


@cases(
    # for 1 B parameters, training takes 20 GB, the shared weights 4, the residual 4, and
    # messages 0.76; pinned beside a GPU, 4 GB take 2^32 bytes
    (58 * GB, None, "adamw", "ok", "28.8 GB; a rank has 29 GB left"),
    (56 * GB, None, "adamw", "bad", "fits alone, but with attach takes 28.8 GB"),
    (39 * GB, None, "adamw", "bad", "20 GB; a rank has 19.5 GB left"),
    (9 * GB, 25 * GB, "adamw", "ok", "24.8 GB on the device and 4.29 GB on the host"),
    (18 * GB, 24 * GB, "adamw", "note", "20.8 GB on the device and 8.59 GB on the host"),
    (17 * GB, 24 * GB, "adamw", "bad", "fits alone"),
    (15 * GB, 24 * GB, "adamw", "bad", "fits alone"),
    (900 * GB, 19 * GB, "adamw", "bad", "20 GB on the device and 0 B on the host"),
    # training takes 12 GB, the residual 4 GB, and the selected hundredth of the entries 12
    # bytes each
    (33 * GB, None, "sgd", "ok", "16.1 GB; a rank has 16.5 GB left"),
    (32 * GB, None, "sgd", "bad", "fits alone, but with attach takes 16.1 GB"),
    (None, None, "adamw", "note", "28.8 GB; how much is free here is unknown"),
)
def test_a_model_is_compared_with_the_free_memory(memory, device, optimizer, level, words):
    found = check_memory(ranks_with(memory, device), GB, optimizer)
    assert found.level == level and words in found.what, found


def test_the_rank_with_the_least_memory_counts():
    ranks = ranks_with(60 * GB)
    ranks[1] = dataclasses.replace(ranks[1], machine="another", memory=25 * GB)
    found = check_memory(ranks, GB, "adamw")
    assert found.level == "bad"
    assert found.what.split("; ")[1] == "a rank has 25 GB left, without activations"
    mixed = [*ranks_with(60 * GB, 80 * GB), *ranks_with(60 * GB)]
    assert "unknown" in check_memory(mixed, GB, "adamw").what


def test_free_memory_is_read_from_linux():
    assert machine_facts.free_bytes("MemTotal: 9 kB\nMemAvailable:   2048 kB\n") == 2048 * 1024
    assert machine_facts.free_bytes("") is None
    if sys.platform == "linux":
        assert local_facts("zmq").memory > 10**6
