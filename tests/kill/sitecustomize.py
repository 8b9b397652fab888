"""Ends a run of `overtone train` at a chosen moment. Python imports this file by itself when its folder is on
PYTHONPATH; without the variable OVERTONE_MOMENT it does nothing.

The variable is JSON: ``where`` names a function ("overtone.rules:Outer.absorb"), which is wrapped in the replica of
this ``rank``. At the ``count``-th call (``edge`` before or after it; of those whose first argument is like ``match``
and that take place at local ``step``, where these are given), once the files ``until`` exist, the replica leaves a note
that the moment was reached and does what ``does`` says.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.util
import json
import os
import signal
import sys
import time
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

VARIABLE = "OVERTONE_MOMENT"
PULSE = "OVERTONE_PULSE"  # seconds between two stop votes, in place of the program's own
LATEST: dict[str, Any] = {}  # the newest Replica and StopVote of this process, by the name of the class


def arm() -> None:
    """Wrap what the environment names; overtone has been imported."""
    if PULSE in os.environ:
        importlib.import_module("overtone.runs.coordination").SECONDS_BETWEEN_VOTES = float(os.environ[PULSE])
    if VARIABLE not in os.environ:
        return
    moment = json.loads(os.environ[VARIABLE])
    if str(moment["rank"]) != os.environ.get("RANK", "0") or moment["where"] == "start":
        return
    for where in ("overtone.replica:Replica", "overtone.runs.coordination:StopVote"):
        _remember(*_find(f"{where}.__init__"))
    owner, name = _find(moment["where"])
    setattr(owner, name, _wrapped(getattr(owner, name), moment))


def _find(where: str) -> tuple[Any, str]:
    module, path = where.split(":")
    *parents, name = path.split(".")
    return functools.reduce(getattr, parents, importlib.import_module(module)), name


def _remember(owner: Any, name: str) -> None:
    made = getattr(owner, name)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        LATEST[owner.__name__] = self
        made(self, *args, **kwargs)

    setattr(owner, name, init)


def _wrapped(function: Any, moment: dict[str, Any]) -> Any:
    calls = 0

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        step = getattr(LATEST.get("Replica"), "steps", 0)
        due = moment["step"] in (None, step) and fnmatch(str(args[0]) if args else "", moment["match"])
        calls += due
        if not due or calls != moment["count"]:
            return function(*args, **kwargs)
        if moment["edge"] == "before":
            act(moment)
            return function(*args, **kwargs)
        if moment["edge"] == "torn":  # half of a line of the run log
            log, event, *_ = args
            log._file.write(json.dumps(event)[:40])
            log._file.flush()
            act(moment)
        found = function(*args, **kwargs)
        if moment["edge"] == "half":  # half of the file that was to be written
            os.truncate(args[1], os.path.getsize(args[1]) // 2)
        act(moment)
        return found

    return call


def act(moment: dict[str, Any]) -> None:
    wait_for(lambda: all(Path(path).exists() for path in moment["until"]), f"files {moment['until']}")
    with Path(moment["note"]).open("a") as note:
        note.write(json.dumps({"pid": os.getpid(), "launcher": os.getppid()}) + "\n")
    DEEDS[moment["does"]]()


def kill_all() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def send(pid: int, number: signal.Signals) -> None:
    """And go on only when this replica knows of it."""
    os.kill(pid, number)
    wait_for(lambda: LATEST["StopVote"].request.name, f"{number.name} to arrive")


DEEDS = {
    "kill all": kill_all,
    "kill launcher": lambda: os.kill(os.getppid(), signal.SIGKILL),
    "freeze": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "kill myself": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "terminate launcher": lambda: send(os.getppid(), signal.SIGTERM),
    "interrupt launcher": lambda: send(os.getppid(), signal.SIGINT),
    "terminate myself": lambda: send(os.getpid(), signal.SIGTERM),
    "nothing": lambda: None,
}


def wait_for(condition: Any, what: str, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {seconds} s for {what}")
        time.sleep(0.002)


class _OnceLoaded(importlib.abc.MetaPathFinder):
    """Arms as soon as overtone.runs.open_run, and with it all the rest, has been imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002
        if name != "overtone.runs.open_run":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def load_and_arm(module: Any) -> None:
            load(module)
            arm()

        spec.loader.exec_module = load_and_arm  # type: ignore[method-assign]
        return spec


if "RANK" in os.environ and (VARIABLE in os.environ or PULSE in os.environ):
    sys.meta_path.insert(0, _OnceLoaded())
    now = json.loads(os.environ.get(VARIABLE, '{"where": ""}'))
    if now["where"] == "start" and str(now["rank"]) == os.environ["RANK"]:
        act(now)
