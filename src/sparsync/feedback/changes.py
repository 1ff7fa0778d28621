"""Detect weights that something other than a step has changed, e.g. a checkpoint loaded after ``attach``.

An update is a difference of weights.  So if one rank loads weights, the difference from its old weights
would be delivered to its peers as an update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, final

import torch
from torch import Tensor

from sparsync.errors import DisagreementError, PeerError
from sparsync.transports.agree import agree, digest, worst
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import run
from sparsync.units import local_of

__all__ = ["Changes", "Undone", "begin_together"]

_SAMPLED: Final = 8  # elements are sampled from this many of the largest parameters
_ELEMENTS: Final = 64  # number of elements sampled from each parameter
# Weights count as replaced if they changed by more than the fraction ``_FAR`` of their norm, which no
# step does, and if more than the fraction ``_TURNED`` of their elements changed sign.  Clipping, masks
# and projections may change weights as much, but they change hardly any signs.
_FAR: Final = 0.1
_TURNED: Final = 0.01
# An exchange counts as undone if the next step begins closer to the weights before the exchange than to
# the weights after it, by this factor.  In nine trainings of 200 steps on 2 ranks, two of them with
# different data on each rank, the factor was 0.22 or more.  Where copies were written into the model, it
# fell to between 0.006 and 0.08.
_UNDONE: Final = 0.1
# If exchanges have no effect, ranks drift apart, and the changes by exchanges grow by this factor.  If
# ranks only disagree, the changes do not grow.
_GROWN: Final = 4.0
_TIMES: Final = 10  # exchanges in a row that must be undone


@final
class Changes:
    """Detects changes of parameters, by their version counters and a few of their elements.

    An in-place operation raises a tensor's version counter; an operation on ``parameter.data`` does not.

    Args:
        parameters: the parameters of one model, by name.

    Cost: remembering takes one small copy and a loop over the parameters, 20 us for a hundred of them.
    Comparing takes one more loop, and additional time only if all parameters have changed.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = dict(parameters)
        found = sorted(parameters.items(), key=lambda item: item[1].numel(), reverse=True)
        # all have the same dtype and device, so that the samples can be concatenated without more copies
        alike = [
            n for n, p in found if (p.dtype, p.device) == (found[0][1].dtype, found[0][1].device)
        ]
        self._largest = alike[:_SAMPLED]
        self._versions: list[int] = []
        self._sample = torch.zeros(0, device="cpu")

    def follow(self, tensors: Mapping[str, Tensor]) -> None:
        """Watch these tensors instead of the parameters of the same names, which they replaced."""
        self._parameters |= {n: tensor for n, tensor in tensors.items() if n in self._parameters}

    def remember(self) -> None:
        """Remember the current parameters, which should not change before the next step."""
        self._versions = [parameter._version for parameter in self._parameters.values()]
        self._sample = self.some()

    def written(self) -> bool:
        """Return whether counters or samples show that a parameter was written to."""
        now = [parameter._version for parameter in self._parameters.values()]
        return now != self._versions or self.differ()

    def differ(self) -> bool:
        """Return whether any sampled element has changed."""
        now, before = self.some(), self._sample
        # torch.equal would report a NaN as a change even if it was there before
        return not torch.allclose(now, before, rtol=0, atol=0, equal_nan=True)

    def replaced(self) -> bool:
        """Return whether all parameters were written to, with weights that no step could produce."""
        # Usually no elements are read: loading a checkpoint writes all parameters, so a single unwritten
        # parameter proves that none was loaded.
        pairs = zip(self._parameters.values(), self._versions, strict=False)
        if not self._versions or any(p._version == version for p, version in pairs):
            return False
        now, before = self.some(), self._sample
        far = torch.linalg.vector_norm(now - before) > _FAR * torch.linalg.vector_norm(before)
        return bool(far) and bool((now * before < 0).float().mean() > _TURNED)

    def some(self) -> Tensor:
        """Return a copy of the sampled elements."""
        if not self._largest:
            return torch.zeros(0, device="cpu")
        largest = [_some_of(local_of(self._parameters[name])) for name in self._largest]
        return torch.cat(largest).float()


@final
class Undone:
    """Detects a program that overwrites the weights after exchanges, so that exchanges have no effect.

    For instance, a program may step copies of the weights, e.g. in fp32, and copy them into the model.
    Nothing else would reveal this.
    """

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._before = self._after = changes.some()
        self._first, self._times = 0.0, 0

    def before(self) -> bool:
        """Record the weights before an exchange; return whether many earlier exchanges were undone."""
        now = self._changes.some()
        change, from_before, from_after = (
            float(torch.linalg.vector_norm(difference))
            for difference in (self._after - self._before, now - self._before, now - self._after)
        )
        if change:  # otherwise no exchange has been applied
            self._first = self._first or change
            undone = from_before < _UNDONE * from_after and change > _GROWN * self._first
            self._times = self._times + 1 if undone else 0
        self._before = now
        return self._times >= _TIMES

    def after(self) -> None:
        """Record the weights after an exchange."""
        self._after = self._changes.some()


def begin_together(
    comms: Sequence[Communicator], loaded: bool, own: Tensor, since: str = "attach"
) -> bool:
    """Return whether ranks begin from weights loaded after ``attach``; replicas must load equal weights.

    Args:
        comms: the replicas of this part of the model and, if it is split, the parts of this replica.
        loaded: whether this rank's weights have changed since ``attach``.
        own: this rank's weights.
        since: for messages, the event that last set this rank's weights: "attach", or a later load.

    Raises:
        PeerError: ranks have loaded different weights, or only some have loaded any; raised on all
            ranks.

    Cost: an allgather of 8 bytes, plus the cost of ``worst`` if a replica is split over ranks, and the
    cost of ``digest`` if ``loaded``.
    """
    # In the first round, replicas of this part compare weights.  In the second round, all parts of this
    # replica adopt the worst outcome.  An error in the first round is raised only after the second: a
    # part that raised immediately would leave the others waiting.
    failure: PeerError | None = None
    what = f"the weights that were loaded after {since}"
    try:
        run(agree(comms[0], {what: digest(own) if loaded else f"none, but those of {since}"}))
    except DisagreementError as error:
        failure = DisagreementError(f"{error}, or load them before {since}")
    except PeerError as error:
        failure = error
    found = run(worst(comms[1:], 2 if failure else int(loaded), "", "agreement"))
    if found.severity > 1:
        others = f"ranks with another part disagree on {what}; see their errors"
        raise failure or DisagreementError(others)
    return found.severity == 1


def _some_of(part: Tensor) -> Tensor:
    """Return a view of a few elements, spread evenly over a tensor's memory."""
    # flatten() would copy a channels_last tensor, which is contiguous only in the order of its strides
    order = sorted(range(part.dim()), key=part.stride, reverse=True)
    ordered = part.permute(order)
    flat = ordered.view(-1) if ordered.is_contiguous() else part.flatten()
    return flat[:: max(flat.numel() // _ELEMENTS, 1)]
