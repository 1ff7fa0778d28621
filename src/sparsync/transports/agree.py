"""Agreement between ranks: on facts before data moves, and on tensors that a majority can repair."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from sparsync.errors import (
    CheckpointError,
    DisagreementError,
    SparsyncError,
    first_line,
)
from sparsync.transports.communicator import Communicator, bytes_of
from sparsync.transports.ledger import Raw

__all__ = [
    "Divergence",
    "Outcome",
    "agree",
    "check_equal_digests",
    "check_equal_parameters",
    "digest",
    "divergences",
    "equalise_",
    "heal_",
    "on_all_or_none",
    "tell",
    "texts_of",
    "unequal_steps",
    "worst",
]

_TEXT_BYTES = 1 << 16  # limit in bytes on a fact's text, which ranks exchange if the fact differs
_NO_MARKS = torch.zeros(0, dtype=torch.bool, device="cpu")
_NAMED = 3  # number of other ranks whose values an error shows
# the number of characters of a value that an error shows, and of the ones before the first difference
_SHOWN, _BEFORE = 240, 60
_BETWEEN = " | "  # separates the names that ranks exchange when they differ
_WORD = 8  # bytes in a word
_ROW = 1024  # words in a row; a row fits into a cache, and long rows leave few sums per tensor

T = TypeVar("T")


# ---- outcomes --------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """The worst of all ranks' outcomes, equal on all ranks.

    Attributes:
        severity: 0 if all ranks are fine.
        rank: the rank with this outcome; for a split replica, its position in the world if a replica's
            parts are adjacent ranks.
        words: its explanation, in printable characters only.
        marks: marks set by any rank.
    """

    severity: int
    rank: int
    words: str
    marks: Tensor


async def worst(
    comms: Sequence[Communicator], severity: int, words: str, phase: str, marks: Tensor = _NO_MARKS
) -> Outcome:
    """Return the worst outcome of all ranks; among equally bad ones, the lowest rank's.

    Args:
        comms: a communicator over the replicas of this part of the model and, if a replica is split, one
            over its parts.
        severity: severity of this rank's outcome: 0 if fine, at most 255.
        words: explanation of an outcome that is not fine.
        phase: the phase under which messages are counted.
        marks: flags to combine by "or", `[n]` with ``torch.bool``; n is the same on every rank.

    Cost: an allgather of 9 + n bytes in each group; if an outcome is not fine, also the cost of
    ``texts_of``.
    """
    place = 0
    for comm in comms:
        place = place * comm.world_size + comm.rank
    for comm in comms:
        head = torch.tensor([severity, *place.to_bytes(_WORD, "little")], device="cpu")
        row = torch.cat([head, marks]).to(torch.uint8)
        rows = torch.stack(await comm.allgather(row, phase))
        # among equal severities ``argmax`` returns the first, so all ranks choose the same outcome
        first = int(rows[:, 0].argmax())
        severity, *at = rows[first, : 1 + _WORD].tolist()
        place, marks = int.from_bytes(at, "little"), rows[:, 1 + _WORD :].amax(0)
        if severity:  # equal on all ranks, so either all of them exchange explanations or none does
            words = (await texts_of(comm, words, phase))[first]
    return Outcome(severity, place, words, marks.bool())


async def on_all_or_none(comms: Sequence[Communicator], action: Callable[[], T], what: str) -> T:
    """Run an action on every rank; return this rank's result if it succeeded on all of them.

    Args:
        comms: as in ``worst``.
        action: may raise anything; must not communicate.
        what: the action, in words that can follow "could not".

    Raises:
        SparsyncError: the action's own error on a rank where it failed; on all other ranks, a
            ``CheckpointError`` that names one failed rank and the reason.
        ConfigurationError: an earlier exchange was interrupted on this rank.

    Cost: the cost of ``worst``.
    """
    result: T | None = None
    error: Exception | None = None
    words = ""
    # An error that leaves ``exchange`` marks the group as broken.  A failed action breaks no exchange,
    # because all ranks learn of it, so its error is raised after this context.
    with comms[0].exchange():
        try:
            result = action()
        except Exception as caught:
            error, words = caught, first_line(caught)
            if not isinstance(caught, SparsyncError):
                words = f"{type(caught).__name__}: {words}"
                error = CheckpointError(f"cannot {what}: {words}")
                error.__cause__ = caught
        # exchange outcomes even if this rank has failed: if it raised now, the others would keep waiting
        failed = await worst(comms, int(error is not None), words, "checkpoint")
    if error is not None:
        raise error
    if failed.severity:
        raise CheckpointError(f"rank {failed.rank} could not {what}: {failed.words}")
    return result  # type: ignore[return-value]  # there was no error


def unequal_steps(least: int, most: int, here: int) -> str:
    """Return the error text for ranks with different numbers of local steps."""
    return (
        f"ranks have done {least} to {most} local steps, this one {here}; on a rank that skips an "
        "iteration (no batch, no loss), call sync.step() as often as the other ranks' optimizers "
        "step"
    )


# ---- facts -----------------------------------------------------------------------------------------


async def agree(
    comm: Communicator, facts: Mapping[str, object], numbers: Sequence[int] = ()
) -> list[list[int]]:
    """Return every rank's ``numbers``, in rank order, if all ranks have the same facts.

    Every rank must give the same number of facts and of numbers, in the same order.

    Args:
        comm: the group.
        facts: must be the same on all ranks.
        numbers: 64-bit integers that may differ; sent in the same message.

    Raises:
        DisagreementError: facts differ.  All ranks raise it, with no message left in flight.  It names
            the first fact that differs, with the values of this rank and of others.

    Cost: one allgather of 8 bytes per fact and number; if facts differ, another of 64 KiB from every
    rank.
    """
    mine = [_number(f"{name}={value}") for name, value in facts.items()]
    told = torch.stack(
        await comm.allgather(torch.tensor([*mine, *numbers], device="cpu"), "agreement")
    )
    digests = told[:, : len(mine)]
    differs = digests != digests[comm.rank]
    if not bool(differs.any()):
        return told[:, len(mine) :].tolist()
    # all ranks see the first mismatch at the same fact, so all of them take part in exchanging the texts
    at = int(differs.any(dim=0).nonzero()[0])
    name, value = list(facts.items())[at]
    raise await _disagreement(comm, name, value, differs[:, at].nonzero().flatten().tolist())


async def _disagreement(
    comm: Communicator, name: str, value: object, others: Sequence[int]
) -> DisagreementError:
    texts = await tell(comm, str(value), _TEXT_BYTES, "agreement")
    named = {r: texts[r] for r in (comm.rank, *others[:_NAMED])}
    columns = enumerate(zip_longest(*named.values()))
    first = next((at for at, characters in columns if len(set(characters)) > 1), 0)
    said = [f"rank {r} has {_excerpt(text, first)}" for r, text in named.items()]
    more = [f"{len(others) - _NAMED} more differ"] if len(others) > _NAMED else []
    return DisagreementError(
        f"ranks disagree on {name}: {', '.join(said + more)}; give all ranks the same"
    )


def _excerpt(text: str, first: int) -> str:
    """Return the part of a text around the first differing character, short enough for an error."""
    start = max(0, first - _BEFORE) if len(text) > _SHOWN else 0
    end = start + _SHOWN
    return "..." * (start > 0) + text[start:end] + "..." * (end < len(text))


async def tell(comm: Communicator, text: str, nbytes: int, phase: str) -> list[str]:
    """Return all ranks' texts, each cut to ``nbytes`` bytes, with unprintable characters replaced."""
    raw = text.encode()[:nbytes].ljust(nbytes, b"\0")
    mine = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    everyone = await comm.allgather(mine, phase)
    # ignore decoding errors, because the cut may have split a character; replace control characters,
    # because a peer's text ends up in this rank's terminal and logs, where they could do harm
    texts = [bytes(raw.tolist()).rstrip(b"\0").decode(errors="ignore") for raw in everyone]
    return ["".join(c if c.isprintable() else "?" for c in text) for text in texts]


async def texts_of(comm: Communicator, text: str, phase: str) -> list[str]:
    """Return all ranks' texts, which may have any length.

    Cost: an allgather of 8 bytes.  Unless all texts are empty, a second allgather follows; in it, each
    rank sends as many bytes as the longest text has.
    """
    lengths = await comm.allgather(torch.tensor([len(text.encode())], device="cpu"), phase)
    longest = int(max(lengths))
    return await tell(comm, text, longest, phase) if longest else [""] * comm.world_size


# ---- tensors ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Divergence:
    """A tensor that differs between ranks.

    Attributes:
        groups: ranks with the same bits, the largest group first, then by lowest rank.

    Example:
        >>> torn = Divergence("weight", ((0, 1, 3), (2,)))
        >>> torn.majority, torn.minority, str(torn)
        ((0, 1, 3), (2,), "'weight' differs on rank 2")
    """

    name: str
    groups: tuple[tuple[int, ...], ...]

    @property
    def majority(self) -> tuple[int, ...]:
        """The largest group of equal ranks if it has more than half of all ranks; otherwise empty."""
        largest = self.groups[0]
        return largest if 2 * len(largest) > sum(map(len, self.groups)) else ()

    @property
    def minority(self) -> tuple[int, ...]:
        """The ranks outside the majority; all ranks if there is no majority."""
        ranks = sorted(rank for group in self.groups for rank in group)
        return tuple(rank for rank in ranks if rank not in self.majority)

    def __str__(self) -> str:
        if self.majority:
            return f"'{self.name}' differs on {_ranks(self.minority)}"
        sides = " and ".join(_ranks(group) for group in self.groups)
        return f"'{self.name}' differs between {sides}, none of which is a majority"


def digest(tensor: Tensor) -> str:
    """Return a text that differs if tensors differ in dtype, shape or bits; exceptions are given below.

    The tensor is read as a table of 8-byte words, whose row sums and column sums are hashed.  The digest
    always detects a single differing word and two swapped words.  It misses differences of four or more
    words that cancel in every row and every column.  The result does not depend on the device.

    Cost: two passes over the tensor's memory; 1/1024 of it is copied to the host and hashed.

    Example:
        >>> digest(torch.tensor([0.0])) == digest(torch.tensor([-0.0]))
        False
    """
    flat = bytes_of(tensor)
    # ``view`` needs aligned memory.  torch's allocators align it, but memory that another library has
    # allocated may start at any byte.
    if flat.storage_offset() % _WORD or (flat.is_cpu and flat.data_ptr() % _WORD):
        flat = flat.clone()
    words = flat[: flat.numel() // _WORD * _WORD].view(torch.int64)
    full = words.numel() // _ROW * _ROW
    table = words[:full].view(-1, _ROW)
    # copy the rest: once NumPy has seen a storage, torch cannot resize it, but torch's quantisation
    # observers resize their buffers
    rest = flat[full * _WORD :].clone()
    # Unlike sums of floats, integer sums modulo 2^64 depend neither on the order of addition nor on the
    # device.  The rest, which is shorter than 8 KiB, is hashed directly.
    state = hashlib.blake2b(digest_size=8)
    for part in (table.sum(0), table.sum(1), rest):
        state.update(part.cpu().contiguous().view(torch.uint8).numpy().data)
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} {state.hexdigest()}"


async def check_equal_parameters(
    comm: Communicator, parameters: Iterable[tuple[str, Tensor]]
) -> None:
    """Check that all ranks hold the same tensors, bit for bit.

    Raises:
        PeerError: tensors differ.  All ranks raise it; it names the first tensor that differs, and the
            ranks.

    Cost: the cost of ``digest`` for every tensor, and two allgathers, the second with 8 bytes per
    tensor.
    """
    await check_equal_digests(comm, {name: digest(tensor) for name, tensor in parameters})


async def check_equal_digests(comm: Communicator, parameters: Mapping[str, str]) -> None:
    """Check that all ranks hold the same tensors by their digests; see ``check_equal_parameters``."""
    digests = {f"parameter {name}": text for name, text in parameters.items()}
    # compare the names first, because ``agree`` needs the same number of facts on every rank
    names = f"{len(digests)} with digest {_number(chr(10).join(digests)) % 2**64:016x}"
    await agree(comm, {"the names of the parameters": names})
    await agree(comm, digests)


async def divergences(comm: Communicator, tensors: Mapping[str, Tensor]) -> list[Divergence]:
    """Return the tensors that differ between ranks, in the given order.

    Raises:
        DisagreementError: the ranks compare tensors with different names, or in a different order.

    Cost: the cost of ``digest`` for every tensor, and an allgather of 16 bytes.  If a tensor differs,
    another allgather of 8 bytes per tensor; if names differ, the cost of ``texts_of`` for the names.
    """
    mine = torch.tensor(
        [_number(digest(tensor)) for tensor in tensors.values()], dtype=torch.int64, device="cpu"
    )
    # first compare one digest of all digests, so that a check without a difference costs 16 bytes
    # regardless of the model's size
    names = _number("\n".join(tensors))
    sums = torch.tensor([names, _number(str(mine.tolist()))], device="cpu")
    everyone = await comm.allgather(sums, "sentinel")
    others = [r for r, theirs in enumerate(everyone) if theirs[0] != names]
    if others:
        # the names are not equal on all ranks, so every rank sees a mismatch and takes part here
        texts = await texts_of(comm, _BETWEEN.join(tensors), "sentinel")
        pairs = zip_longest(*(texts[r].split(_BETWEEN) for r in (comm.rank, others[0])))
        here, there = next((a or "none", b or "none") for a, b in pairs if a != b)
        raise DisagreementError(
            f"rank {comm.rank} compares {here!r} where rank {others[0]} compares {there!r}; give all "
            "ranks the same model, with buffers of equal sizes, and the same optimizer in the same state"
        )
    if all(torch.equal(theirs, sums) for theirs in everyone):
        return []
    columns = torch.stack(await comm.allgather(mine, "sentinel")).T.tolist()
    found = zip(tensors, (_groups(column) for column in columns), strict=True)
    return [Divergence(name, groups) for name, groups in found if len(groups) > 1]


async def heal_(
    comm: Communicator, tensors: Mapping[str, Tensor], torn: Sequence[Divergence]
) -> None:
    """Overwrite differing tensors in place with the majority's version; this is collective.

    Every divergence in ``torn`` must have a majority.

    Cost: the lowest rank of the majority sends each healed rank one message with the tensor.
    """
    for each in torn:
        await _copy_(comm, tensors[each.name].detach(), each.majority[0], each.minority)


async def equalise_(comm: Communicator, tensors: Mapping[str, Tensor]) -> list[str]:
    """Overwrite the tensors that differ from rank 0's with rank 0's, in place; return their names.

    Cost: the cost of ``divergences``; for each such tensor, rank 0 sends one message to every rank whose
    tensor differs.
    """
    torn = await divergences(comm, tensors)
    for each in torn:
        others = [rank for group in each.groups if 0 not in group for rank in group]
        await _copy_(comm, tensors[each.name].detach(), 0, others)
    return [each.name for each in torn]


async def _copy_(comm: Communicator, tensor: Tensor, source: int, others: Sequence[int]) -> None:
    if comm.rank == source:
        # send a copy, because some transports pass payloads to NumPy, after which torch cannot resize
        # them
        payload = bytes_of(tensor).clone()
        sending = [comm.isend(payload, rank, "heal", Raw("value")) for rank in others]
        for operation in sending:
            await operation
    elif comm.rank in others:
        nbytes = tensor.numel() * tensor.element_size()
        payload = await comm.irecv(source, nbytes, "heal", Raw("value"))
        # clone, because ``view`` needs an aligned start, and a received payload may start at any byte
        values = payload.clone().view(tensor.dtype)
        tensor.copy_(values.view(tensor.shape))


def _groups(column: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks that have equal numbers, the largest group first."""
    members: dict[int, list[int]] = {}
    for rank, number in enumerate(column):
        members.setdefault(number, []).append(rank)
    return tuple(sorted((tuple(m) for m in members.values()), key=lambda m: (-len(m), m)))


def _number(text: str) -> int:
    hashed = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(hashed, "little", signed=True)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
