"""`overtone train`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import tyro

from overtone.cli import plan
from overtone.cli.console import out
from overtone.errors import ConfigError
from overtone.runs import directory, launch, stored, toml
from overtone.runs.config import Run
from overtone.runs.recipes import RECIPES
from overtone.tasks import refuse_missing, refuse_untrusted
from overtone.world.join import check_environment


@dataclass(frozen=True)
class Train:
    """Train a task on several replicas, on this machine or under torchrun.

    A flag overrides the configuration file, the file overrides the recipe, the recipe overrides the defaults.
    """

    recipe: str | None = None
    """Name of a configuration to start from. An unknown name prints a list of them."""
    config: Path | None = None
    """TOML file with a configuration. Its keys are the names of these flags."""
    resume: Path | None = None
    """Directory of a run to continue with its own configuration, which flags may change: more steps, other replicas."""
    trust_task: tyro.conf.FlagCreatePairsOff[bool] = False
    """Run the Python file that the configuration of the resumed run names as its task."""
    dry_run: bool = False
    """Build the model without memory for its weights, print the cost of the run, and train nothing."""
    settings: Run = field(default_factory=Run)


def run_train(flags: Train) -> None:
    """Train, or print the cost of the run."""
    if flags.dry_run:
        out.print(plan.dry_run(flags.settings))
        return
    check_environment()
    if flags.settings.stored.store is not None:
        _refuse_world(flags)
    if not launch.is_replica():  # a replica tells the others if its host lacks something
        refuse_missing(flags.settings.task)
        launch.refuse_too_many(flags.settings.replicas)
    launch.train(flags.settings, resume=flags.resume is not None)


def _refuse_world(flags: Train) -> None:
    """Refuse what makes no sense for a member of a run in a store, which is one process, and comes and goes."""
    settings = flags.settings
    store = settings.stored.store
    assert store is not None
    if launch.is_replica():
        raise ConfigError(f"store={store}: each process joins by itself; start it without torchrun, once per replica")
    if settings.replicas != 1:
        raise ConfigError(
            f"replicas={settings.replicas}: with --store, this process is one replica; start the command once for each"
        )
    stored.refuse_other(store, settings)


def defaults(arguments: Sequence[str]) -> Train:
    """The flags before any flag is read: from the launcher, or from a recipe, an earlier run and a file."""
    if (inherited := toml.inherited(Run())) is not None:
        return Train(settings=inherited)
    recipe, config, resume, out = (_value_of(arguments, f"--{flag}") for flag in ("recipe", "config", "resume", "out"))
    run = Run()
    if recipe is not None:
        if recipe not in RECIPES:
            raise ConfigError(f"recipe {recipe!r}: unknown; there are {', '.join(RECIPES)}")
        run = RECIPES[recipe]()
    if resume is not None:
        if out is not None:
            raise ConfigError(f"out={out}: a resumed run stays where it is, in {resume}; leave --out away")
        directory.refuse_unused(Path(resume), "resume")
        run = replace(toml.load(Path(resume) / directory.CONFIG, run), out=Path(resume))
        if not _trusts(arguments):
            refuse_untrusted(run.task, Path(resume), "resume")
    if config is not None:
        run = toml.load(Path(config), run)
    store = _value_of(arguments, "--store") or run.stored.store
    if store is not None:
        task = run.task.task
        run = replace(stored.inherited(store, run), replicas=1)
        if run.task.task != task and not _trusts(arguments):
            refuse_untrusted(run.task, Path(store), "store")
    return Train(settings=run)


def _trusts(arguments: Sequence[str]) -> bool:
    """True if the user names the task, or allows the one that a configuration of somebody else names."""
    return _value_of(arguments, "--task") is not None or bool({"--trust-task", "--trust_task"} & {*arguments})


def _value_of(arguments: Sequence[str], flag: str) -> str | None:
    """The value of a flag, before tyro reads the arguments. If a flag is given twice, the last value counts."""
    found = None
    for place, argument in enumerate(arguments):
        if argument == flag:
            found = next(iter(arguments[place + 1 :]), None)
        elif argument.startswith(f"{flag}="):
            found = argument.partition("=")[2]
    return found
