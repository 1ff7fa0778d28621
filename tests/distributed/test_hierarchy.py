"""Train by DDP on two nodes of two ranks, dense inside nodes and sparse between them, also with faults.

All ranks learn of a failure on one of two nodes or shards, and no rank is ahead of the others.
"""

import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import sparsync
from sparsync import ConfigurationError, Correction, Sentinel
from sparsync.collectives import quantised
from sparsync.errors import CommunicationError, PeerError
from sparsync.gradients import hierarchy, sites
from sparsync.transports.driver import Operation
from sparsync.transports.ledger import Raw
from sparsync.transports.process_group import Groups, TorchCommunicator
from sparsync.units import local_of
from tests.on_ranks import gathered, on_ranks, refused, same_everywhere

from . import small_model
from .small_model import (
    all_refuse_what_is_not_finite,
    backward,
    batch,
    ddp_model,
    flat,
    fully_shard,
    model,
    residuals,
    resumes_exactly,
    the_law_holds,
    train,
)


def nodes():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "ranks"))


def attach(ddp, **options):
    return small_model.attach(ddp, **{"hierarchy": nodes(), **options})


def on_nodes(seed=0, **options):
    ddp = ddp_model(seed, bucket_cap_mb=0.001)
    return ddp, attach(ddp, **{"unit_bytes": 700, **options})


def shards(**options):
    net = fully_shard(model(), mesh=nodes()["ranks"])
    return net, small_model.attach(net, replicate=nodes()["nodes"], **options)


def replicas(**options):
    net = model()
    return net, small_model.attach(net, replicate=dist.group.WORLD, unit_bytes=700, **options)


@on_ranks(4)
@pytest.mark.parametrize(
    ("options", "everything"),
    [
        ({"algorithm": "allgather", "density": 1.0}, True),
        ({"algorithm": "budgeted", "unit_bytes": None}, False),
        pytest.param({"transport": "torch"}, False, marks=pytest.mark.slow),
    ],
)
def test_replicas_stay_equal_and_at_density_1_are_those_of_ddp(options, everything):
    reference, (ddp, sync) = ddp_model(), on_nodes(**options)
    for net in (reference, ddp):
        train(net, range(6))
    assert same_everywhere(flat(ddp))
    assert torch.allclose(flat(ddp), flat(reference), atol=1e-6) == everything
    sync.close()


@on_ranks(4)
def test_the_law_holds_over_nodes():
    ddp, sync = on_nodes(density=0.05, algorithm="budgeted")
    the_law_holds(ddp, sync, ddp_model(), backward)


@on_ranks(4)
def test_a_total_in_messages_is_decoded_into_place():
    """No caller asks for a separate tensor with all elements of the total."""

    def asked(_total):
        raise AssertionError("a total was decoded whole")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantised._Coded, "values", property(asked))
        ddp, sync = on_nodes(algorithm="quantised")
        before = flat(ddp)
        train(ddp, range(3))
        assert same_everywhere(flat(ddp)) and not torch.equal(flat(ddp), before)
        sync.close()


@on_ranks(4)
def test_bytes_are_booked():
    """Between nodes, a rank sends its part; inside a node, it sends half of all elements twice."""
    ddp, sync = on_nodes(algorithm="allgather", unit_bytes=None)
    train(ddp, range(3))
    stats, size, part = sync.stats(), flat(ddp).numel(), dist.get_rank() % 2
    assert stats["units"][0]["size"] == (size + 1 - part) // 2
    assert 0 < stats["bytes_sent_per_exchange_max"] < 0.1 * size * 8
    for phase in ("node reduce-scatter", "node allgather"):
        assert stats["inner"][phase]["sent"] == 3 * 4 * ((size + 1) // 2)
    assert not any("node" in phase for phase in stats["phases"])
    sync.close()


@on_ranks(4)
def test_nodes_resume_and_no_plain_ddp_takes_their_state():
    options = {"threshold_period": 4, "correction": Correction(0.9, weight_decay=0.01)}
    state = resumes_exactly(on_nodes, **options)
    with (
        small_model.attached(ddp_model(), threshold_period=4) as plain,
        pytest.raises(ConfigurationError),
    ):
        plain.load_state_dict(state)


@on_ranks(4)
def test_memory_for_weights_that_decay_is_made_once():
    ddp, sync = on_nodes(correction=Correction(weight_decay=0.1))
    train(ddp, range(1))
    like, zeros_like = [], torch.zeros_like
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "zeros_like", lambda x, **how: like.append(x) or zeros_like(x, **how))
        train(ddp, range(1, 3))
    assert not {id(x) for x in like} & {id(flat) for flat in sync._steps.nodes._flat}
    sync.close()


@pytest.mark.slow
@on_ranks(4)
def test_nonfinite_gradients_are_refused_on_all_nodes():
    """With NaN in one element of one rank, even ranks that exchange other elements refuse the step."""

    def poison(ddp):
        spoil = torch.ones(5)
        spoil[0] = float("nan") if dist.get_rank() == 2 else 1.0  # not in the second rank's part
        return ddp.module[3].bias.register_hook(lambda gradient: gradient * spoil)

    all_refuse_what_is_not_finite(on_nodes, "3.bias", poison)


@on_ranks(4)
def test_what_cannot_work_is_refused():
    for words, options in (
        (["Correction(clip=...)", "clip_grad_norm_"], {"correction": Correction(clip=1.0)}),
        (["'rack'", "'node'"], {"hierarchy": "rack"}),
        (["two dimensions"], {"hierarchy": nodes()["ranks"]}),
        (["replicate= is for models without DDP"], {"replicate": nodes()["nodes"]}),
    ):
        with refused(*words):
            attach(ddp_model(), **options)
    with refused("density", error=PeerError):
        attach(ddp_model(), density=0.1 * (1 + dist.get_rank() % 2))
    with pytest.MonkeyPatch.context() as patch, refused("LOCAL_WORLD_SIZE", "'3'"):
        patch.setenv("LOCAL_WORLD_SIZE", "3")
        attach(ddp_model(), hierarchy="node")


@pytest.mark.parametrize(
    ("ranks", "grid"),
    [
        (range(4), [[0, 1], [2, 3]]),
        ([0, 2], [[0], [2]]),
        ([2, 3], [[2, 3]]),
        ([1, 0, 4, 5], [[0, 1], [4, 5]]),
        ([1, 2], [[1], [2]]),
    ],
)
def test_a_node_is_a_machine_even_if_the_group_leaves_out_ranks(ranks, grid):
    assert hierarchy.grid_of("node", ranks, {"LOCAL_WORLD_SIZE": "2"}) == grid


@pytest.mark.parametrize(
    ("size", "words"),
    [("2", r"unequal sizes, \[\[0, 1\], \[2\]\]"), ("0", "it is '0'"), ("", "it is ''")],
)
def test_machines_with_unequal_numbers_of_ranks_are_refused(size, words):
    with pytest.raises(ConfigurationError, match=words) as caught:
        hierarchy.grid_of("node", [0, 1, 2], {"LOCAL_WORLD_SIZE": size})
    assert "\n" not in str(caught.value)


@on_ranks(4)
def test_one_rank_of_each_machine_exchanges_as_without_nodes():
    """On two machines of two ranks, DDP over {0, 2} and {1, 3} has nothing to average in a node."""
    pairs, weights = [dist.new_group([0, 2]), dist.new_group([1, 3])], []
    group = pairs[dist.get_rank() % 2]
    for given in ("node", None):
        ddp = ddp_model(process_group=group)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LOCAL_WORLD_SIZE", "2")
            sync = attach(ddp, hierarchy=given, algorithm="allgather")
        train(ddp, range(3))
        assert sync.stats()["exchanges"] == 3 and sync.stats()["phases"]["allgather"]["sent"]
        assert same_everywhere(flat(ddp), group)
        weights.append(flat(ddp))
        sync.close()
    assert torch.equal(*weights)


async def _two_sites(_comm):
    """Stand in for ``time_pairs``: ranks 0 and 2 are at one site, 1 and 3 at another."""
    return {(a, b): 0.002 if b == a + 2 else 0.04 for b in range(4) for a in range(b)}, 1024


@on_ranks(4)
@pytest.mark.fast(1)
@pytest.mark.parametrize("exchanged", ["gradients", "updates"])
def test_sites_found_by_their_links_train_as_a_mesh_of_them_does(exchanged):
    weights = []
    for given in ("links", DeviceMesh("cpu", [[0, 2], [1, 3]])):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sites, "time_pairs", _two_sites)
            if exchanged == "gradients":
                (net, sync), optimizer = on_nodes(hierarchy=given), None
            else:
                net, optimizer, sync = updating(algorithm="quantised", hierarchy=given)
        train(net, range(5), optimizer)
        sync.finish() if exchanged == "updates" else None
        assert same_everywhere(flat(net))
        weights.append(flat(net))
        sync.close()
    assert torch.equal(*weights)


@on_ranks(4)
@pytest.mark.parametrize("transport", ["zmq", pytest.param("torch", marks=pytest.mark.slow)])
def test_links_that_are_alike_are_measured_and_refused(transport):
    with pytest.MonkeyPatch.context() as patch, refused("links are alike", "omit hierarchy="):
        patch.setattr(sites, "_SHORTEST", 10.0)  # independent of this machine's load
        attach(ddp_model(), hierarchy="links", transport=transport)


# ---- updates: gradients are averaged in a node, and nodes exchange what its optimizers do -----------


def updating(net=None, **settings):
    net = ddp_model(bucket_cap_mb=0.001) if net is None else net
    return net, *small_model.updating(net, **{"hierarchy": nodes(), **settings})


@on_ranks(4)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"noise_correction": True}, marks=pytest.mark.slow),
        {"period": 4, "fragments": 3, "delay": 1, "momentum": 0.5, "residual": "apart"},
    ],
)
def test_updates_of_nodes_are_those_of_ranks_with_their_averaged_gradients(settings):
    mesh, ends, settings = nodes(), [], {"algorithm": "dense", **settings}
    group = mesh["ranks"].get_group()

    def averaged(net, step):
        loss = backward(net, step)
        for parameter in net.parameters():
            parameter.grad = small_model.mean_over(parameter.grad, group)
        return loss

    single = model()
    for net, optimizer, sync, back in (
        (single, *small_model.updating(single, mesh["nodes"], **settings), averaged),
        (*updating(**settings), backward),
    ):
        for step in range(9):
            train(net, range(step, step + 1), optimizer, back)
            assert same_everywhere(flat(net), group)
        with sync.shared():
            shared = flat(net)
        own = flat(net)
        sync.finish()
        assert same_everywhere(flat(net))
        ends.append(torch.stack([own, shared, flat(net)]))
        sync.close()
    torch.testing.assert_close(*ends, atol=2e-5, rtol=0)


@on_ranks(4)
@pytest.mark.parametrize("algorithm", [pytest.param("dense", marks=pytest.mark.slow), "quantised"])
def test_all_ranks_of_all_nodes_measure_the_same_noise(algorithm):
    """A late average is added to a node's own changes, which rounds differently in each node."""
    net, optimizer, sync = updating(algorithm=algorithm, noise_correction=True, period=3, delay=1)
    train(net, range(12), optimizer)
    measured = sync._weights.noise.state_dict()
    assert measured["measured"] == 3
    for name in ("squares", "common", "lasting"):
        assert same_everywhere(measured[name]) and bool(measured[name].any()), name
    sync.close()


@on_ranks(4)
def test_the_law_holds_for_updates_of_nodes_and_bytes_are_those_of_a_rank_each():
    mesh = nodes()
    net, optimizer, sync = updating(algorithm="quantised")
    group = mesh["nodes"].get_group()
    small_model.the_law_of_updates_holds(net, optimizer, sync, backward, group)
    assert same_everywhere(flat(net))
    sent, size = sum(gathered(sync.stats()["bytes_sent_per_local_step"])) / 2, flat(net).numel()
    # half of the elements travel with 2 bits up and 2 down, and scales; finish() sends as many in
    # 32 bits
    assert size / 4 < sent < size * (1 / 3 + 4 / 5)
    inner = sync.stats()["inner"]
    assert inner["node allreduce"]["sent"] == 5 * 4 * size and "node allgather" in inner
    sync.close()


@on_ranks(4)
def test_nan_on_one_rank_of_a_node_brings_all_back():
    net, optimizer, sync = updating(algorithm="quantised")
    hook = net.module[3].bias.register_hook(  # averaged only over its own node
        lambda gradient: gradient * (torch.nan if dist.get_rank() == 3 else 1)
    )
    before = flat(net)
    train(net, range(1), optimizer)
    hook.remove()
    assert torch.equal(flat(net), before) and sync.stats()["refused_exchanges"] == 1
    sync.close()
    net, optimizer, sync = updating(algorithm="quantised")
    first = net.module[0].weight
    small_model.nan_on_one_rank_brings_all_back(net, optimizer, sync, backward, first, rank=2)
    sync.close()


@on_ranks(4)
def test_buffers_are_averaged_over_nodes_too():
    torch.manual_seed(0)
    layers = torch.nn.Linear(20, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 5)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    net, optimizer, sync = updating(net, algorithm="dense")
    train(net, range(3), optimizer)
    assert same_everywhere(layers[1].running_mean) and bool(layers[1].running_mean.any())
    sync.close()


@on_ranks(4)
@pytest.mark.parametrize("exchange", ["gradients", "updates"])
def test_groups_that_may_be_of_nccl_get_no_messages(exchange):
    """NCCL runs the messages of a pair in order: two ranks that first receive would wait forever."""
    default, make, real = set(), Groups.make, {"isend": dist.isend, "irecv": dist.irecv}

    def noted(self, ranks, backend="gloo"):
        group = make(self, ranks, backend)
        default.update([group] if backend is None else [])
        return group

    def checked(name):
        def call(*arguments, group, **named):
            assert group not in default, f"{name} over the default backend"
            return real[name](*arguments, group=group, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Groups, "make", noted)
        for name in real:
            patch.setattr(dist, name, checked(name))
        if exchange == "gradients":
            net, sync = on_nodes(sentinel=Sentinel(period=1))
            train(net, range(2))
        else:
            layers = torch.nn.Linear(20, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 5)
            net = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
            layers[1].running_mean.fill_(dist.get_rank())  # made equal by messages
            net, optimizer, sync = updating(net)
            train(net, range(2), optimizer)
            sync.finish()
        sync.load_state_dict(sync.state_dict())
        assert default and same_everywhere(flat(net))
        sync.close()


@on_ranks(4)
def test_messages_over_nccl_are_refused():
    comm = TorchCommunicator()
    comm.device = torch.device("cuda", 0)  # as with NCCL
    for start in (comm.start_send, comm.start_recv):
        payload = torch.zeros(1) if start == comm.start_send else 4
        with refused("in phase 'a' would go over NCCL"):
            start(payload, 1 - dist.get_rank() % 2, "a", Raw("value"))


@on_ranks(4)
def test_updates_of_nodes_need_ddp_and_their_ranks():
    for net, replicate in ((model(), None), (model(), nodes()["nodes"])):
        with refused("is for DDP", "omit hierarchy="):
            small_model.updating(net, replicate, algorithm="dense", hierarchy=nodes())
    net, optimizer, sync = updating(algorithm="dense")
    train(net, range(1), optimizer)
    node = sync._weights.node
    if dist.get_rank() == 0:
        node.comm.under_way = lambda *_: Failing()
        with refused("the other rank is gone", error=PeerError):
            backward(net, 1)
    else:
        backward(net, 1)
    sync.close()


# ---- what goes wrong ------------------------------------------------------------------------------


def message_of(run, *arguments):
    try:
        run(*arguments)
    except CommunicationError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.slow
@on_ranks(4)
@pytest.mark.parametrize(
    ("make", "policy"), [(on_nodes, "raise"), (shards, "raise"), (shards, "warn")]
)
def test_the_sentinel_is_heard_on_all_ranks(make, policy):
    """Ranks 1 and 3 find a difference between them; unless told, ranks 0 and 2 would continue."""
    net, sync = make(sentinel=Sentinel(period=2, policy=policy))
    train(net, range(1))
    if dist.get_rank() == 3:
        with torch.no_grad():
            local_of(list(net.parameters())[-1])[0] += 1e-3
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        error = message_of(train, net, range(1, 2))
    told = "|".join([error, *(str(w.message) for w in warned)])
    assert "step 1: '3.bias' differs between rank 1 and rank 3" in told
    assert ("DisagreementError" in told) == (policy == "raise")
    sync.close()


@on_ranks(4)
@pytest.mark.parametrize("make", [pytest.param(on_nodes, marks=pytest.mark.slow), shards])
def test_a_part_that_fails_is_heard_of(make):
    """The exchange of rank 0's first unit fails while gradients of other units are still missing."""
    net, sync = make(unit_bytes=700)
    train(net, range(3))
    before, exchange = residuals(sync), sync.reducer.exchange
    part = dist.get_rank() % 2  # ranks 0 and 2 fail, neither of which waits for the other

    async def failing(unit):
        raise PeerError("the other node is gone")

    if part == 0:
        sync.reducer.exchange = failing
    # by then the first exchange has failed
    hook = list(net.parameters())[2].register_hook(lambda gradient: time.sleep(0.3))
    started = time.monotonic()
    said = ["the other node is gone", "the exchange of part 0 of this replica failed"]
    with refused(said[part], error=PeerError):
        train(net, range(3, 4))
    assert time.monotonic() - started < 15, "waited for the timeout of 30 s"
    hook.remove()
    sync.reducer.exchange = exchange
    assert all(map(torch.equal, before, residuals(sync)))
    train(net, range(4, 6))
    assert same_everywhere(flat(net)) and sync.stats()["exchanges"] == 5
    sync.close()


@on_ranks(4)
@pytest.mark.parametrize("when", ["exchange", pytest.param("finish", marks=pytest.mark.slow)])
def test_updates_of_a_part_that_fail_are_heard_of(when):
    mesh = nodes()
    net = fully_shard(model(), mesh=mesh["ranks"])
    optimizer, sync = small_model.updating(net, mesh["nodes"], algorithm="quantised")
    train(net, range(2), optimizer)

    async def failing(*_):
        raise PeerError("the other node is gone")

    part = dist.get_rank() % 2
    if part == 0:
        sync.reducer.exchange = sync.reducer.comm.allreduce = failing
    started = time.monotonic()
    said = ["the other node is gone", "the exchange of part 0 of this replica failed"]
    with refused(said[part], error=PeerError):
        train(net, range(2, 3), optimizer) if when == "exchange" else sync.finish()
    assert time.monotonic() - started < 15, "waited for the timeout of 30 s"
    sync.close()


@pytest.mark.slow
@on_ranks(4)
def test_a_gather_that_fails_undoes_the_step():
    """The second node has its averages and the first does not, so the first node undoes the step."""
    ddp, sync = on_nodes()
    train(ddp, range(3))
    before, first = residuals(sync), dist.get_rank() < 2

    def failing(*arguments, **options):
        raise PeerError("a rank of this node is gone")

    with pytest.MonkeyPatch.context() as patch:
        if first:
            patch.setattr(hierarchy, "_gather", failing)
        error = message_of(train, ddp, range(3, 4))
    assert ("is gone" in error) == first
    assert sync.state_dict()["content"]["reducer"]["step"] == 4 - first
    assert all(map(torch.equal, before, residuals(sync))) == first
    sync.close()


class Failing(Operation):
    """Fails when waited for, like a send to a rank that is gone."""

    def wait(self):
        raise PeerError("the other rank is gone")

    def poll(self, seconds):
        self.wait()


@pytest.mark.slow
@on_ranks(4)
def test_a_node_that_has_lost_a_rank_is_asked_no_more():
    """The driver raises the error in the coroutine, so later units do not wait for the lost rank."""
    ddp, sync = on_nodes()
    train(ddp, range(1))
    started, node = [], sync._steps.nodes.node
    node.under_way = lambda *given: started.append(given) or Failing()
    with refused("the other rank is gone", error=PeerError):
        sync._engine.submit(sync._steps.nodes.exchange(0)).result()
    sync._engine.submit(sync._steps.nodes.follow(1)).result()
    del node.under_way
    assert len(started) == 1
    with refused("an earlier exchange broke off (the other rank is gone)"):
        backward(ddp, 1)
    sync.reducer.comm.broken.clear()  # no rank is gone
    sync._engine.submit(sync._steps.nodes.refuse).result()
    train(ddp, range(1, 3))
    assert same_everywhere(flat(ddp))
    sync.close()


@on_ranks(4)
@pytest.mark.parametrize("exchanged", ["gradients", "updates"])
def test_no_step_begins_after_a_node_has_failed(exchanged):
    """The ranks between nodes have no part in it, so they have noticed nothing."""
    net = ddp_model()
    kind = {"gradients": torch.optim.SGD, "updates": torch.optim.AdamW}[exchanged]
    optimizer = kind(net.parameters(), lr=0.01)
    transport = sparsync.Transport(hierarchy=DeviceMesh("cpu", [[0, 1], [2, 3]]))
    with sparsync.attach(net, optimizer, exchange=exchanged, transport=transport) as sync:
        train(net, range(1), optimizer)
        own = sync._weights.node.comm if exchanged == "updates" else sync._steps.nodes.node
        own.under_way = lambda *_: Failing()
        with refused("the other rank is gone", error=PeerError):
            backward(net, 1)
        del own.under_way
        for call in (lambda: net(batch(2)[0]), sync.communicators[0].check_whole):
            with refused("an earlier exchange broke off (the other rank is gone)"):
                call()
        dist.barrier()


@pytest.mark.slow
@on_ranks(4)
def test_a_comparison_that_fails_is_heard_of():
    """The replicas of shard 0 cannot compare, and those of shard 1, which could, are told so."""
    net, sync = shards(sentinel=Sentinel(period=2))
    train(net, range(1))
    real = sync.reducer.channel

    async def allgather(mine, phase):
        return await Failing()

    def channel(use):
        found = real(use)
        if use == "weights":
            found.allgather = allgather
        return found

    if dist.get_rank() % 2 == 0:
        sync.reducer.channel = channel
    with refused("the other rank is gone", error=PeerError):
        train(net, range(1, 2))
    sync.close()


@pytest.mark.slow
@on_ranks(4)
def test_states_of_different_steps_are_refused_on_all_ranks():
    """The ranks of each part agree among themselves, but the parts have different steps."""
    net, sync = shards()
    states = []
    for step in range(3):
        train(net, range(step, step + 1))
        states.append(sync.state_dict())
    with refused("the step of the saved states of a replica's parts", error=PeerError):
        sync.load_state_dict(states[dist.get_rank() % 2])
    with refused("ranks disagree on", error=PeerError):
        sync.load_state_dict(states[dist.get_rank() == 3])  # not as rank 1, of its part
    assert sync.stats()["exchanges"] == 3
    sync.close()


def break_off(net, step):
    """Run the backward pass up to the first layer's gradients, when the last units are in flight."""

    def give_up(gradient):
        raise KeyError("a user's error")

    hook = net[0].weight.register_hook(give_up)
    with pytest.raises(KeyError):
        backward(net, step)
    hook.remove()
    net.zero_grad()


@pytest.mark.slow
@on_ranks(4)
def test_a_load_after_a_broken_pass_is_whole():
    """Exchanges begun by the interrupted pass must not overwrite the loaded state."""
    ends = []
    for breaks in (False, True):
        net, sync = replicas()
        train(net, range(2))
        state, weights = sync.state_dict(), {n: v.clone() for n, v in net.state_dict().items()}
        train(net, range(2, 4))
        if breaks:
            break_off(net, 4)
        net.load_state_dict(weights)
        sync.load_state_dict(state)
        train(net, range(2, 5))
        ends.append(flat(net))
        sync.close()
    assert torch.equal(*ends)


@pytest.mark.slow
@on_ranks(4)
def test_one_pass_that_breaks_off_ends_all():
    """Rank 1 catches its error and takes the next batch while others wait for its first attempt.

    Messages over gloo carry no names, so those of the second attempt would be taken for those of
    the first.
    """
    net, _ = replicas(transport="torch", timeout=4)
    train(net, range(2))
    breaks = dist.get_rank() == 1
    if breaks:
        break_off(net, 2)
    error = message_of(train, net, range(2 + breaks, 6))
    assert error.startswith(("DeadlineError", "PeerError")), error
    assert ("rank 1 repeats step 2" in error) == breaks
    assert len({str(end.tolist()) for end in gathered(flat(net))}) == 1
