"""From the arguments of the command line to a command and its flags."""

from __future__ import annotations

import io
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import make_dataclass
from functools import reduce
from operator import or_
from typing import Annotated, Any, NamedTuple

import tyro

from overtone.cli import commands
from overtone.cli.commands import COMMANDS
from overtone.errors import ConfigError, OvertoneError, OvertoneWarning, one_line, printable
from overtone.version import __version__

MARKERS = (tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes)
HELP = ("-h", "--help")
MAY_BE_EMPTY = "--title"
OTHER_WORDS = {  # Python's words for a value of the wrong type, and ours
    r"invalid literal for int\(\) with base 10: (.*)": r"\1: not a whole number",
    r"could not convert string to float: (.*)": r"\1: not a number",
    r"no type matching \{None\}(\w+) could be instantiated from \[(.*?)\]\..*": r"\2: not of the kind \1",
    r"Could not find valid parse for arguments: (.*)": r"\1: not of the right kind",
}


class Parsed(NamedTuple):
    """A command line that was understood: a function, and the flags to call it with."""

    run: Callable[[Any], None]
    flags: Any


def parse(arguments: Sequence[str]) -> Parsed:
    """The command and its flags. A wrong command line raises; the --help of a command prints and exits."""
    _refuse_odd(arguments)
    first, second = [*arguments[:2], "", ""][:2]
    if first == "--version":
        return Parsed(print, f"overtone {__version__}")
    if first in HELP or (second in HELP and commands.members_of(first)):
        return Parsed(print, commands.overview("" if first in HELP else first))
    if first.startswith("--tyro-"):  # tyro's own flags, which write completions for a shell
        return Parsed(print, _parse_flags(_all_commands(), "overtone", arguments, None))
    name = commands.find(arguments)
    command = COMMANDS[name]
    given = _with_new_names(arguments[len(name.split()) :])
    flags = _parse_flags(command.flags, f"overtone {name}", given, command.defaults_for(given))
    return Parsed(command.run, flags)


def _refuse_odd(arguments: Sequence[str]) -> None:
    """Refuse two kinds of arguments that no flag takes: bytes that are not UTF-8, since neither a log nor a
    configuration could hold them, and empty texts, since an empty path would mean the current directory."""
    before = ""
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if not argument or (argument.startswith("--") and equals and not value):
            name = flag or before
            if name != MAY_BE_EMPTY:
                raise ConfigError(f"{name or 'command line'} '': empty; give a value, or leave it out")
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"{before} {printable(argument)}: not UTF-8; rename it".strip()) from None
        before = argument


def _with_new_names(arguments: Sequence[str]) -> list[str]:
    """The same arguments with the present name of every flag that had another name in an earlier version."""
    from overtone.runs.toml import RENAMED  # here, because it imports torch

    given = {argument.partition("=")[0] for argument in arguments}
    found = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        renamed = flag.startswith("--") and name in RENAMED
        if renamed and (present := f"--{RENAMED[name].replace('_', '-')}") in given:
            raise ConfigError(f"{flag}: the former name of {present}, which is given too; {present} is enough")
        found.append(f"--{RENAMED[name].replace('_', '-')}{equals}{value}" if renamed else argument)
    return found


def _parse_flags(kind: Any, program: str, arguments: Sequence[str], default: Any) -> Any:
    """The flags as tyro reads them. What it prints about a mistake becomes a `ConfigError` of one line."""
    printed = io.StringIO()
    more = {} if default is None else {"default": default}
    try:
        with redirect_stderr(printed):
            return tyro.cli(kind, prog=program, args=list(arguments), config=MARKERS, **more)
    except AssertionError as error:  # tyro's own, about a shell that it does not know
        raise ConfigError(str(error)) from error
    except SystemExit as stop:
        if not stop.code:  # after --help
            raise
        raise _refusal(stop, printed.getvalue()) from None


def _all_commands() -> Any:
    """One type of all commands and their flags. It imports every command."""
    found: list[Any] = []
    groups: dict[str, list[Any]] = {}
    for name, command in COMMANDS.items():
        *group, word = name.split()
        members = groups.setdefault(group[0], []) if group else found
        members.append(Annotated[command.flags, tyro.conf.subcommand(word)])
    for group_name, members in groups.items():
        kind = make_dataclass(group_name.capitalize(), [("command", reduce(or_, members))])
        found.append(Annotated[kind, tyro.conf.subcommand(group_name)])
    return reduce(or_, found)


def _refusal(stop: SystemExit, box: str) -> OvertoneError:
    """The reason why tyro stopped: an error of ours that tyro caught, or the text in the box that tyro printed."""
    cause: BaseException | None = stop
    while cause is not None:
        if isinstance(cause, OvertoneError):
            return cause
        cause = cause.__context__
    return ConfigError(_unboxed(box))


def _unboxed(box: str) -> str:
    """The first sentence in tyro's box, and the flag that tyro suggests."""
    plain = re.sub(r"\x1b\[[0-9;]*m|[│┃|╭╮╰╯]", "", box)
    parts = [" ".join(part.split()) for part in re.split(r"(?:^|\s)[─━-]{3,}(?=\s|$)", plain)]
    title, sentence, *others = [part for part in parts if part] + ["", ""]
    words = re.sub(r"^Error parsing ", "", sentence or title)
    for theirs, ours in OTHER_WORDS.items():
        words = re.sub(theirs, ours, words)
    nearest = re.search(r"Perhaps you meant: (--[\w-]+)", " ".join(others))
    hint = f"; did you mean {nearest[1]}?" if nearest else ""
    return f"{words.rstrip('.')}{hint}; --help shows all flags"


@contextmanager
def warnings_in_one_line() -> Iterator[None]:
    """Print each warning of overtone's own once, in one line like everything else."""
    printed: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if not issubclass(category, OvertoneWarning):
            before(message, category, *place, **more)
        elif str(message) not in printed:
            printed.add(str(message))
            print(f"overtone: {one_line(str(message))}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("always", OvertoneWarning)
        before, warnings.showwarning = warnings.showwarning, show
        yield
