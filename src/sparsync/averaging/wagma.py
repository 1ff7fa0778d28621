"""WAGMA-SGD: averages within changing groups that wait for nobody, and a global one now and then."""

from __future__ import annotations

from typing import Any, final

from torch import Tensor, nn

from sparsync.averaging import groups
from sparsync.averaging.base import Averager
from sparsync.averaging.coded import Values, codec_of
from sparsync.averaging.rounds import Welcome, round_of
from sparsync.averaging.wait_avoiding import Grouping, ModelRounds, WaitAvoiding
from sparsync.errors import ConfigurationError
from sparsync.transports.base import Communicator, Subgroup

__all__ = ["Wagma"]


@final
class Wagma(Averager):
    """Averages with a group of S ranks behind every step, without waiting for late ones.

    Behind local step t, with W' this rank's model (Algorithm 2)::

        (t + 1) % tau != 0:   W = sum / S               W' was in the sum
                              W = (sum + W') / (S + 1)  an older model of this rank was in it
        (t + 1) % tau == 0:   W = mean over all ranks, which wait for each other

    The first rank to arrive starts the average for all; a late rank takes part with the model that it
    published last.  One that is late by several averages publishes once and takes the newest alone.
    No model is older than the last global average, so none is tau steps old.

    Args:
        model: as for ``Averager``.
        group_size: S; default: the divisor of P nearest sqrt(P).  Groups that S does not divide evenly
            differ by one rank.
        sync_period: tau, in steps; None: no global average before ``finish``.
        grouping: "wait-avoiding" (alpha of section 4), "synchronous" (beta: a group waits for its
            members), or "none" (neither: local SGD).
        dynamic: groups change from step to step (Algorithm 1); False: for the ablation of 5.2.
        values: group averages travel as "fp32" (as the model has them), "bf16" or "int8"; what rounding
            takes away is contributed later.  Global averages are never rounded.
        deadline: seconds of silence after which a rank that others wait for is left out and reported;
            training goes on.  When it is heard again it is given the last global average and goes on
            with the others' step (``resume_at``).  None: it is waited for.
        binding: the other arguments of ``Averager``.

    Raises:
        ConfigurationError: a size, period or deadline that cannot be.
        DeadlineError: a rank does not come to a global average within the communicator's timeout.

    Cost: per step 2 n (S - 1) / S elements in 2 ceil(log2 S) messages, or log2 S messages of n where
    that is cheaper (rounded: S - 1 + ceil(log2 S) messages), and at most log2 P activations; memory:
    the published model and the newest result; rounded: the last global average and the error, too.
    State: the step and the error: a resumed run begins as after a global average.
    Differs from the paper: any P and S; a late rank that finds no newer result keeps its model; the
    deadline.

    Example:
        >>> averager = Wagma(nn.Linear(2, 1), sync_period=4)
        >>> averager.step(); averager.finish(); averager.close(); averager.steps
        1

    References: Li et al., WAGMA-SGD, IEEE TPDS 2021, Algorithms 1 and 2.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        group_size: int | None = None,
        sync_period: int | None = 10,
        grouping: Grouping = "wait-avoiding",
        dynamic: bool = True,
        values: Values = "fp32",
        deadline: float | None = None,
        **binding: Any,
    ) -> None:
        if group_size is not None and group_size < 1:
            raise ConfigurationError(f"group_size is {group_size}; give at least 1 rank, or None")
        if sync_period is not None and sync_period < 1:
            raise ConfigurationError(f"sync_period is {sync_period}; give at least 1 step, or None")
        if grouping not in ("wait-avoiding", "synchronous", "none"):
            raise ConfigurationError(
                f"grouping is {grouping!r}; choose wait-avoiding, synchronous or none"
            )
        if deadline is not None and not deadline > 0:
            raise ConfigurationError(f"deadline is {deadline}; give seconds > 0, or None")
        self.group_size, self.sync_period, self.grouping = group_size, sync_period, grouping
        self.dynamic, self.values, self.deadline = dynamic, values, deadline
        self._codec = codec_of(values)
        self._way: WaitAvoiding | None = None
        super().__init__(model, **binding)

    @property
    def left_out(self) -> tuple[tuple[int, int, str], ...]:
        """The ranks that were left out so far: rank, step, reason."""
        return () if self._way is None else self._way.left_out

    def survivors(self, comm: Communicator) -> Communicator:
        """Return the ranks that have not been left out, or have come back."""
        if self._way is None or len(self._way.present) == comm.world_size:
            return comm
        return Subgroup(comm, self._way.present)

    async def begin(self, comm: Communicator, vector: Tensor, step: int) -> None:
        """Start the agent."""
        size = self.group_size or groups.default_group_size(comm.world_size)
        if size > comm.world_size:
            raise ConfigurationError(
                f"group_size is {size} of {comm.world_size} ranks; give at most all of them"
            )
        rounds = ModelRounds(
            comm.world_size,
            size,
            self.sync_period,
            self.grouping,
            dynamic=self.dynamic,
            codec=self._codec,
        )
        rounds.error = self.memory.get("error")
        self._way = WaitAvoiding(comm, rounds, vector, step, self.deadline)

    async def average(self, comm: Communicator, vector: Tensor, step: int) -> Tensor:
        """Average with the group, or with all."""
        if self._way is None:
            raise ConfigurationError("Wagma.average: call begin() first")
        if not self._way.rounds.has(step):
            return vector
        return self._taken(await self._way.average(round_of(step), vector), self._way.rounds)

    async def conclude(self, comm: Communicator, vector: Tensor, step: int) -> Tensor:
        """Return the mean of all models; ranks wait for each other."""
        if self._way is None:
            raise ConfigurationError("Wagma.conclude: call begin() first")
        return self._taken(await self._way.average(2 * step, vector), self._way.rounds)

    def _taken(self, came: Tensor | Welcome, rounds: ModelRounds) -> Tensor:
        error = rounds.error
        self.memory = {} if error is None else {"error": error}
        if isinstance(came, Welcome):
            self.resume_at = came.step
            return came.model
        return came
