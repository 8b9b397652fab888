"""Several runs side by side: which ones a comparison asks for, and how they are made, kept and gone on with.

Each run is the command that anyone would type, as a process of its own: `overtone simulate` or `overtone train`. Its
log is all that is known of it, so that a comparison that was cut off goes on with what is not finished yet.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from overtone import history, rundir, runlog, settings
from overtone.config import Comparison, ConfigError, MethodChoice, Run, Saving, Simulation
from overtone.history import History
from overtone.methods import METHODS, takes

CELLS = "runs"  # below the comparison's own directory
POLL = 0.5  # seconds


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
            return ["simulate", *settings.flags(self.config, Simulation())]
        if (self.folder / rundir.CONFIG).exists():
            return ["train", "--resume", str(self.folder)]
        return ["train", *settings.flags(self.config, Run())]

    def history(self) -> History | None:
        """What there is of it so far; nothing before its log has a first line."""
        return history.load(self.folder) if runlog.last(self.folder, "start") is not None else None

    @property
    def is_done(self) -> bool:
        """It finished, or it ended in a way that it would end again."""
        found = self.history()
        return found is not None and (found.finish is not None or (found.simulated and bool(found.all("stop"))))


def cells(asked: Comparison, folder: Path) -> list[Cell]:
    """All runs of the comparison; a method or number that does not exist is refused before anything runs."""
    found: dict[str, Cell] = {}
    for seed in asked.seeds:
        for entry in asked.methods:
            name = f"{_slug(entry)}-seed{seed}"
            if name in found:
                raise ConfigError(f"methods {entry}: given twice (as {found[name].entry}); each once is enough")
            config = configured(asked, entry, seed, folder / CELLS / name)
            config.choice.build()
            found[name] = Cell(entry, folder / CELLS / name, config)
    return list(found.values())


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
    values = dict(_number(entry, part) for part in numbers.split(",") if part)
    return replace(settings.updated(base, values, f"methods {entry}"), seed=seed, out=out)


def _number(entry: str, part: str) -> tuple[str, Any]:
    key, equals, text = part.partition("=")
    if not equals or key.strip() in ("seed", "out", "json", "method"):
        raise ConfigError(f"methods {entry}: {part}: a method's numbers are key=value, such as keep=128")
    try:
        return key.strip(), tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
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
    seconds: float = 0.0


Watch = Callable[[dict[Path, Progress]], None]  # by the cells' directories


def make(found: Sequence[Cell], *, workers: int, watch: Watch) -> dict[Path, Progress]:
    """Run what is not done yet, ``workers`` at a time. A run that fails does not keep the others from running."""
    states = {cell.folder: _before(cell) for cell in found}
    waiting = [cell for cell in found if states[cell.folder].state == "waiting"]
    running: list[_Running] = []
    try:
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
    watch(states)
    return states


def _before(cell: Cell) -> Progress:
    """What an earlier call left of it. Only a finished run counts; a simulated one begins again."""
    found = cell.history()
    if found is None:
        _clear(cell)
        return Progress()
    wanted = settings.flat(cell.config.resolved(), leave_out=history.ASIDE)
    for key, value in wanted.items():
        if found.config.get(key) != value:
            raise ConfigError(
                f"{cell.folder}: was run with {key}={found.config.get(key)}, and {value} is asked for now; choose "
                "another --out, or delete it"
            )
    if cell.is_done:
        return _progress(cell, "kept" if found.finish else "stopped")
    _clear(cell)
    return Progress()


def _clear(cell: Cell) -> None:
    """Make way for a new try. Real replicas go on from their checkpoints; virtual ones have none."""
    rundir.refuse_busy(cell.folder)
    if isinstance(cell.config, Simulation) and cell.folder.exists():
        shutil.rmtree(cell.folder)


def _progress(cell: Cell, state: str, words: str = "") -> Progress:
    """From the end of its log."""
    found = cell.history()
    if found is None:
        return Progress(state, words=words)
    trained = found.all("train")
    loss = found.loss() if found.finish else trained[-1]["loss"] if trained else None
    latest = found.finish or (trained[-1] if trained else {})
    words = words or "; ".join(found.marks)
    return Progress(state, found.steps_done, loss, latest.get("bytes_sent", 0), words, latest.get("seconds", 0.0))


class _Running:
    """A cell's process. Its own words go into a file, to be told if it fails."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.ended = False
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        command = [sys.executable, "-m", "overtone", *cell.arguments()]
        one_thread = {"OMP_NUM_THREADS": "1"} if isinstance(cell.config, Simulation) else {}
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=self._said, stdin=subprocess.DEVNULL,
            env={**os.environ, **one_thread},
        )  # fmt: skip

    def look(self) -> Progress:
        code = self._process.poll()
        if code is None:
            return _progress(self.cell, "running")
        self.ended = True
        if code == 0:
            return _progress(self.cell, "done")
        if self.cell.is_done:
            return _progress(self.cell, "stopped")
        return _progress(self.cell, "failed", self._last_words() or f"exit code {code}")

    def _last_words(self) -> str:
        self._said.seek(0)
        lines = [line.strip() for line in self._said.read().decode(errors="replace").splitlines() if line.strip()]
        ours = [line for line in lines if line.startswith("overtone: ")]
        return (ours or lines or [""])[-1].removeprefix("overtone: ")

    def stop(self) -> None:
        """A run of real processes saves first."""
        self._process.terminate()
        self._process.wait()
