"""WAGMA's bounds as numbers: the distance between models (Lemma 4.5), and the rate of convergence.

The analysis considers one interaction at a time, which averages S of the P models, drawn at random.  Each
of these ranks averages its own model with the other S - 1, as they were before their last gradient step,
and then takes a gradient step.  Every tau interactions, all models are averaged.  P / S interactions
correspond to one training step.

============  =======================================================================================
f, L          the objective; the Lipschitz constant of its gradients
eta           learning rate (called alpha in Theorem 4.6)
M^2           bound on ``E |gradient of a sample|^2``, on every rank
mu_t          the mean of all models
tau           largest number of interactions since the last global average; bounds staleness
============  =======================================================================================
"""

from __future__ import annotations

import math

from sparsync.errors import require

__all__ = ["lemma_4_5", "theorem_4_1", "theorem_4_6"]


def lemma_4_5(rate: float, sync_period: int, *, world_size: int, second_moment: float) -> float:
    """Bound ``E sum |W_i - mu|^2`` over the ranks' models: ``16 P eta^2 M^2 tau^2``.

    Example:
        >>> lemma_4_5(0.5, 2, world_size=4, second_moment=1.0)
        64.0
    """
    return 16 * world_size * rate**2 * second_moment * sync_period**2


def theorem_4_6(
    steps: int,
    *,
    gap: float,
    smoothness: float,
    second_moment: float,
    group_size: int,
    world_size: int,
    sync_period: int,
) -> float:
    """Bound the mean of ``E |grad f(mu_t)|^2`` over T interactions at a learning rate of ``P / sqrt(T)``.

    The bound is ``(2 gap + 8 S^2 M^2 + 64 S^2 L^2 M^2) / sqrt(T)``.  The expected squared gradient is at
    most M^2 in any case, so the bound says nothing unless ``T > 64 S^4``.

    Args:
        steps: T, at least ``P^4 tau^4``.
        gap: ``f(mu_0) - f(x*)``, or more.
        smoothness: L.
        second_moment: M^2.
        group_size: S.
        world_size: P.
        sync_period: tau.

    Raises:
        ConfigurationError: the theorem does not hold for so few steps.

    Example:
        >>> task = {"gap": 1.0, "smoothness": 0.1, "second_moment": 1.0}
        >>> round(theorem_4_6(10**8, **task, group_size=8, world_size=64, sync_period=1), 4)
        0.0555
    """
    least = world_size**4 * sync_period**4
    require(
        steps >= least,
        f"theorem_4_6 holds from P^4 tau^4 = {least:,} interactions on, not for {steps:,}; give more",
    )
    noise = 8 * group_size**2 * second_moment * (1 + 8 * smoothness**2)
    return (2 * gap + noise) / math.sqrt(steps)


def theorem_4_1(
    goal: float,
    *,
    gap: float,
    smoothness: float,
    second_moment: float,
    group_size: int,
    world_size: int,
    sync_period: int,
) -> int:
    """Return a number of interactions in which ``E |grad f(mu_t)|^2 <= goal`` holds at least once.

    The paper gives the order, ``max(gap^2 / goal^2, S^4 M^4 L^4 / goal^2, P^4 tau^4)``; this function
    returns the number that follows from Theorem 4.6.

    Example:
        >>> task = {"gap": 1.0, "smoothness": 0.1, "second_moment": 1.0}
        >>> theorem_4_1(0.5, **task, group_size=2, world_size=4, sync_period=10)  # P^4 tau^4
        2560000
    """
    require(goal > 0, f"theorem_4_1: goal is {goal}; give a square norm > 0")
    whole = 2 * gap + 8 * group_size**2 * second_moment * (1 + 8 * smoothness**2)
    return max(math.ceil((whole / goal) ** 2), world_size**4 * sync_period**4)
