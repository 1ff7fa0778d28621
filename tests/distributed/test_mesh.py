"""Pipeline stages (dp 2 x pp 2) and tensor parallelism (dp 2 x tp 2), on gloo."""

import pytest

from sparsync.cli.launch import launch

from . import mesh_programs, tensor_programs

pytestmark = pytest.mark.gloo

SCENARIOS = ["pipelines", "bubbles", "resume", "nonfinite", "a part of the world"]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("stages"))
    return launch(mesh_programs.everything_about_meshes, 4, directory, timeout=60.0)


@pytest.mark.parametrize("scenario", [*SCENARIOS, "tensors", "tensors resume", "tensors refuse"])
def test_meshes(mesh, scenario):
    assert all(mesh[scenario].values()), mesh[scenario]


def test_a_forgotten_step_is_named(mesh):
    assert "call step() after every step of the schedule" in mesh["forgotten"]["forgotten"]
    assert "schedule is int" in mesh["forgotten"]["no schedule"]


def test_one_rank_and_a_forgotten_handle():
    result = launch(tensor_programs.alone, 1, timeout=60.0)
    assert all(result.values()), result
