"""From the words of the command line to the command they mean."""

from __future__ import annotations

import io
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from overtone.cli.commands import Bench, Demo, Export, Plan, Report, Train
from overtone.errors import ConfigError, OvertoneError, OvertoneWarning, one_line, printable
from overtone.runs import directory, toml
from overtone.runs.config import Comparison, Run, Simulation
from overtone.runs.recipes import RECIPES
from overtone.tasks import refuse_untrusted

DESCRIPTION = "Train one model on many machines joined by thin wires."
MARKS = (tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes)
RULES = {  # what Python says of a word that is no number, and what we say
    r"invalid literal for int\(\) with base 10: (.*)": r"\1: not a whole number",
    r"could not convert string to float: (.*)": r"\1: not a number",
    r"no type matching \{None\}(\w+) could be instantiated from \[(.*?)\]\..*": r"\2: not of the kind \1",
    r"Could not find valid parse for arguments: (.*)": r"\1: not of the right kind",
}


def parse(arguments: Sequence[str]) -> object:
    """The command that these arguments of the command line say."""
    _refuse_odd(arguments)
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
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            return tyro.cli(kinds, prog="overtone", description=DESCRIPTION, args=list(arguments), config=MARKS)
    except AssertionError as error:  # tyro's own, of a shell that it cannot complete words for
        raise ConfigError(str(error)) from error
    except SystemExit as stop:
        if not stop.code:  # it was asked for help
            raise
        raise _refusal(stop, said.getvalue()) from None


def _refuse_odd(arguments: Sequence[str]) -> None:
    """What no flag takes: bytes that are no text, since neither a log nor a configuration could hold them; nothing at
    all, since a path of no letters is the current directory."""
    before = ""
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if not argument or (argument.startswith("--") and equals and not value):
            name = flag or before
            if name != "--title":
                raise ConfigError(f"{name or 'command line'} '': empty; give a value, or leave it out")
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"{before} {printable(argument)}: not UTF-8; rename it".strip()) from None
        before = argument


def _refusal(stop: SystemExit, box: str) -> OvertoneError:
    """Why tyro stopped: an error of ours that it wraps in a box of its own, or its own words."""
    cause: BaseException | None = stop
    while cause is not None:
        if isinstance(cause, OvertoneError):
            return cause
        cause = cause.__context__
    return ConfigError(_unboxed(box))


def _unboxed(box: str) -> str:
    """The first words of tyro's box, and the flag or the commands that it thinks were meant."""
    plain = re.sub(r"\x1b\[[0-9;]*m|[│┃|╭╮╰╯]", "", box)
    parts = [" ".join(part.split()) for part in re.split(r"(?:^|\s)[─━-]{3,}(?=\s|$)", plain)]
    title, said, *others = [part for part in parts if part] + ["", ""]
    words = re.sub(r"^Error parsing ", "", said or title)
    for theirs, ours in RULES.items():
        words = re.sub(theirs, ours, words)
    nearest = re.search(r"Perhaps you meant: (--[\w-]+)", " ".join(others))
    commands = next((part for part in others if part.startswith("Available subcommands")), "")
    hint = f"; did you mean {nearest[1]}?" if nearest else f"; {commands[:1].lower()}{commands[1:]}" if commands else ""
    return f"{words.rstrip('.')}{hint}; --help shows what there is"


@contextmanager
def warnings_in_one_line() -> Iterator[None]:
    """What our own code warns of, told as everything else is, and once."""
    told: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if not issubclass(category, OvertoneWarning):
            before(message, category, *place, **more)
        elif str(message) not in told:
            told.add(str(message))
            print(f"overtone: {one_line(str(message))}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("always", OvertoneWarning)
        before, warnings.showwarning = warnings.showwarning, show
        yield


def _base(arguments: Sequence[str]) -> Run:
    """What the flags start from: a recipe, a file or an earlier run, each if there is one."""
    if (told := toml.told(Run())) is not None:
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
        directory.refuse_unused(Path(resume), "resume")
        run = replace(toml.load(Path(resume) / directory.CONFIG, run), out=Path(resume))
        if _value_of(arguments, "--task") is None and not {"--trust-task", "--trust_task"} & {*arguments}:
            refuse_untrusted(run.task, Path(resume), "resume")
    if config is not None:
        run = toml.load(Path(config), run)
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
