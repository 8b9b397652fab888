"""What several commands share: the two consoles, the progress bar, files for results."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from overtone.errors import ConfigError
from overtone.runs.directory import write_whole

err = Console(stderr=True)
out = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)  # a file has no width


def write_json(path: Path, value: Any) -> None:
    """Write the value as JSON, the whole file or nothing."""
    try:
        write_whole(path, json.dumps(value, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"json {path}: {error.strerror}; the result was not written") from error


def check_writable(path: Path, flag: str = "json") -> None:
    """Refuse a file that cannot be written, before the work and not after it."""
    if not path.parent.is_dir():
        raise ConfigError(f"{flag} {path}: there is no directory {path.parent}; create it first")
    if path.is_dir():
        raise ConfigError(f"{flag} {path}: is a directory; give the name of a file")
    if path.exists() and not path.is_file():
        raise ConfigError(f"{flag} {path}: a device or a pipe, which would be replaced; give the name of a file")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{flag} {path}: no permission to write into {path.parent}; choose another file")


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on the terminal; nothing if standard error is not a terminal."""
    columns = (
        TextColumn("{task.description:>10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, TimeRemainingColumn(), console=err, disable=not err.is_terminal) as bar:
        yield bar
