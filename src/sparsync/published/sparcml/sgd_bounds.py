"""SparCML's bounds for top-k SGD with error feedback, as numbers: Lemma C.3 and Theorem C.4.

Ok-Topk's Theorem 4.1 has the same proof, with the xi of its own Assumption 1.  Both papers take the proof
from Alistarh et al., "The Convergence of Sparsified Gradient Methods", NeurIPS 2018.

============  =======================================================================================
f, L          the objective; the Lipschitz constant of its gradient
alpha_t       learning rate of step t
x_t           the model after uncompressed steps: ``x - alpha mean(gradients)``
v_t           the model that the ranks have; ``x_t - v_t`` is the mean residual, up to its sign
M^2           bound on ``E |mean of the ranks' gradients|^2``, times the quantiser's ``1 + omega``
gamma         bound on ``|x - TopK(x)| / |x|``: at most ``sqrt(1 - k / n)``
xi            the xi of Assumption 1 or C.2
============  =======================================================================================

**The paper divides xi by P**, in ``(1 + xi / (P gamma))^2``.  Assumption C.2 does not justify this,
because both of its sides are means over ranks.  After one step, ``|x - v| <= (gamma + xi) |alpha G|``,
and for some vectors the smaller factor ``gamma + xi / P`` does not hold
(``test_lemma_c_3_fails_where_xi_is_divided_by_p``).  With the default, ``ranks=1``, the bounds hold;
pass P to get the printed numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from sparsync.errors import require

__all__ = ["condition_6", "lemma_c_3", "theorem_c_4", "top_k_gamma"]


def top_k_gamma(k: int, size: int) -> float:
    """Return the gamma that holds for every vector: ``sqrt(1 - k / n)``.

    The k largest entries account for at least k / n of the squared norm.  In the bounds, old gradients
    weigh more than new ones unless ``2 gamma^2`` is below 1; with this gamma, that requires k > n / 2.
    In training runs, the measured gamma is smaller.

    Example:
        >>> round(top_k_gamma(10, 1000), 4), 2 * top_k_gamma(10, 1000) ** 2 < 1
        (0.995, False)
    """
    require(0 < k <= size, f"top_k_gamma: k is {k} of {size} elements; give 1 to all of them")
    return math.sqrt(1 - k / size)


def condition_6(rates: Sequence[float], gamma: float) -> float:
    """Return the smallest D in Equation (6), the maximum of ``sum_k (2 gamma^2)^k a_(t-k)^2 / a_t``.

    Args:
        rates: learning rates a_t of steps t = 0, 1, ..., all > 0; the sum is over k from 1 to t.
        gamma: as in the module's table.

    Returns:
        D, which does not grow with the number of steps if ``2 gamma^2 < 1`` and rates decay slowly.

    Example:
        >>> round(condition_6([0.1] * 100, gamma=0.5), 6)  # 0.1 (1/2 + 1/4 + ...)
        0.1
    """
    require(min(rates, default=0.0) > 0, "condition_6: give at least one rate, all > 0")
    most = past = 0.0
    for before, now in pairwise(rates):
        # update the sum from step t - 1 to step t: one more square, and one more factor for all terms
        past = 2 * gamma**2 * (past + before**2)
        most = max(most, past / now)
    return most


def lemma_c_3(steps: Sequence[float], gamma: float, xi: float, ranks: int = 1) -> float:
    """Bound ``E |v_t - x_t|^2``, the squared norm of the mean residual.

    The bound is ``(1 + xi / (P gamma))^2 sum_k (2 gamma^2)^k |x_(t-k+1) - x_(t-k)|^2``.

    Args:
        steps: norms of the uncompressed updates, ``|x_1 - x_0|, ..., |x_t - x_(t-1)|``.
        gamma: as in the module's table; > 0.
        xi: as in the module's table; the largest value over these steps.
        ranks: P gives the printed bound; the module's docstring explains the default of 1.

    Example:
        >>> round(lemma_c_3([1.0], gamma=0.5, xi=0.5), 6)  # 2 (gamma + xi)^2
        2.0
    """
    require(gamma > 0, f"lemma_c_3: gamma is {gamma}; give a number > 0")
    past = 0.0
    for norm in steps:
        past = 2 * gamma**2 * (past + norm**2)
    return (1 + xi / (ranks * gamma)) ** 2 * past


def theorem_c_4(
    rates: Sequence[float],
    *,
    gap: float,
    smoothness: float,
    second_moment: float,
    gamma: float,
    xi: float,
    ranks: int = 1,
) -> float:
    """Bound the mean of ``E |grad f(v_t)|^2`` over steps, each weighted by its learning rate.

    The bound is ``4 gap / sum a + (2 L M^2 + 4 L^2 M^2 (1 + xi / (P gamma))^2 D) sum a^2 / sum a``
    (Equation (7)), where a are the learning rates.  It tends to 0 if the sum of the rates diverges, the
    sum of their squares converges, and D stays bounded.  This is Theorem 4.1 of Ok-Topk and of SparCML.

    Args:
        rates: learning rates of all steps, all > 0.
        gap: ``f(x_0) - f(x*)``, or more.
        smoothness: L.
        second_moment: M^2.
        gamma: as in the module's table; > 0.
        xi: as in the module's table.
        ranks: P gives the printed bound; the module's docstring explains the default of 1.

    Returns:
        The bound; infinity if D is too large for a float.

    Example:
        >>> task = {"gap": 1.0, "smoothness": 1.0, "second_moment": 1.0, "gamma": 0.6, "xi": 1.0}
        >>> [round(theorem_c_4([t**-0.5] * t, **task), 2) for t in (100, 10_000, 1_000_000)]
        [1.33, 0.07, 0.01]
        >>> theorem_c_4([0.1] * 10_000, **{**task, "gamma": top_k_gamma(1, 100)})
        inf
    """
    require(gamma > 0, f"theorem_c_4: gamma is {gamma}; give a number > 0")
    try:
        late = (1 + xi / (ranks * gamma)) ** 2 * condition_6(rates, gamma)
    except OverflowError:
        return math.inf
    noise = 2 * smoothness * second_moment + 4 * smoothness**2 * second_moment * late
    whole = math.fsum(rates)
    return (4 * gap + noise * math.fsum(rate**2 for rate in rates)) / whole
