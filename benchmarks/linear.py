"""Train linear models on trigrams; compare sparse exchanges with dense, and with scikit-learn.

    python benchmarks/linear.py     (4 minutes; Linux; writes benchmarks/linear.md)

This runs the equivalent of these commands, one after the other, and shows the ratios first:

    sparsync linear --lab 1gbit --ranks 8 --compare dense,allgather,...
    sparsync linear --lab 1gbit --ranks 8 --solver scd --steps 100 --compare dense

Then it runs ``SparseLinearClassifier`` and scikit-learn's ``SGDClassifier`` on one rank.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from sklearn.linear_model import SGDClassifier

from sparsync.published.sparcml.linear import SparseLinearClassifier, trigram_shard

HERE = Path(__file__).parent
SPARSE = "allgather,recursive-doubling,ring,topkdsa,sparcml-auto"
RUNS = {  # heading -> arguments
    "SGD, logistic": ["--exchange", "split-allgather", "--compare", f"dense,{SPARSE}"],
    "SGD, svm": ["--model", "svm", "--exchange", "split-allgather", "--compare", "dense"],
    "SCD, logistic": ["--solver", "scd", "--exchange", "allgather", "--compare", "dense"],
}
HEADINGS = (
    "exchange",
    "communication ratio",
    "updates ratio",
    "time ratio",
    "bytes ratio",
    "s per epoch",
    "communication, s",
    "sent per epoch, MB",
    "loss",
    "difference to dense",
    "accuracy, %",
)


def train(arguments: argparse.Namespace, options: list[str]) -> list[dict]:
    """Run one command in a separate process; return its results."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "linear.json"
        command = [sys.executable, "-m", "sparsync", "linear", "--ranks", str(arguments.ranks)]
        command += ["--epochs", str(arguments.epochs), "--steps", str(arguments.steps)]
        command += ["--dimensions", str(arguments.dimensions), "--json", str(path)]
        command += ["--cache", folder, *options]
        if arguments.lab:
            command += ["--lab", arguments.lab]
        if arguments.rows:
            command += ["--rows", str(arguments.rows)]
        subprocess.run(command, check=True, timeout=3600)
        return json.loads(path.read_text("utf-8"))


def line(result: dict) -> str:
    """Return one row of a table."""

    def mean(key: str) -> float:
        return sum(result[key]) / len(result[key])

    updates = f"{result['speedup_updates']:.1f}" if result["solver"] == "scd" else "-"
    cells = [
        result["exchange"],
        f"{result['speedup_communication']:.1f}",
        updates,
        f"{result['speedup']:.2f}",
        f"{result['bytes_ratio']:.1f}",
        f"{mean('seconds'):.2f}",
        f"{mean('seconds_communication'):.3f}",
        f"{mean('bytes_sent') / 1e6:.3g}",
        f"{result['objective'][-1]:.5f}",
        f"{result['objective_difference']:.1e}",
        f"{100 * result['accuracy'][-1]:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def section(heading: str, results: list[dict]) -> list[str]:
    """Return the section on one command's measurements."""
    first = results[0]
    carriers = "/".join(sorted({result["transport"] for result in results}))
    equal = all(result["replicas_equal"] for result in results)
    return [
        "",
        f"## {heading}",
        "",
        f"{first['rows']:,} rows, {first['dimensions']:,} weights, {first['ranks']} ranks over "
        f"{carriers}, {first['steps']} steps per epoch; replicas {'equal' if equal else 'DIFFER'}.",
        "",
        f"| {' | '.join(HEADINGS)} |",
        f"| --- |{' ---: |' * (len(HEADINGS) - 1)}",
        *(line(result) for result in results),
    ]


def accuracy(rows: int, epochs: int, l2: float = 1e-5, lr: float = 20.0) -> list[str]:
    """Compare the accuracy with scikit-learn's on a tenth of the rows; one rank, the same penalty."""
    shard = trigram_shard(rows=rows)
    cut = rows * 9 // 10
    training, held_out = slice(None, cut), slice(cut, None)
    text = [
        "",
        "## Accuracy compared with scikit-learn, one rank",
        "",
        f"{rows:,} trigram samples, a tenth of them held out, l2 = alpha = {l2:g}; ours: {epochs} epochs "
        f"in batches of 8, lr {lr:g}, schedule 1/t.",
        "",
        "| model | difference, points | ours, % | SGDClassifier, % |",
        "| --- | ---: | ---: | ---: |",
    ]
    for model, loss in (("logistic", "log_loss"), ("svm", "hinge")):
        ours = SparseLinearClassifier(
            model, l2=l2, lr=lr, batch_size=8, epochs=epochs, schedule="1/t", dtype="float32"
        )
        scores = [
            100
            * classifier.fit(shard.features[training], shard.labels[training]).score(
                shard.features[held_out], shard.labels[held_out]
            )
            for classifier in (ours, SGDClassifier(loss=loss, alpha=l2, random_state=0))
        ]
        text.append(
            f"| {model} | {scores[0] - scores[1]:+.2f} | {scores[0]:.2f} | {scores[1]:.2f} |"
        )
    return text


def main() -> None:
    """Run all commands, and write the results after each."""
    parser = argparse.ArgumentParser(description="Linear models on trigrams, on real links.")
    parser.add_argument("--output", type=Path, default=HERE / "linear.md")
    parser.add_argument("--lab", default="1gbit", help="empty: simulated")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100, help="most steps of an epoch")
    parser.add_argument("--dimensions", type=int, default=3_231_961)
    parser.add_argument("--rows", type=int, help="default: all")
    parser.add_argument("--accuracy-rows", type=int, default=20_000)
    parser.add_argument("--accuracy-epochs", type=int, default=20)
    arguments = parser.parse_args()
    text = [
        "# Linear models on naturally sparse data",
        "",
        "The data are trigrams of the standard library's sources. Ratios are dense over the exchange.",
        "*Communication*: from the moment when all ranks are ready until the last has its result;",
        "*updates*: only SCD's exchange of updates (derivatives are summed in the same way by all).",
        "Losses are over all training rows.",
        f"{arguments.lab or 'simulated'}; {os.cpu_count()} cores, {platform.machine()}, "
        f"torch {torch.__version__}. Made by `python benchmarks/linear.py`.",
    ]
    for heading, options in RUNS.items():
        text += section(heading, train(arguments, options))
        arguments.output.write_text("\n".join(text) + "\n", "utf-8")
    text += accuracy(arguments.accuracy_rows, arguments.accuracy_epochs)
    arguments.output.write_text("\n".join(text) + "\n", "utf-8")


if __name__ == "__main__":
    main()
