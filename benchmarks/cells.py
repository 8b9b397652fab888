"""What the studies share: where their data lies, and how their runs are made, two at a time, and kept."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from overtone.report import compare
from overtone.report.comparison import Cell
from overtone.report.live_table import LiveTable
from overtone.runs import directory

DATA = Path("data")  # the runs name their data below this directory, wherever it lies


def found(place: Path, name: str) -> str | None:
    """The data set of this name in the directory ``place``, as the logs name it: a link below `data` leads there."""
    if not (place / name).exists():
        return None
    link = DATA / name
    if not link.exists():
        link.parent.mkdir(exist_ok=True)
        link.symlink_to((place / name).resolve())
    return str(link)


def arguments(study: str | None, files: str) -> argparse.ArgumentParser:
    """The flags that all studies have. ``study`` is a study's own text, ``files`` are the data that it looks for."""
    parser = argparse.ArgumentParser(description=study, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help=f"directory with {files}")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, one thread each")
    return parser


def make(runs: Path, cells: Sequence[Cell], workers: int) -> None:
    """Make all runs that are not there yet. An interrupted study continues with the runs that are left."""
    try:
        with directory.claim(runs), LiveTable(Console(stderr=True), cells) as live:
            states = compare.make(cells, workers=workers, watch=live)
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command continues with the runs that are left")
    failed = [f"{folder}: {state.reason}" for folder, state in states.items() if state.state == "failed"]
    if failed:
        sys.exit("\n".join(failed))
