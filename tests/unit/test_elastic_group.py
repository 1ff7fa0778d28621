"""Test the members of quorums: handles, excluded members, keys, and gloo."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sparsync import testing
from sparsync.errors import ConfigurationError, DeadlineError, PeerError, WireFormatError
from sparsync.transports.driver import run
from sparsync.transports.ledger import Raw
from sparsync.transports.zmq import make_curve_keys
from sparsync.transports.zmq.curve import own_curve_keys

pytest.importorskip("torchft")
from sparsync.elastic import ElasticGroup
from sparsync.elastic.copies import Source, fetch
from tests.tables import cases

RAW = Raw("value", variable=True)
SECONDS = 15.0  # far more than any of these takes
EIGHT = torch.arange(8, dtype=torch.uint8)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Return a folder with the keys of four ranks, and one that also has a fifth rank's keys."""
    listed, more = (tmp_path_factory.mktemp(name) for name in ("listed", "more"))
    make_curve_keys(listed, 4)
    make_curve_keys(more, 5)
    for public in listed.glob("*.key"):
        (more / public.name).write_bytes(public.read_bytes())
    return listed, more


@pytest.fixture
def make():
    with ExitStack() as stack:

        def one(**options):
            group = ElasticGroup(interface="127.0.0.1", timeout=SECONDS, **options)
            stack.callback(group.shutdown)
            return group

        yield one


def told(*members, number=7):
    """Return torchft's description of a quorum."""
    handles = [m if isinstance(m, str) else m.get_reconfigure_handle() for m in members]
    return SimpleNamespace(uuid=number, handles=handles)


def play(members, program, number=7):
    """Form a group of members, and run a program on each."""

    def one(member):
        member.reconfigure(told(*members, number=number))
        quorum = member.quorum
        member.comm.regroup(quorum.rank, quorum.number, quorum.endpoints)
        return program(member.comm)

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(one, members))


def total(comm):
    return run(comm.allreduce(torch.tensor([comm.rank + 1.0]), "sum")).item()


# ---- what is refused -------------------------------------------------------------------------------


@cases(
    ({"transport": "mpi"}, r"transport is 'mpi'; give 'zmq', or 'torch' \(gloo\)"),
    ({"transport": "torch", "curve_keys": "x"}, "curve_keys: .*gloo neither encrypts nor"),
    ({"transport": "torch", "port_range": (9000, 9009)}, "port_range: for transport='zmq'"),
    ({"curve_keys": "absent"}, "absent is missing; make keys for all"),
    ({"curve_keys": "rank-9.key_secret"}, "rank-9.key_secret is missing; make keys"),
    ({"curve_keys": "rank-1.key"}, "give all of them, and a .key_secret"),
    ({"curve_keys": ""}, "has 4 secret keys; give this rank's own, as in curve_keys='.*secret"),
    ({"transport": "zmq", "curve_keys": ""}, "curve_keys is ''; give the folder"),
)
def test_what_cannot_work_is_refused(options, words, make, keys):
    if "transport" not in options:
        options = {"curve_keys": keys[0] / options["curve_keys"]}
    with pytest.raises(ConfigurationError, match=words):
        make(**options)


def test_a_secret_key_whose_public_one_is_not_there_is_refused(keys, tmp_path):
    secret = keys[0] / "rank-2.key_secret"
    (tmp_path / secret.name).write_bytes(secret.read_bytes())
    with pytest.raises(ConfigurationError, match=r"fits none of the .key files next to it"):
        own_curve_keys(tmp_path)
    for public in keys[0].glob("*.key"):
        (tmp_path / public.name).write_bytes(public.read_bytes())
    assert own_curve_keys(tmp_path) == own_curve_keys(secret)
    assert own_curve_keys(secret).secret.decode() not in repr(own_curve_keys(secret))


def test_a_channel_that_gloo_has_not_is_refused(make):
    comm = make(transport="torch").comm
    assert comm.channel(2**30 - 1).tag == 2**30 - 1
    with pytest.raises(ConfigurationError, match="channel 1073741824 does not exist"):
        comm.channel(2**30)


KINDS = {
    "zmq": lambda keys: {},
    "torch": lambda keys: {"transport": "torch"},
    "keys": lambda keys: {"curve_keys": keys[0] / "rank-0.key_secret"},
    "more keys": lambda keys: {"curve_keys": keys[1] / "rank-4.key_secret"},
}


@cases(
    ("zmq", "torch", r"others use transport torch, this rank uses zmq\); give all the same transp"),
    ("keys", "zmq", "the others use transport zmq, this rank uses zmq with the keys "),
    ("zmq", "keys", r"the others use transport zmq with the keys \w+, this rank uses zmq"),
    ("keys", "more keys", r"with the keys (\w+), this rank uses zmq with the keys (?!\1)"),
)
def test_who_does_not_fit_ends_and_the_others_go_on(mine, theirs, words, make, keys, capsys):
    """The incompatible rank is the one that has not met any other rank yet."""
    group, other = make(**KINDS[mine](keys)), make(**KINDS[theirs](keys))
    group.reconfigure(told(other, group))
    with pytest.raises(ConfigurationError, match=f"^1 of 2 members .*{words}"):
        _ = group.quorum.endpoints
    group.reconfigure(told(other, group, number=8))
    with pytest.raises(ConfigurationError, match="1 of 2 members"):
        _ = group.quorum.endpoints
    assert capsys.readouterr().err == ""
    group.reconfigure(told(group, number=9))
    for number in (10, 11):
        group.reconfigure(told(other, group, number=number))
        assert (group.quorum.rank, len(group.quorum.endpoints)) == (0, 1)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith("sparsync: 1 of 2 members")
    assert said[0].endswith("they are left out")


# ---- keys ------------------------------------------------------------------------------------------


def test_members_with_keys_exchange_and_copy(make, keys):
    members = [make(curve_keys=keys[0] / f"rank-{r}.key_secret") for r in range(3)]
    assert play(members[:2], total) == [3.0] * 2
    for number, chosen in enumerate([members, members[::-1], members[1:]], start=20):
        play(chosen, lambda comm: run(testing.exercise_communicator(comm)), number)
    members[2].copies.offer(5, b"weights")
    assert fetch(members[1].quorum.copies[1], 3.0) == (5, b"weights")
    handles = "".join(member.get_reconfigure_handle() for member in members)
    assert not any(m.comm.mesh.keys.secret.decode() in handles for m in members)
    assert not any(m.comm.dropped for m in members)


def test_a_key_that_is_not_listed_does_not_get_in_whatever_its_handle_says(make, keys, capsys):
    """The stranger claims to fit and to have met the members, and has the lighthouse's knowledge."""
    members = [make(curve_keys=keys[0] / f"rank-{r}.key_secret") for r in range(2)]
    stranger = make(curve_keys=keys[1] / "rank-4.key_secret")
    stranger._card["transport"] = members[0]._card["transport"]
    every = told(*members, stranger)
    for member in members:
        member.reconfigure(every)
        assert len(member.quorum.names) == 2
    assert capsys.readouterr().err.count("a key is not listed here") == 2
    members[0].copies.offer(5, b"weights")

    # with the members' number and endpoints, the stranger takes the place of a member
    quorum = members[0].quorum
    stranger.comm.regroup(1, quorum.number, quorum.endpoints)
    stranger.comm.isend(EIGHT, 0, "p", RAW)
    members[0].comm.regroup(0, quorum.number, quorum.endpoints)
    receiving = members[0].comm.irecv(1, 8, "p", RAW)
    assert not receiving.poll(0.5)
    with pytest.raises(PeerError, match="refused this rank's key"):
        stranger.comm.irecv(0, 8, "p", RAW).wait()
    assert members[0].comm.mesh.refusals() == {"unlisted keys": 1}

    _, key, own = quorum.copies[0]
    its = stranger.comm.mesh.keys
    for source in (Source(quorum.copies[0].endpoint), Source(quorum.copies[0].endpoint, key, its)):
        with pytest.raises(DeadlineError, match="did not go on"):
            fetch(source, 0.3)
    assert fetch(quorum.copies[0], 3.0) == (5, b"weights")
    with pytest.raises(DeadlineError, match="did not go on"):  # a server that is another one
        fetch(Source(quorum.copies[0].endpoint, its.public, own), 0.3)
    with pytest.raises(ConfigurationError, match=r"the keys of ranks \[1\] .* are not listed"):
        members[0].comm.regroup(0, 9, [quorum.endpoints[0], f"tcp://127.0.0.1:9 {'x' * 40}"])


def test_a_member_cannot_pose_as_another(make, keys):
    members = [make(curve_keys=keys[0] / f"rank-{r}.key_secret") for r in range(3)]

    def program(comm):
        total(comm)
        if comm.rank == 2:
            comm.rank = 1
            comm.isend(EIGHT, 0, "p", RAW)
        if comm.rank == 0:
            assert not comm.irecv(1, 8, "p", RAW).poll(0.3)
            return dict(comm.dropped)
        return {}

    assert play(members, program)[0] == {"from a rank that poses as another": 1}


# ---- gloo ------------------------------------------------------------------------------------------


@pytest.mark.gloo
def test_over_gloo_every_group_fulfils_the_contract_and_nothing_piles_up(make):
    members = [make(transport="torch") for _ in range(4)]
    for number, chosen in enumerate([[0], [0, 1], [1, 0, 3], [3, 2, 1, 0], [2, 3]], start=1):
        ranks = [members[m] for m in chosen]
        play(ranks, lambda comm: run(testing.exercise_communicator(comm)), number)
    threads = []
    for number in range(10, 20):
        assert play(members, total, number) == [10.0] * 4
        threads.append(len(list(Path("/proc/self/task").glob("*"))))  # 0 on macOS
    assert threads[-1] < threads[0] + 2 * len(members), threads


@pytest.mark.gloo
@pytest.mark.parametrize("claimed", [9, -1])
def test_over_gloo_a_length_that_cannot_be_is_refused(make, claimed):
    def program(comm):
        if comm.rank == 1:
            prefix = torch.tensor([claimed]).view(torch.uint8)
            comm.isend(torch.cat([prefix, EIGHT]), 0, "p", Raw("value")).wait()
            return
        with pytest.raises(WireFormatError, match=f"rank 1 claims {claimed} bytes in phase 'p'"):
            comm.irecv(1, 8, "p", RAW).wait()

    play([make(transport="torch") for _ in range(2)], program)


@pytest.mark.gloo
def test_over_gloo_who_gives_up_lets_nobody_wait(make):
    """No rank waits for a rank that gave up, or for live ranks, even after another gives up as well."""
    members = [make(transport="torch") for _ in range(3)]
    failed = threading.Barrier(3, timeout=10)

    def program(comm):
        total(comm)
        waited = 0.0
        if comm.rank == 2:
            time.sleep(0.1)
        else:
            began = time.monotonic()
            with pytest.raises(PeerError, match=r"message from rank \d in phase 'p' failed"):
                comm.irecv(comm.rank + 1, 8, "p", RAW).wait()
            waited = time.monotonic() - began
        comm.give_up()
        with pytest.raises(PeerError, match="this rank has given the step up"):
            comm.isend(EIGHT, (comm.rank + 1) % 3, "p", RAW)
        failed.wait()
        return waited

    assert max(play(members, program, 1)) < 2
    assert play(members, total, 2) == [6.0] * 3


@pytest.mark.gloo
def test_over_gloo_every_wait_ends(make):
    """Cover a message that is never sent, a missing rank, and a lost store."""
    one, two = make(transport="torch"), make(transport="torch")

    def silent(comm):
        total(comm)
        if comm.rank == 0:
            comm.timeout = 0.5
            with pytest.raises(DeadlineError, match=r"from rank 1 .* needs more than 0.5 s"):
                comm.irecv(1, 8, "p", RAW).wait()

    play([one, two], silent, 1)
    for place in (one.comm.endpoint, "127.0.0.1:9"):
        one.comm.regroup(1, 2, [place, "absent"])
        with pytest.raises((DeadlineError, PeerError), match="message from rank 0 in phase 'p'"):
            one.comm.irecv(0, 8, "p", RAW)
        with pytest.raises(PeerError, match="given the step up"):
            one.comm.irecv(0, 8, "p", RAW)
    one.comm.timeout = SECONDS
    assert play([two, one], total, 3) == [3.0] * 2
