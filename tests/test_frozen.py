"""The public face, frozen: flags and their defaults, the names of `import overtone`, the fields of a `Round`.

Scripts depend on them, so a change must be a decision. If you decided it: add the change to CHANGELOG.md and run
`python tests/test_frozen.py`, which writes tests/golden/public.json anew; the diff of that file belongs to your commit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import overtone
from overtone import cli

FILE = Path(__file__).parent / "golden" / "public.json"
COMMANDS = ("train", "simulate", "demo", "compare", "report", "plan", "export", "bench codec", "bench train")
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
        "flags": {command: flags_of(command) for command in COMMANDS},
        "names": sorted(overtone.__all__),
        "round": [field.name for field in dataclasses.fields(overtone.Round)],
    }


FROZEN = json.loads(FILE.read_text()) if FILE.exists() else {}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_flags_of_every_command_are_frozen(command: str) -> None:
    assert flags_of(command) == FROZEN["flags"][command], WHAT_TO_DO


def test_the_names_of_the_package_are_frozen() -> None:
    assert sorted(overtone.__all__) == FROZEN["names"], WHAT_TO_DO


def test_the_fields_of_a_round_are_frozen() -> None:
    assert [field.name for field in dataclasses.fields(overtone.Round)] == FROZEN["round"], WHAT_TO_DO


if __name__ == "__main__":
    FILE.write_text(json.dumps(public_face(), indent=2) + "\n")
