"""`overtone report`, and the table and page that `overtone compare` ends with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from overtone.cli.console import check_writable, out
from overtone.errors import NotALogError, printable, shortened
from overtone.report import history, page_data, standings, table
from overtone.report.format import headline


@dataclass(frozen=True)
class Report:
    """Make one page of any runs, real or simulated, and its table as files.

    The table is written as Markdown and as CSV, beside the page.
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Directories of runs, or directories that contain runs, such as a comparison's."""
    out: Path = Path("report.html")
    """File for the page."""
    title: str = "overtone: runs side by side"
    """Title of the page."""


def run_report(flags: Report) -> None:
    """Read the logs, print the table and write the page."""
    check_writable(flags.out, "out")
    runs = [_checked(history.load(path)) for path in history.find(flags.runs)]
    show_standings(runs, flags.out, flags.title, None)


def _checked(run: history.History) -> history.History:
    """The run, if its log has everything that a report needs: another program may have written it."""
    try:
        page_data.data(standings.groups([run]), title="")
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise NotALogError(f"{run.path}: the log lacks what a report needs ({shortened(error)})") from error
    return run


def show_standings(runs: Sequence[history.History], file: Path, title: str, command: str | None) -> None:
    """Write the page, and print the same table. ``command`` is the command line that made the runs."""
    found = standings.groups(runs)
    page, *others = page_data.write(file, found, title=title, command=command)
    for group in found:
        out.print(printable(headline(group.facts)), markup=False)
        for note in table.notes(group, found[0]):
            out.print(printable(note), style="yellow", markup=False)
        out.print(table.terminal(group))
    for line in table.legend(found):
        out.print(line, style="dim", markup=False)
    out.print(f"page: {page} (and {', '.join(other.name for other in others)})", markup=False)
