"""Exchange updates: the outer step, its settings, and the handle of ``attach`` for AdamW and others.

An update is the change that local steps have made to a rank's weights since the last exchange.  Many
comments call it a move; the two words mean the same.  A move has the sign of a gradient: it is positive
where weights have decreased.

An update passes through the modules in this order:

- ``stepping`` hooks the optimizer's step.
- ``step_length`` lengthens each step of an optimizer whose step length does not depend on the gradient's
  size, e.g. Muon.
  ``gradient_noise`` lengthens the steps of Adam and AdamW, up to four at a time, just before they are
  exchanged.
- ``sync`` is the handle and counts local steps; ``start`` determines the weights before the first one.
- ``carrier`` runs exchanges on the handle's thread, among the ranks that ``ranks`` stands for.
- ``outer_engine`` exchanges updates, with the settings of ``outer_step``, in ``fragments`` and at
  ``periods``.  ``contributions`` weighs them before they are sent.
- ``weights`` writes the result into the model.

Other packages carry out the exchange itself.  ``feedback.reducer`` adds the residual and keeps the part
that was not delivered, ``collectives.quantised`` sums over ranks, and ``wire.levels`` encodes the bits.
The reducer treats an update as if it were a gradient.

``family`` contains the settings of the default and of published methods; ``offload`` decides which
vectors live in host memory; ``advice`` warns and recommends; ``outer_averager`` runs the outer step
without ``attach``; ``rank_state`` and ``saved`` handle saved states.  ``feedback.changes`` detects
weights that the program has written.
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
