"""FSDP2 inside replicas, sparse between them: 2 replicas x 2 shards, and 4 x 1, on gloo."""

import pytest

from sparsync.cli.launch import launch

from . import fsdp_programs

pytestmark = pytest.mark.gloo


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("shards"))
    return launch(fsdp_programs.everything_about_fsdp, 4, directory, timeout=60.0)


@pytest.mark.parametrize(
    "scenario",
    ["densities", "one shard", "accumulation", "resume", "nonfinite", "precision", "unused"],
)
def test_hsdp(fsdp, scenario):
    assert all(fsdp[scenario].values()), fsdp[scenario]


def test_the_law_holds_over_shards_and_replicas(fsdp):
    assert fsdp["law"]


def test_a_part_that_fails_is_heard_of_by_the_others(fsdp):
    assert all(fsdp["fails"].values()), fsdp["fails"]


def test_a_module_that_runs_twice_is_exchanged_once(fsdp):
    assert all(fsdp["again"].values()), fsdp["again"]


def test_a_broken_backward_pass_leaves_no_trace(fsdp):
    assert all(fsdp["broken"].values()), fsdp["broken"]


@pytest.mark.parametrize("scenario", ["unused", "copies"])
def test_what_models_do(fsdp, scenario):
    assert all(fsdp["models"][scenario].values()), fsdp["models"][scenario]


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        ("reentrant", ["inside another", "use_reentrant=False"]),
        ("left", ["still in the gradients", "no_sync()"]),
        ("thawed", ["frozen", "'0.weight'"]),
        ("partly", ["'rare.weight' is not sharded by FSDP2", "fully_shard on the whole"]),
    ],
)
def test_what_models_may_not_do(fsdp, scenario, words):
    for case, message in fsdp["models"][scenario].items():
        assert all(word in message for word in words), (case, message)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("native HSDP", ["holds the replicas", "mesh['shard']"]),
        ("clip", ["Correction(clip=...)", "clip_grad_norm_"]),
        ("DDP", ["replicate= is for models without DDP"]),
        ("parts disagree", ["PeerError", "density"]),
        ("second attach", ["exchanged already", "close()"]),
        ("step without schedule", ["schedule="]),
        ("other weights", ["PeerError", "ranks disagree on parameter"]),
        ("replaced", ["replaced after attach", "assign=True"]),
        ("two dimensions", ["2 dimensions", "mesh['replicate']"]),
    ],
)
def test_what_cannot_work_is_refused(fsdp, name, words):
    message = fsdp["refusals"][name]
    assert all(word in message for word in words), message
