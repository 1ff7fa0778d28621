"""Rows about the training around it: DDP's settings, compilation, loops, optimizers."""

from __future__ import annotations

from .matrix import Row, absent, refused, works

__all__ = ["LOOPS", "OPTIMIZERS", "SETTINGS"]

_MOMENTS = "tests/unit/test_averager_interface.py::test_moments_stay_or_travel_or_are_reset"
_GLOO = "tests/distributed/test_gloo.py::"
_NO_DDP = "It wraps nothing."

SETTINGS = (
    Row(
        "`static_graph=True`",
        works("case static_graph", "The first step is exchanged behind the backward pass."),
        absent(_NO_DDP),
        absent(_NO_DDP),
        absent(_NO_DDP),
    ),
    Row(
        "`static_graph=True` with parameters that nobody uses",
        works(
            "backward_cells.unused_ones_decay_in_a_static_graph",
            "What decay or velocity of the correction does to them reaches them.",
        ),
        absent(_NO_DDP),
        absent(_NO_DDP),
        absent(_NO_DDP),
    ),
    Row(
        "`gradient_as_bucket_view=True`, `zero_grad(set_to_none=False)`, many buckets",
        works("case bucket view", "Units are ours, whatever DDP's buckets are."),
        absent(_NO_DDP),
        absent(_NO_DDP),
        absent(_NO_DDP),
    ),
    Row(
        "a second communication hook",
        refused(f"{_GLOO}test_attach_refuses", "DDP has one; native mixed precision uses it, too."),
        absent(_NO_DDP),
        absent(_NO_DDP),
        absent(_NO_DDP),
    ),
    Row(
        "`torch.compile` of the wrapped model",
        works(
            "case compiled",
            "With `optimize_ddp` at its default; DDP's hooks run between the compiled parts.",
        ),
        works("case compiled", "Of the model; `step()` is not compiled."),
        works("case compiled", "Of the model; `step()` is not compiled."),
        works("case compiled", "Of the model; `step()` is not compiled."),
    ),
    Row(
        "`torch.compile` of the model before it is wrapped",
        works(
            "case compiled inside", "As without; names in saved states have the prefix torch gives."
        ),
        works("case compiled inside", "As above."),
        works("case compiled inside", "As above."),
        works("case compiled inside", "As above."),
    ),
    Row(
        "`torch._dynamo.config.optimize_ddp = 'python_reducer'`",
        refused(
            "backward_cells.python_reducer_is_refused",
            "It hands over gradients one by one, with no end. Wrap under the default.",
        ),
        absent(_NO_DDP),
        absent(_NO_DDP),
        absent(_NO_DDP),
    ),
    Row(
        "activation checkpointing, not reentrant",
        works("case checkpointed", "As without."),
        works("case checkpointed", "As without."),
        works("case checkpointed", "As without."),
        works("case checkpointed", "As without."),
    ),
    Row(
        "activation checkpointing, reentrant",
        works(
            "case checkpointed, reentrant",
            "As without, where DDP itself allows it. Without DDP (`replicate=`) it is refused.",
        ),
        works("case checkpointed, reentrant", "As without."),
        works("case checkpointed, reentrant", "As without."),
        works("case checkpointed, reentrant", "As without."),
    ),
)

_STEP = "A rank that is done trains no more but calls `step()` as often as the others: "

LOOPS = (
    Row(
        "uneven inputs",
        works(
            "uneven_cells.join_delivers_what_is_left",
            "`with ddp.join():`. A rank that is done gives zero gradients and goes on delivering its "
            "residual; averages are over all ranks; what is left in the end is kept and saved.",
        ),
        works(
            "uneven_cells.a_rank_that_is_done_goes_on_stepping",
            f"{_STEP}its residual is delivered, its updates are zero.",
        ),
        works(
            "uneven_cells.a_done_rank_delivers_updates",
            f"{_STEP}without gradients its residual is delivered.",
        ),
        works(
            "uneven_cells.a_done_rank_follows_the_average",
            f"{_STEP}its weights follow the average, and count in it.",
        ),
    ),
    Row(
        "uneven inputs at density 1",
        works("uneven_cells.join_at_density_1_is_ddp", "Ends where plain DDP's `join()` does."),
        absent("It has no `join()`."),
        absent("It has no `join()`."),
        absent("It has no `join()`."),
    ),
    Row(
        "NaN or Inf while a rank is done",
        works(
            "uneven_cells.join_refuses_overflow_on_all",
            "All ranks raise, those that are done out of `join()`.",
        ),
        absent("As on any step."),
        absent("As on any step."),
        absent("As on any step."),
    ),
    Row(
        "`join(divide_by_initial_world_size=False)`, or decay in `correction=` under `join()`",
        refused(
            "uneven_cells.join_refuses_what_it_cannot_do",
            "A rank that is done still delivers, so averages are over all; its weights are old, "
            "so they must not decay.",
        ),
        absent("It has no `join()`."),
        absent("It has no `join()`."),
        absent("It has no `join()`."),
    ),
    Row(
        "evaluation between steps (`eval()`, `no_grad()`)",
        works("case evaluated", "It touches no gradient."),
        works(
            "case evaluated", "Of this rank's weights; `with local.shared():` for the common ones."
        ),
        works("case evaluated", "As without."),
        works("case evaluated", "Of this rank's weights."),
    ),
    Row(
        "an exception in one rank's forward pass, caught, and on with the next batch",
        works(
            "case failing forward",
            "The others wait for it. A rank that leaves out a step altogether is one short in the "
            "end: the others' last exchange ends at its deadline, with an error.",
        ),
        works("case failing forward", "As attach."),
        works("case failing forward", "As attach."),
        works("case failing forward", "As attach."),
    ),
)

OPTIMIZERS = (
    Row(
        "SGD",
        works("case plain", "Replicas are bit-identical."),
        works("case plain", "Period 1 and density 1 is training on the averaged gradient."),
        works("case plain", "Density 1 is training on the averaged gradient."),
        works("case plain", "Averaging after every step is training on the averaged gradient."),
    ),
    Row(
        "SGD with momentum and weight decay",
        works(
            "case momentum",
            "Applied to averages. Below 0.1 % let `correction=` do it before "
            "(`docs/optimizers.md`); twice is refused if `optimizer=` is given.",
        ),
        works("case momentum", "Momentum is local: this rank's."),
        absent("`UpdateSpaceSGD` has none."),
        works("case momentum", "Momentum is local, or averaged by `moments=`."),
    ),
    Row(
        "momentum correction (`correction=`)",
        works(f"{_GLOO}test_momentum_correction_under_ddp", "At density 1 it is torch's momentum."),
        absent("Its momentum is the local optimizer's."),
        absent("It has none."),
        absent("It has none."),
    ),
    Row(
        "Adam and AdamW",
        works(
            "case AdamW",
            "Exact at density 1; below it `attach(optimizer=)` warns: its second moment is not that of "
            "dense training. Prefer `LocalUpdates`.",
        ),
        works("case AdamW", "Moments are local; nothing of the updates is lost."),
        works("local_cells.local_momenta_lose_nothing", "`UpdateSpaceAdamW`: moments are local."),
        works(_MOMENTS, "Moments are local, averaged, or reset by `moments=`."),
    ),
    Row(
        "Adafactor, Adagrad, RMSprop, Rprop, Adadelta",
        works("case Adafactor", "As Adam: exact at density 1, a warning below it."),
        works("case Adafactor", "As any local optimizer."),
        absent("It is the optimizer itself."),
        works("case Adafactor", "As any local optimizer."),
    ),
)
