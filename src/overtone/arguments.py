"""From the words of the command line to the command they mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import tyro

from overtone import rundir, settings
from overtone.commands import Bench, Demo, Export, Plan, Report, Train
from overtone.config import Comparison, ConfigError, Run, Simulation
from overtone.recipes import RECIPES


def parse(arguments: Sequence[str]) -> object:
    """The command that these arguments of the command line say."""
    train = Train(settings=_base(arguments)) if arguments[:1] == ["train"] else Train()
    kinds = (
        Annotated[Train, tyro.conf.subcommand("train", default=train)]
        | Annotated[Simulation, tyro.conf.subcommand("simulate")]
        | Annotated[Demo, tyro.conf.subcommand("demo")]
        | Annotated[Comparison, tyro.conf.subcommand("compare")]
        | Annotated[Report, tyro.conf.subcommand("report")]
        | Annotated[Plan, tyro.conf.subcommand("plan")]
        | Annotated[Export, tyro.conf.subcommand("export")]
        | Annotated[Bench, tyro.conf.subcommand("bench")]
    )
    return tyro.cli(
        kinds,
        prog="overtone",
        description="Train one model on many machines joined by thin wires.",
        args=list(arguments),
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
    )


def _base(arguments: Sequence[str]) -> Run:
    """What the flags start from: a recipe, a file or an earlier run, each if there is one."""
    if (told := settings.told(Run())) is not None:
        return told
    recipe, config, resume, out = (_value_of(arguments, f"--{flag}") for flag in ("recipe", "config", "resume", "out"))
    run = Run()
    if recipe is not None:
        if recipe not in RECIPES:
            raise ConfigError(f"recipe {recipe!r}: unknown; there are {', '.join(RECIPES)}")
        run = RECIPES[recipe]()
    if resume is not None:
        if out is not None:
            raise ConfigError(f"out={out}: a resumed run stays where it is, in {resume}; leave --out away")
        rundir.refuse_unused(Path(resume), "resume")
        run = replace(settings.load(Path(resume) / rundir.CONFIG, run), out=Path(resume))
    if config is not None:
        run = settings.load(Path(config), run)
    return run


def _value_of(arguments: Sequence[str], flag: str) -> str | None:
    """The last one counts, as everywhere on the command line."""
    found = None
    for argument, following in zip(arguments, [*arguments[1:], None], strict=True):
        if argument == flag:
            found = following
        elif argument.startswith(f"{flag}="):
            found = argument.partition("=")[2]
    return found
