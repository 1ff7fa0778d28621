"""Test PPO's parts against their definitions, that ranks collect separately, and that it learns."""

import sys
from statistics import fmean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsync.errors import ConfigurationError
from sparsync_papers.workloads.ppo import Ppo, advantages_of, clipped_loss

PLACE = {"seed": 0, "iteration": 0, "rank": 0}
NUMBERS = st.floats(-10, 10, width=32)


@given(
    steps=st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=20),
    last=NUMBERS,
    discount=st.floats(0, 1),
    trace=st.floats(0, 1),
)
def test_advantages_are_the_sum_of_discounted_errors(steps, last, discount, trace):
    rewards = torch.tensor([reward for reward, _ in steps], dtype=torch.float64)
    values = torch.tensor([*(value for _, value in steps), last], dtype=torch.float64)
    errors = [rewards[t] + discount * values[t + 1] - values[t] for t in range(len(steps))]
    expected = [
        sum((discount * trace) ** ahead * error for ahead, error in enumerate(errors[t:]))
        for t in range(len(steps))
    ]
    found = advantages_of(rewards, values, discount=discount, trace=trace)
    torch.testing.assert_close(found, torch.stack(expected))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.4, 0.0),  # a good action that is likely enough
        (0.5, 2.0, -1.0, -1.0),  # a good action that has become rare: learned
        (1.5, -2.0, 3.0, 3.0),  # a bad action that has become likely: unlearned
        (0.5, -2.0, 1.6, 0.0),  # a bad action that is rare enough
    ],
)
def test_the_objective_is_clipped_on_the_side_that_gains(ratio, advantage, loss, gradient):
    new = torch.tensor([ratio]).log().requires_grad_()
    found = clipped_loss(new, torch.zeros(1), torch.tensor([advantage]), clip=0.2)
    found.backward()
    assert found.item() == pytest.approx(loss)
    assert new.grad.item() == pytest.approx(gradient)


def test_without_gymnasium_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'sparsync-papers\[rl\]'"):
        Ppo().make_model(0)


# ---- on a task ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def task():
    pytest.importorskip("gymnasium")
    return Ppo(episodes=3)


def test_what_is_collected_depends_on_seed_iteration_and_rank(task):
    model = task.make_model(0)
    first, before = task.collect(model, **PLACE), torch.random.get_rng_state()
    again = task.collect(model, **PLACE)
    assert first.returns == again.returns
    assert torch.equal(first.observations, again.observations)
    assert torch.equal(first.actions, again.actions)
    for changed in ({"seed": 1}, {"iteration": 1}, {"rank": 1}):
        other = task.collect(model, **{**PLACE, **changed})
        assert not torch.equal(first.observations[0], other.observations[0]), changed
    assert torch.equal(torch.random.get_rng_state(), before)


def test_ranks_collect_whole_episodes_of_unequal_length(task):
    model = task.make_model(0)
    collected = [task.collect(model, **{**PLACE, "rank": rank}) for rank in range(4)]
    for experience in collected:
        # CartPole pays 1 per step, so returns are lengths
        assert len(experience.returns) == 3 and experience.steps == sum(experience.returns)
        assert len(experience.observations) == len(experience.targets) == experience.steps
    assert len({experience.steps for experience in collected}) > 1


def test_nothing_follows_a_failure_and_something_what_is_cut(task):
    """A failed episode has no value after its end; an episode cut off at the limit has one.

    With trace 0, the last advantage is reward + discount * next value - value.
    """

    def collected(one):
        model = one.make_model(0)
        with torch.no_grad():
            for parameter in model.critic.parameters():
                parameter.zero_()
            model.critic[-1].bias.fill_(10.0)  # the value of every state
        return one.collect(model, **PLACE)

    failed = collected(Ppo(episodes=1, trace=0.0))
    assert failed.steps < 500
    assert failed.advantages[-1].item() == pytest.approx(1 - 10)
    assert failed.advantages[0].item() == pytest.approx(1 + 0.99 * 10 - 10)
    # with this seed, no episode reaches the limit
    reached_the_limit = collected(Ppo("MountainCar-v0", episodes=1, trace=0.0))
    assert reached_the_limit.steps == 200
    assert reached_the_limit.advantages[-1].item() == pytest.approx(-1 + 0.99 * 10 - 10)


def test_an_update_is_repeatable_and_moves_likely_what_was_good(task):
    collected, results = None, []
    for _ in range(2):
        model = task.make_model(0)
        collected = task.collect(model, **PLACE)
        optimizer = torch.optim.Adam(model.parameters(), task.lr)
        task.update_(model, optimizer, collected, **PLACE)
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*results)
    logits, _ = model(collected.observations)
    chosen = logits.log_softmax(-1).gather(1, collected.actions[:, None]).squeeze(1)
    advantages = collected.advantages - collected.advantages.mean()
    assert ((chosen - collected.log_probabilities) * advantages).mean() > 0


def test_it_learns(task):
    model = task.make_model(0)
    optimizer = torch.optim.Adam(model.parameters(), task.lr)
    returns = []
    for iteration in range(12):
        place = {**PLACE, "iteration": iteration}
        experience = task.collect(model, **place)
        task.update_(model, optimizer, experience, **place)
        returns.append(fmean(experience.returns))
    assert fmean(returns[-3:]) > 2.0 * fmean(returns[:4])


@pytest.mark.parametrize(
    ("environment", "message"),
    [("Poleless-v0", "environment 'Poleless-v0'"), ("Pendulum-v1", "choose one with Discrete")],
)
def test_a_task_that_cannot_be_played_is_refused(task, environment, message):
    with pytest.raises(ConfigurationError, match=message):
        Ppo(environment).make_environment()
