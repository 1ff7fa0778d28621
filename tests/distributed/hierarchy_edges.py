"""What goes wrong on one of two nodes, or on one shard of two: all ranks hear of it, none is ahead."""

import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync.integrations import hierarchy
from sparsync.integrations.shards import local_of
from tests.attaching import attach

from .hierarchy_programs import attached, nodes
from .small_model import batch, flat, gathered, model, same_everywhere, train


def error_of(steps: Any, *arguments: Any) -> str:
    try:
        steps(*arguments)
    except sparsync.SparsyncError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def shards(**options: Any) -> tuple[Any, Any]:
    net = fully_shard(model(), mesh=nodes()["ranks"])
    options = {"density": 0.1, "timeout": 30, **options}
    return net, attach(net, replicate=nodes()["nodes"], **options)


def on_nodes(**options: Any) -> tuple[Any, Any]:
    ddp = DistributedDataParallel(model(), bucket_cap_mb=0.001)
    return ddp, attached(ddp, unit_bytes=700, **options)


def a_rank_that_differs() -> dict[str, list[str]]:
    """Ranks 1 and 3 compare with each other; 0 and 2 would only see their step succeed."""
    said = {}
    for name, make, policy in (
        ("nodes, raise", on_nodes, "raise"),
        ("shards, raise", shards, "raise"),
        ("shards, warn", shards, "warn"),
    ):
        net, sync = make(sentinel=sparsync.Sentinel(period=2, policy=policy))
        train(net, range(1))
        if dist.get_rank() == 3:
            with torch.no_grad():
                local_of(list(net.parameters())[-1])[0] += 1e-3
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            error = error_of(train, net, range(1, 2))
        told = [str(w.message) for w in warned if "sentinel" in str(w.message)]
        said[name] = gathered("|".join([*told, error]))
        sync.close()
    return said


def a_node_that_fails() -> dict[str, bool]:
    """The exchange of rank 0's first unit fails while gradients of others are still to come."""
    ddp, sync = on_nodes()
    train(ddp, range(3))
    before, exchange = sync.state_dict(), sync.reducer.exchange
    here = dist.get_rank() in (0, 2)  # neither waits for the other

    async def failing(unit: int) -> None:
        raise sparsync.PeerError("the other node is gone")

    if here:
        sync.reducer.exchange = failing
    hook = ddp.module[2].weight.register_hook(_slow)
    started = time.monotonic()
    error = error_of(train, ddp, range(3, 4))
    took = time.monotonic() - started
    hook.remove()
    sync.reducer.exchange = exchange
    train(ddp, range(4, 6))
    words = "the other node is gone" if here else "the exchange of part 0 of this replica failed"
    result = {
        "told": words in error,
        "at once": took < 15,  # of a timeout of 30
        "goes on": same_everywhere(flat(ddp)) and sync.stats()["steps"] == before["step"] + 2,
    }
    sync.close()
    return _all(result)


def _slow(gradient: torch.Tensor) -> None:
    time.sleep(0.3)  # the first exchange has failed by then


def a_gather_that_fails() -> dict[str, bool]:
    """The second node has its averages, the first has not: there the step has not been."""
    ddp, sync = on_nodes()
    train(ddp, range(3))
    before, real, first = sync.state_dict(), hierarchy._all_gather, dist.get_rank() < 2

    def failing(*arguments: Any, **options: Any) -> Any:
        raise sparsync.PeerError("a rank of this node is gone")

    if first:
        hierarchy._all_gather = failing
    error = error_of(train, ddp, range(3, 4))
    hierarchy._all_gather = real
    after = sync.state_dict()
    kept = all(torch.equal(v, after["residual"][n]) for n, v in before["residual"].items())
    sync.close()
    result = {"raised": ("is gone" in error) == first, "step": after["step"] == 4 - first}
    return _all({**result, "residual": kept == first})


def states_that_do_not_fit() -> dict[str, list[Any]]:
    """Both ranks of a part agree among themselves, on another step than those of the other part."""
    net, sync = shards()
    states = []
    for step in range(3):
        train(net, range(step, step + 1))
        states.append(sync.state_dict())
    parts = error_of(sync.load_state_dict, states[dist.get_rank() % 2])
    rank = error_of(sync.load_state_dict, states[dist.get_rank() == 3])  # not as 1, of its part
    steps = sync.stats()["steps"]
    sync.close()
    return {"parts": gathered(parts), "rank": gathered(rank), "steps": gathered(steps)}


def replicas(**options: Any) -> tuple[Any, Any]:
    net = model()
    options = {"density": 0.1, "timeout": 30, "unit_bytes": 700, **options}
    return net, attach(net, replicate=dist.group.WORLD, **options)


def a_load_after_a_broken_pass() -> dict[str, bool]:
    """What the broken pass has begun must not come back over what was loaded."""
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
    return _all({"exact": torch.equal(*ends)})


def break_off(net: Any, step: int) -> None:
    """Go backward until the first layer's gradients; the last units are under way then."""

    def give_up(gradient: torch.Tensor) -> None:
        raise KeyError("a user's error")

    hook = net[0].weight.register_hook(give_up)
    x, y = batch(step)
    try:
        (net(x) - y).pow(2).mean().backward()
    except KeyError:
        hook.remove()
    net.zero_grad()


def one_pass_that_breaks_off() -> dict[str, bool]:
    """Rank 1 catches its error and goes on with the next batch; the others wait for its first try.

    Over gloo, messages have no names: those of the second try would be taken for those of the first.
    """
    net, _ = replicas(transport="torch", timeout=4)
    train(net, range(2))
    breaks = dist.get_rank() == 1
    if breaks:
        break_off(net, 2)
    error = error_of(train, net, range(2 + breaks, 6))
    ends = error.startswith(("DeadlineError", "PeerError"))
    again = "rank 1 begins step 2 again" in error
    return _all({"ends": ends, "why": again == breaks, "equal": same_everywhere(flat(net))})


def _all(mine: dict[str, bool]) -> dict[str, bool]:
    answers = gathered(mine)
    return {name: all(answer[name] for answer in answers) for name in mine}


def everything_that_goes_wrong() -> dict[str, Any]:
    return {
        "sentinel": a_rank_that_differs(),
        "a node fails": a_node_that_fails(),
        "a gather fails": a_gather_that_fails(),
        "states": states_that_do_not_fit(),
        "load": a_load_after_a_broken_pass(),
        "one breaks off": one_pass_that_breaks_off(),
    }
