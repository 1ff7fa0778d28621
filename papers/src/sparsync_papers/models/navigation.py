"""The policy that WAGMA-SGD trains by reinforcement learning (section 5.4): DD-PPO's Habitat agent."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsync.errors import ConfigurationError, require

# the stages of the encoder: (channels as a multiple of the width, number of blocks)
_STAGES = ((2, 1), (2, 2), (2, 4), (2, 8))
_SIDE = 256  # pixels per side; halved first, then divided by 32, so 4 x 4 remain
_FEATURES = 2048  # outputs of the encoder, before its fully connected layer
_EMBEDDED = 32  # size of the embeddings of the goal and of the last action

State = tuple[Tensor, Tensor]


class _Block(nn.Module):
    """Two convolutions and a shortcut; group normalisation, because workers' batches are small."""

    def __init__(self, inner: int, outer: int, *, stride: int, groups: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inner, outer, 3, stride=stride, padding=1, bias=False),
            nn.GroupNorm(groups, outer),
            nn.ReLU(),
            nn.Conv2d(outer, outer, 3, padding=1, bias=False),
            nn.GroupNorm(groups, outer),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inner != outer:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inner, outer, 1, stride=stride, bias=False), nn.GroupNorm(groups, outer)
            )

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.body(images) + self.shortcut(images))


class NavigationPolicy(nn.Module):
    """Build the policy of WAGMA-SGD (section 5.4): 8,476,421 parameters.

    A ResNet-18 of half the usual width encodes a depth image. Two LSTM layers receive these
    features, the goal and the last action. Two fully connected layers return the action logits and
    the value.

    Free choices: the paper states only the parts and the parameter count. The rest follows DD-PPO's
    agent for point goals, which has exactly this count with one channel (depth), four actions and
    512 units. With colours and depth, it would have 8,481,125 parameters.

    Args:
        width: channels of the first stage, even.
        hidden: units of an LSTM layer.
        actions: number of actions.

    Raises:
        ConfigurationError: the width is odd, or not positive.

    References: Wijmans et al., `DD-PPO <https://arxiv.org/abs/1911.00357>`_, 2019.
    """

    def __init__(self, *, width: int = 32, hidden: int = 512, actions: int = 4) -> None:
        super().__init__()
        require(
            width > 0 and width % 2 == 0,
            f"width is {width}, but two channels share a group; give an even number",
        )
        groups, channels = width // 2, width
        layers: list[nn.Module] = [
            nn.AvgPool2d(2),
            nn.Conv2d(1, width, 7, stride=2, padding=3, bias=False),
            nn.GroupNorm(groups, width),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        ]
        for stage, (blocks, multiple) in enumerate(_STAGES):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                layers.append(_Block(channels, multiple * width, stride=stride, groups=groups))
                channels = multiple * width
        compressed = _FEATURES // (_SIDE // 64) ** 2
        layers += [
            nn.Conv2d(channels, compressed, 3, padding=1, bias=False),
            nn.GroupNorm(1, compressed),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(_FEATURES, hidden),
            nn.ReLU(),
        ]
        self.encoder = nn.Sequential(*layers)
        self.goal = nn.Linear(3, _EMBEDDED)
        self.last_action = nn.Embedding(actions + 1, _EMBEDDED)
        self.memory = nn.LSTM(hidden + 2 * _EMBEDDED, hidden, num_layers=2)
        self.action = nn.Linear(hidden, actions)
        self.value = nn.Linear(hidden, 1)

    def forward(
        self, images: Tensor, goals: Tensor, last: Tensor, state: State | None = None
    ) -> tuple[Tensor, Tensor, State]:
        """Return logits `[steps, batch, actions]`, values `[steps, batch]`, and the final state.

        Args:
            images: `[steps, batch, 1, 256, 256]`, ``float32``, depth.
            goals: `[steps, batch, 3]`, ``float32``: distance, and cosine and sine of the angle.
            last: `[steps, batch]`, ``int64``: the last action plus one, or 0 if an episode begins,
                which resets the LSTM state.
            state: state of the two LSTM layers from the previous call; None for zeros.

        Raises:
            ConfigurationError: the images do not have the shape above.
        """
        steps, batch = last.shape
        if images.shape != (steps, batch, 1, _SIDE, _SIDE):
            raise ConfigurationError(
                f"images have shape {tuple(images.shape)}; expected {(steps, batch, 1, _SIDE, _SIDE)}"
            )
        seen = self.encoder(images.flatten(0, 1)).unflatten(0, (steps, batch))
        inputs = torch.cat([seen, self.goal(goals), self.last_action(last)], dim=-1)
        if state is None:
            empty = inputs.new_zeros(self.memory.num_layers, batch, self.memory.hidden_size)
            state = empty, empty
        outputs = []
        for step in range(steps):  # one at a time, because episodes may begin within the sequence
            goes_on = (last[step] != 0).to(inputs.dtype)[None, :, None]
            kept = state[0] * goes_on, state[1] * goes_on
            output, state = self.memory(inputs[step : step + 1], kept)
            outputs.append(output)
        known = torch.cat(outputs)
        return self.action(known), self.value(known).squeeze(-1), state
