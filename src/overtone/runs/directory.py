"""The directory of a run: its name, its lock, and its configuration file."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import time
from pathlib import Path
from typing import IO

from overtone.errors import RunError, UnfitRunError, printable
from overtone.runs import log
from overtone.runs.checkpoint.index import present

CONFIG = "config.toml"
CHECKPOINTS = "checkpoints"
LOCK = "lock"
PATIENCE = 2.0  # seconds to wait for the lock: if a replica of this run holds it, it lets go sooner
RUNS = Path("runs")


def fresh(method: str) -> Path:
    """The path of a new directory below runs/, named after the time and the method."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{method}"
    path, number = RUNS / name, 1
    while path.exists():
        number += 1
        path = RUNS / f"{name}-{number}"
    return path


def elected(name: object) -> Path:
    """The directory below runs/ that rank 0 has chosen. Rank 0 sends a name; a path that leads elsewhere is refused."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", name):
        raise RunError(f"run {printable(str(name))}: chosen by rank 0, but not the name of a directory; give --out")
    return RUNS / name


def refuse_used(folder: Path, way_out: str | None = None) -> None:
    """Refuse a directory that holds a run already. Every host checks its own disk."""
    if (folder / log.NAME).exists():
        way_out = way_out or f"--resume {folder} goes on with it, or choose another --out"
        raise UnfitRunError(f"run {folder}: holds a run already; {way_out}")
    if any(True for _ in present(folder / CHECKPOINTS)):
        raise UnfitRunError(f"run {folder}: holds checkpoints of another run; delete them, or choose another --out")


def refuse_unused(folder: Path, why: str) -> None:
    """Refuse a directory without a run. ``why`` is the command that needs one."""
    if not (folder / CONFIG).exists():
        raise UnfitRunError(f"{why} {folder}: no run there (it has no {CONFIG}); give the directory of a run")


def claim(folder: Path, world: str | None = None) -> IO[str]:
    """Lock the directory for this run until the process ends. The kernel releases the lock when the process dies,
    however it dies. Replicas of one ``world`` share the lock; without a world, a process holds it alone."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+")
    except OSError as error:
        raise UnfitRunError(f"run {folder}: {error.strerror}; choose an --out that can be written") from error
    alone = _locked(file, fcntl.LOCK_EX)
    if alone:
        file.truncate(0)
        file.write(f"{os.getpid()} {world or ''}\n")
        file.flush()
    if world is None:
        if not alone:
            raise _in_use(folder, file)
        return file
    # The kernel turns an exclusive lock into a shared one in two steps, and another process may get the lock between
    # them. So the holder is read only after this process has the lock.
    if not _locked(file, fcntl.LOCK_SH, patience=PATIENCE) or _holder(file)[1:] != [world]:
        raise _in_use(folder, file)
    return file


def _locked(file: IO[str], kind: int, patience: float = 0.0) -> bool:
    end = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return True
        except OSError:
            if time.monotonic() >= end:
                return False
            time.sleep(0.02)


def _holder(file: IO[str]) -> list[str]:
    """The process that took the lock first, and its world."""
    file.seek(0)
    return file.read(200).split()


def _in_use(folder: Path, file: IO[str]) -> RunError:
    process = " ".join(_holder(file)[:1]) or "unknown"
    file.close()
    return RunError(f"run {folder}: in use by a live run (process {process}); wait for it, or choose another --out")


def refuse_busy(folder: Path) -> None:
    """Refuse a directory that a live run holds. For an early check, before any replica is started."""
    if folder.exists():
        claim(folder).close()


def write_config(folder: Path, text: str) -> None:
    """Write the configuration of the run, for `--resume` and `export`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / CONFIG, text)
    except OSError as error:
        raise RunError(f"run {folder}: {error.strerror}; free some space or choose another --out") from error


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it appears complete or not at all: under a temporary name, then renamed. A link is followed;
    a device or a pipe is refused."""
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
