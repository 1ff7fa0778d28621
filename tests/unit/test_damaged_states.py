"""Damage every field of a saved state in every way: its rank refuses it, or others notice."""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

import sparsync
from sparsync.averaging import LocalSgd
from sparsync.errors import ConfigurationError
from sparsync.fields import STATE_KINDS, STATE_VERSION
from sparsync.state import packed, unpacked
from sparsync.updates import OuterAverager, OuterStep
from sparsync_papers.baseline_optimizers import UpdateSpaceSGD
from tests.attaching import attach
from tests.digests.canonical import sha
from tests.tables import cases

pytestmark = pytest.mark.usefixtures("alone")


UNKNOWN = "a field that nobody knows"


def damages(state: Any) -> Iterator[tuple[tuple[Any, ...], str, Any]]:
    """Yield a place in a state, the damage there, and the damaged state.

    Each field is omitted; each dictionary gets an additional field; each value gets other types.
    Each tensor gets another shape, size or dtype, NaN or Inf, or no memory. Each number becomes
    NaN, Inf, or longer than 64 bits.
    """
    for path in places(state):
        value = at(state, path)
        yield path, "missing", changed(state, path, remove=True)
        if isinstance(value, dict):
            yield (*path, UNKNOWN), "unknown", changed(state, (*path, UNKNOWN), 1)
        for what, wrong in wrongs(value):
            yield path, what, changed(state, path, wrong)


def wrongs(value: Any) -> Iterator[tuple[str, Any]]:
    others = {"text": "x", "list": [[]], "dictionary": {"a": 1}, "tensor": torch.ones(7, 3)}
    kind = {str: "text", list: "list", tuple: "list", dict: "dictionary"}.get(type(value), "")
    yield from ((f"a {what}", other) for what, other in others.items() if what != kind)
    if isinstance(value, torch.Tensor):
        yield "no tensor", 3
        yield "another shape", value.unsqueeze(0)
        yield "another size", torch.cat([value.flatten(), value.flatten()[:1]])
        yield "another dtype", value.to(torch.float16)
        yield "no memory", value.to("meta")
        if value.is_floating_point() and value.numel():
            for number in (torch.nan, torch.inf):
                broken = value.clone()
                broken.view(-1)[-1:] = number
                yield str(number), broken
    elif isinstance(value, bool):
        yield "a number", 0.5
    elif isinstance(value, int | float):
        yield from (("nan", torch.nan), ("inf", torch.inf), ("True", True))
        if isinstance(value, int):
            yield "long", 2**70


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    listed = enumerate(value) if isinstance(value, list | tuple) else ()
    for key, inner in value.items() if isinstance(value, dict) else listed:
        yield from places(inner, (*path, key))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def is_switch(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def changed(value: Any, path: tuple[Any, ...], other: Any = None, *, remove: bool = False) -> Any:
    """Return a copy with another value at one place, which shares everything else."""
    if not path:
        return other
    key, *rest = path
    copied = copy.copy(list(value) if isinstance(value, tuple) else value)
    if remove and not rest:
        del copied[key]
    else:
        inner = copied[key] if isinstance(copied, list) else copied.get(key)
        copied[key] = changed(inner, tuple(rest), other, remove=remove)
    return tuple(copied) if isinstance(value, tuple) else copied


def net():
    torch.manual_seed(0)
    layers = torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
    return torch.nn.Sequential(*layers)


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().sum().backward()
        optimizer.step()


def of_updates(settings, make=torch.optim.AdamW, **options):
    model = net()
    optimizer = make(model.parameters(), lr=0.01)
    outer = OuterStep(**settings) if settings else None
    sync = sparsync.attach(model, optimizer, outer, exchange="updates", **options)
    train(model, optimizer, 5)
    while settings.get("delay") and not sync.state_dict()["content"]["under_way"]:
        train(model, optimizer, 1)
    return sync


def of_gradients():
    model = torch.nn.parallel.DistributedDataParallel(net())
    correction = sparsync.Correction(momentum=0.5)
    sync = attach(model, "oktopk", density=0.1, correction=correction)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 3)
    return sync


def test_a_state_of_an_older_torch_fits():
    """Missing fields keep their values, as when torch's own optimizers load the state."""
    with of_updates({}) as sync:
        saved, (group,) = sync.state_dict(), sync.outer.optimizers[0].param_groups
        group["foreach"] = False
        (of_group,) = saved["content"]["groups"][0]
        for name in ("decoupled_weight_decay", "fused", "foreach"):
            del of_group[name]
        of_group["lr"] = 0.5
        sync.load_state_dict(saved)
        (group,) = sync.outer.optimizers[0].param_groups
        kept = [group[name] for name in ("lr", "foreach", "decoupled_weight_decay")]
        assert kept == [0.5, False, True]


def test_moments_of_sparse_gradients_are_saved_loaded_and_dropped(tmp_path):
    def make(seed):
        torch.manual_seed(seed)
        model = torch.nn.Embedding(6, 3, sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        outer = OuterStep(period=2, residual="weights", density=0.5)
        return model, optimizer, sparsync.attach(model, optimizer, outer, exchange="updates")

    def steps(model, optimizer, count, factor=1.0):
        for _ in range(count):
            optimizer.zero_grad()
            (factor * model(torch.tensor([1, 4, 4])).square().sum()).backward()
            optimizer.step()

    model, optimizer, sync = make(0)
    with sync:
        steps(model, optimizer, 3)
        sparsync.save(sync, tmp_path)
        steps(model, optimizer, 3)
    other, its_optimizer, sync = make(1)
    with sync:
        sparsync.load(sync, tmp_path)
        assert its_optimizer.state[other.weight]["momentum_buffer"].is_sparse
        steps(other, its_optimizer, 3)
        assert torch.equal(other.weight, model.weight)
        broken = sync.state_dict()
        broken["content"]["moments"]["weight"]["momentum_buffer"]._values().fill_(torch.nan)
        with pytest.raises(ConfigurationError, match=r"momentum_buffer.*NaN or Inf"):
            sync.load_state_dict(broken)
        steps(other, its_optimizer, 2, factor=torch.nan)
        assert other.weight.isfinite().all() and not its_optimizer.state[other.weight]


SCALER = torch.amp.GradScaler("cpu", enabled=True)
UNDER_WAY = {"residual": "weights", "fragments": 2, "delay": 2, "density": 0.1, "period": 4}
HANDLES = {
    "updates": lambda: of_updates({}),
    "fragments under way": lambda: of_updates(UNDER_WAY),
    "momentum": lambda: of_updates({"momentum": 0.9, "period": 2}, torch.optim.RMSprop),
    "a scaler": lambda: of_updates({}, monitoring=sparsync.Monitoring(scaler=SCALER)),
    "gradients": of_gradients,
}


@cases(*(pytest.param(n, marks=[] if n == "gradients" else pytest.mark.slow) for n in HANDLES))
def test_no_damaged_state_is_like_the_others(name):
    with HANDLES[name]() as sync:
        state = sync.state_dict()
        saved = state["content"]

        def common(content):
            parsed = sync.validate({**state, "content": content})
            return [str(parsed.common()), sync.common(content) if hasattr(sync, "common") else ""]

        expected, loaded, tried = common(saved), [], 0
        for path, what, damaged in damages(saved):
            tried += 1
            if what == "long" and path[0] == "groups":
                continue  # a rate that was given as a whole number
            if what == "missing" and path[0] == "groups" and is_switch(at(saved, path)):
                continue  # the state was saved before torch had this field
            try:
                if common(damaged) == expected:
                    loaded.append((path, what))
            except ConfigurationError as error:
                if "\n" in str(error) or len(str(error)) > 600:
                    loaded.append((path, what, error))
            except Exception as error:
                loaded.append((path, what, error))
        assert not loaded, loaded
        assert tried > 200


# ---- envelopes -------------------------------------------------------------------------------------


def stepped(make):
    """Return a model's optimizer, or averager, after a step."""
    model = net()
    one = make(model)
    model(torch.randn(8, 3)).square().sum().backward()
    one.step()
    return one


class Saver(NamedTuple):
    state_dict: Callable[[], Any]
    load_state_dict: Callable[[Any], Any]
    close: Callable[[], None] = lambda: None


def copies_of_gradients():
    """Return an object that saves and loads a joining rank's copy."""
    pytest.importorskip("zmq")
    from sparsync.elastic.catch_up import load_copy, make_copy

    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, 1)
    return Saver(
        lambda: unpacked(make_copy(model, [optimizer])),
        lambda state: load_copy(packed(state), model, [optimizer]),
    )


def copies_of_updates():
    pytest.importorskip("torchft")
    from sparsync.elastic import ElasticGroup

    model, group = net(), ElasticGroup(interface="127.0.0.1")
    manager = SimpleNamespace(_pg=group, start_quorum=lambda **_: None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sync = sparsync.attach(model, optimizer, elastic=manager)
    ends = ExitStack()
    ends.callback(group.shutdown)
    ends.callback(sync.close)
    opened = lambda state: sync._ranks._opened(packed(state))  # noqa: E731
    return Saver(lambda: unpacked(sync._ranks._copy()), opened, ends.close)


def resharding():
    sync = of_gradients()
    return Saver(sync.state_dict, lambda state: sparsync.reshard([state], 2), sync.close)


SAVERS = {  # by name, which begins with the kind: an object that saves and loads states of that kind
    "gradients": of_gradients,
    "gradients, resharded": resharding,
    "updates": lambda: of_updates({}),
    "averager": lambda: stepped(LocalSgd),
    "averager, OuterAverager": lambda: stepped(OuterAverager),
    "optimizer": lambda: stepped(lambda model: UpdateSpaceSGD(model, lr=0.1)),
    "elastic gradients": copies_of_gradients,
    "elastic updates": copies_of_updates,
}


def test_every_kind_of_state_has_its_envelope_damaged():
    assert {name.partition(",")[0] for name in SAVERS} == {*STATE_KINDS}


def damaged_envelopes(state: Any) -> Iterator[tuple[Any, str]]:
    """Yield envelopes that an object of this kind must refuse, with the words of the error."""
    kind, here = state["kind"], f"load a state of {STATE_KINDS[state['kind']]}"
    for other in (None, 7, [], "state", UNKNOWN):
        yield other, f"the saved state is {other!r}, expected a dictionary; {here}"
    for part in state:
        cure = "load it with the sparsync that saved it" if part == "version" else here
        said = f"the saved state has no state['{part}']; {cure}"
        yield changed(state, (part,), remove=True), said
    for other in ("surprise", 3, None, [kind], torch.ones(2)):
        found = sparsync.state.brief(other)
        said = f"the saved state['kind'] is {found}, expected '{kind}'; {here}"
        yield {**state, "kind": other}, said
    for other, place in STATE_KINDS.items():
        if other != kind:
            said = f"saved state['kind'] is '{other}', expected '{kind}'; it belongs in {place};"
            # the error names the other kind, whatever the envelope's version and content
            yield {"kind": other, "version": 99, "content": {"a": 1}}, said
    for other in (STATE_VERSION + 1, 0, -1, float(STATE_VERSION), str(STATE_VERSION), True, None):
        expected = f"expected {STATE_VERSION}; load it with the"
        said = f"the saved state['version'] is {other!r}, {expected}"
        yield {**state, "version": other, UNKNOWN: 1}, said
    yield {**state, UNKNOWN: 1}, f"the saved state has an unknown state['{UNKNOWN}']; {here}"
    for other in (None, 3, [], "x"):
        said = f"the saved state['content'] is {other!r}, expected Mapping"
        yield {**state, "content": other}, said
    content = state["content"]
    yield {**state, "content": {**content, UNKNOWN: 1}}, f"has an unknown state['{UNKNOWN}']; load"
    for name in content:
        yield changed(state, ("content", name), remove=True), f"has no state['{name}']; load"


@pytest.mark.parametrize("name", SAVERS)
def test_no_damaged_envelope_is_opened(name):
    """The error states the given and the expected value and the remedy, and nothing changes."""
    saver = SAVERS[name]()
    state = saver.state_dict()
    assert (state["kind"], state["version"]) == (name.partition(",")[0], STATE_VERSION)
    assert [*state] == ["kind", "version", "content"]
    saver.load_state_dict(state)
    before, wrong = sha(saver.state_dict()), []
    for damaged, words in damaged_envelopes(state):
        try:
            saver.load_state_dict(damaged)
            wrong.append((words, "loaded"))
        except ConfigurationError as error:
            said = str(error)
            if words not in said or "\n" in said or len(said) > 300:
                wrong.append((words, said))
    assert not wrong, wrong
    assert sha(saver.state_dict()) == before
    getattr(saver, "close", lambda: None)()
