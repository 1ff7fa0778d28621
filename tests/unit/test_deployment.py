"""Test that the files for launchers fit the published schemas and start existing programs."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
KUBERNETES = list(yaml.safe_load_all((ROOT / "examples" / "kubernetes.yaml").read_text()))
SKYPILOT = yaml.safe_load((ROOT / "examples" / "skypilot.yaml").read_text())


def of_kind(kind):
    return [one for one in KUBERNETES if one["kind"] == kind]


def containers():
    for one in of_kind("Deployment") + of_kind("StatefulSet"):
        yield from one["spec"]["template"]["spec"]["containers"]


def test_the_train_job_fits_the_schema_of_kubeflow():
    models = pytest.importorskip("kubeflow_trainer_api.models")
    (job,) = of_kind("TrainJob")
    # the round trip drops fields that the schema does not know
    assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job


def test_labels_and_ports_fit_each_other():
    (service,) = of_kind("Service")
    lighthouse, ranks = containers()
    (port,) = service["spec"]["ports"]
    assert port["port"] == lighthouse["ports"][0]["containerPort"]
    assert f":{port['port']}" in lighthouse["args"][-1]
    assert ranks["args"][0] == f"http://{service['metadata']['name']}:{port['port']}"
    for one in of_kind("Deployment") + of_kind("StatefulSet"):
        labels = one["spec"]["template"]["metadata"]["labels"]
        assert one["spec"]["selector"]["matchLabels"] == labels
    matched = [one["spec"]["selector"]["matchLabels"] for one in of_kind("Deployment")]
    assert service["spec"]["selector"] in matched


def commands():
    (job,) = of_kind("TrainJob")
    trainer = job["spec"]["trainer"]
    yield [*trainer["command"], *trainer["args"]]
    for container in containers():
        yield [*container["command"], *container["args"]]
    script = SKYPILOT["run"].replace("\\\n", " ")
    for line in script.splitlines():
        words = shlex.split(line)
        if words[:1] in (["python"], ["torchft_lighthouse"]):
            yield words


@pytest.mark.slow
def test_what_is_run_takes_the_options_that_it_is_given():
    for words in commands():
        program = next((word for word in words if word.endswith(".py")), words[0])
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        if program.endswith(".py"):
            shown = [sys.executable, str(ROOT / program), "--help"]
        else:
            pytest.importorskip("torchft")
            shown = [str(Path(sys.executable).parent / program), "--help"]
        told = subprocess.run(shown, capture_output=True, text=True, timeout=60, check=True).stdout
        known = set(re.findall(r"--[a-z_-]+", told.replace("-_", "_")))
        assert given <= known, (words, known)


def test_skypilot_sets_what_the_script_reads():
    used = set(re.findall(r"\$\{?([A-Z_]+)", SKYPILOT["run"]))
    assert used <= {*SKYPILOT["envs"], "SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK"}
    assert all(type(value) is str for value in SKYPILOT["envs"].values())
    assert set(SKYPILOT) <= {"name", "num_nodes", "resources", "workdir", "envs", "setup", "run"}


def test_the_container_file_copies_what_is_there():
    text = (ROOT / "Containerfile").read_text()
    for source in re.findall(r"^COPY (?!--from)(\S+)", text, flags=re.MULTILINE):
        assert (ROOT / source).exists()
    assert f"torch=={pinned('torch')}" in text


def pinned(name):
    found = re.search(rf"^{name}==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert found
    return found[1]
