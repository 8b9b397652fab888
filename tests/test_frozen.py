"""The public face, frozen: flags and their defaults, the names of `import overtone`, the fields of a `Round`.

Scripts depend on them, so a change must be a decision. If you decided it: add the change to CHANGELOG.md and run
`python tests/test_frozen.py`, which writes tests/golden/public.json anew; the diff of that file belongs to your commit.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import overtone
from overtone import cli
from overtone.cli import commands

FILE = Path(__file__).parent / "golden" / "public.json"
WHAT_TO_DO = "If this was meant, note it in CHANGELOG.md and run `python tests/test_frozen.py`."


def help_of(command: str) -> str:
    """What `overtone COMMAND --help` prints on a terminal of 120 columns."""
    printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with (
        mock.patch.object(sys, "argv", ["overtone", *command.split(), "--help"]),
        mock.patch.dict(os.environ, {"COLUMNS": "120"}),
        contextlib.redirect_stdout(printed),
        contextlib.suppress(SystemExit),
    ):
        cli.main()
    printed.seek(0)
    return re.sub(r"\x1b\[[0-9;]*m", "", printed.read())


def texts_of(command: str) -> dict[str, str]:
    """Each flag or positional argument with the kind of its value, and the text that stands beside it."""
    found: dict[str, str] = {}
    flag = ""
    for line in re.findall(r"│ (.*)│\n", help_of(command)):
        if not line.startswith((" ", "─", "-h,")):
            flag, _, text = line.partition("  ")
            while flag in found:  # a positional argument of the same kind
                flag += "'"
            found[flag] = text.strip()
        elif flag and line.startswith(" "):
            found[flag] = f"{found[flag]} {line.strip()}".strip()
    return {flag: text for flag, text in found.items() if re.match(r"--[a-z]|PATH|\[\[PATH", flag)}


def flags_of(command: str) -> dict[str, str]:
    """Each flag or positional argument with the kind of its value, and its default."""
    found = {}
    for flag, text in texts_of(command).items():
        default = re.search(r"\((default: .*|required)\)$", text)
        assert default, f"{command} {flag}: {text}"
        found[flag] = default[1]
    return found


def public_face() -> dict[str, Any]:
    return {
        "flags": {command: flags_of(command) for command in commands.COMMANDS},
        "names": sorted(overtone.__all__),
        "round": [field.name for field in dataclasses.fields(overtone.Round)],
    }


def python(code: str) -> str:
    """What a new process prints that runs this code; conftest.py has imported torch into this one."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


FROZEN = json.loads(FILE.read_text()) if FILE.exists() else {}


@pytest.mark.parametrize("command", commands.COMMANDS)
def test_the_flags_of_every_command_are_frozen(command: str) -> None:
    assert flags_of(command) == FROZEN["flags"].get(command), WHAT_TO_DO


def test_the_commands_are_frozen() -> None:
    assert list(commands.COMMANDS) == list(FROZEN["flags"]), WHAT_TO_DO


def test_the_names_of_the_package_are_frozen() -> None:
    assert sorted(overtone.__all__) == FROZEN["names"], WHAT_TO_DO


def test_the_fields_of_a_round_are_frozen() -> None:
    assert [field.name for field in dataclasses.fields(overtone.Round)] == FROZEN["round"], WHAT_TO_DO


# -- the package without torch -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["--help"], "bench codec  Measure how fast"),
        (["-h"], "usage: overtone"),
        (["bench", "--help"], "bench train"),
        (["--version"], f"overtone {overtone.__version__}"),
        (["nothing"], "unknown command"),
        ([], "no command"),
    ],
)
def test_an_answer_that_needs_no_torch_does_not_import_it(arguments: list[str], answer: str) -> None:
    printed = python(
        "import sys\n"
        "from overtone.cli import main\n"
        f"sys.argv, sys.stderr = ['overtone', *{arguments}], sys.stdout\n"
        "try: main()\n"
        "except SystemExit as stop: assert stop.code in (0, 2)\n"
        "print('imported:', *({'torch', 'numpy', 'transformers'} & sys.modules.keys()))"
    )
    assert answer in printed
    assert printed.endswith("imported:\n")


def test_import_overtone_imports_torch_when_a_name_needs_it() -> None:
    printed = python(
        "import sys, overtone\n"
        "print('torch' in sys.modules, set(overtone.__all__) <= set(dir(overtone)))\n"
        "from overtone import Replica\n"
        "print('torch' in sys.modules, Replica is overtone.Replica, overtone.rules.Outer.__name__)"
    )
    assert printed == "False True\nTrue True Outer\n"
    with pytest.raises(AttributeError, match="has no attribute 'Replcia'"):
        overtone.Replcia  # noqa: B018


def test_type_checkers_and_python_find_each_name_in_the_same_module() -> None:
    """The imports under TYPE_CHECKING and the table beside them are two lists of one thing."""
    tree = ast.parse(Path(overtone.__file__).read_text())
    (choice,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {alias.name: node.module for node in choice.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == overtone._MODULE_OF  # type: ignore[attr-defined]
    assert all(hasattr(overtone, name) for name in overtone.__all__)


# -- the commands ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_a_command_is_a_named_function_and_its_flags(name: str) -> None:
    command = commands.COMMANDS[name]
    assert command.run.__name__ == f"run_{name.replace(' ', '_')}"
    assert command.run.__doc__
    assert dataclasses.is_dataclass(command.flags)
    first, *_ = (command.flags.__doc__ or "").split("\n\n")
    assert first == command.description, "one line for `overtone --help`, and the first of `overtone COMMAND --help`"


@pytest.mark.parametrize("command", commands.COMMANDS)
def test_every_help_text_stands_alone(command: str) -> None:
    """A sentence of its own: it begins with a capital letter, ends with a full stop, and refers to no neighbour."""
    for flag, text in texts_of(command).items():
        sentence = re.sub(r" *\((default: .*|required)\)$", "", text)
        assert re.fullmatch(r"[A-Z0-9`].{8,}\.", sentence), f"{command} {flag}: {sentence!r}"
        assert not re.search(r"\b([Ll]ikewise|[Dd]itto|as above|Of the)\b", sentence), f"{command} {flag}: {sentence!r}"


if __name__ == "__main__":
    FILE.write_text(json.dumps(public_face(), indent=2) + "\n")
