"""The table of commands. To add one: a module with a dataclass of flags, a function that runs it, and a line here.

Only the module of the chosen command is imported. `overtone --help` reads this table and imports none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, get_type_hints

from overtone.errors import ConfigError, printable

DESCRIPTION = "Train one model on many machines joined by thin wires."


@dataclass(frozen=True)
class Command:
    """A command: the module and the function that runs it, and one line for `overtone --help`.

    The function has one parameter, the dataclass of the command's flags. ``defaults`` names a function of the module
    that finds the flags' defaults, if these depend on the arguments.
    """

    module: str
    function: str
    description: str
    defaults: str = ""

    @property
    def run(self) -> Callable[[Any], None]:
        """The function that runs the command."""
        found: Callable[[Any], None] = getattr(import_module(self.module), self.function)
        return found

    @property
    def flags(self) -> type:
        """The dataclass of the command's flags."""
        (kind,) = (kind for name, kind in get_type_hints(self.run).items() if name != "return")
        found: type = kind
        return found

    def defaults_for(self, arguments: Sequence[str]) -> Any:
        """The flags before any flag is read; None if the dataclass itself has all defaults."""
        return getattr(import_module(self.module), self.defaults)(arguments) if self.defaults else None


COMMANDS = {
    "train": Command(
        "overtone.cli.train", "run_train", "Train a task on several replicas, on this machine or under torchrun.",
        defaults="defaults",
    ),
    "simulate": Command(
        "overtone.cli.simulate", "run_simulate",
        "Train a task with K virtual replicas in one process, on a virtual network.",
    ),
    "demo": Command(
        "overtone.cli.demo", "run_demo", "Compare five methods on one small task, in about a minute.",
    ),
    "compare": Command(
        "overtone.cli.compare", "run_compare",
        "Run several methods on the same task, data, samples and seeds, and show them on one page.",
    ),
    "report": Command(
        "overtone.cli.report", "run_report", "Make one page of any runs, real or simulated, and its table as files.",
    ),
    "spectrum": Command(
        "overtone.cli.spectrum", "run_spectrum",
        "Draw the signal of runs that were made with --spectrum, per layer and over time, on one page.",
    ),
    "plan": Command(
        "overtone.cli.plan", "run_plan", "Print how each tensor of a model travels, and the bytes of a round.",
    ),
    "export": Command(
        "overtone.cli.export", "run_export", "Write the model of a run into a folder that other programs can load.",
    ),
    "follow": Command(
        "overtone.cli.follow", "run_follow",
        "Observe a run in a store: replay its rounds as they come, validate, and write a run log.",
    ),
    "replay": Command(
        "overtone.cli.replay", "run_replay",
        "Replay a run in a store: export its model as it was after any round, or verify all of it.",
    ),
    "prune": Command(
        "overtone.cli.prune", "run_prune",
        "Delete old messages and snapshots of a run in a store, which nobody needs to go on.",
    ),
    "bench codec": Command(
        "overtone.cli.bench", "run_bench_codec",
        "Measure how fast one round is encoded and decoded, against the published code and against memory.",
    ),
    "bench train": Command(
        "overtone.cli.bench", "run_bench_train",
        "Measure how fast the loop trains, against torch's DistributedDataParallel and against a bare loop.",
    ),
}  # fmt: skip


def overview(group: str = "") -> str:
    """The text of `overtone --help`, or of `overtone GROUP --help` for commands of two words."""
    found = {name: command for name, command in COMMANDS.items() if name.startswith(group)}
    width = max(map(len, found))
    return "\n".join(
        [
            f"usage: overtone [-h] [--version] {f'{group} ' if group else ''}COMMAND ...",
            "",
            DESCRIPTION,
            "",
            "commands:",
            *(f"  {name:{width}}  {command.description}" for name, command in found.items()),
            "",
            "`overtone COMMAND --help` shows the flags of a command.",
        ]
    )


def find(arguments: Sequence[str]) -> str:
    """The name of the command that the arguments begin with. An unknown one is refused, with a list of the known."""
    for words in (2, 1):
        name = " ".join(arguments[:words])
        if name in COMMANDS:
            return name
    first, *rest = arguments or [""]
    if members := members_of(first):
        asked = f"{first} {printable(rest[0])}: unknown command" if rest else f"{first}: not a whole command"
        raise ConfigError(f"{asked}; give one of {', '.join(members)}; --help shows what they do")
    names = ", ".join(dict.fromkeys(name.split()[0] for name in COMMANDS))
    asked = f"{printable(first)}: unknown command" if first else "no command"
    raise ConfigError(f"{asked}; give one of {names}; --help shows what they do")


def members_of(group: str) -> list[str]:
    """The second words of the commands whose first word is ``group``."""
    return [name.split()[1] for name in COMMANDS if name.split()[:-1] == [group]]
