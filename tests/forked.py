"""Command lines of `overtone`, each in a fork of one process that has imported everything: a tenth of a second each.

For command lines that end before anything is started, or compute in one process; tests/kill/warm.py is for whole runs.
A fork ends without taking its libraries apart, which would take most of the time.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

SECONDS = 300  # only there to end a hang, on however busy a machine
MODULES = (
    "cli.bench", "cli.demo", "cli.export", "cli.follow", "cli.plan", "cli.prune", "cli.replay", "cli.report",
    "cli.simulate", "cli.spectrum", "cli.train",
    "runs.open_run", "tasks.image.task", "tasks.text.task", "bench.codec",
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


@functools.cache
def shared() -> Forks:
    """One server for all tests of this process."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "OVERTONE"))}
    server = Forks({**mine, "OMP_NUM_THREADS": "1"})
    atexit.register(server.close)
    return server


def overtone(*words: object, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`overtone words…`, as `subprocess.run` would tell of it."""
    args = [str(word) for word in words]
    return subprocess.CompletedProcess(args, *shared().run(args, env or {}, Path.cwd()))


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
        with suppress(ImportError):  # of a library that is not installed; who needs it will say so
            importlib.import_module(f"overtone.{module}")
    importlib.import_module("torch._dynamo")  # every optimizer loads it
    importlib.import_module("overtone.cli.arguments").parse(["simulate"])  # what is built once is built here
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
