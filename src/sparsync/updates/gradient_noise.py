"""Lengthen Adam's steps on each rank, whose gradients are noisier than the average over ranks."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import accumulate, chain, pairwise, starmap
from typing import Any, Final

import torch
from torch import Tensor, nn

from sparsync.errors import require
from sparsync.fields import Common, Fields, Kind, Number, Values
from sparsync.kernels import backend_of, native, reference
from sparsync.sparse import run_length
from sparsync.units import flatten, is_finite, local_of, output_parameters, unflatten
from sparsync.updates.step_length import floats, of_own_length

__all__ = [
    "TOGETHER",
    "GradientNoise",
    "common_rate",
    "correct",
    "corrects",
    "drop_broken",
    "found_inf",
    "marks_of",
    "noise_of",
    "with_moments",
]


Counts = dict[Tensor, tuple[Any, float]]
"""By parameter, an optimizer's count of steps: the object in its state (None: any), and its value."""

# The number of steps that may be lengthened together.  A few consecutive steps are alike, because moments
# remember about ten gradients.  If a hundred steps were lengthened, the last step would be repeated a
# hundred times, which would add mostly its own noise.
TOGETHER: Final = 4
_MOMENTS: Final = frozenset({"step", "exp_avg", "exp_avg_sq"})  # in the state of Adam and AdamW
_SIDE: Final = 8  # each gradient is projected to 8 x 8 sums, so 64 numbers are exchanged
_RUN: Final = 1 << 18  # elements processed at a time: a few such runs fit into a CPU's cache
# Tensors of up to this many elements are joined, which costs no more than Python's overhead per tensor.
_SMALL: Final = 1 << 13
_JOINED: Final = 64  # number of small tensors that are joined at a time
_PAIRS: Final = 25  # pairs of measurements that ``agreement`` needs before it reports a number
_FORGETS: Final = 0.98  # each new pair multiplies the weight of older pairs by this
_STEPS_KEPT: Final = 0.98  # each local step multiplies the weight of older measurements by this
# Differences between ranks' gradients last, if the ranks' data pull the weights apart, or cancel over
# time, if they are noise.  Ranks count as pulling apart only if the lasting part exceeds ``_SURE`` times
# all differences, and also ``_ERRORS`` times its own standard error.  The second condition is needed
# because with heavy-tailed gradients or few parameters, a few pairs of measurements dominate the
# estimate.
_SURE, _ERRORS = 0.1, 4.0
# The least difference that counts, relative to a parameter's squares.  Sums are float32, and the roundoff
# of about 50 remembered pairs adds up, so ranks with the same data would otherwise seem to differ.
_ROUNDOFF: Final = 1e-3

# a parameter's first moment, second moment and weights, and the constants that lengthen its step
_Job = tuple[Tensor, Tensor, Tensor, native.Moments]


class GradientNoise:
    """Measures how much noisier a single rank's gradients are than their average over all ranks.

    ``correct`` and ``lengthen`` need this to make steps as long as those of dense training.

    A gradient is a signal s, common to all ranks, plus noise n from the rank's own batch.  The average
    over P ranks has the squares ``s^2 + n^2 / P``, and a single rank's gradient has ``s^2 + n^2``.  The
    quotient of the two, from 1 / P (pure noise) to 1, is the parameter's ``share``.

    *Measurement.*  Ranks average a few numbers per parameter, which travel with the model's buffers and
    cost no extra round.  These numbers are sums p of the gradient's elements with random signs, for
    which ``E |p|^2 = |g|^2``, regardless of how the elements are distributed.  (A sample of elements
    would not suffice, because a few elements contribute most of the squares.)  A rank's own squares are
    computed from the same sums, so chance affects numerator and denominator alike.  Squares are
    remembered for as long as Adam's v remembers them.  At first, v consists of a few gradients that were
    equal on all ranks.  Until v has forgotten these gradients, steps are lengthened too much.

    *Why ranks must cooperate.*  A single rank's first moment reveals which part of the gradient *lasts*.
    It does not reveal a part that all ranks share but whose sign changes from step to step.  At every
    useful learning rate, such a part exists along the steepest directions.  If it were mistaken for
    noise, it would be lengthened too much, which raises the loss by up to 15 % at dense Adam's best rate.

    *Agreement.*  Two consecutive measurements use the same signs.  Their noise is independent, so the
    product of the two reveals the part of gradients that lasts: ``E p p' = s^2`` for the average, and
    ``s^2 + d^2`` for single ranks.  Here d is the lasting difference between a rank's gradients and the
    average, caused by its data.

    *Rows.*  In an embedding, and in an output layer over its tokens, the share differs from row to row.
    The row of a rare token has gradients on one rank at a time (share 1 / P), and the row of a common
    token has gradients on all ranks.  So these matrices are also measured ``by_rows``, with one random
    sum per row.  Otherwise the rows of common tokens would decide the length of all steps.

    *Steps.*  Some optimizers make steps whose length does not depend on the size of the gradient
    (``step_length.lengthen``).  For these, steps are measured in the same way instead of gradients.

    Args:
        memory: Adam's second beta by parameter, in the same order on all ranks.  If a parameter is
            sharded, only the elements on this rank are measured.
        by_steps: the parameters whose steps are measured instead of gradients.
        by_rows: the matrices in which each row gets its own share.

    Attributes:
        values: `[66 parameters + 2 rows]`, float32, on the first parameter's device.  Each parameter has
            64 sums of its gradient, the sum of their squares, and in every second measurement the sum of
            their products with the previous sums.  The sums of rows and their squares follow.
        shares: the share of each parameter, from 0 to 1, or `[rows, 1]` shares if it is in ``by_rows``;
            empty until the first measurement.
        steps: the last steps of the parameters in ``by_steps``.

    Cost: an exchange carries 66 numbers per parameter and 2 per row, which are copied to the host once.
    Measuring takes one pass over the gradients, and a second pass over those in ``by_rows``.  Each row
    takes 24 bytes of memory.
    State: ``state_dict()``, equal on all ranks.

    References: McCandlish et al., `An Empirical Model of Large-Batch Training
    <https://arxiv.org/abs/1812.06162>`_, 2018, section 2.2: the noise scale, there over all parameters.
    """

    def __init__(
        self,
        memory: Mapping[Tensor, float],
        by_steps: Iterable[Tensor] = (),
        by_rows: Collection[Tensor] = (),
    ) -> None:
        self._parameters = list(memory)
        rows = {one: len(local_of(one)) for one in memory if one in set(by_rows)}
        ends = list(accumulate(rows.values(), initial=0))
        self._rows = dict(zip(rows, starmap(slice, pairwise(ends)), strict=True))
        self._row_memory = torch.tensor(
            [memory[one] for one, count in rows.items() for _ in range(count)],
            dtype=torch.float64,
            device="cpu",
        )
        self.steps = {one: torch.zeros_like(local_of(one.detach())) for one in by_steps}
        self._by_steps = torch.tensor(
            [one in self.steps for one in memory], dtype=torch.bool, device="cpu"
        )
        self._memory = torch.tensor(list(memory.values()), dtype=torch.float64, device="cpu")
        like = next(map(local_of, memory), torch.zeros(0, device="cpu"))
        shape = len(self._parameters), _SIDE * _SIDE + 2
        table = math.prod(shape)
        self.values = torch.zeros(table + 2 * ends[-1], dtype=torch.float32, device=like.device)
        self._table = self.values[:table].view(shape)
        self._of_rows = self.values[table:].view(2, -1)
        self._last = torch.zeros_like(self._table)  # this rank's previous sums, with the same signs
        self._common = torch.zeros(
            len(self._parameters), _SIDE * _SIDE, dtype=torch.float64, device="cpu"
        )
        # three sums of squares: the lasting part common to all ranks, the lasting part particular to
        # single ranks, and all differences between ranks; then the squared standard error of the second
        self._lasting, self._pairs = torch.zeros(4, dtype=torch.float64, device="cpu"), 0
        # For each parameter: the squared norm of the ranks' average gradient, and the average of their
        # squared norms.  The quotient of the two is the parameter's share.
        self._squares = torch.zeros(2, len(self._parameters), dtype=torch.float64, device="cpu")
        self._row_squares = torch.zeros(2, ends[-1], dtype=torch.float64, device="cpu")
        self._measured, self._step = 0, 0
        self.shares: dict[Tensor, float | Tensor] = {}
        # the optimizer's count of steps at the last correction, by parameter
        self.counts: Counts = {}
        self._held: dict[Tensor, Tensor] = {}

    def hold(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep references to gradients until they are sampled, because scripts may drop them earlier.

        Memory: n elements on steps that are sampled, if the script frees each gradient immediately.
        """
        # for instance, a script with several optimizers may drop gradients after each optimizer's step,
        # or a subclass may drop them in its ``step``
        for group in optimizer.param_groups:
            self._held |= {p: p.grad for p in group["params"] if p.grad is not None}

    @torch.no_grad()
    def sample(self, step: int, skipped: Collection[Tensor] = ()) -> None:
        """Sum the gradients of a local step with random signs, which are equal on all ranks.

        Parameters that a GradScaler has ``skipped`` are left out: their gradients contain Inf on this
        rank, or are still scaled.
        """
        # Adam's second moment v decays by beta2 in every local step, so squares decay here with every
        # local step, not with every exchange
        self._squares.mul_(self._memory ** (step - self._step))
        self._row_squares.mul_(self._row_memory ** (step - self._step))
        self._step = step
        left_out = set(skipped)
        draw = torch.Generator()  # draws on the CPU, so the signs do not depend on the device
        self.values.zero_()
        for at, (row, parameter) in enumerate(zip(self._table, self._parameters, strict=True)):
            # Each parameter has its own seed.  Some parameters are whole on all tensor-parallel ranks.
            # Their copies need the same signs everywhere, because they must make equal steps.  A common
            # generator would give different signs, because shards differ in size from rank to rank.
            # With // 2, the two measurements of a pair share their signs.
            draw.manual_seed(self._measured // 2 * len(self._parameters) + at)
            gradient = None
            if parameter not in left_out:
                gradient = self.steps.get(parameter)
                if gradient is None:
                    gradient = _gradient_of(parameter, self._held.get(parameter))
            if gradient is not None and gradient.numel():
                row[:-2] = _projected(gradient, draw)
                if parameter in self._rows:
                    self._of_rows[0, self._rows[parameter]] = _row_sums(gradient, draw)
        self._held.clear()
        table = self._table
        table[:, -2] = table.square().sum(1)
        if self._measured % 2:
            table[:, -1] = (table * self._last)[:, :-2].sum(1)
        # A gradient may contain Inf if something other than a GradScaler skipped the step.  Sums are sent
        # with the weights, so ranks would refuse to exchange finite weights because of an infinite sum.
        table.copy_(torch.where(torch.isfinite(table).all(1, keepdim=True), table, 0.0))
        self._last.copy_(table)
        self._of_rows[1] = self._of_rows[0].square()
        finite = torch.isfinite(self._of_rows).all(0)
        self._of_rows.copy_(torch.where(finite, self._of_rows, 0.0))

    def measure(self) -> None:
        """Update the shares from ``values`` after the exchange, when they hold the average over ranks."""
        everything = self.values.double().cpu()  # the only copy to the host
        values = everything[: self._table.numel()].view(self._table.shape)
        of_rows = everything[self._table.numel() :].view(self._of_rows.shape)
        sums, of_ranks, products = values[:, :-2], values[:, -2], values[:, -1]
        of_average = sums.square().sum(1)
        if self._measured % 2:
            # Parameters measured by their steps are left out: momentum spreads a batch over several
            # steps, so the noise of a single batch would seem to last.
            common, known = (sums * self._common).sum(1), (of_ranks > 0) & ~self._by_steps
            found = torch.stack([common, products - common, of_ranks - of_average])
            # divide the sums by each parameter's squares, so that all parameters count equally, as they
            # do in Adam's steps
            found = (found / of_ranks.clamp(min=1e-300))[:, known].sum(1)
            self._lasting[:3].mul_(_FORGETS).add_(found)
            self._lasting[3:].mul_(_FORGETS**2).add_(found[1].square())  # squared standard error
            self._pairs += int(known.any())
        self._common = sums.clone()
        self._measured += 1
        # Steps shrink with the learning rate, so their squares are normalised in each measurement, which
        # gives all measurements the same weight.  Squares of gradients are not normalised, because v does
        # not normalise them either.
        unit = torch.where(self._by_steps & (of_ranks > 0), of_ranks, 1.0)
        self._squares.add_(torch.stack([of_average, of_ranks]) / unit)
        self._row_squares.add_(torch.stack([of_rows[0].square(), of_rows[1]]))
        self._find_shares()

    @property
    def agreement(self) -> float | None:
        """The fraction of the lasting part of gradients that is common to all ranks; None if unknown.

        The fraction is 1 if ranks draw from the same data, however noisy, and 0 if they pull in
        directions that cancel out.
        """
        if self._pairs < _PAIRS:
            return None
        common, apart, differing, variance = self._lasting.clamp(min=0.0).tolist()
        least = max(
            _SURE * differing, _ERRORS * math.sqrt(variance), _ROUNDOFF * len(self._parameters)
        )
        return common / (common + apart) if apart > least else 1.0

    def lengthening(self, ranks: float) -> float:
        """Return by how much steps are lengthened, on average over all elements; at most sqrt(P).

        It is 1 if all ranks have equal gradients, and sqrt(P) if they are nothing but noise.
        """
        sizes = [local_of(parameter).numel() for parameter in self._parameters]
        weights = torch.tensor(sizes, dtype=torch.float64, device="cpu")
        factors = _quotients(*self._squares).clamp(min=1 / ranks).rsqrt()
        return float((factors * weights).sum() / weights.sum().clamp(min=1.0))

    def _find_shares(self) -> None:
        self.shares = {}
        if not self._measured:
            return
        named = dict(zip(self._parameters, _quotients(*self._squares).tolist(), strict=True))
        self.shares.update(named)
        for parameter, rows in self._rows.items():
            of_average, of_ranks = self._row_squares[:, rows]
            # a row that has had no gradient yet gets the share of the whole matrix
            of_rows = _quotients(of_average, of_ranks, named[parameter])
            self.shares[parameter] = of_rows.float()[:, None].to(local_of(parameter).device)

    def state_dict(self) -> dict[str, Any]:
        """Return the measurements and this rank's sums, which an exchange in flight may need."""
        named = ("squares", "row_squares", "last", "common", "lasting")
        kept = {name: getattr(self, f"_{name}").clone() for name in named}
        counts = {"measured": self._measured, "step": self._step, "pairs": self._pairs}
        known = [self.counts.get(parameter, (None, -1.0))[1] for parameter in self._parameters]
        corrected = torch.tensor(known, dtype=torch.float64, device="cpu")
        return {**kept, "values": self.values.clone(), "corrected": corrected, **counts}

    def kind(self) -> Kind:
        """Return the kind of every field of a saved state."""

        def as_here(tensor: Tensor, least: float = -math.inf) -> Values:
            return Values(tuple(tensor.shape), tensor.dtype, least=least)

        count = Common(Number(0, whole=True))
        return Fields(
            {
                "squares": Common(as_here(self._squares, 0)),
                "row_squares": Common(as_here(self._row_squares, 0)),
                "last": as_here(self._last),
                "common": Common(as_here(self._common)),
                "lasting": Common(as_here(self._lasting)),
                "values": as_here(self.values),
                "corrected": Values((len(self._parameters),), torch.float64, least=-1),
                **dict.fromkeys(("measured", "step", "pairs"), count),
            }
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from saved measurements."""
        self._squares, self._common = state["squares"].clone(), state["common"].clone()
        self._row_squares = state["row_squares"].clone()
        self._lasting, self._pairs = state["lasting"].clone(), int(state["pairs"])
        self._measured, self._step = int(state["measured"]), int(state["step"])
        known = zip(self._parameters, state["corrected"].tolist(), strict=True)
        self.counts = {parameter: (None, count) for parameter, count in known}
        self.values.copy_(state["values"])
        self._last.copy_(state["last"])
        self._find_shares()


def _gradient_of(parameter: Tensor, held: Tensor | None = None) -> Tensor | None:
    """Return this rank's part of the gradient that Adam sees, or of ``held``; None if it is sparse."""
    gradient: Any = held if parameter.grad is None else parameter.grad
    if gradient is None or gradient.is_sparse:
        return None
    placements = getattr(parameter, "placements", None)
    if getattr(gradient, "placements", None) != placements:
        # torch 2.13 leaves the sum over tensor-parallel ranks to the code that reads the gradient
        # (``Partial``).  The squares must be computed from this sum, not from one rank's addend.
        gradient = gradient.redistribute(placements=placements)
    return local_of(gradient.detach())


def _projected(gradient: Tensor, draw: torch.Generator) -> Tensor:
    """Project a gradient to 8 x 8 sums, with random signs, over all rows and over every 8th column."""
    # An element's sign is the product of a sign of its row (8 of which are drawn, for 8 sums) and a sign
    # of its column.  This takes two small draws and one matrix product.  With a single sign per row, sums
    # of low-rank gradients were too noisy (design notes).
    matrix = gradient.reshape(len(gradient) if gradient.dim() else 1, -1)
    height, width = matrix.shape
    rows, columns = (
        torch.randint(2, shape, generator=draw, device="cpu").mul_(2).sub_(1).to(matrix)
        for shape in ((_SIDE, height), (width,))
    )
    padded = matrix.new_zeros(_SIDE, -(-width // _SIDE) * _SIDE, dtype=torch.float32)
    padded[:, :width] = (rows @ matrix).mul_(columns)
    return padded.view(_SIDE, -1, _SIDE).sum(1).flatten()


def _row_sums(gradient: Tensor, draw: torch.Generator) -> Tensor:
    """Return the sum of each row's elements, with random signs; all rows use the same signs."""
    drawn = torch.randint(2, gradient.shape[1:], generator=draw, device="cpu")
    return (gradient @ drawn.mul_(2).sub_(1).to(gradient)).float()


def _quotients(of_average: Tensor, of_ranks: Tensor, otherwise: float = 1.0) -> Tensor:
    """Return each parameter's share, ``of_average / of_ranks``; ``otherwise`` if it had no gradient."""
    shares = torch.where(of_ranks > 0, of_average / of_ranks.clamp(min=1e-300), otherwise)
    # Transports add in different orders, so sums differ in the last bit. To keep steps unaffected,
    # shares are rounded to 64 values per octave: training over MPI is bit-identical to training over
    # gloo unless a share falls right between two of these values.
    return (shares.log2() * 64).round().div(64).exp2().clamp(max=1.0)


def corrects(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``correct`` handles an optimizer: torch's Adam or AdamW, without amsgrad."""
    return isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)) and not all(
        group["amsgrad"] for group in optimizer.param_groups
    )


def noise_of(
    optimizers: Iterable[torch.optim.Optimizer],
    trained: Mapping[str, Tensor],
    model: nn.Module | None = None,
) -> GradientNoise | None:
    """Return a ``GradientNoise``, or None if neither ``correct`` nor ``lengthen`` fits any optimizer.

    The matrices of ``model`` whose rows belong to tokens are measured by rows.
    """
    several = list(optimizers)
    memory = {
        parameter: group["betas"][1]
        for optimizer in filter(corrects, several)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if not group["amsgrad"]
    }
    steps = {parameter for one in several for parameter, *_ in of_own_length(one)}
    if first := next(filter(corrects, several), None):
        # Parameters that no optimizer holds yet may be given to Adam later, by ``add_param_group`` when
        # they are unfrozen, so their gradients are measured.  Their steps are not remembered for
        # ``lengthen``, because this would take a copy of such weights.
        held = {p for one in several for group in one.param_groups for p in group["params"]}
        beta = first.defaults["betas"][1]
        memory |= {parameter: beta for parameter in trained.values() if parameter not in held}
    memory.update(dict.fromkeys(steps, _STEPS_KEPT))
    # use the model's order, because ranks may give optimizers their parameters in different orders
    found = {parameter: memory[parameter] for parameter in trained.values() if parameter in memory}
    by_rows = () if model is None else _of_tokens(model) - steps
    return GradientNoise(found, [one for one in found if one in steps], by_rows) if found else None


def _of_tokens(model: nn.Module) -> set[Tensor]:
    """Return the weights of embeddings, and of an output layer with as many rows as one of them."""
    named = dict(model.named_parameters())
    found = {one.weight for one in model.modules() if isinstance(one, nn.Embedding)}
    tokens = {len(one) for one in found}
    # An output layer over classes does not count, because all ranks see all classes in every batch.
    # Shares per row in other matrices cost a vision transformer 4 points of loss (design notes).
    output = (named[name] for name in output_parameters(model))
    return found | {one for one in output if one.dim() == 2 and len(one) in tokens}


def with_moments(
    optimizer: torch.optim.Optimizer,
) -> Iterator[tuple[Tensor, dict[str, Any], dict[str, Any]]]:
    """Yield each parameter that Adam or AdamW has stepped without amsgrad, its state and its group."""
    for group in optimizer.param_groups if corrects(optimizer) else ():
        for parameter in group["params"] if not group["amsgrad"] else ():
            # a subclass may have different moments, or none
            state = optimizer.state.get(parameter)
            if state and state.keys() >= _MOMENTS:
                yield parameter, state, group


@torch.no_grad()
def correct(
    optimizer: torch.optim.Optimizer,
    shares: Mapping[Tensor, float | Tensor],
    ranks: float,
    counts: Counts | None = None,
    steps: int = 1,
) -> None:
    """Lengthen Adam's last ``steps``, as if Adam had used the second moment of averaged gradients.

    The squares of a parameter's average gradient over P ``ranks`` are k times those of a single rank's
    gradient.  k is the parameter's share (``shares``, see ``GradientNoise``).  Dense training divides by
    the root of ``k v``, but a rank divides by the root of its own v, so its steps are up to sqrt(P) times
    shorter.  This function adds the difference:

        w -= lr m (1 / (sqrt(k v) + eps) - 1 / (sqrt(v) + eps)),    1 / P <= k <= 1

    where both moments are bias-corrected.  Adam's own moments are not changed, and nothing is divided
    by the learning rate, so any schedule works.

    Several steps are lengthened together, just before they are exchanged, as if each had been equal to
    the last one.  Most of the added length is a rank's own noise.  Adding it only then keeps the ranks'
    weights, at which they compute gradients, up to sqrt(P) times closer together until the exchange.
    (When every step was lengthened immediately, 16 ranks lost 2.7 %; now they lose 1.3 %.  See the design
    notes.)

    A step that the optimizer had to skip is not corrected.  For each parameter, only the steps since its
    count in ``counts`` are corrected, because a subclass may step only on some of its calls.  The counts
    are updated.

    Cost: one pass, which reads three tensors and writes one.  If step counts or rates are on a device
    (``fused``, ``capturable``), the host waits once for all these numbers.
    """
    counts = {} if counts is None else counts
    # Steps are counted even without shares and gradients: the first share may become known just before a
    # call that does not step, and the optimizer may have dropped the gradients of an earlier step.
    stepped = [] if found_inf(optimizer) or ranks <= 1 else list(with_moments(optimizer))
    groups = list({id(group): group for *_, group in stepped}.values())
    rates = chain.from_iterable((group["lr"], *group["betas"]) for group in groups)
    told = floats([*(state["step"] for _, state, _ in stepped), *rates])
    taken, told = told[: len(stepped)], told[len(stepped) :]
    rates_of = dict(
        zip(map(id, groups), zip(told[::3], told[1::3], told[2::3], strict=True), strict=True)
    )
    jobs: list[_Job] = []
    for (parameter, state, group), step in zip(stepped, taken, strict=True):
        known, before = counts.get(parameter, (None, -1.0))
        # A count can be compared only if it is the same tensor and has not decreased: if a state was
        # loaded or dropped, counting starts again.
        if 0 <= before <= step and (known is None or known is state["step"]):
            short = min(step - before, steps)
        else:
            short = 0.0 if parameter.grad is None else min(step, steps)
        counts[parameter] = state["step"], step
        if short <= 0 or not _shortened(shares.get(parameter)):
            continue
        (lr, beta1, beta2), share = rates_of[id(group)], shares[parameter]
        # the bias corrections as factors: v / (1 - beta2^t) and lr m / (1 - beta1^t)
        own = 1 / (1 - beta2**step)
        rate = -lr * short / (1 - beta1**step)
        moments = local_of(state["exp_avg"]), local_of(state["exp_avg_sq"])
        tensors, eps = (*moments, local_of(parameter)), float(group["eps"])
        # even pure noise has a share of 1 / P on average, so lower measurements are due to chance
        if isinstance(share, Tensor):
            factors = share.clamp(min=1 / ranks).mul_(own)
            _lengthen_rows(*tensors, factors, (own, own, eps, rate))
        else:
            jobs.append((*tensors, (own * max(share, 1 / ranks), own, eps, rate)))
    _pass_over(jobs)


def _shortened(share: float | Tensor | None) -> bool:
    """Return whether averaging shortens a parameter's gradient; always True for shares of rows.

    Shares of rows are on the device, and the host should not wait for it.
    """
    return isinstance(share, Tensor) or (share is not None and share < 1)


def found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a GradScaler has told a fused optimizer to skip the current step."""
    return bool(getattr(optimizer, "found_inf", False))


def common_rate(optimizers: Iterable[torch.optim.Optimizer]) -> float:
    """Return the learning rate shared by all groups, for a step by signs."""
    # one rate serves the whole vector, because the outer step does not distinguish groups
    rates = set(floats(group["lr"] for one in optimizers for group in one.param_groups))
    require(len(rates) == 1, f"sign: groups have learning rates {sorted(rates)}; give all one rate")
    return rates.pop()


def drop_broken(
    optimizers: Iterable[torch.optim.Optimizer], on_any_part: Callable[[bool], bool]
) -> None:
    """Drop optimizer states that contain NaN or Inf, except their marks (``marks_of``).

    If any part of a replica has such a state, all parts drop all states.
    """
    states = [state for one in optimizers for state in one.state.values()]
    tensors = [[v for v in s.values() if isinstance(v, Tensor)] for s in states]
    broken = [not all(map(is_finite, values)) for values in tensors]
    # Several parts may hold the same parameter, and must make equal steps with it.  A part does not know
    # which states are broken on other parts, so all parts drop all states.
    everything = on_any_part(any(broken))
    for state, here in zip(states, broken, strict=True):
        if here or everything:
            marks = marks_of(state)
            state.clear()
            state.update(marks)


def marks_of(state: Mapping[str, Any]) -> dict[str, bool]:
    """Return the true or false entries of a parameter's state, which a constructor may have made.

    Moonlight's Muon marks in this way which parameters it orthogonalises, and cannot step without.

    Example:
        >>> marks_of({"use_muon": True, "step": 3, "moment1": torch.zeros(1)})
        {'use_muon': True}
    """
    return {key: value for key, value in state.items() if isinstance(value, bool)}


def _pass_over(jobs: Iterable[_Job]) -> None:
    """Lengthen the step of every job; small tensors are joined first, which saves calls."""
    # tensors are joined only if their constants, dtypes and devices are the same
    waiting: dict[Any, list[tuple[Tensor, Tensor, Tensor]]] = {}

    def join(numbers: native.Moments, several: list[tuple[Tensor, Tensor, Tensor]]) -> None:
        first, second, weights = zip(*several, strict=True)
        joined = flatten(weights)
        _lengthen(flatten(first), flatten(second), joined, numbers)
        torch._foreach_copy_(weights, unflatten(joined, weights))

    for *tensors, numbers in jobs:
        first, second, weights = tensors
        if weights.numel() > _SMALL:
            _lengthen(first, second, weights, numbers)
            continue
        kind = numbers, *((tensor.dtype, tensor.device) for tensor in tensors)
        several = waiting.setdefault(kind, [])
        several.append((first, second, weights))
        if len(several) == _JOINED:
            join(numbers, waiting.pop(kind))
    for (numbers, *_), several in waiting.items():
        join(numbers, several)


def _lengthen_rows(
    first: Tensor, second: Tensor, weights: Tensor, factors: Tensor, numbers: native.Moments
) -> None:
    """Lengthen a step with ``factors``, one per row, `[rows, 1]`, instead of the first of ``numbers``."""
    tensors = first, second, weights, factors
    dense, backend = all(tensor.is_contiguous() for tensor in tensors), backend_of(*tensors)
    if dense and backend is native:
        native.lengthen_rows_(*tensors, numbers)
        return
    if dense and backend is not reference:
        fused = importlib.import_module("sparsync.kernels.triton_moves")
        fused.lengthen_rows_(*tensors, numbers)
        return
    most = _RUN if weights.is_cpu else run_length(weights)
    rows = max(most // max(weights[:1].numel(), 1), 1)
    for one, other, run, some in zip(*(torch.split(t, rows) for t in tensors), strict=True):
        _lengthen_plainly(one, other, run, (some, *numbers[1:]))


def _lengthen(first: Tensor, second: Tensor, weights: Tensor, numbers: native.Moments) -> None:
    """Lengthen a step, in C++ or Triton if possible, otherwise in runs in PyTorch."""
    tensors = first, second, weights
    dense, backend = all(tensor.is_contiguous() for tensor in tensors), backend_of(*tensors)
    if dense and backend is native:
        native.lengthen_(first, second, weights, numbers)
    elif dense and backend is not reference:
        fused = importlib.import_module("sparsync.kernels.triton_moves")
        fused.lengthen_(first, second, weights, numbers)
    elif dense:
        # The pass works in runs.  On a CPU, large temporary tensors would be fresh memory, and clearing
        # its pages takes longer than the arithmetic.  On a device, they might not fit.
        most = _RUN if weights.is_cpu else run_length(weights)
        parts = (torch.split(tensor.view(-1), most) for tensor in tensors)
        for one, other, run in zip(*parts, strict=True):
            _lengthen_plainly(one, other, run, numbers)
    else:
        _lengthen_plainly(first, second, weights, numbers)


# ---- what the C++ and Triton kernels must compute bit for bit: without fused multiply-adds -----------


def _lengthen_plainly(
    first: Tensor,
    second: Tensor,
    weights: Tensor,
    numbers: native.Moments | tuple[Tensor, float, float, float],
) -> None:
    lengthened, own, eps, rate = numbers
    # m lr (1 / (sqrt(k v) + eps) - 1 / (sqrt(v) + eps)), in float32 if moments have 16 bits
    dtype = torch.promote_types(second.dtype, torch.float32)
    square = second.to(dtype)
    missing = _sqrt(square * lengthened).add_(eps).reciprocal_()
    missing.sub_(_sqrt(square * own).add_(eps).reciprocal_())
    weights.add_(missing.mul_(first.to(dtype) * rate).to(weights.dtype))


def _sqrt(x: Tensor) -> Tensor:
    """Return correctly rounded square roots; torch's are not, for float32 on a CPU."""
    return x.double().sqrt_().to(x.dtype) if x.is_cpu else x.sqrt_()
