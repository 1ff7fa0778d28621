"""Bring a joining rank to its peers' weights while they continue training.

The rank fetches a copy of a peer's state.  It keeps all averages since the step in which the fetch began.
Then it applies them to the copy as its peers did, so its weights equal theirs, bit for bit.

If gradients are exchanged, the rank keeps the gradients that its optimizers are given.  With them, it
repeats the steps of the donor's optimizers, in the same order and with the same learning rates.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from sparsync.elastic.copies import Source, fetch
from sparsync.errors import PeerError
from sparsync.exclusive import repeating
from sparsync.fields import Each, Fields, opened, sealed
from sparsync.state import packed, unpacked
from sparsync.transports.driver import close_at_exit

__all__ = [
    "CatchUp",
    "Rates",
    "Taken",
    "keep_gradients",
    "load_copy",
    "make_copy",
    "rates_of",
    "repeat",
]

Rates = list[list[dict[str, Any]]]
"""The settings of all optimizers' groups (learning rates, decay, ...), without their parameters."""

Taken = dict[int, list[tuple[int, list[dict[str, Any]]]]]
"""The optimizer steps after each exchange, in order: the optimizer's number and its rates."""

Kept = tuple[Tensor, Tensor] | Tensor | None
"""A gradient; if most of it is zero, its nonzero indices and their values."""


def rates_of(optimizers: Sequence[torch.optim.Optimizer]) -> Rates:
    """Return the current rates of optimizers, by optimizer and group."""
    return [
        [{k: v for k, v in group.items() if k != "params"} for group in one.param_groups]
        for one in optimizers
    ]


def make_copy(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> memoryview:
    """Return the state of a model and its optimizers as bytes."""
    states = {"model": model.state_dict(), "optimizers": [one.state_dict() for one in optimizers]}
    return memoryview(packed(sealed("elastic gradients", states)))


def load_copy(
    raw: bytes | bytearray, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Load a state returned by ``make_copy``."""
    # use ``unpacked`` instead of pickle: the bytes come from a different machine, and must not run code
    content = Fields({"model": Mapping, "optimizers": Each((Mapping,) * len(optimizers))})
    states = opened(unpacked(raw), "elastic gradients", content)
    model.load_state_dict(states["model"])
    for one, state in zip(optimizers, states["optimizers"], strict=True):
        one.load_state_dict(state)


@final
class CatchUp:
    """One fetch of a copy, and a log of the averages that arrived since it started.

    Args:
        donor: name of the rank whose copy is fetched from ``source``.
        timeout: seconds without progress after which the fetch is abandoned.
        since: the first step whose averages are kept.

    Attributes:
        copy: the step before which the copy was made, and its bytes; None until it has arrived.
        log: everything that was kept, by step.  If gradients are exchanged, these are the gradients of
            every optimizer that has stepped, by its number; if updates are exchanged, the averages and
            the momentum.
    """

    def __init__(self, donor: str, source: Source | str, timeout: float, since: int) -> None:
        self.donor, self.since = donor, since
        self.log: dict[int, Any] = {}
        self.copy: tuple[int, bytearray] | None = None
        self._error: Exception | None = None
        self._stopped = False

        # The fetch has its own thread and socket, because this rank meanwhile takes part in all steps.  A
        # copy older than ``since`` is useless, because the log lacks the steps before ``since``.
        def work() -> None:
            try:
                self.copy = fetch(source, timeout, since, lambda: self._stopped)
            # whatever it is, ``done`` has to raise it, or this rank would wait for the copy for ever
            except Exception as error:
                self._error = error

        self._thread = threading.Thread(target=work, name="sparsync-catch-up", daemon=True)
        self._thread.start()
        close_at_exit(self)

    @property
    def done(self) -> bool:
        """Whether the copy has arrived.

        Raises:
            PeerError: the fetch failed.
        """
        # raise the error here, because the caller's thread can start a new fetch
        if self._error is not None:
            raise PeerError(f"{self._error}; another rank is asked") from self._error
        return self.copy is not None

    def stop(self) -> None:
        """Stop fetching."""
        self._stopped = True

    def close(self) -> None:
        """Stop fetching, and wait until the thread has ended."""
        self.stop()
        self._thread.join()


@torch.no_grad()
def keep_gradients(
    catch_up: CatchUp, step: int, number: int, optimizer: torch.optim.Optimizer
) -> None:
    """Keep the gradients given to the ``number``-th optimizer, and remove them from its parameters."""
    here: list[Kept] = []
    for parameter in _parameters(optimizer):
        # with None, the optimizer skips the parameter, whose weights will be replaced anyway
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            here.append(None)
            continue
        flat = gradient.reshape(-1)
        at = flat.nonzero().flatten()
        # Averages of sparse messages are mostly zero.  If less than a third is nonzero, storing indices
        # (32 bits) and values saves at least a third of the memory.
        few = 3 * at.numel() < flat.numel()
        narrow = torch.int32 if flat.numel() <= 1 << 31 else torch.int64
        here.append((at.to(narrow), flat[at]) if few else flat.clone())
    # An optimizer may step twice with the same gradients.  Keep the gradients of the first step, because
    # this function has removed them from the parameters before the second step.
    catch_up.log.setdefault(step, {}).setdefault(number, here)


@torch.no_grad()
def repeat(
    catch_up: CatchUp,
    step: int,
    taken: Taken,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
) -> None:
    """Bring the weights to the state that they had on the other ranks before step ``step`` was applied.

    Raises:
        PeerError: an optimizer has stepped on the donor (``taken``) but not on this rank.
    """
    assert catch_up.copy is not None
    begin, raw = catch_up.copy
    # keep the open step's gradients, which the optimizers apply after the repeated steps
    gradients = [[p.grad for p in _parameters(one)] for one in optimizers]
    load_copy(raw, model, optimizers)
    for done in range(begin, step):
        # not every optimizer steps after every exchange: a GAN's two optimizers alternate
        for number, groups in taken.get(done, []):
            kept = catch_up.log.get(done, {}).get(number)
            if kept is None:
                raise PeerError(
                    f"after exchange {done} optimizer {number} of those given to attach has stepped on "
                    "the others and not on this rank; where optimizers take turns, let sync.steps, read "
                    "after backward(), decide which of them steps"
                )
            one = optimizers[number]
            for group, its in zip(one.param_groups, groups, strict=True):
                group.update(its)
            # ``kept`` holds the gradients as the optimizer received them, e.g. after clipping
            for parameter, gradient in zip(_parameters(one), kept, strict=True):
                parameter.grad = _whole(gradient, parameter)
            with repeating():
                one.step()
    for one, own in zip(optimizers, gradients, strict=True):
        for parameter, gradient in zip(_parameters(one), own, strict=True):
            parameter.grad = gradient


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _whole(kept: Kept, like: Tensor) -> Tensor | None:
    if not isinstance(kept, tuple):
        return None if kept is None else kept.view(like.shape)
    whole = torch.zeros_like(like, memory_format=torch.contiguous_format)
    whole.view(-1)[kept[0].long()] = kept[1]
    return whole
