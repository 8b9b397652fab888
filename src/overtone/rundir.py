"""The directory of a run: its name, and who may write into it."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from overtone import runlog
from overtone.errors import OvertoneError

CONFIG = "config.toml"


class RunError(OvertoneError, RuntimeError):
    """A run directory that cannot be used."""


def fresh(method: str) -> Path:
    """A new name below runs/."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{method}"
    path, number = Path("runs") / name, 1
    while path.exists():
        number += 1
        path = Path("runs") / f"{name}-{number}"
    return path


def claim(folder: Path, *, first: bool, resume: bool, tell: Callable[[Any], Sequence[Any]]) -> IO[str] | None:
    """Make the directory this run's own until the process ends; replica 0 does it for all, and all hear how it went."""
    lock, trouble = None, ""
    if first:
        try:
            check(folder, resume=resume)
            lock = _lock(folder)
        except RunError as error:
            trouble = str(error)
    if trouble := tell(trouble)[0]:
        raise RunError(trouble)
    return lock


def check(folder: Path, *, resume: bool) -> None:
    """Refuse a directory that holds a run already, or to resume none."""
    there = (folder / runlog.NAME).exists()
    if there and not resume:
        raise RunError(f"run {folder}: holds a run already; --resume {folder} goes on with it, or choose another --out")
    if resume and not there:
        raise RunError(f"resume {folder}: no run there (it has no {runlog.NAME}); give the directory of a run")


def _lock(folder: Path) -> IO[str]:
    """The kernel gives a lock back when its holder dies, however it dies."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("a+")
    except OSError as error:
        raise RunError(f"run {folder}: {error.strerror}; choose a --out that can be written") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        raise RunError(
            f"run {folder}: in use by a live run (process {file.read().strip() or 'unknown'}); wait for it, or choose "
            "another --out"
        ) from error
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def write_config(folder: Path, text: str) -> None:
    """What the run was started with, for `--resume` and `export`; whole or not at all."""
    beside = folder / ".config.toml.tmp"
    try:
        beside.write_text(text)
        beside.replace(folder / CONFIG)
    except OSError as error:
        raise RunError(f"run {folder}: {error.strerror}; free some space or choose another --out") from error


def free(folder: Path) -> None:
    """Refuse early, before any replica is started, a directory that a live run holds."""
    if folder.exists():
        _lock(folder).close()
