"""Run ``sparsync doctor`` on real processes, and on real links of a known rate."""

import json

import pytest
import typer

from sparsync.cli.app import exit_code
from sparsync.cli.doctor import command as doctor
from sparsync.cli.doctor.command import DoctorSettings
from sparsync.cli.lab import Lab
from sparsync.cost.machine import Machine
from sparsync.errors import ConfigurationError

pytestmark = [pytest.mark.gloo, pytest.mark.alone]


def test_the_command_examines_local_ranks(tmp_path, capsys):
    path, app = tmp_path / "machine.json", typer.Typer()
    app.command()(doctor.command)
    options = ["--ranks", "2", "--transport", "torch", "--seconds", "1", "--json", str(path)]
    code = exit_code(lambda: app(options, standalone_mode=False))
    out, err = capsys.readouterr()
    found = json.loads(path.read_text())
    assert code == any(check["level"] == "bad" for check in found["checks"]), err
    assert "2 ranks at " in out
    machine = Machine.from_json(path.read_text())
    for name, value in machine.as_dict().items():
        low, high = found["intervals"][name]
        assert 0 <= low <= value <= high, name
    assert [(link["source"], link["dest"]) for link in found["links"]] == [(0, 1), (1, 0)]
    assert {facts["host"] for facts in found["ranks"]} == {None}


def test_it_measures_the_rate_of_the_lab():
    try:
        with Lab(2, "1gbit"):
            pass
    except ConfigurationError as error:
        pytest.skip(str(error))
    pytest.importorskip("zmq")
    found = doctor.doctor(DoctorSettings(ranks=2, lab="20mbit", seconds=2.0))
    assert found is not None and found.transport == "zmq"
    # headers of Ethernet, IP and TCP take 4.4 % of the rate, and busy cores delay some messages
    assert 0.5 < 8 / found.calibration.machine.beta / 20e6 < 1.0
