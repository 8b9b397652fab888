"""Several runs side by side: which ones a comparison asks for, and how they are made, kept and gone on with.

Each run is the command that anyone would type, as a process of its own: `overtone simulate` or `overtone train`. Its
log is all that is known of it, so that a comparison that was cut off goes on with what is not finished yet.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from overtone.errors import ConfigError
from overtone.methods import METHODS, takes
from overtone.report import history
from overtone.report.history import History
from overtone.runs import directory, stop_signals, toml
from overtone.runs.config import Comparison, MethodChoice, Network, Run, Saving, Simulation
from overtone.tasks import refuse_missing

CELLS = "runs"  # below the comparison's own directory
POLL = 0.5  # seconds
FOLLOWS = ("warmup", "eval_every", "checkpoint_every")  # from other numbers, if not given: those are to be named first


@dataclass(frozen=True)
class Cell:
    """One run of a comparison."""

    entry: str  # as the user wrote it
    folder: Path
    config: Simulation | Run

    @property
    def seed(self) -> int:
        return self.config.seed

    @property
    def steps(self) -> int:
        return self.config.training.steps

    def arguments(self) -> list[str]:
        """What follows `overtone` on the command line."""
        if isinstance(self.config, Simulation):
            return ["simulate", *toml.flags(self.config, Simulation())]
        if (self.folder / directory.CONFIG).exists():
            return ["train", "--resume", str(self.folder), "--task", self.config.task.task]
        return ["train", *toml.flags(self.config, Run())]

    def history(self) -> History | None:
        """What there is of it so far."""
        return history.so_far(self.folder)


def cells(asked: Comparison, folder: Path) -> list[Cell]:
    """All runs of the comparison; a method or number that does not exist is refused before anything runs."""
    if asked.processes and asked.network != Network():
        raise ConfigError("processes: real replicas talk over the real network; leave bandwidth, latency, step_seconds")
    found: list[Cell] = []
    entries: dict[str, str] = {}  # by what they mean
    for entry in asked.methods:
        config = configured(asked, entry, 0, folder)
        refuse_missing(config.task)  # once, and not by every run
        meaning = str([config.choice.build().numbers(), toml.flat(replace(config, choice=MethodChoice()))])
        if meaning in entries:
            raise ConfigError(f"methods {entry}: the same run as {entries[meaning]}; each once is enough")
        entries[meaning] = entry
    for seed in asked.seeds:
        for number, entry in enumerate(asked.methods):
            place = folder / CELLS / f"{_slug(entry)}-seed{seed}"
            if any(cell.folder == place for cell in found):  # entries that differ in signs which no path should have
                place = place.with_name(f"{place.name}-{number}")
            found.append(Cell(entry, place, configured(asked, entry, seed, place)))
    return found


def configured(asked: Comparison, entry: str, seed: int, out: Path) -> Simulation | Run:
    """The run that an entry such as ``decoupled:keep=512,bits=1`` means."""
    name, _, numbers = entry.partition(":")
    every = asked.every if name in METHODS and "every" in takes(name) else None
    choice = MethodChoice(name, every=every)
    base: Simulation | Run
    if asked.processes:
        saving = Saving(eval_every=asked.eval_every, log_every=asked.log_every)
        base = Run(choice=choice, replicas=asked.replicas, task=asked.task, training=asked.training, saving=saving)
    else:
        base = Simulation(
            choice=choice, replicas=asked.replicas, task=asked.task, training=asked.training, network=asked.network,
            eval_every=asked.eval_every, log_every=asked.log_every,
        )  # fmt: skip
    values: dict[str, Any] = {}
    for key, value in (_number(entry, part) for part in numbers.split(",") if part):
        if key in values:
            raise ConfigError(f"methods {entry}: {key} is given twice")
        values[key] = value
    return replace(toml.updated(base, values, f"methods {entry}"), seed=seed, out=out)


def _number(entry: str, part: str) -> tuple[str, Any]:
    key, equals, text = part.partition("=")
    if not equals or key.strip() in ("seed", "out", "json", "method"):
        raise ConfigError(f"methods {entry}: {part}: a method's numbers are key=value, such as keep=128")
    try:
        return key.strip(), toml.parsed(f"x = {text}", f"methods {entry}")["x"]
    except ConfigError:
        return key.strip(), text  # a word


def _slug(entry: str) -> str:
    return "-".join("".join(c if c.isalnum() or c in "._" else " " for c in entry).split())


# -- making them -----------------------------------------------------------------------------------------------------


@dataclass
class Progress:
    """How far a cell has come."""

    state: str = "waiting"  # running, done, kept, stopped, failed
    step: int = 0
    loss: float | None = None
    bytes: int = 0
    words: str = ""  # what it failed of


Watch = Callable[[dict[Path, Progress]], None]  # by the cells' directories


def make(found: Sequence[Cell], *, workers: int, watch: Watch) -> dict[Path, Progress]:
    """Run what is not done yet, ``workers`` at a time. A run that fails does not keep the others from running."""
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
    """Asked to end in whatever way, do what Ctrl-C does: no run is left behind."""

    def interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        raise KeyboardInterrupt

    for one in signals:
        signal.signal(one, interrupt)


def _before(cell: Cell) -> Progress:
    """What an earlier call left of it. Only a finished run counts; a simulated one begins again."""
    found = cell.history()
    if found is None:
        _clear(cell)
        return Progress()
    wanted = {"simulated": isinstance(cell.config, Simulation), **toml.flat(cell.config.resolved())}
    there = {**found.config, "simulated": found.simulated}
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
    """A resumed run remembers its paths as seen from anywhere."""
    return isinstance(one, str) and isinstance(other, str) and Path(one).resolve() == Path(other).resolve()


def _clear(cell: Cell) -> None:
    """Make way for a new try. Real replicas go on from their checkpoints; virtual ones have none."""
    directory.refuse_busy(cell.folder)
    if isinstance(cell.config, Simulation) and cell.folder.exists():
        shutil.rmtree(cell.folder)


def _progress(found: History | None, state: str, words: str = "") -> Progress:
    """From the end of a cell's log."""
    if found is None:
        return Progress(state, words=words)
    trained = found.trained
    loss = found.loss() if found.finish else trained[-1]["loss"] if trained else None
    latest = found.finish or (trained[-1] if trained else None)
    words = words or "; ".join(found.caveats)
    return Progress(state, found.steps_done, loss, latest["bytes_sent"] if latest else 0, words)


class _Running:
    """A cell's process. What it says goes into a file beside its log, which stays if it fails."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.ended = False
        cell.folder.mkdir(parents=True, exist_ok=True)
        self._said = cell.folder / "stderr.txt"
        command = [sys.executable, "-m", "overtone", *cell.arguments()]
        one_thread = {"OMP_NUM_THREADS": "1"} if isinstance(cell.config, Simulation) else {}
        with self._said.open("wb") as said:
            # A session of its own: Ctrl-C reaches this process, which then asks each run to stop, once.
            self._process = subprocess.Popen(
                command,
                stdout=subprocess.DEVNULL,
                stderr=said,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **one_thread},
                start_new_session=True,
            )

    def look(self) -> Progress:
        code = self._process.poll()
        found = self.cell.history()  # after asking: the log of a process that ended is whole
        if code is None:
            return _progress(found, "running")
        self.ended = True
        if code == 0 or (found is not None and found.is_over):
            self._said.unlink()
            return _progress(found, "done" if code == 0 else "stopped")
        return _progress(found, "failed", f"{self._last_words() or f'exit code {code}'} ({self._said})")

    def _last_words(self) -> str:
        lines = [line.strip() for line in self._said.read_text(errors="replace").splitlines() if line.strip()]
        ours = [line for line in lines if line.startswith("overtone: ")]
        return (ours or lines or [""])[-1].removeprefix("overtone: ")

    def stop(self) -> None:
        """Ask it to. A run of real processes saves first."""
        self._process.terminate()

    def wait(self) -> None:
        self._process.wait()
