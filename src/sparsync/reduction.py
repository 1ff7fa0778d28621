"""The operations with which collectives reduce: element-wise, associative, with a neutral element.

*Absent means neutral*: an element that a sparse vector does not store is the operation's neutral
element (0 for a sum, 1 for a product, -inf for a maximum), and elements equal to it are never sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError

__all__ = ["OPERATIONS", "SUM", "Reduction", "reduction"]

Number = int | float


@dataclass(frozen=True)
class Reduction:
    """An operation of two values with a neutral element.

    Attributes:
        name: ranks compare it before any data moves.
        apply: `[m], [m] -> [m]`, element-wise and associative; must not modify its arguments.
        neutral: the element e with ``apply(e, x) == x == apply(x, e)``, per dtype.
        commutative: whether the operands may change places.  If not, collectives that cannot keep the
            rank order refuse the operation.

    Example:
        >>> gcd = Reduction("gcd", torch.gcd, lambda dtype: 0)
        >>> gcd.apply(torch.tensor([12]), torch.tensor([18])).tolist()
        [6]
    """

    name: str
    apply: Callable[[Tensor, Tensor], Tensor]
    neutral: Callable[[torch.dtype], Number]
    commutative: bool = True

    def check(self, dtype: torch.dtype) -> Number:
        """Return the neutral element for ``dtype``.

        Raises:
            ConfigurationError: the operation is not defined on ``dtype``, such as "and" on floats.
        """
        # tried on one element: torch has no other way to ask which dtypes an operation takes
        try:
            element = self.neutral(dtype)
            self.apply(torch.full((1,), element, dtype=dtype), torch.zeros(1, dtype=dtype))
        except (RuntimeError, TypeError) as error:
            raise ConfigurationError(
                f"operation '{self.name}' is not defined on {dtype}; convert the values first"
            ) from error
        return element

    def __repr__(self) -> str:
        return f"Reduction({self.name!r})"  # ranks compare options by it: no address in it


def reduction(operation: str | Reduction) -> Reduction:
    """Return the operation of a name; a ``Reduction`` as it is.

    Raises:
        ConfigurationError: unknown name (lists the known ones).

    Example:
        >>> reduction("max").neutral(torch.float32)
        -inf
    """
    if isinstance(operation, Reduction):
        return operation
    if operation not in OPERATIONS:
        raise ConfigurationError(
            f"unknown operation {operation!r}; choose one of {', '.join(OPERATIONS)}, or give a "
            "sparsync.reduction.Reduction with its neutral element"
        )
    return OPERATIONS[operation]


def _lowest(dtype: torch.dtype) -> Number:
    return -torch.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _highest(dtype: torch.dtype) -> Number:
    return torch.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def _truth(combine: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda a, b: combine(a, b).to(a.dtype)


SUM = Reduction("sum", torch.add, lambda dtype: 0)

OPERATIONS: MappingProxyType[str, Reduction] = MappingProxyType(
    {
        operation.name: operation
        for operation in (
            SUM,
            Reduction("max", torch.maximum, _lowest),
            Reduction("min", torch.minimum, _highest),
            Reduction("prod", torch.mul, lambda dtype: 1),
            # bit by bit, for integers; -1 has all bits set
            Reduction("and", torch.bitwise_and, lambda dtype: -1),
            Reduction("or", torch.bitwise_or, lambda dtype: 0),
            Reduction("xor", torch.bitwise_xor, lambda dtype: 0),
            # for truth values, which are 0 and 1 in any dtype
            Reduction("logical_and", _truth(torch.logical_and), lambda dtype: 1),
            Reduction("logical_or", _truth(torch.logical_or), lambda dtype: 0),
        )
    }
)
