"""The exchange of a training run: plain DDP, one of PyTorch's hooks, a preset, or a scheme."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from sparsync.algorithm import Algorithm
from sparsync.attach import attach
from sparsync.averaging.averager import Averager
from sparsync.averaging.schemes import SCHEMES, averaged_by, options_of
from sparsync.cli.named_algorithms import Named, labels, named
from sparsync.cli.network_choice import transport_of
from sparsync.cli.train.settings import TrainSettings
from sparsync.cli.values import INSTALL_PAPERS
from sparsync.cli.workloads.workload import is_hidden_matrix
from sparsync.console import say
from sparsync.errors import ConfigurationError, require
from sparsync.handle import Handle
from sparsync.options import Compression, Transport
from sparsync.presets import PRESETS, preset, resolve
from sparsync.selection import Everything
from sparsync.transports.communicator import Communicator
from sparsync.transports.ledger import Traffic
from sparsync.updates.family import OUTER_SETTINGS
from sparsync.updates.outer_step import OuterStep

__all__ = [
    "HOOKS",
    "Exchange",
    "attach_elastic",
    "attached_as",
    "check_algorithms",
    "check_elastic",
    "dense_bytes_per_step",
    "labels_of",
    "make_exchange",
]

_GROUP = "sparsync.spaces"  # group of entry points: (settings, algorithm, model) -> Exchange
HOOKS = ("fp16", "powersgd")


def dense_bytes_per_step(parameters: int, world_size: int, itemsize: int = 4) -> int:
    """Return the bytes that a rank sends in a bandwidth-optimal allreduce of ``parameters`` elements.

    Example:
        >>> dense_bytes_per_step(parameters=1000, world_size=4)  # 2 n (P - 1) / P elements
        6000
    """
    return -(-2 * parameters * itemsize * (world_size - 1) // world_size)


def labels_of(text: str) -> tuple[str, ...]:
    """Split a list of algorithms; see ``sparsync.cli.named_algorithms.labels``."""
    return labels(text, PRESETS, SCHEMES, plain=HOOKS)


def _named(label: str) -> Named:
    return named(label, PRESETS, SCHEMES, plain=HOOKS)


def attached_as(settings: TrainSettings, label: str) -> Algorithm | OuterStep:
    """Return the argument of ``attach``: a preset, or an outer step for a scheme of that family."""
    found = _named(label)
    if found.name in OUTER_SETTINGS:
        return _outer_step(settings, found)
    if found.name in SCHEMES:
        raise ConfigurationError(averaged_by(found.name))
    return resolve(found.name, **found.options)


def check_elastic(settings: TrainSettings, label: str) -> None:
    """Refuse an algorithm that cannot be attached, and settings that ``attach_elastic`` would ignore."""
    chosen = attached_as(settings, label)
    name, updates = _named(label).name, isinstance(chosen, OuterStep)
    correction = settings.correction(name in PRESETS and preset(name).corrects)
    for what, there, instead in (
        (
            "--lr-schedule plateau",
            settings.lr_schedule.startswith("plateau"),
            "ranks that join do not know earlier losses; choose step",
        ),
        ("--space", settings.space != "gradient", "it exchanges gradients or updates; omit it"),
        (
            "--target-step",
            settings.target_step is not None,
            "it trains with one algorithm only, so there is no dense run; omit it",
        ),
        (
            f"--buffers {settings.buffers}",
            settings.buffers != "average",
            "that is for schemes that are not attached; omit it",
        ),
        (
            "momentum before the exchange",
            bool(correction.momentum or correction.weight_decay),
            "ranks that join do not take it over; add --no-momentum-correction",
        ),
        (
            "--warmup-steps",
            updates and settings.warmup_steps > 0,
            f"{name} exchanges updates; give its own, {name}:warmup_steps={settings.warmup_steps}",
        ),
    ):
        require(not there, f"--elastic has no {what}: {instead}")
    check_algorithms(settings, [label])


def check_algorithms(settings: TrainSettings, algorithms: Sequence[str]) -> tuple[str, ...]:
    """Refuse unknown algorithms, options that no algorithm takes, and a target without "dense".

    Returns:
        One label per algorithm, in the form that ``labels`` returns.
    """
    found = [_named(text) for text in algorithms]
    for one in found:
        if one.name in PRESETS:
            resolve(one.name, **one.options)
    algorithms = tuple(one.label for one in found)
    schemes = [one for one in found if one.name in SCHEMES]
    target = settings.target_step
    if target is not None and not 1 <= target <= settings.steps:
        raise ConfigurationError(
            f"target_step is {target}; give a step of the run, from 1 to {settings.steps}"
        )
    if target is not None and "dense" not in algorithms:
        raise ConfigurationError(
            f"--target-step {target} needs the loss of dense, which is not among the algorithms "
            f"{', '.join(algorithms)}; add dense"
        )
    # To check the target, ranks wait for each other after every step.  "updates" is allowed, because by
    # default its ranks wait for each other in every second step anyway.  The additional waits are short,
    # and they can only make "updates" look slower.
    ahead = [one.name for one in schemes if one.name != "updates"]
    if ahead and target is not None:
        raise ConfigurationError(
            "--target-step compares all ranks' losses after each step, for which ranks that "
            f"average models would wait; leave it out for {ahead[0]}, and compare the losses after "
            "as many seconds: give the faster one more --steps"
        )
    if settings.period is not None and settings.space != "local":
        having = [name for name in SCHEMES if "period" in options_of(name)]
        require(
            any(one.name in having for one in schemes),
            f"period is {settings.period}, but none of {', '.join(algorithms)} has it; leave it out, "
            f"or choose one of {', '.join(having)}",
        )
    _check_used(settings, found)
    for one in schemes:
        size = one.options.get("group_size")
        require(
            size is None or size <= settings.ranks,
            f"{one.name}: group_size is {size} of {settings.ranks} ranks; give at most all of them",
        )
        given = _scheme_options(settings, one)
        require(
            settings.optimizer != "sgd" or not {**options_of(one.name), **given}.get("sign"),
            f"{one.name} moves weights by signs, at a rate like Adam's; add --optimizer adamw (the "
            "workload's own is SGD)",
        )
        SCHEMES[one.name](None, **given)
    return algorithms


def _check_used(settings: TrainSettings, found: Sequence[Named]) -> None:
    """Refuse options that no algorithm uses; if an algorithm ignores ``curve_keys``, print a line."""
    schemes = [one for one in found if one.name in SCHEMES]
    local = settings.space == "local"  # its exchange accepts every algorithm, even "dense"
    plain = [one for one in found if one.name in ("dense", *HOOKS) and not local]
    presets = [one for one in found if one not in schemes and one not in plain]
    selecting = [one for one in (*schemes, *presets) if _selects(one)]
    for flag, given, having in (
        # with --space local, the density also determines the default period
        ("--density", settings.density != TrainSettings.density, found if local else selecting),
        ("--warmup-steps", settings.warmup_steps > 0, presets),
        ("--momentum-correction", settings.momentum_correction, presets),
        ("--buffers local", settings.buffers == "local", found if local else schemes),
        ("--curve-keys", settings.curve_keys is not None, [*presets, *schemes]),
    ):
        require(
            bool(having) or not given,
            f"{flag} has no effect on {', '.join(one.label for one in found)}; leave it out, or add an "
            "algorithm that has it",
        )
    if settings.curve_keys is not None and plain:
        say(f"{plain[0].name} is DDP's own exchange over gloo, which --curve-keys does not encrypt")


def _selects(one: Named) -> bool:
    """Return whether an algorithm selects entries, with the density that all algorithms share."""
    if one.name in SCHEMES:
        return options_of(one.name).get("density", 1.0) < 1 and "density" not in one.options
    return not isinstance(resolve(one.name, **one.options).make_selector(), Everything)


def _nothing() -> None:
    pass


@dataclass
class Exchange:
    """A model and its optimizers, with the hooks that exchange gradients or updates and count bytes."""

    model: nn.Module  # the module to call and train, either wrapped in DDP or plain
    optimizers: Sequence[torch.optim.Optimizer]
    comm: Communicator | None = None  # its ledger counts the bytes; None: ``formula`` computes them
    formula: Callable[[], int] = int  # returns the last step's bytes if there is no ledger
    sparse: bool = False  # entries are selected, so density applies
    sums: bool = False  # gradients are summed over ranks, not averaged
    corrected: bool = False  # momentum is applied before the exchange, not by the optimizer
    clips: bool = False  # the exchange clips gradients; if False, the training loop does
    dense_share: float = 0.0  # predicted fraction of a step's bytes from layers left dense
    options: Mapping[str, object] | None = None  # options of an averaging scheme
    averager: Averager | None = None  # None even for a scheme if it is attached, e.g. "updates"
    after_step: Callable[[], object] = _nothing  # called after the optimizer's step
    finish: Callable[[], object] = _nothing  # makes the replicas equal
    close: Callable[[], object] = _nothing  # ends background threads and groups

    def __post_init__(self) -> None:
        # bytes sent during setup belong to no step
        self._before = Traffic() if self.comm is None else self.comm.ledger.total()

    @property
    def transport(self) -> str:
        """Return the name of the transport that carries the gradients."""
        return "torch" if self.comm is None else transport_of(self.comm)

    def traffic(self) -> tuple[int, int]:
        """Return the bytes that this rank sent and received since the last call."""
        if self.comm is None:
            sent = self.formula()
            return sent, sent
        before, self._before = self._before, self.comm.ledger.total()
        return self._before.sent - before.sent, self._before.received - before.received


def make_exchange(settings: TrainSettings, label: str, model: nn.Module) -> Exchange:
    """Prepare this rank's model for "dense" (plain DDP), one of ``HOOKS``, a preset, or a scheme."""
    found = _named(label)
    if found.name in SCHEMES:
        return _averaged(settings, found, model)
    if found.name in ("dense", "fp16") and settings.space != "local":
        return _allreduced(settings, model, half=found.name == "fp16")
    if found.name == "powersgd":
        return _power_sgd(settings, model)
    algorithm = resolve(found.name, **found.options)
    if settings.space == "gradient":
        return _attached(settings, found.name, algorithm, model)
    for point in entry_points(group=_GROUP, name=settings.space):
        added: Exchange = point.load()(settings, algorithm, model)
        return added
    raise ConfigurationError(
        f"--space {settings.space} is in the package sparsync-papers, which is not installed: "
        f"{INSTALL_PAPERS}; or choose gradient"
    )


def attach_elastic(
    settings: TrainSettings,
    label: str,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    manager: Any,
) -> Handle:
    """Attach a preset, or a scheme of the outer step's family, with a torchft manager."""
    chosen = attached_as(settings, label)
    if isinstance(chosen, OuterStep):
        return attach(model, optimizers, chosen, elastic=manager)
    return attach(
        model,
        optimizers,
        chosen,
        settings.density,
        exchange="gradients",
        compression=_compression(settings, _named(label).name),
        elastic=manager,
    )


def _allreduced(settings: TrainSettings, model: nn.Module, *, half: bool) -> Exchange:
    """Use plain DDP, or its ``fp16_compress_hook``: the same allreduce with 16-bit floats."""
    ddp = _in_ddp(model)
    if half:
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    sent = dense_bytes_per_step(_elements(model), dist.get_world_size(), 2 if half else 4)
    return Exchange(ddp, settings.make_optimizers(ddp), formula=lambda: sent)


def _power_sgd(settings: TrainSettings, model: nn.Module) -> Exchange:
    """Use PyTorch's ``powerSGD_hook``, in a configuration that compresses well and is safe on gloo.

    The bytes are computed from the elements that the hook reports.  The whole model is one bucket,
    because with several buckets the hook waits for a collective inside a callback and hangs on gloo.
    """
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    ddp = _in_ddp(model, bucket_cap_mb=nbytes // 2**20 + 1)
    # The hook's documentation suggests a rank of 1 to 4.  The hook needs two dense steps; its default is
    # 1000, which would make a short run dense.
    state = powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=4, start_powerSGD_iter=2
    )
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    before = 0

    def formula() -> int:
        nonlocal before
        so_far = state.total_numel_after_compression
        compressed, before = so_far - before, so_far
        return dense_bytes_per_step(compressed or _elements(model), dist.get_world_size())

    return Exchange(ddp, settings.make_optimizers(ddp), formula=formula)


def _attached(
    settings: TrainSettings, name: str, algorithm: Algorithm, model: nn.Module
) -> Exchange:
    """Attach a preset to the gradients of a DDP model."""
    ddp = _in_ddp(model)
    correction = settings.correction(preset(name).corrects)
    sync = attach(
        ddp,
        algorithm=algorithm,
        density=settings.density,
        correction=correction,
        compression=_compression(settings, name),
        transport=Transport(settings.transport, settings.timeout, settings.curve_keys),
    )
    return Exchange(
        ddp,
        settings.make_optimizers(ddp, correction),
        sync.reducer.comm,
        sparse=True,
        sums=not sync.reducer.algorithm.average,
        corrected=bool(correction.momentum),
        clips=True,
        dense_share=sync.stats()["dense_share"],
        close=sync.close,
    )


def _compression(settings: TrainSettings, name: str) -> Compression:
    # like the paper, do not compress all layers (SparCML, section 8.4)
    compress = is_hidden_matrix if name == "sparcml" else None
    return Compression(compress=compress, warmup_steps=settings.warmup_steps)


def _averaged(settings: TrainSettings, found: Named, model: nn.Module) -> Exchange:
    """Let each rank train its model separately, and a scheme average the models.

    Schemes of the outer step's family are attached, so that the optimizer's moments can follow the
    average.  ``attach`` always averages buffers, so these schemes are attached only if buffers are to be
    averaged.
    Methods that step by signs get plain SGD, as published.
    """
    name, given = found.name, _scheme_options(settings, found)
    has = {**options_of(name), **given}
    optimizers, own = settings.make_optimizers(model), {}
    if has.get("sign"):
        sgd = torch.optim.SGD(model.parameters(), settings.lr, weight_decay=settings.weight_decay)
        optimizers, own = [sgd], {"optimizer": "sgd"}
    scheme: Any
    averager: Any
    if name in OUTER_SETTINGS and settings.buffers == "average":
        scheme = _outer_step(settings, found)
        carried = Transport(settings.transport, settings.timeout, settings.curve_keys)
        averager = attach(model, optimizers, scheme, transport=carried)
        comm = averager.reducer.comm
    else:
        comm = settings.connect()
        bound: dict[str, Any] = {"comm": comm, "buffers": settings.buffers}
        if own:  # the learning rate of this plain SGD is the length of a step by signs
            bound["optimizer"] = optimizers[0]
        scheme = averager = SCHEMES[name](model, **given, **bound)
    settings_of = getattr(scheme, "settings", scheme)
    shown = settings_of.described() if isinstance(settings_of, OuterStep) else vars(scheme)
    chosen = {key: shown.get(key) for key in has}
    plain = {k: value for k, value in chosen.items() if isinstance(value, int | float | str)}
    return Exchange(
        model,
        optimizers,
        comm,
        sparse=has.get("density", 1.0) < 1,
        options={"buffers": settings.buffers, **given, **plain, **own},
        averager=averager if averager is scheme else None,
        # an attached scheme steps in an optimizer hook
        after_step=averager.step if averager is scheme else _nothing,
        finish=averager.finish,
        close=averager.close,
    )


def _outer_step(settings: TrainSettings, found: Named) -> OuterStep:
    return OuterStep(**{**OUTER_SETTINGS[found.name], **_scheme_options(settings, found)})


def _scheme_options(settings: TrainSettings, found: Named) -> dict[str, Any]:
    """Return the options of a scheme: the common settings, overridden by the options in its label."""
    has = options_of(found.name)
    given: dict[str, Any] = {"period": settings.period, "seed": settings.seed}
    if has.get("density", 1.0) < 1:  # a dense exchange has no density to set
        given["density"] = settings.density
    shared = {key: value for key, value in given.items() if key in has and value is not None}
    return {**shared, **found.options}


def _in_ddp(model: nn.Module, bucket_cap_mb: float | None = None) -> DistributedDataParallel:
    """Wrap a model in DDP without sending its initial weights; a seed makes them equal on all ranks."""
    return DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb, init_sync=False)


def _elements(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
