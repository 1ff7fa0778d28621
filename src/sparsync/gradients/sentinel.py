"""Compare replicas periodically, to detect that they have drifted apart."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from sparsync.errors import (
    CommunicationError,
    ConfigurationError,
    DisagreementError,
    PeerError,
    check_number_fields,
)
from sparsync.names import naming_options
from sparsync.transports.agree import Divergence, divergences, heal_, worst
from sparsync.transports.communicator import Communicator
from sparsync.units import local_of, replicated_tensors

__all__ = ["Sentinel", "check_replicas"]

_NAMED = 3  # number of tensors named in a message
# outcomes of a comparison; an interruption is the worst, because messages may still be in flight
_FINE, _REPORTED, _REFUSED, _BROKEN_OFF = range(4)


@naming_options
@dataclass(frozen=True, eq=False)
class Sentinel:
    """Settings for comparing replicas: how often, and what to do if they differ.

    Ranks that apply the same totals to the same parameters stay bit-identical.  A rank drifts away if its
    memory flips a bit, the settings of its optimizer differ, or its code changes a weight.  Nothing else
    would reveal this, because the loss only gets a little worse.

    The sentinel compares parameters, trained or frozen, and the running statistics of ``SyncBatchNorm``.
    The statistics of other normalisation layers are local: each rank updates them with its own batch.
    DDP broadcasts rank 0's statistics before the next forward pass, unless ``broadcast_buffers`` is
    False.

    Attributes:
        period: steps between comparisons.
        policy: the reaction to a difference.  "raise" raises ``PeerError`` from ``backward()`` on all
            ranks.  "warn" warns and continues.  "heal" copies the tensor of the majority to the ranks in
            the minority, in place; without a majority (two ranks, or two halves) it raises.
        buffers: names of other buffers that should be equal.
        optimizer: the optimizer, whose state is then also compared and healed.  Otherwise the momentum of
            a healed parameter may differ between ranks, and the parameter would soon differ again.

    Cost, every ``period`` steps: two passes over the compared memory, one wait for a GPU, and a message
    of 16 bytes per rank.  If a replica is split over ranks, there is one more message
    (``docs/checkpoints.md`` gives times).
    """

    period: int = 100
    policy: Literal["raise", "warn", "heal"] = "raise"
    buffers: Collection[str] = ()
    optimizer: torch.optim.Optimizer | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_number_fields(self)
        if self.period < 1:
            raise ConfigurationError(
                f"Sentinel: period is {self.period!r}; give a whole number of steps >= 1"
            )
        if self.policy not in ("raise", "warn", "heal"):
            raise ConfigurationError(
                f"Sentinel: policy is {self.policy!r}; choose one of raise, warn, heal"
            )
        # a single string would pass as a collection of its letters
        named = isinstance(self.buffers, Collection) and not isinstance(self.buffers, str)
        if not named or not all(isinstance(name, str) for name in self.buffers):
            raise ConfigurationError(f"Sentinel: buffers is {self.buffers!r}; give a list of names")
        if not isinstance(self.optimizer, torch.optim.Optimizer | None):
            raise ConfigurationError(
                f"Sentinel: optimizer is {self.optimizer!r}; give a torch.optim.Optimizer"
            )

    def due(self, step: int) -> bool:
        """Return whether the replicas are compared after step ``step`` (0-based)."""
        # compare at the end of a period, where averagers also average
        return (step + 1) % self.period == 0

    def tensors(self, model: nn.Module, ignored: Collection[str] = ()) -> dict[str, Tensor]:
        """Return the tensors that should be equal on all ranks, by name, with local parts of DTensors.

        Args:
            model: the attached model; its parameters are looked up again on every call.
            ignored: names of parameters and buffers that are private to each rank.

        Raises:
            ConfigurationError: ``buffers`` names a buffer that the model does not have.
        """
        buffers = dict(model.named_buffers())
        unknown = [name for name in self.buffers if name not in buffers]
        if unknown:
            raise ConfigurationError(
                f"Sentinel: buffers has {unknown[0]!r}, which is not a buffer of this model; it has "
                f"{', '.join(buffers) or 'none'}"
            )
        chosen = {name: local_of(buffers[name]) for name in self.buffers if name not in ignored}
        # Moments are sorted, because digests are compared in the order of this dict, and the optimizer's
        # own order may differ between ranks, e.g. after a load.
        moments = {
            f"{kind} of {name}": local_of(value)
            for name, parameter in model.named_parameters()
            if self.optimizer is not None and name not in ignored
            for kind, value in sorted(self.optimizer.state.get(parameter, {}).items())
            if isinstance(value, Tensor)
        }
        return {**replicated_tensors(model, ignored), **chosen, **moments}


async def check_replicas(
    sentinel: Sentinel,
    comm: Communicator,
    tensors: Mapping[str, Tensor],
    place: str,
    parts: Communicator | None = None,
    rank: int | None = None,
) -> None:
    """Compare ``tensors`` across all ranks, and apply the policy; this is collective.

    Args:
        sentinel: the policy.
        comm: the replicas; under FSDP, the ranks that hold the same shard.
        tensors: plain tensors by name (of a DTensor, the local tensor).
        place: the step to name in messages, e.g. "step 65".
        parts: the other ranks of this replica, each of which compares with its own peers; if one of them
            finds a difference, all act on it.
        rank: the number to use for this rank in messages; None means its number in ``comm``.

    Raises:
        DisagreementError: something differs and the policy is "raise", or "heal" without a majority.
        CommunicationError: the comparison was interrupted, here or on another part.
    """
    # An error is held back until the other parts know of it. They compare with their own peers, so they
    # may find nothing wrong. They would then continue training, or wait for this rank in the next step.
    said, severity, comms = "", _FINE, [] if parts is None else [parts]
    failure: CommunicationError | None = None
    try:
        said = await _compare(sentinel, comm, tensors, place, comm.rank if rank is None else rank)
        severity = _REPORTED if said else _FINE
    except CommunicationError as error:
        failure = error
        severity = _REFUSED if isinstance(error, DisagreementError) else _BROKEN_OFF
    try:
        found = await worst(comms, severity, str(failure or said), "sentinel")
    except CommunicationError as error:
        # the other parts may have died too; only the first error is reported
        raise (failure if failure and severity == _BROKEN_OFF else error) from None
    if found.severity >= _REFUSED:
        # the kind of error decides whether a further exchange may begin, so all parts need the same kind
        if failure is not None and severity == found.severity:
            raise failure
        raise (PeerError if found.severity == _BROKEN_OFF else DisagreementError)(found.words)
    for text in dict.fromkeys([said, found.words]):
        if text:
            warnings.warn(f"sparsync's sentinel, {text}", RuntimeWarning, stacklevel=2)


async def _compare(
    sentinel: Sentinel, comm: Communicator, tensors: Mapping[str, Tensor], place: str, rank: int
) -> str:
    """Return a text about the differences between these replicas, or "" if they are equal."""
    torn = await divergences(comm, tensors)
    if not torn:
        return ""
    # All ranks have found the same differences, so all of them reach this line.  ``comm`` numbers the
    # replicas of one part, but users know global ranks.
    called = [
        int(theirs)
        for theirs in await comm.allgather(torch.tensor([rank], device="cpu"), "sentinel")
    ]
    found = _named(torn, called, place)
    if sentinel.policy == "raise":
        raise DisagreementError(
            f"{found}: replicas are no longer equal; restart from the last checkpoint, or "
            "pass Sentinel(policy='heal')"
        )
    if sentinel.policy == "warn":
        return found
    hopeless = [each for each in torn if not each.majority]
    if hopeless:  # raise before any tensor is healed: a checkpoint must not contain half a repair
        raise DisagreementError(
            f"{_named(hopeless, called, place)}: nobody can tell which is right; restart from the "
            "last checkpoint"
        )
    await heal_(comm, tensors, torn)
    return f"{found}: healed from the majority"


def _named(torn: Sequence[Divergence], called: Sequence[int], place: str) -> str:
    """Name the first tensors that differ, with the ranks' numbers in ``called``, for an error message."""
    more = len(torn) - _NAMED
    shown = "; ".join(
        str(replace(each, groups=tuple(tuple(called[r] for r in group) for group in each.groups)))
        for each in torn[:_NAMED]
    )
    return f"{place}: {shown}" + (f"; and {more} more tensors" if more > 0 else "")
