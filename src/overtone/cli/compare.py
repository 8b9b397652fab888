"""`overtone compare`, and the work that `overtone demo` shares with it."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from overtone.cli.console import err
from overtone.cli.report import show_standings
from overtone.errors import RunError
from overtone.report import compare, comparison
from overtone.report.comparison import Comparison
from overtone.report.live_table import LiveTable
from overtone.runs import directory


def run_compare(flags: Comparison) -> None:
    """Make the runs that are not finished yet, then show all of them."""
    make_and_show(flags, flags.out, "compare")


def make_and_show(asked: Comparison, out: Path | None, name: str) -> None:
    """Make the runs of a comparison below ``out`` (default: a new directory with this name in it) and show them."""
    folder = out or directory.fresh(name)
    again = shlex.join(["overtone", *sys.argv[1:], *([] if out else ["--out", str(folder)])])  # continues this one
    cells = comparison.cells(asked, folder)
    workers = asked.workers or (1 if asked.processes else os.cpu_count() or 1)
    err.print(f"{len(cells)} runs, into {folder}", highlight=False, markup=False)
    try:
        with directory.claim(folder), LiveTable(err, cells) as live:
            states = compare.make(cells, workers=workers, watch=live)
    except KeyboardInterrupt:
        err.print("overtone: interrupted; finished runs are kept, and this command makes the others:", highlight=False)
        err.print(again, highlight=False, markup=False, soft_wrap=True)
        sys.exit(130)
    runs = [found for cell in cells if (found := cell.history()) is not None]
    if runs:
        show_standings(runs, folder / "report.html", asked.title, again)
    failed = {folder.name: state.reason for folder, state in states.items() if state.state == "failed"}
    if failed:
        first, reason = next(iter(failed.items()))
        raise RunError(f"{len(failed)} of {len(cells)} runs failed, first {first}: {reason}")
