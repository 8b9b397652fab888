"""The progress of a comparison: a live table on a terminal, else a line for each run that has ended."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from overtone.common.limits import human_bytes
from overtone.report.compare import Progress
from overtone.report.comparison import Cell

ENDED = ("done", "kept", "stopped", "failed")


class LiveTable:
    """Shows the progress of all cells whenever it is called."""

    def __init__(self, console: Console, cells: Sequence[Cell]) -> None:
        self.console = console
        self.cells = {cell.folder: cell for cell in cells}
        self._printed: set[Path] = set()
        self._begun = time.monotonic()
        self._live = Live(console=console, refresh_per_second=4, auto_refresh=False)

    def __enter__(self) -> LiveTable:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def __call__(self, states: Mapping[Path, Progress]) -> None:
        if self.console.is_terminal:
            self._live.update(self._table(states), refresh=True)
            return
        for name, state in states.items():
            if state.state in ENDED and name not in self._printed:
                self._printed.add(name)
                self.console.print(
                    f"{name.name}: {' '.join(self._cells(name, state)[2:])}", highlight=False, markup=False
                )

    def _table(self, states: Mapping[Path, Progress]) -> Table:
        shown = Table(
            box=None, pad_edge=False, header_style="bold", caption=self._caption(states), caption_justify="left"
        )
        for column in ("run", "seed", "state", "step", "loss", "sent", ""):
            shown.add_column(column, justify="right" if column in ("seed", "step", "loss", "sent") else "left")
        names = self._visible(states)
        for name in names:
            style = {"running": "bold", "waiting": "dim", "failed": "red", "stopped": "yellow"}.get(states[name].state)
            shown.add_row(*map(escape, self._cells(name, states[name])), style=style)
        return shown

    def _cells(self, name: Path, state: Progress) -> list[str]:
        cell = self.cells[name]
        return [
            cell.entry,
            str(cell.seed),
            state.state,
            f"{state.step}/{cell.steps}" if state.state != "waiting" else "",
            "" if state.loss is None else f"{state.loss:.3f}",
            human_bytes(state.bytes) if state.state != "waiting" else "",
            state.reason if state.state in ("stopped", "failed") else "",
        ]

    def _visible(self, states: Mapping[Path, Progress]) -> list[Path]:
        """The rows that fit the screen: the running cells, before them the latest that ended, after them the next."""
        most = max(5, self.console.height - 4)
        names = list(states)
        if len(names) <= most:
            return names
        busy = [i for i, name in enumerate(names) if states[name].state == "running"] or [len(names) - 1]
        begin = max(0, min(busy[0] - most // 2, len(names) - most))
        return names[begin : begin + most]

    def _caption(self, states: Mapping[Path, Progress]) -> str:
        ended = sum(state.state in ENDED for state in states.values())
        fresh = sum(state.state in ENDED and state.state != "kept" for state in states.values())
        words = f"{ended} of {len(states)} runs done"
        if fresh and ended < len(states):
            left = (time.monotonic() - self._begun) / fresh * (len(states) - ended)
            words += f", about {left / 60:.0f} min left" if left >= 60 else ", less than a minute left"
        return words
