"""The directory of a run: its name, and who may write into it."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import IO

from overtone import runlog
from overtone.errors import OvertoneError
from overtone.files import write_whole
from overtone.marks import present

CONFIG = "config.toml"
CHECKPOINTS = "checkpoints"


class RunError(OvertoneError, RuntimeError):
    """A run directory that cannot be used."""


class UnfitRunError(RunError):
    """A run directory that cannot be meant: used already, not a run, not a place to write to."""

    status = 2


def fresh(method: str) -> Path:
    """A new name below runs/."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{method}"
    path, number = Path("runs") / name, 1
    while path.exists():
        number += 1
        path = Path("runs") / f"{name}-{number}"
    return path


def refuse_used(folder: Path, way_out: str | None = None) -> None:
    """A new run needs a directory that holds none; on each host, where the replicas have disks of their own."""
    if (folder / runlog.NAME).exists():
        way_out = way_out or f"--resume {folder} goes on with it, or choose another --out"
        raise UnfitRunError(f"run {folder}: holds a run already; {way_out}")
    if any(True for _ in present(folder / CHECKPOINTS)):
        raise UnfitRunError(f"run {folder}: holds checkpoints of another run; delete them, or choose another --out")


def refuse_unused(folder: Path, why: str) -> None:
    if not (folder / CONFIG).exists():
        raise UnfitRunError(f"{why} {folder}: no run there (it has no {CONFIG}); give the directory of a run")


def claim(folder: Path) -> IO[str]:
    """Make the directory this run's own until the process ends: the kernel gives a lock back when its holder dies,
    however it dies."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("a+")
    except OSError as error:
        raise UnfitRunError(f"run {folder}: {error.strerror}; choose an --out that can be written") from error
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


def refuse_busy(folder: Path) -> None:
    """Early, before any replica is started."""
    if folder.exists():
        claim(folder).close()


def write_config(folder: Path, text: str) -> None:
    """What the run was started with, for `--resume` and `export`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / CONFIG, text)
    except OSError as error:
        raise RunError(f"run {folder}: {error.strerror}; free some space or choose another --out") from error
