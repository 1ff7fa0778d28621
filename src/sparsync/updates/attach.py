"""Attach a handle that exchanges updates: its settings, groups, thread, engine and first checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparsync.accepted_optimizers import held_by
from sparsync.algorithm import LARGE, Algorithm, default_bits
from sparsync.errors import ConfigurationError, require
from sparsync.feedback.step import Proposal
from sparsync.gradients.ddp import check_ddp
from sparsync.gradients.hierarchy import Node
from sparsync.handle import make_engine
from sparsync.options import Compression, Options
from sparsync.transports.agree import agree, check_equal_parameters, equalise_
from sparsync.transports.driver import run
from sparsync.transports.process_group import Groups
from sparsync.units import local_of, output_parameters, writable
from sparsync.updates.carrier import Carrier
from sparsync.updates.family import OUTER_SETTINGS
from sparsync.updates.gradient_noise import noise_of
from sparsync.updates.offload import offloaded
from sparsync.updates.outer_engine import OuterEngine, alone
from sparsync.updates.outer_step import OuterStep
from sparsync.updates.ranks import AllRanks
from sparsync.updates.step_length import floats
from sparsync.updates.sync import UpdateSync
from sparsync.updates.weights import ModelWeights, OwnWeights, trained_of

_DIVIDED = (
    "contribute() is for replicas of one rank, and this replica is divided over ranks (a node, or "
    "shards); weigh the loss inside the replica, and give all replicas the same amount of data"
)

__all__ = ["attach_updates", "make_outer", "said_of_size"]


def make_outer(
    algorithm: str | Algorithm | OuterStep | None,
    density: Any,
    compression: Compression,
    model: nn.Module,
) -> OuterStep:
    """Return the outer step that matches the arguments of ``attach``."""
    named = isinstance(algorithm, str) and algorithm in OUTER_SETTINGS
    whole = algorithm is None or isinstance(algorithm, OuterStep) or named
    if density is not None and whole:
        raise ConfigurationError(
            f"density is {density!r}, but algorithm= determines how updates are exchanged, by "
            "default all of them in a few bits each; omit density=, or name an algorithm that "
            "selects entries, e.g. algorithm='allgather', or give exchange='gradients'"
        )
    if isinstance(algorithm, OuterStep):
        outer = algorithm
    elif algorithm is None or named:
        outer = OuterStep(**OUTER_SETTINGS[str(algorithm or "updates")])
    else:
        given = {} if density is None else {"density": density}
        outer = OuterStep(algorithm=algorithm, residual="weights", **given)
    if compression.warmup_densities or not compression.overlap:
        raise ConfigurationError(
            "Compression(warmup_densities=..., overlap=False) are for gradients; for updates give "
            "warmup_steps, over which the period grows"
        )
    ddp = model if isinstance(model, DistributedDataParallel) else None
    trained = trained_of(model) if ddp is None else trained_of(ddp.module, ddp.parameters_to_ignore)
    outer = outer.for_size(sum(parameter.numel() for parameter in trained.values()))
    return outer.adapted(compression.compress, compression.unit_bytes, compression.warmup_steps)


def said_of_size(algorithm: str | Algorithm | OuterStep | None, outer: OuterStep) -> str:
    """Return a phrase about the bits if ``make_outer`` chose them for a small model, otherwise ""."""
    by_size = algorithm in (None, "updates") or getattr(algorithm, "algorithm", "") is None
    bits: Any = dict(outer.chosen.options).get("bits")
    if not by_size or (bits == default_bits(LARGE) and outer.first_period > 1):
        return ""
    often = "on every step" if outer.first_period == 1 else f"every {outer.first_period} steps"
    return (
        f"{bits} bits per weight {often}, because in a model this small "
        "rounding costs more than bytes (algorithm= overrides this)"
    )


def attach_updates(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    outer: OuterStep,
    options: Options,
    replicate: Any = None,
    *,
    advises: bool = False,
) -> UpdateSync:
    """Exchange updates; see ``attach``.  With ``advises``, tell the user if plain DDP would be faster."""
    require(
        dist.is_initialized(),
        "torch.distributed is not initialised; call torch.distributed.init_process_group() before attach",
    )
    ddp = model if isinstance(model, DistributedDataParallel) else None
    if ddp is not None:
        check_ddp(ddp)
    if options.transport.hierarchy is not None and (ddp is None or replicate is not None):
        raise ConfigurationError(
            "Transport(hierarchy=...) is for DDP, whose gradients it averages inside a node; wrap the "
            "module in DistributedDataParallel and omit replicate=, or omit hierarchy="
        )
    module: nn.Module = model if ddp is None else ddp.module
    ignored = set() if ddp is None else ddp.parameters_to_ignore
    trained = trained_of(module, ignored)
    groups = Groups(options.transport.world, **options.transport.waits)
    try:
        # creating groups is collective, so all ranks must do so in the same order: node, parts, replicas
        pieces, consensus, node, kinds = {}, None, None, dict[str, str]()
        if replicate is None:
            ranks = dist.get_process_group_ranks(groups.world or dist.group.WORLD)
            if options.transport.hierarchy is not None:
                device = next((p.device for p in trained.values()), None)
                node = Node(options, ranks, groups, device)
                ranks, consensus = node.peers, node.consensus
        else:
            pieces, kinds, ranks, consensus = _parts(module, replicate, groups, options)
        corrected = optimizers if outer.noise_correction else ()
        noise = noise_of(corrected, trained, module)
        averages = ddp is None or ddp.broadcast_buffers
        weights = ModelWeights(module, trained, averages, node, noise, ignored)
        apart = output_parameters(module, options.compression.output_layer)
        output = apart if outer.chosen.output else ()
        # Inside a node, a rank exchanges only its run of each parameter, and plans units of these runs.
        # The user's ``compress`` still expects whole parameters.
        parameters: Mapping[str, Tensor] = trained
        if node is not None:
            parameters = {name: node.run_of(local_of(p)) for name, p in trained.items()}
            if (compress := outer.chosen.compress) is not None:
                outer = outer.adapted(lambda name, _run: compress(name, trained[name]))
        layout = outer.plan(weights.read(slice(0, None)), parameters, output, kinds, weights.rest)
        if consensus is not None and consensus.parts.world_size > 1:
            facts = {**outer.described(), "fragments of each part": len(layout.fragments)}
            run(agree(consensus.parts, facts))
        offload = offloaded(options.compression.offload, outer, layout, weights, optimizers)
        reducer = options.reducer(
            groups.make(ranks),
            layout.units,
            consensus or Proposal.broken,
            on_host=offload.residual,
            outer=outer.described(),
            advises=advises,
            # as floats, because the text of a tensor names its device and shows only four digits
            rates=[floats(group.get("lr") for group in one.param_groups) for one in optimizers],
            ranks_of_a_node=1 if node is None else node.comm.world_size,
            stepped_parameters=held_by(optimizers, trained),
            buffers_that_hold_nan_or_inf=sorted(weights.left_out),
        )
        if node is not None:  # no exchange may begin once the node has failed
            node.comm.share_broken(reducer.comm)
    except BaseException:
        groups.close()
        raise
    try:
        # ranks that share a replica may count differently, but its update can have only one weight
        several = consensus is not None and consensus.parts.world_size > 1
        # Buffers are made equal here.  A forward pass may have made statistics differ, later exchanges
        # send only changes, and DDP stops broadcasting buffers.  This must happen before the engine reads
        # the vector that ranks share.
        if buffers := weights.exchanged_buffers():
            for comm in [reducer.comm] if node is None else [node.consensus.parts, reducer.comm]:
                run(equalise_(comm, buffers))
        countable = node is None and not several
        carrier = Carrier(make_engine(reducer, groups, consensus), weights.device)
        running = OuterEngine(
            outer,
            layout,
            reducer,
            weights,
            optimizers=optimizers,
            carry=carrier.carry,
            on_any_part=consensus.on_any if consensus and several else alone,
            weighs=None if countable else False,
            ledgers=[] if consensus is None else [consensus.parts.ledger],
            on_host=offload.shared,
        )
        sync = UpdateSync(
            module,
            OwnWeights(weights, running),
            carrier,
            AllRanks(running, weights),
            groups,
            options,
            consensus,
            pieces,
            advises=advises,
            unweighed="" if countable else _DIVIDED,
        )
    except BaseException:
        groups.close()
        raise
    # from here on the handle owns the thread and the groups, so an error must close the handle
    try:
        # Ranks of a node must also start with equal weights, because they average only gradients.
        # Without DDP, nothing has compared the frozen parameters yet, e.g. the base model of a LoRA.
        compared = trained if ddp is not None else dict(module.named_parameters())
        named = [(name, local_of(one)) for name, one in compared.items() if writable(one)]
        for comm in sync.communicators if node is not None else [reducer.comm]:
            run(check_equal_parameters(comm, named))
        sync.watch(ddp)
    except BaseException:
        sync.close()
        raise
    return sync


def _parts(module: nn.Module, replicate: Any, groups: Groups, options: Options) -> Any:
    """Describe how this replica is split: pieces and kinds of parameters, ranks, and the consensus."""
    from sparsync.gradients.consensus import PartsConsensus  # DTensor takes 0.4 s to import
    from sparsync.gradients.shards import Fsdp, ranks_of, shards_of

    ranks = ranks_of(replicate)
    shards = shards_of(module, ranks)
    Fsdp(module).check_covers(shards)
    pieces = {p.name: p.piece for p in shards if p.piece is not None}
    kinds = {p.name: p.kind for p in shards}
    return pieces, kinds, ranks, PartsConsensus(options.parts(ranks, groups))
