"""One run as its log tells it: what it was, how it went, how it ended."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from overtone import runlog, settings
from overtone.config import ConfigError, Run, Simulation
from overtone.runlog import Record, RunLogError

# What says nothing about the science of a run: where it ran, what it wrote, which network was imagined.
ASIDE = frozenset(
    (
        "seed", "out", "json", "device", "threads", "port", "replicas", "bandwidth", "latency", "step_seconds",
        "eval_every", "log_every", "checkpoint_every", "keep_checkpoints", "track",
    )
)  # fmt: skip


@dataclass(frozen=True)
class History:
    path: Path
    records: Sequence[Record]

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

    @property
    def config(self) -> dict[str, Any]:
        found: dict[str, Any] = self.start["config"]
        return found

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
        """finished, diverged, stopped (it said so) or cut off (it did not: killed, or still running)."""
        if self._divergence:
            return "diverged"
        if self.finish is not None:
            return "finished"
        return "stopped" if self.all("stop") else "cut off"

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
            said = self.all("stop")
            how = f"stopped at step {self.steps_done}" if said else f"cut off at step {self.steps_done}"
            found.append(f"{how} of {self.start['steps']}" + (f": {said[-1]['why']}" if said else ""))
        if any(r.get("folded") for r in self.all("resume")):
            found.append(f"went on from {self.start['from_replicas']} replicas")
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
            config = settings.updated(base, given, str(self.path))
        except ConfigError:  # of another version: what was typed then
            return shlex.join(self.start["environment"]["command"])
        config = replace(config, out=None)
        if isinstance(config, Simulation):
            config = replace(config, json=None)
        return shlex.join(["overtone", "simulate" if self.simulated else "train", *settings.flags(config, base)])


_METHOD = frozenset(settings.flat(Simulation().choice))  # said with their resolved values in the method's own numbers
_SILENT = frozenset(("method", "signal", "rule", "codec"))
_WORDS = {"lr": "outer lr"}


def load(path: Path) -> History:
    """A run's directory, or its log itself."""
    records = runlog.read(path)
    if not any(r["event"] in ("start", "resume") for r in records):
        raise RunLogError(f"{path}: the log has no beginning; is it the log of a run?")
    history = History(path, records)
    missing = {"config", "numbers", "data", "simulated"} - history.start.keys()
    if missing:
        version = history.start.get("environment", {}).get("overtone", "of another version")
        raise RunLogError(
            f"{path}: written by overtone {version}, without {', '.join(sorted(missing))}; make the run again"
        )
    return history


def find(paths: Sequence[Path]) -> list[Path]:
    """The runs at these places: a log, the directory of a run, or one that holds such directories at any depth."""
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_file() or (path / runlog.NAME).is_file():
            found[path] = None
            continue
        if not path.is_dir():
            raise RunLogError(f"{path}: no such file or directory; give runs, or a directory that holds some")
        below = sorted(log.parent for log in path.rglob(runlog.NAME))
        if not below:
            raise RunLogError(f"{path}: holds no run (no {runlog.NAME} in it or below)")
        found |= dict.fromkeys(below)
    return list(found)
