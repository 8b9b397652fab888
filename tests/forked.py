"""Command lines of `overtone`, each in a fork of one process that has imported everything: a tenth of a second each.

For command lines that end before anything is started; tests/kill/warm.py is for whole runs. A fork ends without taking
its libraries apart, which would take most of the time.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SECONDS = 15  # a command line that takes longer hangs
MODULES = (
    "cli.commands", "runs.export", "runs.launch", "runs.open_run", "runs.simulate", "tasks.image.task",
    "tasks.text.task", "bench.codec",
)  # fmt: skip


class Forks:
    """The tests' side."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self, words: Sequence[str], env: Mapping[str, str], cwd: Path) -> tuple[int, str, str]:
        """The exit status (negative: the signal that ended it), standard output and standard error."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(
            json.dumps({"words": list(words), "env": dict(env), "cwd": str(cwd)}), file=self.process.stdin, flush=True
        )
        heard = json.loads(self.process.stdout.readline())
        return heard["status"], heard["out"], heard["err"]

    def close(self) -> None:
        self.process.communicate()


def answer(request: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        if not (pid := os.fork()):
            become(request, out.fileno(), err.fileno())
        _, status = os.waitpid(pid, 0)
        said = {}
        for name, file in (("out", out), ("err", err)):
            file.seek(0)
            said[name] = file.read().decode(errors="backslashreplace")
        return {"status": os.waitstatus_to_exitcode(status), **said}


def become(request: dict[str, Any], out: int, err: int) -> None:
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.chdir(request["cwd"])
    os.environ.update(request["env"])
    sys.argv = ["overtone", *request["words"]]
    signal.alarm(SECONDS)
    status: object = 1
    try:
        from overtone.cli import main

        main()
        status = 0
    except SystemExit as stop:
        status = stop.code
    except BaseException:
        traceback.print_exc()
    if isinstance(status, str):
        print(status, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 1 if status else 0)


if __name__ == "__main__":
    for module in MODULES:
        importlib.import_module(f"overtone.{module}")
    importlib.import_module("overtone.cli.arguments").parse(["simulate"])  # what is built once is built here
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
