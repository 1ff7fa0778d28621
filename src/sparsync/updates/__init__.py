"""The life of an update: the outer step, its settings, and the handle of ``attach`` for AdamW.

An update passes through the modules in this order: ``stepping`` hooks the optimizer's step;
``gradient_noise`` lengthens the steps of Adam and AdamW, and ``step_length`` those of other optimizers;
``sync`` is the handle and counts local steps; ``outer_engine`` exchanges the moves of the weights, with
the settings of ``outer_step``, in ``fragments`` and at ``periods``; ``contributions`` weighs the moves
before they are sent; ``weights`` writes the result into the model.

The moves themselves are exchanged outside this package: ``feedback.reducer`` adds the residual and keeps
what was not delivered, ``collectives.quantised`` sums over ranks, and ``wire.levels`` makes the bits.  To
the reducer, a move is a gradient.

``family`` has the settings of the default and of published methods; ``offload`` decides which vectors
live in host memory; ``outer_averager`` runs the outer step without ``attach``; ``rank_state`` and
``saved`` deal with saved states.  ``feedback.changes`` detects weights that the program has written.
"""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from sparsync.updates.family import OUTER_SETTINGS
from sparsync.updates.outer_averager import OuterAverager
from sparsync.updates.outer_step import OuterStep
from sparsync.updates.periods import AdaptivePeriod

__all__ = ["OUTER_SETTINGS", "ROWS", "AdaptivePeriod", "OuterAverager", "OuterStep"]

ROWS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "schemes": {
            name: partial(OuterAverager, **given) for name, given in OUTER_SETTINGS.items()
        },
        "aliases": {"Qsparse-local-SGD": "qsparse-local"},
    }
)
