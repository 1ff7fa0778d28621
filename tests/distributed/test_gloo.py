"""The same contracts and the DDP hook on real processes: few and grouped, because starting is slow."""

import pytest

from sparsync import testing
from sparsync.cli.launch import RankError, launch
from sparsync.transports.sim import simulate
from tests.contracts.table import ALGORITHMS, CALLS, OTHERS, exercise

from . import call_programs, correction_programs, ddp_programs, programs, update_programs

pytestmark = pytest.mark.gloo

ALL = [*CALLS, *OTHERS, "oktopk, as published"]


@pytest.mark.parametrize(
    ("world_size", "rows"),
    [(3, CALLS), *(pytest.param(p, ALL, marks=pytest.mark.slow) for p in (2, 3))],
)
def test_gloo_equals_the_simulator_bit_for_bit(world_size, rows):
    on_gloo = launch(programs.contracts, world_size, rows, timeout=60.0)
    for name in rows:

        async def program(comm, name=name):
            return await exercise(comm, name)

        assert on_gloo[name] == simulate(program, world_size).results[0], name

    async def whole_steps(comm):
        return await testing.exercise_algorithm(comm, ALGORITHMS["oktopk"])

    assert on_gloo["algorithm oktopk"] == simulate(whole_steps, world_size).results[0]
    assert on_gloo["announced"] == on_gloo["split-allgather"]


def test_calls_without_a_model_overlap_on_gloo_and_zmq():
    results = launch(call_programs.both, 3, timeout=60.0)
    assert all(results["torch"].values()), results["torch"]
    assert all(results["zmq"].values()), results["zmq"]


def test_momentum_correction_under_ddp():
    result = launch(correction_programs.corrections, 2, timeout=60.0)
    assert all(result.values()), result


def test_updates_of_local_optimizers():
    result = launch(update_programs.updates, 3, timeout=60.0)
    assert all(result.values()), result


def test_sparcml_trains_layer_by_layer():
    result = launch(call_programs.sparcml_under_ddp, 2, timeout=60.0)
    assert all(result.values()), result


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("checkpoints"))
    return launch(ddp_programs.everything_about_ddp, 3, directory, timeout=60.0)


def test_every_ddp_setting_gives_the_same_training(ddp):
    assert all(ddp["settings"].values()), ddp["settings"]


def test_no_sync_accumulates(ddp):
    assert ddp["no_sync"]


def test_unused_parameters_lose_nothing(ddp):
    assert ddp["unused"] == {"conserved": True, "delivered": True}


def test_resume_is_exact_with_other_buckets(ddp):
    assert all(ddp["resume"].values()), ddp["resume"]


def test_nonfinite_gradients_are_refused_collectively(ddp):
    assert all(ddp["nonfinite"].values()), ddp["nonfinite"]


def test_the_planner_chooses_alike_on_all_ranks(ddp):
    assert all(ddp["auto"].values()), ddp["auto"]


def test_update_space_is_algorithm_2(ddp):
    assert all(ddp["update space"].values()), ddp["update space"]


def test_mixed_dtypes_and_empty_parameters_train(ddp):
    assert all(ddp["odd"].values()), ddp["odd"]


def test_a_forgotten_handle_ends_its_thread(ddp):
    assert ddp["forgotten"]


def test_states_of_different_steps_are_refused(ddp):
    assert "step of the saved state" in ddp["different steps"]


def test_a_parameter_that_was_frozen_at_attach_is_named(ddp):
    assert "requires_grad=False when attach was called" in ddp["thawed"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("not DDP", ["DistributedDataParallel", "Sequential", "wrap it"]),
        ("unknown name", ["'oktopq'", "allgather", "dense", "oktopk-paper"]),
        ("density 0", ["density is 0.0", "(0, 1]"]),
        ("density 2", ["density is 2", "(0, 1]"]),
        ("unknown option", ["treshold_period", "threshold_period"]),
        ("bad option", ["threshold_period is 0", "at least 1"]),
        ("bad policy", ["'ignore'", "raise, skip, propagate"]),
        ("second attach", ["already", "freshly wrapped"]),
        ("bad timeout", ["timeout is inf", "10^6"]),
        ("other cap", ["PeerError", "options", "('cap', "]),
        ("other policy", ["PeerError", "settings", "nonfinite="]),
        ("other units", ["PeerError", "settings", "unit_bytes=100"]),
        ("ranks disagree", ["PeerError", "density", "rank 0 has 0.01", "rank 1 has 0.02"]),
    ],
)
def test_attach_refuses(ddp, name, words):
    message = ddp["refusals"][name]
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_a_dead_rank_gets_every_other_rank_a_named_error():
    with pytest.raises(RankError) as caught:
        launch(programs.one_rank_dies, 3, 1, timeout=30.0)
    lines = str(caught.value).splitlines()
    assert lines[1] == "rank 1: died with exit code 7"
    for rank in (0, 2):
        assert lines[rank].startswith(f"rank {rank}: PeerError: rank {rank}, step 2"), lines[rank]
        assert "phase '" in lines[rank]


def test_a_silent_rank_runs_into_the_deadline():
    with pytest.raises(RankError) as caught:
        launch(programs.one_rank_sleeps, 2, 1, timeout=30.0)
    assert "rank 0: DeadlineError: rank 0, step 0" in str(caught.value)
    assert "within 1.5 s" in str(caught.value)
