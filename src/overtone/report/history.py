"""One run as its log tells it: what it was, how it went, how it ended."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from overtone.errors import NotALogError, OvertoneError, RunLogError
from overtone.runs import log as runlog
from overtone.runs import toml
from overtone.runs.config import Run, Simulation
from overtone.runs.log import Record

PLACE = frozenset(("out", "json", "device", "threads", "timeout", "port", "track"))  # where a run is, not what
# What does not set a row apart: seeds make one row, the runs of a group share replicas, model and data (whatever the
# path), and when something was written or which network was imagined says nothing about the science.
ASIDE = PLACE | frozenset(
    (
        "seed", "replicas", "task", "model", "data", "tokenizer", "bandwidth", "latency", "step_seconds", "eval_every",
        "log_every", "checkpoint_every", "keep_checkpoints",
    )
)  # fmt: skip


@dataclass(frozen=True)
class History:
    path: Path
    records: Sequence[Record]

    @property
    def has_begun(self) -> bool:
        return any(r["event"] in ("start", "resume") for r in self.records)

    @cached_property
    def start(self) -> Record:
        """As the last session of the run began."""
        return next(r for r in reversed(self.records) if r["event"] in ("start", "resume"))

    def all(self, event: str) -> list[Record]:
        return [r for r in self.records if r["event"] == event]

    @cached_property
    def finish(self) -> Record | None:
        found = self.all("finish")
        return found[-1] if found else None

    @cached_property
    def config(self) -> dict[str, Any]:
        """The configuration. Keys have their present names, also in the log of an earlier version."""
        return toml.with_new_names(self.start["config"], str(self.path))

    @property
    def method(self) -> str:
        return str(self.start["method"])

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def simulated(self) -> bool:
        return bool(self.start["simulated"])

    @property
    def replicas(self) -> int:
        return int(self.config["replicas"] if self.simulated else self.start["environment"]["world"])

    @property
    def rounds(self) -> int:
        """Not counting the last messages."""
        if self.finish is not None:
            return int(self.finish["rounds"])
        return max((int(r["index"]) + 1 for r in self.all("round")), default=0)

    @property
    def steps_done(self) -> int:
        return int(self.records[-1]["step"])

    @property
    def has_average(self) -> bool:
        """Replicas that exchange without ever agreeing: what counts is replica 0 as much as their mean."""
        return not self.start["consensus"] and self.start["numbers"]["every"] is not None

    @cached_property
    def evals(self) -> list[Record]:
        return [*self.all("eval"), *([self.finish] if self.finish else [])]

    @cached_property
    def last_eval(self) -> Record | None:
        return self.evals[-1] if self.evals else None

    def loss(self, of: str = "metrics") -> float | None:
        """The newest validation loss; ``of="metrics_average"`` is that of the replicas' mean."""
        return self.last_eval.get(of, {}).get("loss") if self.last_eval else None

    @property
    def status(self) -> str:
        """finished, diverged, stopped (it said so) or unfinished (it did not: killed, or still running)."""
        if self._divergence:
            return "diverged"
        if self.finish is not None:
            return "finished"
        return "stopped" if self._stop else "unfinished"

    @property
    def is_over(self) -> bool:
        """It finished, or it gave up and would again."""
        return self.finish is not None or bool(self.all("fail"))

    @cached_property
    def _stop(self) -> Record | None:
        found = [*self.all("stop"), *self.all("fail")]
        return found[-1] if found else None

    @cached_property
    def folds(self) -> list[Record]:
        """The moments when the run went on with another number of replicas."""
        return [r for r in self.all("resume") if r["folded"]]

    @cached_property
    def _divergence(self) -> str:
        trained, seen = ([r["loss"] for r in self.all("train")], [r["metrics"]["loss"] for r in self.evals])
        if not all(map(math.isfinite, [*trained[-1:], *seen[-1:]])):
            return "diverged: its loss is not finite"
        if self.finish is not None and trained and seen[-1] > max(trained[0], seen[0]):
            return "diverged: it ended worse than it began"
        return ""

    @property
    def marks(self) -> list[str]:
        """What a reader must know before comparing it."""
        found = [self._divergence] if self._divergence else []
        if self.finish is None:
            how = "stopped" if self._stop else "unfinished"
            why = f": {self._stop['why']}" if self._stop else ""
            found.append(f"{how} at step {self.steps_done} of {self.start['steps']}{why}")
        found += [f"had {fold['from_replicas']} replicas up to step {fold['step']}" for fold in self.folds]
        return found

    @cached_property
    def numbers(self) -> dict[str, Any]:
        """Everything that sets this run apart from another of the same group, seed and place left out."""
        given = {key: value for key, value in self.config.items() if key not in ASIDE and key not in _METHOD}
        spoken = {_WORDS.get(key, key): value for key, value in self.start["numbers"].items() if key not in _SILENT}
        return {**spoken, **given}

    def command(self) -> str:
        """What makes this run again."""
        base: Simulation | Run = Simulation() if self.simulated else Run()
        given = {key: value for key, value in self.config.items() if value is not None}
        try:
            config = toml.updated(base, given, str(self.path))
        except OvertoneError:  # of another version: what was typed then
            return shlex.join(self.start["environment"]["command"])
        config = replace(config, out=None)
        if isinstance(config, Simulation):
            config = replace(config, json=None)
        return shlex.join(["overtone", "simulate" if self.simulated else "train", *toml.flags(config, base)])


_METHOD = frozenset(toml.flat(Simulation().choice))  # said with their resolved values in the method's own numbers
_SILENT = frozenset(("method", "signal", "rule", "codec"))
_WORDS = {"lr": "outer lr"}


def load(path: Path) -> History:
    """A run's directory, or its log itself."""
    history = History(path, runlog.read(path))
    if not history.has_begun:
        raise NotALogError(f"{path}: the log has no beginning; is it the log of a run?")
    missing = {"config", "numbers", "data", "simulated"} - history.start.keys()
    if missing:
        version = history.start.get("environment", {}).get("overtone", "of another version")
        raise RunLogError(
            f"{path}: written by overtone {version}, without {', '.join(sorted(missing))}; make the run again"
        )
    return history


def so_far(folder: Path) -> History | None:
    """Of a run that is being made: nothing before its log has a first line."""
    if not (folder / runlog.NAME).exists():
        return None
    history = History(folder, runlog.read(folder))
    return history if history.has_begun else None


def find(paths: Sequence[Path]) -> list[Path]:
    """The runs at these places: a log, the directory of a run, or one that holds such directories at any depth."""
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_file():
            found[path.parent if path.name == runlog.NAME else path] = None
            continue
        if (path / runlog.NAME).is_file():
            found[path] = None
            continue
        if not path.is_dir():
            raise NotALogError(f"{path}: no such file or directory; give runs, or a directory that holds some")
        below = sorted(log.parent for log in path.rglob(runlog.NAME))
        if not below:
            raise NotALogError(f"{path}: holds no run (no {runlog.NAME} in it or below)")
        found |= dict.fromkeys(below)
    if not found:
        raise NotALogError("runs: give at least one: the directory of a run, or one that holds some")
    return list({path.resolve(): path for path in found}.values())
