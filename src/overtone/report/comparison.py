"""A comparison of several methods: its configuration, and the runs that it consists of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from overtone.common import limits
from overtone.common.limits import COUNT, Limit, check
from overtone.errors import ConfigError
from overtone.methods import METHODS, STORE, takes
from overtone.report import history
from overtone.report.history import History
from overtone.runs import directory, toml
from overtone.runs.config import Logging, MethodChoice, Network, Run, Saving, Shared, Simulation, handed_on
from overtone.runs.spectrum import refuse_unfit
from overtone.tasks import refuse_missing

CELLS = "runs"  # the directory of the runs, below the comparison's own

COMPARISON = {
    "every": Limit("local steps between rounds", 1, COUNT),
    "replicas": limits.REPLICAS,
    "workers": limits.WORKERS,
}


@dataclass(frozen=True)
class Comparison(Logging, Shared):
    """Run several methods on the same task, data, samples and seeds, and show them on one page.

    Finished runs are kept: the same command continues a comparison that was interrupted.
    """

    methods: tuple[str, ...] = ("alone", "ddp", "diloco:lr=0.9,momentum=0.8", "published", "decoupled")
    """Methods: NAME, or NAME:key=value,key=value where a key is a flag's name, such as decoupled:keep=512,bits=2."""
    every: int = 10
    """Local steps between two rounds (papers: H), for all methods that have this option."""
    seeds: tuple[int, ...] = (0,)
    """Seeds. Each method runs once with each of them."""
    processes: bool = False
    """Train real replicas, each in a process on this machine, instead of virtual ones."""
    workers: int | None = None
    """Number of runs at the same time. By default one for each core, or one with --processes."""
    title: str = "overtone: methods side by side"
    """Title of the page."""
    network: Network = field(default_factory=Network)

    def __post_init__(self) -> None:
        check(self, {**COMPARISON, **limits.WRITING}, ConfigError)
        for name in ("methods", "seeds"):
            given = getattr(self, name)
            if not given:
                raise ConfigError(f"{name}: none given; give at least one")
            if len(set(given)) < len(given):
                raise ConfigError(f"{name} {' '.join(map(str, given))}: one of them is given twice; give each once")
        for seed in self.seeds:
            if not limits.SEED.takes(seed):
                raise ConfigError(f"seeds {limits.shown(seed)}: {limits.SEED}")


@dataclass(frozen=True)
class Cell:
    """One run of a comparison."""

    entry: str  # of --methods, as the user wrote it
    folder: Path
    config: Simulation | Run

    @property
    def seed(self) -> int:
        return self.config.seed

    @property
    def steps(self) -> int:
        return self.config.training.steps

    def arguments(self) -> list[str]:
        """The words that follow `overtone` on the command line of this run."""
        if isinstance(self.config, Simulation):
            return ["simulate", *toml.flags(self.config, Simulation())]
        if (self.folder / directory.CONFIG).exists():
            return ["train", "--resume", str(self.folder), "--task", self.config.task.task]
        return ["train", *toml.flags(self.config, Run())]

    def history(self) -> History | None:
        """The run's log so far; None if there is none."""
        return history.so_far(self.folder)


def cells(asked: Comparison, folder: Path) -> list[Cell]:
    """All runs of the comparison. A method or an option that does not exist is refused before anything runs."""
    if asked.processes and asked.network != Network():
        raise ConfigError(
            "processes: real replicas use the real network; leave out bandwidth, up, down, latency and step_seconds"
        )
    entries: dict[str, str] = {}  # by the run that they mean
    looks = 0
    for entry in asked.methods:
        config = configured(asked, entry, 0, folder)
        refuse_missing(config.task)  # here, once, and not in every run
        meaning = str([config.choice.build().numbers(), toml.flat(replace(config, choice=MethodChoice()))])
        if meaning in entries:
            raise ConfigError(f"methods {entry}: the same run as {entries[meaning]}; give one of them")
        entries[meaning] = entry
        looks += _looks(config)
    if asked.spectrum and not looks:
        raise ConfigError(
            f"spectrum={asked.spectrum}: none of {', '.join(asked.methods)} exchanges drift, and only a drift can be "
            "looked at; leave it out, or add a method such as decoupled"
        )
    found: list[Cell] = []
    for seed in asked.seeds:
        for number, entry in enumerate(asked.methods):
            place = folder / CELLS / f"{_slug(entry)}-seed{seed}"
            if any(cell.folder == place for cell in found):  # two entries that differ only in special characters
                place = place.with_name(f"{place.name}-{number}")
            found.append(Cell(entry, place, configured(asked, entry, seed, place)))
    return found


def configured(asked: Comparison, entry: str, seed: int, out: Path) -> Simulation | Run:
    """The configuration of the run that an entry such as ``decoupled:keep=512,bits=1`` means."""
    name, _, settings = entry.partition(":")
    every = asked.every if name in METHODS and "every" in takes(name) else None
    choice, shared = MethodChoice(name, every=every), handed_on(asked, Shared)
    base: Simulation | Run
    if asked.processes:
        base = Run(choice=choice, saving=Saving(**handed_on(asked, Logging)), **shared)
    else:
        base = Simulation(choice=choice, network=asked.network, **handed_on(asked, Logging), **shared)
    values: dict[str, Any] = {}
    for key, value in _settings(entry, settings):
        if key in values:
            raise ConfigError(f"methods {entry}: {key} is given twice; give it once")
        values[key] = value
    if asked.spectrum and not choice.build().signal.keeps_start:
        values.setdefault("spectrum", 0)  # no drift to look at
    config = replace(toml.updated(base, values, f"methods {entry}"), seed=seed, out=out)
    method = config.choice.build()
    refuse_unfit(_looks(config), method)
    if asked.processes and method.exchange == STORE:
        raise ConfigError(
            f"methods {entry}: processes of a comparison send each other messages, and have no store; leave out "
            "--processes, or this method"
        )
    return config


def _looks(config: Simulation | Run) -> int:
    return config.saving.spectrum if isinstance(config, Run) else config.spectrum


def _settings(entry: str, settings: str) -> Iterator[tuple[str, Any]]:
    """The keys and values of an entry. A value is read as TOML, or taken as a text."""
    for part in filter(None, settings.split(",")):
        key, equals, text = part.partition("=")
        if not equals or key.strip() in ("seed", "out", "json", "method"):
            raise ConfigError(f"methods {entry}: {part}: a method's options are key=value, such as keep=128")
        try:
            yield key.strip(), toml.parsed(f"x = {text}", f"methods {entry}")["x"]
        except ConfigError:
            yield key.strip(), text


def _slug(entry: str) -> str:
    """The entry as part of a file name."""
    return "-".join("".join(c if c.isalnum() or c in "._" else " " for c in entry).split())
