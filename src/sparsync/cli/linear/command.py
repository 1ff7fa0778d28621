"""The command ``sparsync linear``: logistic regression and linear SVMs on sparse data, in parallel."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from sparsync.cli.flags import Json, Network, option, takes
from sparsync.cli.launch import leads, on_one_thread
from sparsync.cli.linear.report import LinearResult, tables, with_ratios
from sparsync.cli.linear.settings import LinearSettings
from sparsync.cli.named_algorithms import OPTIONS_HELP, labels
from sparsync.cli.network_choice import USUAL_NETWORK, parse_network
from sparsync.cli.output import check_outputs, write_json
from sparsync.cli.values import Only, Readable, check
from sparsync.console import say
from sparsync.errors import ConfigurationError
from sparsync.presets import PRESETS
from sparsync.published.sparcml.presets import DECIDED, EXCHANGES

__all__ = ["command", "train_linear"]

_EXCHANGE = f"A lossless collective: {', '.join(EXCHANGES)}. {OPTIONS_HELP}"


def _exchanges(text: str) -> tuple[str, ...]:
    """Return a label for every exchange in a list."""
    return labels(text, PRESETS, among=EXCHANGES, decided=DECIDED, kind="exchange")


def train_linear(settings: LinearSettings) -> list[LinearResult] | None:
    """Train once per exchange; under a launcher, only rank 0 returns results, other ranks return None.

    Example:
        >>> small = {"ranks": 2, "rows": 200, "dimensions": 5_000, "epochs": 2}
        >>> settings = LinearSettings(transport="sim", exchanges=("ring", "dense"), **small)
        >>> ring, dense = train_linear(settings)
        >>> ring.objective[2] < ring.objective[0], ring.objective_difference < 1e-5
        (True, True)
    """
    # imported here because it imports SciPy
    from sparsync.cli.linear.rank import simulate_all, train_all

    connection = settings.connection()
    if connection.simulated:
        connection.prepare()
        with on_one_thread():
            return with_ratios(simulate_all(settings))
    results: list[LinearResult] | None = connection.start(train_all, settings.ranks, settings)
    return None if results is None else with_ratios(results)


@takes(LinearSettings)
def command(
    *,
    exchange: Annotated[str | None, option(_EXCHANGE, "split-allgather; for scd allgather")] = None,
    compare: Annotated[
        str | None,
        option(
            "Repeat the training with these exchanges, separated by commas; ratios are to dense."
        ),
    ] = None,
    network: Network = USUAL_NETWORK,
    aggregation: Annotated[
        str, option("sync, or async: steps go on while gradients are under way.")
    ] = "sync",
    staleness: Annotated[
        int | None, option("async: gradients are applied this many steps late.", "1")
    ] = None,
    predict: Annotated[
        Path | None,
        Readable(),
        option("Do not train: predict the labels of --data with the model in this file."),
    ] = None,
    out: Annotated[
        Path | None,
        Only(("predict",)),
        option("Write the predicted labels to this file, one per line.", "standard output"),
    ] = None,
    json: Json = None,
    **fields: Any,
) -> None:
    """Train a linear model on sparse data, data-parallel, with a lossless sparse exchange.

    Messages are as sparse as the data, and nothing is dropped, so losses are the same as with the
    dense exchange (--compare dense). Starts local ranks, or runs on the ranks of a launcher.
    """
    if predict is not None:
        training = {"exchange": exchange, "compare": compare, "aggregation": aggregation}
        _predict(
            predict, out, json, {**fields, **training, "network": network, "staleness": staleness}
        )
        return
    check("aggregation", aggregation, aggregation in ("sync", "async"), "sync or async")
    if aggregation == "sync" and staleness:
        raise ConfigurationError(
            f"staleness is {staleness} with --aggregation sync; choose async, or leave it out"
        )
    late = 1 if staleness is None and aggregation == "async" else staleness or 0
    exchange = exchange or ("allgather" if fields["solver"] == "scd" else "split-allgather")
    exchanges = [*_exchanges(exchange), *(_exchanges(compare) if compare else ())]
    settings = LinearSettings(
        exchanges=tuple(dict.fromkeys(exchanges)),
        links=parse_network(network),
        staleness=late,
        **fields,
    )
    settings.connection().refuse_network(network)
    if leads():
        check_outputs(json)
        check_outputs(settings.save)
    settings.connection().prepare()
    results = train_linear(settings)
    if results is None:
        return
    write_json(json, results)
    Console().print(tables(results), highlight=False)
    if not all(result.replicas_equal for result in results):
        raise typer.Exit(1)


def _predict(model: Path, out: Path | None, json: Path | None, given: dict[str, Any]) -> None:
    """Predict in this process, and write one label per line."""
    settings = LinearSettings(data=given["data"], cache=given["cache"])
    usual = {**vars(settings), "aggregation": "sync", "network": USUAL_NETWORK, "staleness": None}
    for name, value in given.items():
        if name not in ("data", "cache", "ranks", "timeout") and value != usual.get(name):
            raise ConfigurationError(
                f"--{name.replace('_', '-')} is for training; omit it, or --predict"
            )
    check_outputs(json)
    check_outputs(out)
    # imported here because they import SciPy
    from sparsync.cli.linear.rank import predict
    from sparsync.published.sparcml.linear.data import label_text

    trained, labels, accuracy = predict(settings.data, model, settings.cache)
    text = "".join(f"{label_text(label)}\n" for label in labels.tolist())
    if out is None:
        sys.stdout.write(text)
    else:
        out.write_text(text, "utf-8")
    write_json(json, {"rows": len(labels), "accuracy": accuracy})
    meaning, equal = "", "equal to --data's"
    if len(trained.labels) > 2:  # a class combines several labels, so predictions are -1 and 1
        ones = ", ".join(map(label_text, trained.positive))
        meaning, equal = f" (1 for {ones}, -1 for all others)", "of the class of --data's"
    right = "" if accuracy is None else f", {100 * accuracy:.2f} % of them {equal}"
    say(f"{len(labels):,} labels{meaning}{right}")
