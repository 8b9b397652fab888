"""Make the runs of a comparison: several at a time, finished ones kept, interrupted ones continued.

Each run is a command that anyone could type, `overtone simulate` or `overtone train`, in a process of its own. All that
is known of a run is its log. So a comparison that was interrupted continues with the runs that are not finished.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from overtone.errors import ConfigError
from overtone.report import history
from overtone.report.comparison import Cell
from overtone.report.history import History
from overtone.runs import directory, stop_signals, toml
from overtone.runs.config import Simulation

POLL = 0.5  # seconds
FOLLOWS = ("warmup", "eval_every", "checkpoint_every")  # their defaults depend on other fields: name those fields first


@dataclass
class Progress:
    """How far a cell has come."""

    state: str = "waiting"  # or running, done, kept, stopped, failed
    step: int = 0
    loss: float | None = None
    bytes: int = 0
    reason: str = ""  # why it stopped or failed


Watch = Callable[[dict[Path, Progress]], None]  # receives the progress of each cell, by the cell's directory


def make(found: Sequence[Cell], *, workers: int, watch: Watch) -> dict[Path, Progress]:
    """Run the cells that are not finished, ``workers`` at a time. The others run even if one fails."""
    states = {cell.folder: _before(cell) for cell in found}
    watch(states)
    waiting = [cell for cell in found if states[cell.folder].state == "waiting"]
    running: list[_Running] = []
    try:
        _interrupt_on(stop_signals.heeded())
        while waiting or running:
            while waiting and len(running) < workers:
                running.append(_Running(waiting.pop(0)))
            time.sleep(POLL)
            for one in list(running):
                states[one.cell.folder] = one.look()
                if one.ended:
                    running.remove(one)
            watch(states)
    finally:
        for one in running:
            one.stop()
        for one in running:
            one.wait()
    watch(states)
    return states


def _interrupt_on(signals: Sequence[signal.Signals]) -> None:
    """Treat each of these signals as Ctrl-C, which stops the runs too."""

    def interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        raise KeyboardInterrupt

    for one in signals:
        signal.signal(one, interrupt)


def _before(cell: Cell) -> Progress:
    """The progress that an earlier call left behind: a finished run is kept, any other starts again or is resumed."""
    found = cell.history()
    if found is None:
        _clear(cell)
        return Progress()
    wanted = {"simulated": isinstance(cell.config, Simulation), **toml.flat(cell.config.resolved())}
    # An option that the version which made the run did not have was at its default.
    there = {**toml.flat(type(cell.config)()), **found.config, "simulated": found.simulated}
    for key, value in sorted(wanted.items(), key=lambda item: item[0] in FOLLOWS):
        if key not in history.PLACE and there.get(key) != value and not _is_same_path(there.get(key), value):
            raise ConfigError(
                f"{cell.folder}: was run with {key}={there.get(key)}, and {value} is asked for now; choose another "
                "--out, or delete it"
            )
    if found.is_over:
        return _progress(found, "kept" if found.finish else "stopped")
    _clear(cell)
    return Progress()


def _is_same_path(one: object, other: object) -> bool:
    """True for two forms of one path: a resumed run has absolute paths in its log."""
    return isinstance(one, str) and isinstance(other, str) and Path(one).resolve() == Path(other).resolve()


def _clear(cell: Cell) -> None:
    """Prepare another attempt. Real replicas resume from their checkpoints; virtual ones have none."""
    directory.refuse_busy(cell.folder)
    if isinstance(cell.config, Simulation) and cell.folder.exists():
        shutil.rmtree(cell.folder)


def _progress(found: History | None, state: str, reason: str = "") -> Progress:
    """The progress that a cell's log shows."""
    if found is None:
        return Progress(state, reason=reason)
    trained = found.trained
    loss = found.loss() if found.finish else trained[-1]["loss"] if trained else None
    latest = found.finish or (trained[-1] if trained else None)
    reason = reason or "; ".join(found.caveats)
    return Progress(state, found.steps_done, loss, latest["bytes_sent"] if latest else 0, reason)


class _Running:
    """The process of a cell. Its standard error goes into a file beside its log, which is kept if the cell fails."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.ended = False
        cell.folder.mkdir(parents=True, exist_ok=True)
        self._stderr = cell.folder / "stderr.txt"
        command = [sys.executable, "-m", "overtone", *cell.arguments()]
        one_thread = {"OMP_NUM_THREADS": "1"} if isinstance(cell.config, Simulation) else {}
        with self._stderr.open("wb") as stderr:
            # In a session of its own: a Ctrl-C reaches only this process, which then asks each run to stop, once.
            self._process = subprocess.Popen(
                command,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **one_thread},
                start_new_session=True,
            )

    def look(self) -> Progress:
        """The progress of the cell now."""
        code = self._process.poll()
        found = self.cell.history()  # after `poll`: the log of a process that has ended is complete
        if code is None:
            return _progress(found, "running")
        self.ended = True
        if code == 0 or (found is not None and found.is_over):
            self._stderr.unlink()
            return _progress(found, "done" if code == 0 else "stopped")
        return _progress(found, "failed", f"{self._last_line() or f'exit code {code}'} ({self._stderr})")

    def _last_line(self) -> str:
        """The last message of the process: its own error line if there is one."""
        lines = [line.strip() for line in self._stderr.read_text(errors="replace").splitlines() if line.strip()]
        ours = [line for line in lines if line.startswith("overtone: ")]
        return (ours or lines or [""])[-1].removeprefix("overtone: ")

    def stop(self) -> None:
        """Ask the process to stop. Real replicas save a checkpoint first."""
        self._process.terminate()

    def wait(self) -> None:
        """Wait until the process has ended."""
        self._process.wait()
