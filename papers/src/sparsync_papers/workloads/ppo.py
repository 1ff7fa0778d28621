"""PPO on tasks with unequally long episodes, so that ranks need unequal times to collect (WAGMA, 5.4).

The paper's task, navigation in Habitat, is not available here: it needs its own simulator and licensed
scenes. Gymnasium's classic-control tasks share the property that matters for averaging: an episode
ends when the agent fails, so a rank's collection time is not known in advance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsync.errors import ConfigurationError
from sparsync_papers.workloads.folders import seeded


class ActorCritic(nn.Module):
    """Two perceptrons with two hidden layers: action logits and values (Schulman et al. 2017, 6.1)."""

    def __init__(self, observations: int, actions: int, *, width: int = 64) -> None:
        super().__init__()
        self.actor = _perceptron(observations, width, actions)
        self.critic = _perceptron(observations, width, 1)

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits `[batch, actions]` and values `[batch]` for observations `[batch, numbers]`."""
        return self.actor(observations), self.critic(observations).squeeze(-1)


def _perceptron(inputs: int, width: int, outputs: int) -> nn.Sequential:
    layers = (nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
    return nn.Sequential(*layers, nn.Linear(width, outputs))


@dataclass(frozen=True)
class Experience:
    """The steps of complete episodes, in order, one episode after another."""

    returns: tuple[float, ...]  # undiscounted sum of the rewards of each episode
    observations: Tensor  # `[steps, numbers]`
    actions: Tensor  # `[steps]`
    log_probabilities: Tensor  # `[steps]`, log-probabilities of the actions when they were taken
    advantages: Tensor  # `[steps]`
    targets: Tensor  # `[steps]`, targets for the values: advantage plus value at each step

    @property
    def steps(self) -> int:
        """The number of environment steps; the time to collect them is proportional to it."""
        return len(self.actions)


def advantages_of(rewards: Tensor, values: Tensor, *, discount: float, trace: float) -> Tensor:
    """Estimate the advantages of one episode's actions (GAE; Schulman et al. 2017, equation 11).

    Rewards are `[steps]`, and values `[steps + 1]`. The last value belongs to the state after the
    last action; it is 0 if the episode ended there, but not if the episode was cut off.

    Example:
        >>> advantages_of(torch.ones(2), torch.tensor([0.0, 2.0, 0.0]), discount=0.5, trace=0.5)
        tensor([ 1.7500, -1.0000])
    """
    errors = rewards + discount * values[1:] - values[:-1]
    advantages, following = torch.empty_like(errors), torch.zeros(())
    for step in reversed(range(len(errors))):
        following = errors[step] + discount * trace * following
        advantages[step] = following
    return advantages


def clipped_loss(new: Tensor, old: Tensor, advantages: Tensor, *, clip: float) -> Tensor:
    """Return PPO's negative clipped objective (equation 7).

    Example:
        >>> doubled = torch.tensor([2.0]).log()
        >>> clipped_loss(doubled, torch.zeros(1), torch.ones(1), clip=0.25)
        tensor(-1.2500)
    """
    ratio = (new - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages).mean()


@final
@dataclass(frozen=True)
class Ppo:
    """A task and PPO's settings for it; random draws depend only on (seed, iteration, rank)."""

    # a Gymnasium task with discrete actions and vector observations
    environment: str = "CartPole-v1"
    episodes: int = 4  # whole episodes that a rank collects per iteration
    discount: float = 0.99  # gamma (as in the paper)
    trace: float = 0.95  # lambda of the advantages (as in the paper)
    clip: float = 0.2  # epsilon (as in the paper)
    # passes over the collected experience per iteration (the paper's number for tasks like these)
    epochs: int = 10
    minibatch: int = 64  # environment steps per update (as in the paper)
    lr: float = 1e-3  # learning rate of Adam (three times the paper's rate)
    value_weight: float = 0.5  # weight of the values' squared error (the paper states none)

    def __post_init__(self) -> None:
        for name in ("episodes", "epochs", "minibatch"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; give at least 1")

    def make_environment(self) -> Any:
        """Make the Gymnasium environment.

        Raises:
            ConfigurationError: Gymnasium is not installed, the task is unknown, its actions are not
                discrete, or its observations are not vectors.
        """
        try:
            import gymnasium
        except ImportError as error:
            raise ConfigurationError(
                f"PPO needs Gymnasium, which is not installed ({error}): "
                "pip install 'sparsync-papers[rl]'"
            ) from error
        try:
            environment = gymnasium.make(self.environment)
        except gymnasium.error.Error as error:
            raise ConfigurationError(
                f"environment {self.environment!r}: {error}; name one of Gymnasium, e.g. CartPole-v1"
            ) from error
        observations, actions = environment.observation_space, environment.action_space
        if not isinstance(actions, gymnasium.spaces.Discrete) or len(observations.shape or ()) != 1:
            raise ConfigurationError(
                f"environment {self.environment!r} has actions {actions} and observations "
                f"{observations}; choose one with Discrete actions and a vector, e.g. CartPole-v1"
            )
        return environment

    def make_model(self, seed: int) -> nn.Module:
        """Build an ``ActorCritic``; the same seed gives the same weights."""
        environment = self.make_environment()
        (observations,) = environment.observation_space.shape
        sizes = {"observations": observations, "actions": int(environment.action_space.n)}
        return seeded(ActorCritic, seed, **sizes)

    @torch.no_grad()
    def collect(self, model: nn.Module, *, seed: int, iteration: int, rank: int) -> Experience:
        """Play complete episodes and return their steps; the time is proportional to their lengths."""
        environment, generator = self.make_environment(), _generator(seed, iteration, rank, 0)
        played = [self._play(model, environment, generator) for _ in range(self.episodes)]
        parts = zip(*(tensors for _, tensors in played), strict=True)
        return Experience(tuple(total for total, _ in played), *(torch.cat(part) for part in parts))

    def update_(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        experience: Experience,
        *,
        seed: int,
        iteration: int,
        rank: int,
    ) -> None:
        """Update ``model`` and ``optimizer`` in place from the collected experience."""
        generator = _generator(seed, iteration, rank, 1)
        for _ in range(self.epochs):
            order = torch.randperm(experience.steps, generator=generator)
            for chosen in torch.split(order, self.minibatch):
                optimizer.zero_grad()
                self._loss(model, experience, chosen).backward()  # type: ignore[no-untyped-call]
                optimizer.step()

    def _play(
        self, model: nn.Module, environment: Any, generator: torch.Generator
    ) -> tuple[float, tuple[Tensor, ...]]:
        """Play one episode; return the sum of its rewards, and the tensors of an ``Experience``."""
        seed = int(torch.randint(2**31, (), generator=generator))
        state, ended, cut = environment.reset(seed=seed)[0], False, False
        states, taken, rewards = [torch.as_tensor(state, dtype=torch.float32)], [], []
        while not (ended or cut):
            probabilities = model(states[-1])[0].softmax(-1)
            taken.append(int(torch.multinomial(probabilities, 1, generator=generator)))
            state, reward, ended, cut, _ = environment.step(taken[-1])
            states.append(torch.as_tensor(state, dtype=torch.float32))
            rewards.append(float(reward))
        observations, actions = torch.stack(states), torch.tensor(taken)
        logits, values = model(observations)
        # After a failure, the last value is 0.  An episode that was cut off at the time limit would have
        # continued, so its last value is kept.
        values[-1] *= not ended
        advantages = advantages_of(
            torch.tensor(rewards), values, discount=self.discount, trace=self.trace
        )
        chosen = _log_probabilities(logits[:-1], actions)
        tensors = (observations[:-1], actions, chosen, advantages, advantages + values[:-1])
        return sum(rewards), tensors

    def _loss(self, model: nn.Module, experience: Experience, chosen: Tensor) -> Tensor:
        """Return the loss of the chosen steps; advantages are normalised over all steps."""
        logits, values = model(experience.observations[chosen])
        new = _log_probabilities(logits, experience.actions[chosen])
        # avoids a division by 0 if all advantages are equal
        every, eps = experience.advantages, torch.finfo(values.dtype).eps
        advantages = (every[chosen] - every.mean()) / (every.std(correction=0) + eps)
        loss = clipped_loss(new, experience.log_probabilities[chosen], advantages, clip=self.clip)
        return loss + self.value_weight * F.mse_loss(values, experience.targets[chosen])


def _log_probabilities(logits: Tensor, actions: Tensor) -> Tensor:
    return F.log_softmax(logits, dim=-1).gather(1, actions[:, None]).squeeze(1)


def _generator(seed: int, iteration: int, rank: int, use: int) -> torch.Generator:
    """Make a rank's generator for one iteration, either to collect (use 0) or to update (use 1)."""
    mixed = np.random.SeedSequence([seed, iteration, rank, use]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(mixed[0] >> np.uint64(1)))
