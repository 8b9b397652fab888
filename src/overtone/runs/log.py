"""The run log: one JSON object per line, the one source of all that is shown of a run.

It is only ever appended to. A run that was cut off and went on from a checkpoint says so in a "resume" line; `read`
leaves out what the lost steps before it had written.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import torch

from overtone.errors import DamagedLogWarning, NotALogError, RunLogError
from overtone.version import __version__

NAME = "run.jsonl"
Record = dict[str, Any]
MOST_NAMED = 10  # damaged lines


class Sink(Protocol):
    """Whoever wants to hear of every record."""

    def write(self, record: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class RunLog:
    """Appends records to the file and hands them on to the sinks."""

    def __init__(self, folder: Path, sinks: Sequence[Sink] = ()) -> None:
        self.path = folder / NAME
        self.sinks = sinks
        torn = self.path.exists() and self.path.stat().st_size > 0 and not self.path.read_bytes().endswith(b"\n")
        self._file = self.path.open("a")
        if torn:  # the run before was cut off in the middle of a line
            self._file.write("\n")

    def write(self, event: str, step: int, **values: Any) -> None:
        record = {"event": event, "step": step, "time": round(time.time(), 3), **values}
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except OSError as error:
            raise RunLogError(f"{self.path}: {error.strerror}; free some space and go on with --resume") from error
        for sink in self.sinks:
            try:
                sink.write(record)
            except OSError as error:
                raise RunLogError(f"{type(sink).__name__} of {self.path.parent}: {error}") from error

    def close(self) -> None:
        for close in (self._file.close, *(sink.close for sink in self.sinks)):
            with suppress(OSError):  # what could not be written was told when it was written
                close()


def read(path: Path) -> list[Record]:
    """The records of a run (its directory, or the file itself) as if it had never been cut off. Lines that cannot be
    read are left out, with a warning: the checkpoints of a run do not depend on them."""
    file = path / NAME if path.is_dir() else path
    if file.exists() and not file.is_file():
        raise NotALogError(f"{file}: not a file; give the directory of a run")
    try:
        lines = file.read_bytes().removesuffix(b"\n").split(b"\n")
    except OSError as error:
        raise NotALogError(f"{file}: {error.strerror}; give the directory of a run") from error
    records: list[Record] = []
    damaged: list[int] = []
    for number, line in enumerate(lines, 1):
        record = _record(line)
        if record is None:
            # Cut off in the middle of a line by a kill; in any other place the file is damaged.
            if number < len(lines) and not _follows_a_cut(lines, number):
                damaged.append(number)
            continue
        if record["event"] == "resume":
            step = record["step"]
            records = [r for r in records if r["step"] <= step and r["event"] not in ("stop", "fail", "finish")]
        records.append(record)
    if damaged and records:
        warnings.warn(DamagedLogWarning(f"{file}: {_lines(damaged)}; the rest is used"), stacklevel=2)
    return records


def _record(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # of bytes that are not UTF-8, too
        return None
    sound = isinstance(record, dict) and isinstance(record.get("event"), str) and type(record.get("step")) is int
    return record if sound else None


def _lines(numbers: Sequence[int]) -> str:
    first = ", ".join(map(str, numbers[:MOST_NAMED]))
    more = f" and {len(numbers) - MOST_NAMED} more" if len(numbers) > MOST_NAMED else ""
    several = len(numbers) > 1
    return f"line{'s' if several else ''} {first}{more} cannot be read and {'are' if several else 'is'} left out"


def last(folder: Path, event: str) -> Record | None:
    """The last record of this kind, if the run has a log and its log has one."""
    found = [r for r in read(folder) if r["event"] == event] if (folder / NAME).exists() else []
    return found[-1] if found else None


def _follows_a_cut(lines: Sequence[bytes], number: int) -> bool:
    return b'"event": "resume"' in lines[number] or b'"event": "start"' in lines[number]


def environment(hosts: Sequence[Any]) -> Record:
    """Where the run takes place: enough to tell two machines apart and to build the same again."""
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


def this_host(device: torch.device) -> Record:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {"host": socket.gethostname(), "device": str(device), "name": name, "threads": torch.get_num_threads(),
            "cores": os.cpu_count()}  # fmt: skip


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    """Of the sources that run, with a mark if they were changed; empty where there is no git."""
    ask = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(ask, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
