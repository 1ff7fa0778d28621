"""Train by exchanging updates, with all ranks in this process, for benchmarks and tests.

Except for hooks and processes, the library's own code runs: local steps of every rank's optimizer,
``OuterStep``, the correction of Adam's steps, and messages through the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from sparsync.feedback.reducer import Reducer
from sparsync.presets import resolve
from sparsync.transports.sim import SimCommunicator, simulate
from sparsync.updates import OUTER_SETTINGS, OuterStep
from sparsync.updates.gradient_noise import TOGETHER, correct, noise_of
from sparsync.updates.outer_engine import OuterEngine
from sparsync.updates.step_length import lengthen, remember
from sparsync.updates.weights import ModelWeights

DEFAULT: Mapping[str, Any] = OUTER_SETTINGS["updates"]
# the default for models above a million elements; here also for smaller models, which represent larger
# ones
TWO_BITS: Mapping[str, Any] = MappingProxyType(
    {**DEFAULT, "algorithm": resolve("quantised", bits=2, block=512), "period": 2}
)
# with half the bytes
ONE_BIT: Mapping[str, Any] = MappingProxyType(
    {**TWO_BITS, "algorithm": resolve("quantised", bits=1, block=512)}
)

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def _several(given: Optimizers) -> list[torch.optim.Optimizer]:
    return [given] if isinstance(given, torch.optim.Optimizer) else list(given)


def _set_rates(optimizers: Sequence[torch.optim.Optimizer], rate: float) -> None:
    for group in (group for one in optimizers for group in one.param_groups):
        group["lr"] = rate


def train_updates(
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[[nn.Module], Optimizers],
    loss_of: Callable[[nn.Module, int, int], Tensor],
    rate_at: Callable[[int], float],
    steps: int,
    *,
    ranks: int = 4,
    clip: float = float("inf"),
    settings: Mapping[str, Any] = DEFAULT,
    after_step: Callable[[nn.Module, torch.optim.Optimizer], None] = lambda *_: None,
    seen: Callable[[int, int], float] | None = None,
) -> tuple[nn.Module, dict[str, Any]]:
    """Train; return rank 0's model after ``finish()``, and the bytes that rank 0 sent before that.

    Args:
        make_model: makes the same model on all ranks.
        make_optimizer: makes one optimizer for a rank's model, or several that step together.
        loss_of: returns a model's loss on the batch of a step and rank.
        rate_at: returns the learning rate of a step.
        steps: the steps of every rank.
        ranks: number of ranks P.
        clip: the largest 2-norm of a rank's gradients.
        settings: settings of ``OuterStep``.
        after_step: called on every rank before the exchange, with the model and its last optimizer.
        seen: returns the amount of data in a step of a rank; None if all ranks have the same weight.
    """

    async def program(comm: SimCommunicator) -> tuple[nn.Module, dict[str, Any]]:
        model, given = make_model(), OuterStep(**settings)
        optimizers = _several(make_optimizer(model))
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        given = given.for_size(sum(p.numel() for p in trained.values()))
        corrected = optimizers if given.noise_correction else ()
        noise = noise_of(corrected, trained, model)
        weights = ModelWeights(model, trained, True, noise=noise)
        layout = given.plan(weights.read(slice(0, None)), trained, rest=weights.rest)
        reducer = Reducer(comm, layout.units, await given.chosen.on(comm), given.density)
        # without a carrier, an exchange runs when its result is needed
        outer = OuterEngine(
            given,
            layout,
            reducer,
            weights,
            optimizers=optimizers,
            weighs=None if seen else False,
        )
        averaging, short = float(ranks), 0
        for step in range(steps):
            _set_rates(optimizers, rate_at(step))
            model.zero_grad()
            loss_of(model, step, comm.rank).backward()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            short += 1
            together = outer.begins(step) or short >= TOGETHER
            for optimizer in optimizers:
                if noise is not None:
                    remember(optimizer, noise.steps)
                optimizer.step()
                if noise is not None:
                    lengthen(optimizer, noise.steps, noise.shares, averaging)
                if noise is not None and together:
                    correct(optimizer, noise.shares, averaging, noise.counts, short)
            short = 0 if together else short
            if noise is not None and outer.begins_last(step):
                noise.sample(step)
            after_step(model, optimizers[-1])
            if seen is not None:
                outer.contributions.add(seen(step, comm.rank), None, None)
            await outer.advance(step)
            outer.steps += 1
            if outer.contributions.weighs:
                averaging = outer.contributions.ranks or averaging
        sent = comm.ledger.total().sent
        await outer.deliver()
        return model, {"sent": sent, "agreement": noise and noise.agreement}

    return simulate(program, ranks).results[0]


def train_dense(
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[[nn.Module], Optimizers],
    loss_of: Callable[[nn.Module, int, int], Tensor],
    rate_at: Callable[[int], float],
    steps: int,
    *,
    ranks: int = 4,
    clip: float = float("inf"),
) -> nn.Module:
    """Return the model that plain DDP would train; arguments are as in ``train_updates``."""
    model = make_model()
    optimizers = _several(make_optimizer(model))
    for step in range(steps):
        _set_rates(optimizers, rate_at(step))
        model.zero_grad()
        for rank in range(ranks):
            (loss_of(model, step, rank) / ranks).backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        for optimizer in optimizers:
            optimizer.step()
    return model
