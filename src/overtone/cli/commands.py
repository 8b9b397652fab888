"""What each command of `overtone` does. A command is a dataclass of flags and a function that runs it."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import singledispatch
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from overtone.cli import plan
from overtone.common import limits
from overtone.errors import ConfigError, NotALogError, RunError, printable, shortened
from overtone.report import compare, history, page_data, standings, table
from overtone.report.format import headline, summary
from overtone.report.live_table import LiveTable
from overtone.runs import directory, simulate
from overtone.runs.config import CodecBench, Comparison, MethodChoice, Run, Simulation, TrainBench
from overtone.runs.directory import write_whole
from overtone.runs.live import metrics_line
from overtone.runs.recipes import demo
from overtone.tasks import TaskOptions, refuse_missing
from overtone.world.join import check_environment

err = Console(stderr=True)
out = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)  # a file has no width


@dataclass(frozen=True)
class Demo:
    """Five methods on one small task, in about a minute: what the bytes buy."""

    steps: int = 600
    """Local steps of every replica."""
    workers: int | None = None
    """Methods at a time, each in a process of one thread; by default one for each core."""
    out: Path | None = None
    """Where the runs and the page go; by default a new directory below runs/."""

    def __post_init__(self) -> None:
        limits.check(self, {"steps": limits.STEPS, "workers": limits.WORKERS}, ConfigError)


@dataclass(frozen=True)
class Report:
    """One page of any runs, real or simulated; beside it the table as Markdown and CSV."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Directories of runs, or of several such (a comparison)."""
    out: Path = Path("report.html")
    """The page."""
    title: str = "overtone: runs side by side"
    """Of the page."""


@dataclass(frozen=True)
class Bench:
    """Measure on this machine what the documentation claims, as ratios within one run."""

    what: Annotated[CodecBench, tyro.conf.subcommand("codec")] | Annotated[TrainBench, tyro.conf.subcommand("train")]


@dataclass(frozen=True)
class Plan:
    """Print how each tensor of a model travels, and what a round costs in bytes."""

    choice: MethodChoice = field(default_factory=MethodChoice)
    task: TaskOptions = field(default_factory=TaskOptions)
    replicas: int = 4
    """Replicas that exchange (papers: K)."""

    def __post_init__(self) -> None:
        limits.check(self, {"replicas": limits.REPLICAS}, ConfigError)


@dataclass(frozen=True)
class Train:
    """Train a task on several replicas: spawns them on this machine, or joins the world that torchrun started.

    A flag overrides the configuration file, the file overrides the recipe, the recipe overrides the defaults.
    """

    recipe: str | None = None
    """A named configuration to begin with; an unknown name lists them."""
    config: Path | None = None
    """A TOML file; its keys are the names of these flags."""
    resume: Path | None = None
    """The directory of a run to go on with, with its configuration; flags may change it, the number of replicas too."""
    trust_task: tyro.conf.FlagCreatePairsOff[bool] = False
    """Let the Python file run that the configuration of a resumed run names as its task."""
    dry_run: bool = False
    """Build the model on no device and print what it would cost; train nothing."""
    settings: Run = field(default_factory=Run)


@dataclass(frozen=True)
class Export:
    """Write the model of a run in the form that others load: Hugging Face transformers where it is one of theirs."""

    run: tyro.conf.Positional[Path]
    """The run's directory."""
    folder: tyro.conf.Positional[Path]
    """Where to write; must not exist yet."""
    task: str | None = None
    """The run's task, where it is a Python file of your own."""
    trust_task: tyro.conf.FlagCreatePairsOff[bool] = False
    """Let the Python file run that the run's configuration names as its task."""


@singledispatch
def run(command: object) -> None:
    raise TypeError(f"no such command: {command!r}")


@run.register
def _(command: Simulation) -> None:
    _one_thread()
    if command.json is not None:
        _check_writable(command.json)
    with _bar() as bar:
        task = bar.add_task(command.choice.method, total=command.training.steps, note="")
        result = simulate.simulate(command, _shown(bar, task))
    if command.json is not None:
        write_json(command.json, result)
    out.print(summary(result))


@run.register
def _(command: Demo) -> None:
    folder = command.out or directory.fresh("demo")
    _compare(replace(demo(command.steps), workers=command.workers), folder, _again(command.out, folder))


@run.register
def _(command: Comparison) -> None:
    folder = command.out or directory.fresh("compare")
    _compare(command, folder, _again(command.out, folder))


def _again(out: Path | None, folder: Path) -> str:
    """This very command, said so that it goes on where it stopped."""
    return shlex.join(["overtone", *sys.argv[1:], *([] if out else ["--out", str(folder)])])


def _compare(asked: Comparison, folder: Path, again: str) -> None:
    cells = compare.cells(asked, folder)
    workers = asked.workers or (1 if asked.processes else os.cpu_count() or 1)
    err.print(f"{len(cells)} runs, into {folder}", highlight=False, markup=False)
    try:
        with directory.claim(folder), LiveTable(err, cells) as live:
            states = compare.make(cells, workers=workers, watch=live)
    except KeyboardInterrupt:
        err.print("overtone: interrupted; what is finished is kept, and this goes on with the rest:", highlight=False)
        err.print(again, highlight=False, markup=False, soft_wrap=True)
        sys.exit(130)
    runs = [found for cell in cells if (found := cell.history()) is not None]
    if runs:
        _tell_standings(runs, folder / "report.html", asked.title, again)
    failed = {folder.name: state.words for folder, state in states.items() if state.state == "failed"}
    if failed:
        name, words = next(iter(failed.items()))
        raise RunError(f"{len(failed)} of {len(cells)} runs failed, first {name}: {words}")


@run.register
def _(command: Report) -> None:
    _check_writable(command.out, "out")
    runs = [_sound(history.load(path)) for path in history.find(command.runs)]
    _tell_standings(runs, command.out, command.title, None)


def _sound(run: history.History) -> history.History:
    """With all that a report needs: the log may be of another program, or made up."""
    try:
        page_data.data(standings.groups([run]), title="")
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise NotALogError(f"{run.path}: the log lacks what a report needs ({shortened(error)})") from error
    return run


def _tell_standings(runs: Sequence[history.History], file: Path, title: str, again: str | None) -> None:
    found = standings.groups(runs)
    page, *others = page_data.write(file, found, title=title, command=again)
    for group in found:
        out.print(printable(headline(group.facts)), markup=False)
        for note in table.notes(group, found[0]):
            out.print(printable(note), style="yellow", markup=False)
        out.print(table.terminal(group))
    for line in table.legend(found):
        out.print(line, style="dim", markup=False)
    out.print(f"page: {page} (and {', '.join(other.name for other in others)})", markup=False)


@run.register
def _(command: Bench) -> None:
    run(command.what)


@run.register
def _(command: CodecBench) -> None:
    codec = _optional("overtone.bench.codec", "bench codec", "bench")
    if command.json is not None:
        _check_writable(command.json)
    torch.set_num_threads(command.threads)
    report = codec.run(command, lambda what: err.print(f"measuring: {what}", highlight=False))
    _tell_report(report, codec.markdown(report), command.json)


@run.register
def _(command: TrainBench) -> None:
    bench = _optional("overtone.bench.train", "bench train", "train")
    if command.json is not None:
        _check_writable(command.json)
    torch.set_num_threads(command.threads)
    from overtone.runs import launch

    check_environment()
    if command.replicas > 1 and not launch.is_replica():
        _refuse_crowd(command.replicas)
        launch.spawn(sys.argv[1:], replicas=command.replicas, threads=command.threads)
        return
    report = launch.in_world(lambda: bench.run(command))
    if report["rank"] == 0:
        _tell_report(report, bench.markdown(report), command.json)


def _optional(module: str, what: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(f"{what}: needs {error.name}; pip install 'overtone[{extra}]'") from error


def _tell_report(report: dict[str, Any], text: str, json: Path | None) -> None:
    if json is not None:
        write_json(json, report)
    print(text)


@run.register
def _(command: Plan) -> None:
    shapes = plan.shapes_of(command.task)
    out.print(plan.describe(command.choice.build(), shapes, command.replicas))


@run.register
def _(command: Train) -> None:
    if command.dry_run:
        out.print(plan.dry_run(command.settings))
        return
    from overtone.runs import launch

    check_environment()
    if not launch.is_replica():  # a host of many may lack what others have: the replicas tell each other
        refuse_missing(command.settings.task)
        _refuse_crowd(command.settings.replicas)
    launch.train(command.settings, resume=command.resume is not None)


def _refuse_crowd(replicas: int) -> None:
    """Each replica is a process of some hundred megabytes."""
    most = max(64, 16 * (os.cpu_count() or 1))
    if replicas > most:
        raise ConfigError(
            f"replicas={replicas}: processes to start on this machine, at most {most}; simulate takes more"
        )


@run.register
def _(command: Export) -> None:
    from overtone.runs.export import export

    step, metrics = export(command.run, command.folder, task=command.task, trust_task=command.trust_task)
    out.print(f"{command.folder}: the model of {command.run} at step {step}; {metrics_line(metrics)}", markup=False)


def write_json(path: Path, value: Any) -> None:
    try:
        write_whole(path, json.dumps(value, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"json {path}: {error.strerror}; the result was not written") from error


def _check_writable(path: Path, flag: str = "json") -> None:
    """Before an hour of work, not after it."""
    if not path.parent.is_dir():
        raise ConfigError(f"{flag} {path}: there is no directory {path.parent}; create it first")
    if path.is_dir():
        raise ConfigError(f"{flag} {path}: is a directory; give the name of a file")
    if path.exists() and not path.is_file():
        raise ConfigError(f"{flag} {path}: a device or a pipe, which would be replaced; give the name of a file")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{flag} {path}: no permission to write into {path.parent}")


def _one_thread() -> None:
    """Small models are slower on two threads than on one, and one thread makes a run repeatable on any machine."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def _shown(bar: Progress, task: TaskID) -> simulate.Progress:
    return lambda step, loss: bar.update(task, completed=step, note=f"loss {loss:.3f}")


@contextmanager
def _bar() -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description:>10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, TimeRemainingColumn(), console=err, disable=not err.is_terminal) as bar:
        yield bar
