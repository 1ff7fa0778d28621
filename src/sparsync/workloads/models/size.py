"""How large a model is, as the papers count it: learnable parameters, no buffers."""

from __future__ import annotations

from torch import nn

__all__ = ["megabytes", "parameter_count"]


def parameter_count(model: nn.Module) -> int:
    """Count learnable parameters; a tied one counts once.

    Example:
        >>> parameter_count(nn.Linear(3, 2))
        8
    """
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def megabytes(model: nn.Module) -> float:
    """Return the size of the learnable parameters, and so of a gradient, in 10^6 bytes.

    Example:
        >>> megabytes(nn.Linear(999, 250))
        1.0
    """
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad) / 1e6
