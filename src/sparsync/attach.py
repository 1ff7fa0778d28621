"""The entry point for training: ``sync = sparsync.attach(model, optimizer)``, for every kind of model."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from sparsync.algorithm import Algorithm, check_density, default_density
from sparsync.console import say
from sparsync.errors import ConfigurationError, require
from sparsync.names import parameters_of, suggestion
from sparsync.options import Compression, Monitoring, Options, Transport, disabled

if TYPE_CHECKING:
    from sparsync.feedback.correction import Correction
    from sparsync.handle import Handle
    from sparsync.updates.outer_step import OuterStep

__all__ = ["attach", "check_optimizer"]

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]

P = ParamSpec("P")
R = TypeVar("R")

# Adaptive optimizers without ``betas``; ``check_optimizer`` recognises the others by their ``betas``.
_ADAPTIVE = tuple(
    getattr(torch.optim, name)
    for name in ("Adafactor", "Adagrad", "Adadelta", "RMSprop", "Rprop")
    if hasattr(torch.optim, name)  # older versions of torch have no Adafactor
)

# RedSync's momentum correction is recommended up to this density. Above it, an entry waits for fewer
# than ten steps on average, and momentum factor masking resets its velocity each time it is sent.
_LATE = 0.1


def _naming_options(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate ``attach`` to refuse unknown keywords with an error that says where an option belongs.

    A decorator keeps the signature, which ``**kwargs`` would hide, so type checkers still reject
    unknown keywords.
    """
    known = parameters_of(function)

    @functools.wraps(function)
    def call(*args: P.args, **given: P.kwargs) -> R:
        unknown = [name for name in given if name not in known]
        if unknown:
            algorithm: Any = given.get("algorithm", args[2] if len(args) > 2 else None)
            raise _no_argument(unknown, [*known], algorithm)
        return function(*args, **given)

    return call


@_naming_options
def attach(
    model: nn.Module,
    optimizer: Optimizers | None = None,
    algorithm: str | Algorithm | OuterStep | None = None,
    density: float | None = None,
    *,
    exchange: Literal["auto", "gradients", "updates"] = "auto",
    correction: Correction | None = None,
    replicate: DeviceMesh | ProcessGroup | None = None,
    elastic: Any = None,
    compression: Compression | None = None,
    transport: Transport | None = None,
    monitoring: Monitoring | None = None,
) -> Handle:
    """Compress the exchange between replicas of a model; the training loop stays as it is.

    The replicas exchange gradients or updates.  **Gradients** are exchanged sparsely on every step; this
    suits SGD, whose steps are linear in the gradient.  **Updates**, the changes that the optimizer makes
    to the weights, are exchanged in a few bits per element after every few local steps.  This suits
    AdamW, Muon and every other optimizer whose moments sparse gradients would distort
    (``docs/optimizers.md``).

    Args:
        model: a ``DistributedDataParallel`` module without a communication hook, compiled or not.  With
            ``replicate``, any other module: FSDP2, a pipeline stage, tensor-parallel, plain
            (``docs/fsdp.md``).  Updates also work with a plain module that is equal on all ranks.
        optimizer: the optimizer of the model, or a list of all its optimizers.  Steps of the last one
            count as local steps.
        algorithm: for gradients, the name of a preset in any spelling ("budgeted", the default, "auto",
            "Ok-Topk", ...), or an ``Algorithm``, e.g. ``sparsync.presets.resolve("oktopk", cap=None)``.
            For updates, the name of a published method ("diloco", "sparseloco", ...), an ``OuterStep``,
            or an algorithm for ``OuterStep`` to exchange with.  For updates, None exchanges 2 bits per
            element, on every step for the first 100 steps and on every second step after that
            (``OuterStep``'s ``warmup_steps=200``, divided equally between periods 1 and 2).  Below a
            million parameters, it sends up to 8 bits on every step (``default_bits``).  With DDP, "auto"
            measures the group and chooses dense gradients if they take fewer seconds per step, or hardly
            more.  It does not know how many steps either exchange needs to reach a given loss.
        density: fraction k / n of every unit's entries that is exchanged, in (0, 1], if the algorithm
            selects entries.  None means 1 %, and more for models below a million parameters, up to 100 %
            at 46,000 parameters (``default_density``).  The group's first rank reports the choice once.
        exchange: "gradients", "updates", or "auto", which exchanges updates if an optimizer other than
            SGD is given, or an ``algorithm`` that can exchange only updates.  The group's first rank
            reports once what is exchanged and why, and how the optimizer's steps are treated.
        correction: momentum, decay and clipping, applied to local gradients before they are accumulated.
        replicate: the ranks that hold the same part of the model as this rank, as a one-dimensional mesh,
            e.g. ``mesh["replicate"]``, or as a process group.
        elastic: a ``torchft.Manager`` whose ``pg`` is a ``sparsync.elastic.ElasticGroup``: ranks may join
            and leave (``docs/elastic.md``).  The model must be a plain module.
        compression: settings of units, dense parameters, warm-up and pipelines (``Compression``).
        transport: how messages travel, time limits, and nodes (``Transport``).
        monitoring: settings for NaN and Inf, GradScaler, sentinel and logs (``Monitoring``).

    Returns:
        A handle with ``stats()``, ``state_dict()``, ``load_state_dict()``, ``no_sync()``, ``step()`` (for
        pipelines, and for updates without an optimizer) and ``close()``.  As a context manager, the
        handle closes itself.  A handle that exchanges updates also has ``shared()`` and ``finish()``
        (``UpdateSync``).

    Raises:
        ConfigurationError: there is neither DDP nor ``replicate``; the model contains a DDP module, or
            is attached already; the algorithm is unknown or the density invalid; or the optimizer's
            updates cannot be averaged (``docs/optimizers.md``).  A later step raises it if the module
            runs inside DDP, or if an optimizer unknown to ``attach`` steps parameters whose updates are
            exchanged.
        PeerError: ranks were given different arguments or models, or a rank has died.
        DeadlineError: a rank did not attach in time; the error names it.

    With ``SPARSYNC_DISABLE=1`` in the environment of all ranks, nothing is attached: DDP exchanges whole
    gradients, rank 0 reports this, and the handle's methods do nothing (``docs/lab.md``).

    With only one replica, nothing is selected or rounded, because nothing is sent; ``attach`` reports
    this.

    Cost: one thread, one gloo process group, and zmq's sockets.  Memory for gradients: n elements for the
    residual and O(k + n / P) for an exchange (``benchmarks/memory.md``); a dense step needs 2 n more.
    Memory for updates: 2 n elements for the shared weights and the residual, plus the messages of an
    exchange (0.2 n at the default of 2 bits).  Some settings of ``OuterStep`` need more (see its
    docstring); for measurements, see ``benchmarks/memory_gpt.md``.
    """
    # these imports are local, so that ``import sparsync`` does not load the engines
    from sparsync.accepted_optimizers import (
        check_stepped,
        check_steps_some,
        plain_optimizers,
        treatment_of,
    )
    from sparsync.exclusive import check_outermost, check_unattached
    from sparsync.presets import PRESETS, resolve
    from sparsync.transports.process_group import check_group
    from sparsync.units import check_stepped_later, check_values
    from sparsync.updates import OuterStep

    for option, kind in (
        (compression, Compression),
        (transport, Transport),
        (monitoring, Monitoring),
    ):
        if option is not None and not isinstance(option, kind):
            raise ConfigurationError(
                f"{kind.__name__.lower()} is {option!r}; give a sparsync.{kind.__name__}(...)"
            )
    # torch.compile(ddp) returns a wrapper; hooks and parameters belong to the DDP module inside it
    if isinstance(inner := getattr(model, "_orig_mod", None), DistributedDataParallel):
        model = inner
    # These checks come before the first message: a rank that fails one of them raises alone, while
    # no peer waits for it yet.
    require(
        isinstance(model, nn.Module),
        f"attach was given {type(model).__name__} as the model; call attach(model, optimizer), with a "
        "torch.nn.Module first",
    )
    require(
        not torch.is_inference_mode_enabled(),
        "attach was called within torch.inference_mode(), whose tensors no step can update; call it "
        "outside",
    )
    check_outermost(model)
    check_unattached(model)
    if isinstance(model, DistributedDataParallel):
        check_stepped_later(model.module, model.parameters_to_ignore)
    elif isinstance(model, nn.Module):
        check_stepped_later(model)
    algorithm = _named(algorithm) if isinstance(algorithm, str) else algorithm
    given, optimizers = compression or Compression(), plain_optimizers(optimizer)
    if isinstance(model, nn.Module):
        check_steps_some(optimizers, model)
    carried, watched = transport or Transport(), monitoring or Monitoring()
    world = carried.world
    check_group("Transport(world=...)", world)
    if isinstance(model, DistributedDataParallel):
        require(
            world is None,
            "Transport(world=...) is for models without DDP, which knows its own ranks; omit it",
        )
        if elastic is None:  # with ``elastic``, DDP will be refused
            carried = replace(carried, world=model.process_group)
    chosen, why = _chosen(exchange, algorithm, optimizers, correction, density, given)
    if disabled():
        from sparsync.not_attached import leave_dense

        plain = Options(resolve("dense"), 1.0, correction, given, carried, watched)
        others = {"elastic=": elastic, "replicate=": replicate}
        elsewhere = next((name for name, there in others.items() if there is not None), "")
        return leave_dense(model, optimizers, plain, elsewhere=elsewhere)
    decided = ""
    # "auto" compares updates with dense gradients only if no argument has decided between them.  Each
    # rank must also hold a whole replica in DDP; elastic, replicate and hierarchy are then all None.
    if why and algorithm == "auto" and elastic is replicate is carried.hierarchy is None:
        algorithm = None
        if isinstance(model, DistributedDataParallel):
            from sparsync.dense_or_updates import measured_choice
            from sparsync.updates.attach import make_outer

            made = measured_choice(model, make_outer(None, density, given, model), carried)
            decided = why = made.why
            if made.exchange == "gradients":
                chosen, algorithm, density = "gradients", "dense", 1.0
                why += "; plain DDP does the same without attach"
    outer = None
    if chosen == "updates":
        from sparsync.updates.attach import attach_updates, make_outer, said_of_size

        check_stepped(optimizer)
        outer = make_outer(algorithm, density, given, model)
        treatment = treatment_of(optimizers, noise_correction=outer.noise_correction)
        why_so = [text for text in (why, treatment, said_of_size(algorithm, outer)) if text]
    else:
        why_so = [why] if why else []
    first = not dist.is_initialized() or dist.get_rank(carried.world) == 0
    if why_so and dist.is_initialized() and first:
        say(f"exchanges {chosen}: {'; '.join(why_so)}")
    if elastic is not None and replicate is not None:
        raise ConfigurationError(
            "elastic= is for plain modules, whole on every rank; omit replicate="
        )
    if given.offload is not None and (outer is None or elastic is not None):
        raise ConfigurationError(
            "Compression(offload=...) is for exchanging updates without elastic=; other exchanges "
            "read the whole residual on the model's device; omit it"
        )
    if outer is not None and watched.xi_period is not None:
        raise ConfigurationError(
            f"Monitoring(xi_period={watched.xi_period}) measures exchanges of gradients, and updates are "
            "exchanged; omit it, or give exchange='gradients'"
        )
    if outer is not None and watched.nonfinite is not None:
        raise ConfigurationError(
            f"Monitoring(nonfinite={watched.nonfinite!r}) is for gradients, and updates are exchanged, "
            "where NaN or Inf makes all ranks return to the shared weights, and raises the second time "
            "in a row; omit it, or give exchange='gradients'"
        )
    if outer is not None:
        options = Options(outer.chosen, outer.density, None, given, carried, watched, decided)
        if elastic is not None:
            from sparsync.elastic.updates import attach_elastic_updates

            return attach_elastic_updates(model, optimizers, outer, options, elastic)
        return attach_updates(model, optimizers, outer, options, replicate, advises=bool(why))
    assert not isinstance(algorithm, OuterStep)
    resolved = resolve("budgeted" if algorithm is None else algorithm)
    check_values((name, p) for name, p in model.named_parameters() if p.requires_grad)
    if density is None:
        # Only the warnings below use this estimate. The density itself is chosen later, when the
        # size of a whole replica is known.
        likely = default_density(sum(p.numel() for p in model.parameters() if p.requires_grad))
    else:
        likely = density = check_density(density)
    sparse = likely < 1
    corrects = resolved.name in PRESETS and PRESETS[resolved.name].corrects
    for one in optimizers:
        check_optimizer(one, correction, sparse=sparse and "dense" not in resolved.name)
    if likely <= _LATE and corrects and first:
        _warn_of_momentum(resolved.name, optimizers, correction)
    # the user's settings take precedence over the algorithm's
    completed = replace(
        given,
        unit_bytes=resolved.unit_bytes if given.unit_bytes is None else given.unit_bytes,
        compress=given.compress or resolved.compress,
    )
    options = Options(resolved, density, correction, completed, carried, watched, decided)
    if elastic is not None:
        from sparsync.elastic.gradients import attach_elastic  # only this path needs torchft

        return attach_elastic(model, optimizers, options, elastic)
    if replicate is None:
        if given.schedule is not None or world or not given.overlap:
            raise ConfigurationError(
                "Compression(schedule=..., overlap=False) and Transport(world=...) are for models "
                "without DDP; give replicate= as well, or omit them"
            )
        from sparsync.gradients.ddp import attach_ddp

        return attach_ddp(model, options)
    if isinstance(model, DistributedDataParallel) or carried.hierarchy is not None:
        raise ConfigurationError(
            "replicate= is for models without DDP, which knows its own ranks; omit it, or give the plain "
            "module (for dense exchange inside a node: Transport(hierarchy=...) with DDP, or fully_shard)"
        )
    from sparsync.gradients.replicas import attach_replicas  # DTensor takes 0.4 s to import

    return attach_replicas(model, options, replicate)


def _named(algorithm: str) -> str:
    """Return the canonical name of a preset or of an outer-step method, given in any spelling."""
    from sparsync.presets import PRESETS
    from sparsync.tables import unknown
    from sparsync.updates import OUTER_SETTINGS

    # outer-step methods are looked up first, because the tables import every paper's module to look up
    # a name that the core does not have
    if algorithm in OUTER_SETTINGS:
        return algorithm
    if algorithm in PRESETS:
        return PRESETS.name_of(algorithm)
    from sparsync.averaging.schemes import SCHEMES, averaged_by

    if algorithm not in SCHEMES:
        raise unknown("algorithm", algorithm, [*sorted(PRESETS), *OUTER_SETTINGS])
    name = SCHEMES.name_of(algorithm)
    if name not in OUTER_SETTINGS:
        raise ConfigurationError(averaged_by(name))
    return name


def _no_argument(
    unknown: list[str], known: list[str], algorithm: str | Algorithm | OuterStep | None
) -> ConfigurationError:
    """Return the error for unknown keywords of ``attach``; it says where each option belongs."""
    from sparsync.feedback.correction import Correction
    from sparsync.presets import PRESETS, preset
    from sparsync.updates import OUTER_SETTINGS, OuterStep

    homes = {
        field.name: f"{kind.__name__.lower()}=sparsync.{kind.__name__}({field.name}=...)"
        for kind in (Compression, Transport, Monitoring, Correction)
        for field in fields(kind)
    }
    name = _named(algorithm or "budgeted") if isinstance(algorithm, str | None) else None
    own: list[str] = []
    if name in OUTER_SETTINGS:
        own = [field.name for field in fields(OuterStep)]
        made = f"sparsync.updates.OuterStep(**sparsync.updates.OUTER_SETTINGS[{name!r}] | "
        homes |= {one: f"algorithm={made}{{{one!r}: ...}})" for one in own}
    elif name is not None:
        own = [*preset(name).options]
        homes |= {one: f"algorithm=sparsync.presets.resolve({name!r}, {one}=...)" for one in own}
    said = []
    for one in unknown:
        having = [other for other, row in PRESETS.items() if one in row.options]
        if one in homes:
            said.append(f"{one} (give {homes[one]})")
        elif having:
            said.append(f"{one} (an option of {', '.join(having)})")
        else:
            said.append(one + suggestion(one, [*known, *homes]))
    there = ", ".join(known) + (f"; {name} has {', '.join(own)}" if own else "")
    return ConfigurationError(f"attach has no option {', '.join(said)}; it has {there}")


def _chosen(
    exchange: str,
    algorithm: str | Algorithm | OuterStep | None,
    optimizers: Sequence[torch.optim.Optimizer],
    correction: Correction | None,
    density: float | None,
    compression: Compression,
) -> tuple[str, str]:
    """Return "gradients" or "updates", and the reason if ``attach`` had to choose.

    Raises:
        ConfigurationError: an argument belongs to the other kind of exchange.
    """
    from sparsync.updates import OUTER_SETTINGS, OuterStep

    if exchange not in ("auto", "gradients", "updates"):
        raise ConfigurationError(
            f"exchange is {exchange!r}; choose one of auto, gradients, updates"
        )
    named = isinstance(algorithm, str) and algorithm in OUTER_SETTINGS
    for_updates = named or isinstance(algorithm, OuterStep)
    for_gradients = {
        "correction=": correction is not None,
        "Compression(schedule=...)": compression.schedule is not None,
    }
    needs = next((name for name, there in for_gradients.items() if there), None)
    if exchange == "gradients" and for_updates:
        raise ConfigurationError(
            f"algorithm {algorithm!r} exchanges updates; omit exchange='gradients', or name one of the "
            "presets"
        )
    if needs and (exchange == "updates" or for_updates):
        raise ConfigurationError(
            f"{needs} is for gradients; omit it, or omit exchange='updates' and the algorithm for "
            "updates"
        )
    if exchange != "auto":
        return exchange, ""
    if for_updates:
        return "updates", ""
    # With SGD, sparse averaging only delays entries. Second moments are not linear in the gradient,
    # so sparse averages distort them. The class is tested, not its name, because subclasses of SGD
    # also step in proportion to the gradient.
    others = [one for one in optimizers if not isinstance(one, torch.optim.SGD)]
    if needs or not others:
        return "gradients", ""
    return "updates", (
        f"{type(others[0]).__name__} does not step in proportion to the gradient, and sparse "
        "averages would distort its steps (exchange='gradients' or 'updates' overrides this)"
    )


def check_optimizer(
    optimizer: torch.optim.Optimizer | None,
    correction: Correction | None = None,
    *,
    sparse: bool = False,
) -> None:
    """Refuse an optimizer that would apply the correction's momentum or decay a second time.

    With ``sparse``, i.e. if only some gradient entries are exchanged, warn about adaptive optimizers,
    because they then converge worse.
    """
    if optimizer is None:
        return
    name = type(optimizer).__name__
    adaptive = isinstance(optimizer, _ADAPTIVE) or "betas" in optimizer.defaults
    if adaptive and sparse:
        warnings.warn(
            f"{name} divides by its second moment, and rarely delivered entries distort that estimate: "
            "expect a loss 20 to 27 % higher at density 1 %. exchange='updates' keeps up with "
            "dense training; see "
            "docs/optimizers.md",
            stacklevel=4,  # points at the caller of attach, which is decorated
        )
    if correction is None:
        return
    if correction.momentum and adaptive:
        raise ConfigurationError(
            f"momentum correction is for SGD, but the optimizer is {name}, which divides by its "
            "own moments; omit the correction, and updates are exchanged"
        )
    for group in optimizer.param_groups:
        for what in ("momentum", "weight_decay"):
            if getattr(correction, what) and group.get(what):
                raise ConfigurationError(
                    f"{name} has {what} {group[what]}, which the correction applies before the "
                    f"exchange ({what}={getattr(correction, what)}): it would be applied twice; "
                    f"build the optimizer with {what}=0"
                )


def _warn_of_momentum(
    algorithm: str, optimizers: Sequence[torch.optim.Optimizer], correction: Correction | None
) -> None:
    """Warn once if the optimizer has momentum and the algorithm was published with a correction."""
    groups = (group for one in optimizers for group in one.param_groups)
    group = next((group for group in groups if group.get("momentum")), None)
    if group is None or (correction is not None and correction.momentum):
        return
    settings = [f"{group['momentum']:g}"]
    settings += ["nesterov=True"] if group.get("nesterov") else []
    settings += [f"weight_decay={d:g}"] if (d := group.get("weight_decay")) else []
    cure = f"correction=sparsync.Correction({', '.join(settings)})"
    warnings.warn(
        f"the optimizer applies momentum {settings[0]} to entries that arrive late, and {algorithm} is "
        f"published with momentum correction: give {cure}, and build the optimizer without these "
        "(docs/optimizers.md)",
        stacklevel=3,  # points at the caller of attach
    )
