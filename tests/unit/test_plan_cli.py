"""Test ``sparsync plan``: output, files, and one-line errors for bad input."""

import json
import re

import pytest

from sparsync.cost.machine import Machine
from sparsync.presets import candidates
from tests.tables import cases

BERT = ["--ranks", "32", "--model-size", "133547324", "--network", "10gbit,20us"]
SMALL = ["--ranks", "2", "--model-size", "1000"]


def test_the_table_is_ranked(command):
    code, out, err = command("plan", *BERT, "--density", 0.01, "--compute", 0.18)
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines() if line.startswith(("budgeted", "dense "))]
    assert [row[0] for row in rows[:2]] == ["budgeted", "dense"]
    assert "hidden" in out and "32 ranks, n = 133,547,324, k = 1,335,473 (1 %), 10 Gbit/s" in out
    assert "break-even bandwidth: 3" in out and "Gbit/s (sparse wins below)" in out
    assert "break-even density: 1" in out and "budgeted wins here: 198 ms against" in out
    assert "hidden" not in command("plan", *BERT)[1].splitlines()[2]


def test_help_lists_collectives_alone(command):
    out = " ".join(command("plan", "--help")[1].split())
    assert "With commas: allgather, budgeted, dense, " in out and "those of auto" in out


def test_the_json_has_what_is_asked_for(command, tmp_path):
    path = tmp_path / "new" / "plan.json"
    assert command("plan", *BERT, "--all", "--json", path)[0] == 0
    made = json.loads(path.read_text())
    assert made["choice"] == made["table"][0]["collective"] == "budgeted"
    assert made["why"].startswith("budgeted wins here: ")
    assert made["break_even_bandwidth"] > 1.25e9 and 0 < made["break_even_density"] < 1
    named = {candidate.name for candidate in candidates(planned=False)}
    assert {entry["collective"] for entry in made["table"]} == named
    for entry in made["table"]:
        parts = entry["seconds_selection"] + entry["seconds_exchange"] - entry["seconds_hidden"]
        assert entry["seconds"] == pytest.approx(parts) and entry["bytes_sent"] > 0


def test_json_on_standard_output_stands_alone(command):
    code, out, _ = command("plan", *BERT, "--budget", 1e6, "--json", "-")
    made = json.loads(out)
    assert code == 0 and {entry["collective"] for entry in made["table"]} == {"budgeted", "halving"}


def test_a_measured_machine_is_used_and_a_named_network_goes_before_it(command, tmp_path):
    path = tmp_path / "doctor.json"
    machine = Machine(alpha=1e-3, beta=8e-8, select=0.0, decode=0.0)
    path.write_text(json.dumps({"machine": machine.as_dict()}))
    assert "100 Mbit/s, 1 ms per message" in command("plan", *SMALL, "--machine", path)[1]
    both = ("--machine", path, "--network", "1gbit,1us")
    named = json.loads(command("plan", *SMALL, *both, "--json", "-")[1])
    assert all(entry["seconds_selection"] == 0 for entry in named["table"])
    assert named["table"][-1]["seconds_exchange"] < 1e-3


def test_a_round_trip_comes_on_top(command):
    far = [*BERT, "--density", "0.001", "--rtt", "80ms"]
    assert "40 ms per message" in command("plan", *far)[1]


def test_one_rank_has_one_sentence(command):
    code, out, _ = command("plan", "--ranks", 1, "--model-size", 1000, "--network", "1gbit,1us")
    assert code == 0 and "1 rank, n = 1,000" in out
    assert out.splitlines()[-1] == "dense wins here: one rank has nobody to exchange with"


def test_a_file_that_no_doctor_wrote_is_refused(command, tmp_path):
    path = tmp_path / "other.json"
    for text in ("{}", "no json", '{"machine": {"speed": 1}}'):
        path.write_text(text)
        code, _, err = command("plan", *SMALL, "--machine", path)
        assert code == 2 and err.startswith("error: ") and "achine" in err
    path.write_bytes(b"\xff\xfe\x00")
    assert "not text" in command("plan", *SMALL, "--machine", path)[2]


# ---- several world sizes, and the paper's model ------------------------------------------------------


def test_several_world_sizes_are_a_column_and_a_plan_each(command):
    given = ["--model-size", 133547324, "--network", "10gbit,20us"]
    code, out, err = command("plan", "--ranks", "16,64,256", *given)
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert ["collective", "P", "=", "16", "P", "=", "64", "P", "=", "256"] in rows
    assert [row[0] for row in rows if row[:1] == ["budgeted"]] == ["budgeted"] * 4
    assert all(re.search(rf"^P = {p} +budgeted wins here: ", out, re.M) for p in (16, 64, 256))
    assert "one core's; --machine: your ranks'" in out
    made = json.loads(command("plan", "--ranks", "16,64,256", *given, "--json", "-")[1])
    alone = json.loads(command("plan", "--ranks", 64, *given, "--json", "-")[1])
    assert [one["ranks"] for one in made] == [16, 64, 256] and made[1] == alone


def test_a_collective_over_the_budget_has_a_dash(command):
    given = ["--model-size", 10**6, "--network", "1gbit,1us", "--density", 0.01]
    out = command("plan", "--ranks", "2,64", *given, "--budget", 150_000)[1]
    [first, *_] = [line.split() for line in out.splitlines() if line.startswith("allgather ")]
    assert first[-1] == "-" and first[1] != "-"


def test_the_papers_model_is_table_1_on_my_alpha_and_beta(command):
    """Equation 3 at P = 64, and the rows of TopkA and gTopk, are computed by hand."""
    given = ["--model-size", 10**8, "--density", 0.01, "--network", "alpha=1.5us,beta=0.4ns/word"]
    code, out, err = command("plan", "--model", "paper", "--ranks", "16,64", *given)
    assert (code, err) == (0, "")
    assert "alpha = 1.5 µs per message, beta = 0.4 ns per word of 4 bytes" in " ".join(out.split())
    assert "fastest in the worst case: P = 16: Ok-Topk, P = 64: Ok-Topk" in out
    line = ["plan", "--model", "paper", "--ranks", "16,64", *given, "--json", "-"]
    rows = json.loads(command(*line)[1])
    published = ["Dense", "TopkA", "TopkDSA", "gTopk", "Gaussiank", "Ok-Topk"]
    assert [row["published"] for row in rows[:6]] == published
    [row] = [row for row in rows if (row["collective"], row["ranks"]) == ("oktopk", 64)]
    assert (row["latency"], row["messages"]) == ("2 P + 2 log P", 140)
    most = 140 * 1.5e-6 + 6 * 10**6 * 63 / 64 * 0.4e-9
    assert row["seconds"][1] == pytest.approx(most) and row["words"][1] == 6 * 10**6 * 63 / 64
    named = json.loads(command(*line, "--algorithm", "TopkA,gTopk")[1])
    assert named == [row for row in rows if row["published"] in ("TopkA", "gTopk")]


def test_one_rank_sends_nothing_in_the_papers_model(command):
    line = ["plan", "--model", "paper", "--ranks", 1, "--model-size", 100, "--network", "1gbit,1us"]
    assert "one rank has nobody to exchange with" in command(*line)[1]
    rows = json.loads(command(*line, "--json", "-")[1])
    assert all(row["seconds"] == [0, 0] and row["messages"] == 0 for row in rows)


def test_the_memory_of_a_rank_needs_no_network(command):
    code, out, err = command("plan", "--model-size", "7e9", "--optimizer", "adamw", "--json", "-")
    found = {one["name"]: one for one in json.loads(out)["memory"]}
    assert (code, err) == (0, "")
    alone = {"name": "training itself", "device": 140 * 10**9, "host": 0, "pinned": 0}
    assert found["training itself"] == alone
    # one float per parameter on the device and one on the host; with offload, both on the host
    assert found["updates"]["host"] == 28 * 10**9 < found["updates"]["device"] < 34 * 10**9
    offloaded = found["updates, offload=True"]
    assert offloaded["device"] < 0.2 * 28 * 10**9 and offloaded["host"] == 56 * 10**9
    # pinned memory comes in powers of two
    assert (found["updates"]["pinned"], offloaded["pinned"]) == (2**35, 2**36)


@cases(  # 4 bytes for each entry, and 12 for one in ten
    (["--density", "0.1"], ["+ gradients      5.2 GB"]),
    (["--network", "1gbit,50us"], ["budgeted wins here", "+ gradients      4.12 GB"]),
)
def test_the_memory_of_gradients_is_that_of_selected_entries(given, said, command):
    code, out, _ = command("plan", "--model-size", "1e9", "--optimizer", "sgd", *given)
    assert code == 0 and all(words in out for words in said)
