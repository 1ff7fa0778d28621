"""Test that resharding to other numbers of ranks or other shards preserves the total residual."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsync import ConfigurationError, Correction
from sparsync.checkpoint.reshard import reshard as reshard_envelopes
from sparsync.checkpoint.reshard import state_like as envelope_like
from sparsync.feedback.reducer_state import reducer_state, restore_reducer
from sparsync.fields import opened, sealed
from sparsync.transports.driver import run
from sparsync.transports.groups import SoloCommunicator
from sparsync.transports.sim import simulate
from sparsync.updates import OuterAverager
from sparsync_papers.baseline_optimizers import UpdateSpaceAdamW
from tests.contracts.table import ALGORITHMS
from tests.tables import refused

from .small_reducers import SIZES, gradients, reducer_on


def wrapped(state):
    """Return a reducer's state in the form that a handle saves, with "pieces" if there are any."""
    if not isinstance(state, dict):
        return state
    kept = dict(state)
    pieces = kept.pop("pieces", {})
    return sealed("gradients", {"reducer": kept, "pieces": pieces})


def unwrapped(state):
    content = opened(state, "gradients")
    return {**content["reducer"], **({"pieces": content["pieces"]} if content["pieces"] else {})}


def reshard(states, world_size):
    return [unwrapped(new) for new in reshard_envelopes([*map(wrapped, states)], world_size)]


def state_like(template, states):
    return unwrapped(envelope_like(wrapped(template), [*map(wrapped, states)]))


# ---- another number of ranks ----------------------------------------------------------------------


def states_of(world_size, steps=3, integers=True, correction=None, algorithm=None):
    async def program(comm):
        reducer = reducer_on(comm, algorithm, correction=correction)
        for step in range(steps):
            await reducer.reduce(gradients(reducer, step, integers))
        return reducer_state(reducer)

    return simulate(program, world_size).results


def total(states, what="residual"):
    zeros = {name: torch.zeros(size) for name, size in SIZES.items()}
    return {
        name: sum((state[what].get(name, zero).double() for state in states), zero.double())
        for name, zero in zeros.items()
    }


def equal(one, other):
    return all(torch.equal(one[name], other[name]) for name in SIZES)


@pytest.mark.parametrize("what", ["residual", "velocity"])
@given(before=st.integers(1, 6), after=st.integers(1, 13))
def test_resharding_conserves_the_sum_of_whole_numbers(what, before, after):
    states = made_up(before, lambda: torch.randint(-999, 999, (1,)).float(), seed=before)
    kept = copy.deepcopy(states)
    new = reshard(states, after)
    assert len(new) == after
    assert [state["rank"] for state in new] == list(range(after))
    assert all(state["world_size"] == after for state in new)
    assert equal(total(states, what), total(new, what))
    for state, old in zip(states, kept, strict=True):
        assert equal(state[what], old[what]), "an argument was changed"


def made_up(world_size, draw, seed=0):
    torch.manual_seed(seed)
    (state,) = states_of(1, steps=1, correction=Correction(momentum=0.5))
    drawn = {
        rank: {what: {n: draw().expand(s) * torch.randn(s).sign() for n, s in SIZES.items()}
               for what in ("residual", "velocity")}
        for rank in range(world_size)
    }  # fmt: skip
    return [{**state, "rank": r, "world_size": world_size, **drawn[r]} for r in range(world_size)]


@given(before=st.integers(1, 5), after=st.integers(1, 9), seed=st.integers(0, 99))
def test_resharding_floats_keeps_the_law(before, after, seed):
    states = made_up(before, lambda: torch.randn(1) * 10.0 ** torch.randint(-9, 9, (1,)), seed)
    one, other = total(states), total(reshard(states, after))
    for name in SIZES:
        scale = sum(state["residual"][name].double().abs() for state in states)
        bound = (before + 2) * 2.0**-24 * scale
        assert bool(((one[name] - other[name]).abs() <= bound).all())


@given(before=st.integers(1, 4), factor=st.integers(1, 4))
def test_growing_and_shrinking_again_changes_nothing(before, factor):
    states = made_up(before, lambda: torch.randn(1), seed=factor)
    back = reshard(reshard(states, before * factor), before)
    for state, same in zip(states, back, strict=True):
        assert equal(state["residual"], same["residual"])
        assert equal(state["velocity"], same["velocity"])


def test_more_ranks_share_the_elements_evenly():
    new = reshard(made_up(2, lambda: torch.ones(1)), 6)
    assert [int(state["residual"]["a"].count_nonzero()) for state in new] == [10] * 6


@pytest.mark.parametrize("before, after", [(4, 3), (1, 3)])
@pytest.mark.parametrize("name", ["budgeted", "oktopk", "redsync", "auto", "sparcml"])
def test_a_resharded_run_goes_on_under_the_law(name, before, after):
    algorithm = ALGORITHMS[name]
    new = reshard(states_of(before, algorithm=algorithm), after)
    waiting = torch.cat([total(new)[n] for n in SIZES])

    async def program(comm):
        reducer = reducer_on(comm, algorithm)
        await restore_reducer(reducer, new[comm.rank])
        assert reducer.step == 3
        fed = gradients(reducer, 3, integers=True)
        given = torch.cat(fed).clone()
        await reducer.reduce(fed)
        left = [r.value if r.value is not None else torch.zeros(u.size)
                for r, u in zip(reducer.residuals, reducer.units, strict=True)]  # fmt: skip
        lost = sum((vector.to_dense() for vector in reducer.lost), torch.zeros(50))
        divisor = after if algorithm.average else 1
        mine = given.double() - torch.cat(left).double() - lost.double()
        missing = torch.stack(await comm.allgather(mine, "verify")).sum(0)
        return waiting + missing, torch.cat(fed).double() * divisor

    for owed, arrived in simulate(program, after).results:
        assert torch.allclose(owed, arrived, rtol=1e-5, atol=1e-3)


def test_thresholds_and_boundaries_start_afresh_and_steps_go_on():
    (state, *_) = reshard(states_of(4, algorithm=ALGORITHMS["oktopk"]), 2)
    assert (state["step"], state["selectors"], state["collectives"]) == (3, None, None)
    reducer = reducer_on(SoloCommunicator())
    fresh = [part.state for part in (*reducer.selectors, *reducer.collectives)]
    run(reducer.reduce(gradients(reducer, 0)))
    run(restore_reducer(reducer, {**state, "world_size": 1}))
    assert [part.state for part in (*reducer.selectors, *reducer.collectives)] == fresh
    assert reducer.step == 3


# ---- parameters that are divided -------------------------------------------------------------------


def divided(state, parts):
    """Return states of ``parts`` shards of a replica, each with a run of every parameter's rows."""
    result = []
    for part in range(parts):
        pieces, residual, sizes = {}, {}, []
        for name, size in SIZES.items():
            start, stop = size * part // parts, size * (part + 1) // parts
            pieces[name] = {"shape": [size], "offset": [start], "size": [stop - start]}
            residual[name] = state["residual"][name][start:stop].clone()
            sizes.append(stop - start)
        own = {"pieces": pieces, "residual": residual, "velocity": {}, "sizes": [sizes]}
        result.append({**state, **own})
    return result


def test_shards_become_whole_parameters_and_whole_ones_shards():
    whole = made_up(3, lambda: torch.randn(1))
    whole = [{**state, "velocity": {}} for state in whole]
    shards = [shard for state in whole for shard in divided(state, 2)]
    for state in whole:
        assert equal(state_like(state, shards)["residual"], state["residual"])
    for shard in shards:
        found = state_like(shard, whole)
        assert equal(found["residual"], shard["residual"])
        assert found["pieces"] == shard["pieces"]


def test_shards_move_to_other_numbers_of_replicas_and_shards():
    whole = [{**s, "velocity": {}} for s in made_up(4, lambda: torch.ones(1))]
    shards = [shard for state in whole for shard in divided(state, 3)]
    two = reshard(whole, 2)
    for template in [shard for state in two for shard in divided({**state, "quotas": [1]}, 2)]:
        assert equal(state_like(template, shards)["residual"], template["residual"])


def test_a_piece_of_two_dimensions_finds_its_place():
    (state,) = made_up(1, lambda: torch.ones(1))
    state["residual"]["a"] = torch.arange(30.0)
    column = {"shape": [5, 6], "offset": [0, 2], "size": [5, 2]}
    own = {"pieces": {"a": column}, "units": [["a"]], "sizes": [[10]], "quotas": [1]}
    found = state_like({**state, **own}, [state])
    assert torch.equal(found["residual"]["a"], torch.arange(30.0).view(5, 6)[:, 2:4].flatten())


# ---- invalid sets of states ----------------------------------------------------------------------


outside = {"shape": [30], "offset": [5], "size": [30]}
BROKEN = {
    "a rank is missing": (lambda s: s[:2], "state of rank 2 of 3 is missing"),
    "no states": (lambda s: [], "no states were given"),
    "a state is no dictionary": (lambda s: [*s[:2], 7], "the saved state is 7, expected a dictionary"),
    "a key is missing": (lambda s: s[1].pop("step"), r"has no state\['reducer'\]\['step'\]"),
    "another step": (lambda s: s[1].update(step=9), "ranks 0 and 1 have step 1 and 9"),
    "another scale": (lambda s: s[2].update(scale=2.0), "ranks 0 and 2 have scale 1.0 and 2.0"),
    "a rank of nowhere": (lambda s: s[0].update(rank=8), "belongs to rank 8 of 3"),
    "a size": (lambda s: s[1]["residual"].update(a=torch.ones(3)), r"'a' on rank 1 has shape \(3,\)"),
    "a list": (lambda s: s[1]["residual"].update(a=[1.0]), "is not a tensor of floating-point"),
    "integers": (lambda s: s[1]["residual"].update(a=torch.ones(30).int()), "is not a tensor of"),
    "NaN": (lambda s: s[1]["residual"].update(a=torch.full((30,), torch.nan)), "'a' on rank 1 holds NaN"),
    "an unknown name": (lambda s: s[1]["residual"].update(z=torch.ones(3)), "'z' on rank 1 has shape"),
    "no dictionary": (lambda s: s[1].update(residual=3), r"\['residual'\] is 3, expected Mapping"),
    "no list": (lambda s: s[1].update(sizes=5), r"\['sizes'\] is 5, expected Sequence"),
    "sizes of others": (lambda s: s[1].update(sizes=[[30]]), r"sizes \[\[30\]\], expected one for each"),
    "a tensor": (lambda s: s[1].update(step=torch.ones(2)), r"\['step'\] is a tensor .*expected a whole"),
    "infinity": (lambda s: s[1].update(previous_norm=torch.inf), r"\['previous_norm'\] is inf, expected"),
    "pieces": (lambda s: s[1].update(pieces=None), "pieces of rank 1 are not a dictionary"),
    "a piece": (lambda s: s[1].update(pieces={"a": outside}), "saved piece of 'a' on rank 1 is"),
    "many ranks": (lambda s: [x.update(world_size=2**40) for x in s] and None, "rank 3 of 10995116"),
    "a sparse one": (lambda s: s[1]["residual"].update(a=torch.ones(30).to_sparse()), "not a tensor of"),
    "two of one rank": (lambda s: [*s, {**s[0], "residual": s[1]["residual"]}], "rank 0 differ in the"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_set_of_states_is_refused(name):
    change, words = BROKEN[name]
    states = made_up(3, lambda: torch.randn(1))
    states = [{**state, "residual": dict(state["residual"])} for state in states]
    changed = change(states)
    with pytest.raises(ConfigurationError, match=words) as caught:
        reshard(changed if isinstance(changed, list) else states, 2)
    assert "\n" not in str(caught.value)


def test_another_model_is_refused():
    (state, *_) = states = made_up(2, lambda: torch.ones(1))
    with refused("'a' of rank 0 has 30 elements, this run's 31; was"):
        state_like({**state, "sizes": [[31, 1, 19]], "units": [["a", "b", "c"]]}, states)


# ---- optimizers of this library ---------------------------------------------------------------------


def of_rank(state, rank):
    content, inner = state["content"], state["content"]["reducer"]
    residual = {name: (rank + 1) * values for name, values in inner["residual"].items()}
    inner = {**inner, "rank": rank, "world_size": 2, "residual": residual}
    moments = {key: {"step": rank} for key in content["state"]}
    return sealed("optimizer", {**content, "state": moments, "reducer": inner})


def test_an_update_space_optimizer_moves_to_other_ranks():
    model = torch.nn.Linear(3, 2, bias=False)
    optimizer = UpdateSpaceAdamW(model, lr=0.1, density=0.5)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    alone = optimizer.state_dict()
    saved = alone["content"]
    new = envelope_like(alone, [of_rank(alone, 0), of_rank(alone, 1)])["content"]
    before, after = (one["reducer"]["residual"]["weight"] for one in (saved, new))
    assert bool(before.any())
    assert torch.equal(after, 3 * before)
    assert new["param_groups"] == saved["param_groups"]
    assert new["state"] == {0: {"step": 0}}
    optimizer.load_state_dict(sealed("optimizer", {**new, "state": saved["state"]}))
    assert envelope_like(of_rank(alone, 1), [alone])["content"]["state"] == saved["state"]


def test_outer_steps_do_not():
    model = torch.nn.Linear(3, 2)
    state = OuterAverager(model).state_dict()
    with refused("has its own weights and residuals, which cannot be divided; use attach()"):
        envelope_like(state, [state, state])
