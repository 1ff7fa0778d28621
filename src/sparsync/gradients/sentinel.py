"""Compare replicas at intervals, to be sure that they are still equal."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from sparsync.errors import CommunicationError, ConfigurationError, PeerError, check_number_fields
from sparsync.transports.agree import Divergence, divergences, heal_, worst
from sparsync.transports.communicator import Communicator
from sparsync.units import local_of, replicated_tensors

__all__ = ["Sentinel", "check_replicas"]

_NAMED = 3  # tensors in a message


@dataclass(frozen=True, eq=False)
class Sentinel:
    """How often replicas are compared, and the policy if they differ.

    Ranks that apply the same totals to the same parameters stay equal, bit for bit.  A rank whose memory
    flipped a bit, whose optimizer had another setting, or whose code changed a weight by itself drifts
    away, and nothing else would show it: the loss only looks a little worse.

    Parameters, trained or frozen, and the running statistics of ``SyncBatchNorm`` are compared.  The
    statistics of other normalisation layers are local: each rank updates them with its own batch, and DDP
    sends those of rank 0 at the next forward pass (``broadcast_buffers=True``), or never.

    Attributes:
        period: steps between comparisons.
        policy: when something differs: "raise" ``PeerError`` from ``backward()`` on all ranks, "warn" and
            go on, or "heal": ranks in the minority get the tensor of the majority, in place.  Without
            a majority (two ranks, or two halves) "heal" raises.
        buffers: names of other buffers that should be equal.
        optimizer: its state is compared and healed as well.  Without it a healed parameter may keep a
            momentum of its own, and soon differs again.

    Cost, every ``period`` steps: two passes over the compared memory and a message of 16 bytes per
    rank, one more where a replica is divided (``docs/checkpoints.md`` has seconds); one wait for a GPU.
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
        # a single name would pass as a collection, of letters
        named = isinstance(self.buffers, Collection) and not isinstance(self.buffers, str)
        if not named or not all(isinstance(name, str) for name in self.buffers):
            raise ConfigurationError(f"Sentinel: buffers is {self.buffers!r}; give a list of names")
        if not isinstance(self.optimizer, torch.optim.Optimizer | None):
            raise ConfigurationError(
                f"Sentinel: optimizer is {self.optimizer!r}; give a torch.optim.Optimizer"
            )

    def due(self, step: int) -> bool:
        """Tell whether the replicas are compared when step ``step`` (0-based) is over."""
        # a comparison closes a period, as averages do, so it is due at (step + 1) % period == 0
        return (step + 1) % self.period == 0

    def tensors(self, model: nn.Module, ignored: Collection[str] = ()) -> dict[str, Tensor]:
        """Return the tensors that should be equal on all ranks, by name; of a DTensor the local part.

        Args:
            model: the attached model; its parameters are looked up again on every call.
            ignored: names of parameters and buffers that are each rank's own.

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
        # by name and sorted kind: an optimizer's own order of parameters and keys may differ between
        # ranks, e.g. after a load, and digests are compared in the order of this dict
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
    """Compare ``tensors`` across all ranks, which call this together, and apply the policy.

    Args:
        sentinel: the policy.
        comm: the replicas; under FSDP, the ranks that hold the same shard.
        tensors: plain tensors by name (for a DTensor, its local tensor).
        place: the place that the message names, such as "step 65".
        parts: the other ranks of this replica, each of which compares with its own peers; if any of them
            finds a difference, all act on it.
        rank: this rank's number in messages; None: its number in ``comm``.

    Raises:
        PeerError: something differs and the policy is "raise", or "heal" without a majority.
    """
    # An error is kept until the other parts have been told: they compare with peers of their own, find
    # nothing wrong there, and would train on, or wait for this rank in the next step.
    said, failure, comms = "", None, [] if parts is None else [parts]
    try:
        said = await _compare(sentinel, comm, tensors, place, comm.rank if rank is None else rank)
    except CommunicationError as error:
        failure = error
    try:
        severity = 2 if failure else int(said != "")
        found = await worst(comms, severity, str(failure or said), "sentinel")
    except CommunicationError as error:  # the parts may be gone as well: the first error counts
        raise (failure or error) from None
    if found.severity > 1:
        raise failure or PeerError(found.words)
    for text in dict.fromkeys([said, found.words]):
        if text:
            warnings.warn(f"sparsync's sentinel, {text}", RuntimeWarning, stacklevel=2)


async def _compare(
    sentinel: Sentinel, comm: Communicator, tensors: Mapping[str, Tensor], place: str, rank: int
) -> str:
    """Return a text about these replicas; empty if they are equal."""
    torn = await divergences(comm, tensors)
    if not torn:
        return ""
    # All ranks found the same, so all are here.  ``comm`` numbers the replicas of one part; users know
    # global ranks.
    called = [int(theirs) for theirs in await comm.allgather(torch.tensor([rank]), "sentinel")]
    found = _named(torn, called, place)
    if sentinel.policy == "raise":
        raise PeerError(
            f"{found}: replicas are no longer equal; restart from the last checkpoint, or "
            "pass Sentinel(policy='heal')"
        )
    if sentinel.policy == "warn":
        return found
    hopeless = [each for each in torn if not each.majority]
    if hopeless:  # before any is healed: a checkpoint should not be of half a repair
        raise PeerError(
            f"{_named(hopeless, called, place)}: nobody can tell which is right; restart from the "
            "last checkpoint"
        )
    await heal_(comm, tensors, torn)
    return f"{found}: healed from the majority"


def _named(torn: Sequence[Divergence], called: Sequence[int], place: str) -> str:
    """Name the first tensors that differ, and on which ranks; ``called`` has the numbers to print."""
    more = len(torn) - _NAMED
    shown = "; ".join(
        str(replace(each, groups=tuple(tuple(called[r] for r in group) for group in each.groups)))
        for each in torn[:_NAMED]
    )
    return f"{place}: {shown}" + (f"; and {more} tensors more" if more > 0 else "")
