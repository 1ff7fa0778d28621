"""The command ``sparsync reproduce``."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from sparsync.cli.output import progress
from sparsync.cli.values import Seed, make_folder
from sparsync.console import say
from sparsync.errors import ConfigurationError
from sparsync.names import fold, suggestion
from sparsync_papers.reproduce import Artifact, Settings
from sparsync_papers.reproduce.catalogue import ARTIFACTS, UNAVAILABLE
from sparsync_papers.reproduce.drawing import png
from sparsync_papers.reproduce.report import Finished, catalogue, page, shown, write_files

_Names = Annotated[list[str] | None, typer.Argument(help="What to reproduce; see --list.")]
_List = Annotated[
    bool, typer.Option("--list", help="List what can be reproduced, and what cannot and why.")
]
_All = Annotated[
    bool, typer.Option("--all", help="Run all; with --out also write one page of all results.")
]
_Out = Annotated[Path | None, typer.Option(help="Folder for CSV, JSON, PNG and the page.")]
_Quick = Annotated[
    bool, typer.Option("--quick", help="Scaled down to seconds: tests the code, not the paper.")
]
_Seed = Annotated[Seed, typer.Option(help="Seed of models, data and inputs.")]
_Steps = Annotated[
    int | None,
    typer.Option(min=1, help="Steps of every training, instead of the artifact's own number."),
]
_Seeds = Annotated[
    int | None,
    typer.Option(min=1, help="Repeat every training with this many seeds, and compare the means."),
]
_USUAL = Settings()


def command(
    names: _Names = None,
    list_: _List = False,
    all_: _All = False,
    out: _Out = None,
    quick: _Quick = False,
    seed: _Seed = 0,
    steps: _Steps = None,
    seeds: _Seeds = None,
) -> None:
    """Reproduce tables and figures of the papers; compare the papers' numbers with this run's numbers.

    An artifact that fails does not stop the others; the exit code is then 1.
    """
    console = Console()
    if list_:
        console.print(catalogue(ARTIFACTS, UNAVAILABLE))
        return
    if bool(names) == all_:
        raise ConfigurationError("give either names or --all; --list shows the names")
    wanted = list(ARTIFACTS) if all_ else [find(name) for name in names or ()]
    if steps is not None:
        _refuse("--steps", wanted, lambda artifact: artifact.steps > 0)
    if seeds is not None:
        _refuse("--seeds", wanted, lambda artifact: artifact.repeats)
    if out is not None:
        make_folder(out, "--out")

    def tell(path: Path) -> None:
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)

    def show(finished: Finished) -> None:
        console.print(shown(finished))
        for path in write_files(finished, out) if out is not None else ():
            tell(path)

    finished = reproduce(
        wanted,
        Settings(seed, quick=quick, steps=steps, seeds=seeds),
        draw=out is not None,
        after=show,
    )
    if all_ and out is not None:
        path = out / "index.md"
        path.write_text(page(finished, UNAVAILABLE), encoding="utf-8")
        tell(path)
    failed = [run.artifact.name for run in finished if run.outcome is None]
    if failed:
        Console(stderr=True).print(f"failed: {', '.join(failed)}", highlight=False)
        raise typer.Exit(1)


def _refuse(option: str, wanted: list[Artifact], takes: Callable[[Artifact], bool]) -> None:
    """Raise an error if one of the wanted artifacts does not accept the option."""
    fixed = [artifact.name for artifact in wanted if not takes(artifact)]
    if fixed:
        takers = ", ".join(artifact.name for artifact in ARTIFACTS if takes(artifact))
        raise ConfigurationError(
            f"{option} is for {takers}, not for {', '.join(fixed)}; leave it out there"
        )


def reproduce(
    artifacts: list[Artifact],
    settings: Settings = _USUAL,
    *,
    draw: bool = False,
    after: Callable[[Finished], None] = lambda finished: None,
) -> list[Finished]:
    """Run artifacts one after the other on one thread; record failures and continue."""
    done, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)  # virtual ranks take turns, so more threads would only wait
    try:
        for artifact in artifacts:
            done.append(_run(artifact, settings, draw=draw))
            after(done[-1])
    finally:
        torch.set_num_threads(threads)
    return done


def find(name: str, artifacts: tuple[Artifact, ...] = ARTIFACTS) -> Artifact:
    """Return an artifact by name, ignoring case and separators.

    Raises:
        ConfigurationError: there is no such artifact; the message suggests similar names.

    Example:
        >>> find("Ok-Topk_Table1").paper
        'Ok-Topk'
    """
    by_name = {fold(artifact.name): artifact for artifact in artifacts}
    if fold(name) in by_name:
        return by_name[fold(name)]
    near = suggestion(name, [artifact.name for artifact in artifacts])
    raise ConfigurationError(f"unknown artifact {name!r}{near}; --list shows the names")


def _run(artifact: Artifact, settings: Settings, *, draw: bool) -> Finished:
    started = time.perf_counter()
    if artifact.minutes >= 1 and not settings.quick and settings.steps is settings.seeds is None:
        minutes = "a minute" if artifact.minutes == 1 else f"{artifact.minutes:g} minutes"
        say(f"{artifact.name} takes about {minutes} on two idle cores")
    outcome, error, picture = None, "", None
    with progress(shown=not artifact.own_progress) as row, row(artifact.name) as bar:
        try:
            outcome = artifact.run(replace(settings, advance=bar))
            picture = png(outcome.panels) if draw and outcome.panels else None
        except Exception as failure:  # run the other artifacts, whatever this one raised
            outcome, error = None, f"{type(failure).__name__}: {failure}".splitlines()[0]
    seconds = time.perf_counter() - started
    return Finished(artifact, outcome, seconds, settings.seed, settings.quick, error, picture)
