"""DD-PPO's policy for point-goal navigation in Habitat."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from sparsync.errors import ConfigurationError
from sparsync_papers.models.images import he_
from sparsync_papers.models.resnet import imagenet_stem, residual_stages


class NavigationPolicy(nn.Module):
    """A residual network sees; two LSTM layers remember; two linear layers act and judge.

    The "ResNet-18 visual encoder, connected to a stack of two" LSTM layers of WAGMA (section 5.4):
    8,476,421 parameters.  Inputs and outputs: see ``forward``.

    Free choices: DD-PPO's network, and depth images alone (WAGMA calls the environments RGB-D): this
    gives the count, ``channels=4`` 8,481,125.  A goal is its distance and the cosine and sine of its
    direction; the actions are stop, ahead, left, right.  Initial weights: ``he_`` with He's variance
    for what is seen, orthogonal for the LSTM and the two outputs (0.01 times for actions).

    Differs from the paper: inputs are not normalised by their running mean (no parameters).

    Raises:
        ConfigurationError: ``side`` or ``seen`` is no such multiple.

    References: Wijmans et al., `DD-PPO <https://arxiv.org/abs/1911.00357>`_, 2019.
    """

    def __init__(
        self,
        *,
        channels: int = 1,  # of an image: 1 for depth, 3 for colours, 4 for both
        side: int = 256,  # pixels of an image, a multiple of 64
        width: int = 32,  # channels of the first stage, half of what ResNet-18 has; even
        seen: int = 2048,  # numbers that are left of an image, a multiple of (side / 64)^2
        hidden: int = 512,  # units of each layer of the LSTM
        embedding: int = 32,  # numbers that stand for the goal, and for the previous action
        goal: int = 3,  # numbers that say where it is
        actions: int = 4,  # how many there are
    ) -> None:
        super().__init__()
        cells = (side // 64) ** 2  # pixels that are left of an image
        if side <= 0 or side % 64 or seen % cells:
            raise ConfigurationError(
                f"side is {side} and seen is {seen}, expected a multiple of 64, and one of "
                "(side / 64)^2: take side=256, seen=2048"
            )
        norm = partial(nn.GroupNorm, width // 2)
        self.eye = nn.Sequential(
            nn.AvgPool2d(2),
            imagenet_stem(channels, width, norm=norm),
            residual_stages(width, (2, 2, 2, 2), norm=norm),
            nn.Conv2d(8 * width, seen // cells, 3, padding=1, bias=False),
            nn.GroupNorm(1, seen // cells),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(seen, hidden),
            nn.ReLU(),
        )
        self.goal = nn.Linear(goal, embedding)
        self.action_embedding = nn.Embedding(actions + 1, embedding)
        self.memory = nn.LSTM(hidden + 2 * embedding, hidden, num_layers=2, batch_first=True)
        self.actor = nn.Linear(hidden, actions)
        self.critic = nn.Linear(hidden, 1)
        he_(self.eye, linear_std=(2 / seen) ** 0.5)
        for name, parameter in self.memory.named_parameters():
            (nn.init.orthogonal_ if "weight" in name else nn.init.zeros_)(parameter)
        for layer, gain in ((self.actor, 0.01), (self.critic, 1.0)):
            nn.init.orthogonal_(layer.weight, gain)
            nn.init.zeros_(layer.bias)

    def forward(
        self,
        images: Tensor,  # `[batch, steps, channels, side, side]`, ``float32`` in [0, 1]
        goals: Tensor,  # `[batch, steps, goal]`, ``float32``
        # the actions before, plus 1; 0: none, at the start. `[batch, steps]`, ``int64``
        previous: Tensor,
        # what the call before returned; None: an episode starts
        state: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Judge sequences of steps, each within one episode.

        Returns:
            The actions' logits `[batch, steps, actions]`, the values `[batch, steps]`, the state.
        """
        seen = self.eye(images.flatten(0, 1)).unflatten(0, images.shape[:2])
        inputs = torch.cat((seen, self.goal(goals), self.action_embedding(previous)), -1)
        remembered, state = self.memory(inputs, state)
        return self.actor(remembered), self.critic(remembered).squeeze(-1), state
