"""The run log: one JSON object per line. Everything that is shown of a run comes from its log.

A log is only ever appended to. A run that was interrupted and continues from a checkpoint writes a "resume" event;
`read` then leaves out the events of the steps that were lost. The events are defined in `runs/events.py`.
"""

from __future__ import annotations

import json
import math
import os
import platform
import socket
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol, cast, get_type_hints, is_typeddict

import torch

from overtone.errors import DamagedLogWarning, NotALogError, RunLogError, shortened
from overtone.runs.events import EVENTS, FORMAT, NEEDED, READABLE, Environment, Event, Host, Record
from overtone.version import __version__

NAME = "run.jsonl"
MOST_NAMED = 10  # damaged lines in one warning
ENDINGS = ("stop", "fail", "finish")  # events that a later "resume" makes void


class Sink(Protocol):
    """An object that receives every event of a run: the live view, a tracker."""

    def write(self, event: Event) -> None:
        """Take one event."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...


class RunLog:
    """Appends events to the file and passes them on to the sinks."""

    def __init__(self, folder: Path, sinks: Sequence[Sink] = ()) -> None:
        self.path = folder / NAME
        self.sinks = sinks
        torn = self.path.exists() and self.path.stat().st_size > 0 and not self.path.read_bytes().endswith(b"\n")
        self._file = self.path.open("a")
        if torn:  # the session before was killed in the middle of a line
            self._file.write("\n")

    def write(self, event: Event) -> None:
        """Append one event. It is on its way to the disk before any sink sees it."""
        try:
            self._file.write(json.dumps(event) + "\n")
            self._file.flush()
        except OSError as error:
            raise RunLogError(f"{self.path}: {error.strerror}; free some space and go on with --resume") from error
        for sink in self.sinks:
            try:
                sink.write(event)
            except OSError as error:
                raise RunLogError(f"{type(sink).__name__} of {self.path.parent}: {error}") from error

    def close(self) -> None:
        """Close the file and all sinks."""
        for close in (self._file.close, *(sink.close for sink in self.sinks)):
            with suppress(OSError):  # an error of writing was raised when it happened
                close()


# -- reading ---------------------------------------------------------------------------------------------------------


def read(path: Path) -> list[Event]:
    """The events of a run (its directory, or the file itself), as if it had never been interrupted.

    Lines that cannot be read are left out, with a `DamagedLogWarning`. A format that this version does not know, and an
    event that lacks a field of its format, raise a `RunLogError` (the latter a `NotALogError`).
    """
    file = path / NAME if path.is_dir() else path
    found = [record for record in _records(file) if record["event"] in EVENTS]
    for record in found:
        if key := missing(record):
            raise NotALogError(
                f"{file}: the event {record['event']!r} of step {record['step']} has no {key}, which format "
                f"{FORMAT} of the run log requires; make the run again"
            )
    return cast(list[Event], found)


def last(folder: Path, event: str) -> Record | None:
    """The last event with this name, if there is a log that holds one. Its fields are not checked: a run can be resumed
    from its checkpoints even if its log is not complete."""
    found = [r for r in _records(folder / NAME) if r["event"] == event] if (folder / NAME).exists() else []
    return found[-1] if found else None


def _records(file: Path) -> list[Record]:
    """The lines of a log in the current format, without lost steps and damaged lines."""
    if file.exists() and not file.is_file():
        raise NotALogError(f"{file}: not a file; give the directory of a run")
    try:
        lines = file.read_bytes().removesuffix(b"\n").split(b"\n")
    except OSError as error:
        raise NotALogError(f"{file}: {error.strerror}; give the directory of a run") from error
    records: list[Record] = []
    damaged: list[int] = []
    written = 0  # the format of the session; a log without a number is of format 0
    for number, line in enumerate(lines, 1):
        record = _record(line)
        if record is None:
            # A kill cuts off the last line of a session. In any other place the file is damaged.
            if number < len(lines) and not _begins_session(lines[number]):
                damaged.append(number)
            continue
        if record["event"] in ("start", "resume"):
            written = _format(record, f"{file}: line {number}")
        record = upgraded(record, written)
        if record["event"] == "resume":
            step = record["step"]
            records = [r for r in records if r["step"] <= step and r["event"] not in ENDINGS]
        records.append(record)
    if damaged and records:
        warnings.warn(DamagedLogWarning(f"{file}: {_lines(damaged)}; the rest is used"), stacklevel=3)
    return records


def _record(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # bytes that are not UTF-8 raise a ValueError too
        return None
    sound = isinstance(record, dict) and isinstance(record.get("event"), str) and type(record.get("step")) is int
    return record if sound else None


def _begins_session(line: bytes) -> bool:
    return b'"event": "resume"' in line or b'"event": "start"' in line


def _format(record: Record, where: str) -> int:
    """The format of the session that this event begins; refused if this version cannot read it."""
    found = record.get("format", 0)
    if type(found) is not int or found not in READABLE:
        *earlier, latest = map(str, READABLE)
        known = f"{', '.join(earlier)} and {latest}"
        raise RunLogError(
            f"{where}: run log of format {shortened(found)}; overtone {__version__} reads formats {known}. "
            "Use the version of overtone that wrote it, or make the run again"
        )
    return found


def _lines(numbers: Sequence[int]) -> str:
    first = ", ".join(map(str, numbers[:MOST_NAMED]))
    more = f" and {len(numbers) - MOST_NAMED} more" if len(numbers) > MOST_NAMED else ""
    several = len(numbers) > 1
    return f"line{'s' if several else ''} {first}{more} cannot be read and {'are' if several else 'is'} left out"


# -- the schema, applied to what was read ------------------------------------------------------------------------------


def missing(record: Mapping[str, Any]) -> str:
    """The first field that this event must have and has not, such as "environment.world"; empty if it is complete."""
    return _missing(record, EVENTS[record["event"]])


def _missing(record: Mapping[str, Any], kind: type) -> str:
    for key, hint in _hints(kind).items():
        if key not in record:
            if key in kind.__required_keys__:  # type: ignore[attr-defined]
                return key
            continue
        value = record[key]
        if is_typeddict(hint) or key in NEEDED:
            if not isinstance(value, Mapping):
                return f"{key} (a table)"
            below = _missing(value, hint) if is_typeddict(hint) else _lacking(value, NEEDED[key])
            if below:
                return f"{key}.{below}"
    return ""


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _lacking(table: Mapping[str, Any], needed: tuple[str, ...]) -> str:
    return next((key for key in needed if key not in table), "")


# By format: the fields that its successor added, by event. Numbers that were not written are NaN: not known.
ADDED: dict[int, dict[str, Record]] = {
    0: {  # of simulations only
        "train": {"lr": math.nan, "units_per_second": math.nan, "seconds_left": math.nan, "waiting_share": math.nan},
        "finish": {"shares": {}, "seconds_starting": math.nan, "sample": ""},
    },
    1: {  # no method had a delay
        "train": {"rounds": math.nan},
        "eval": {"rounds": math.nan},
        "round": {"seconds_hidden": 0.0},
    },
    2: {"round": {"keep": None, "control": ""}},  # no method had a budget
    3: {},  # nobody observed a run
    4: {},  # nobody counted requests
}


def upgraded(record: Record, written: int) -> Record:
    """An event of the format ``written`` in the form of the present one."""
    for number in range(written, FORMAT):
        record = {**ADDED[number].get(record["event"], {}), **record}
    return {**record, "format": FORMAT} if record["event"] in ("start", "resume") else record


# -- the environment -------------------------------------------------------------------------------------------------


def environment(hosts: Sequence[Host]) -> Environment:
    """Where the run takes place; ``hosts`` are the machines of all processes, by rank."""
    names = ("torch", "transformers", "tokenizers", "datasets", "safetensors", "numpy", "numba")
    return {
        "overtone": __version__,
        "python": platform.python_version(),
        "versions": {name: version for name in names if (version := _version(name))},
        "commit": _commit(),
        "platform": platform.platform(),
        "world": len(hosts),
        "hosts": list(hosts),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def this_host(device: torch.device) -> Host:
    """The machine of this process."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {"host": socket.gethostname(), "device": str(device), "name": name, "threads": torch.get_num_threads(),
            "cores": os.cpu_count()}  # fmt: skip


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    """The commit of the sources that run, with "-dirty" if they were changed; empty where there is no git."""
    ask = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(ask, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
