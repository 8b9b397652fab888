"""One run, read from its log: what it was, how it went, how it ended."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from overtone.errors import NotALogError, OvertoneError
from overtone.methods import STORE
from overtone.runs import log, toml
from overtone.runs.config import Run, Simulation
from overtone.runs.events import Eval, Event, Fail, Finish, Opening, Resume, RoundDone, Stop, Train

MetricsOf = Literal["metrics", "metrics_average"]  # of the shared model (or replica 0), of the mean of all replicas
PLACE = frozenset(("out", "json", "device", "threads", "timeout", "port", "track"))  # say where a run is
# Options that do not set a row apart. Runs that differ in their seed form one row; the runs of a group share replicas,
# model and data, whatever the paths; the rest (how often something is written, the virtual network) does not change
# what is learnt.
ASIDE = PLACE | frozenset(
    (
        "seed", "replicas", "task", "model", "data", "tokenizer", "bandwidth", "up", "down", "latency",
        "step_seconds", "eval_every", "log_every", "spectrum", "checkpoint_every", "keep_checkpoints",
    )
)  # fmt: skip


@dataclass(frozen=True)
class History:
    """One run: its directory (or the path of its log), and its events in order."""

    path: Path
    events: Sequence[Event]

    @property
    def has_begun(self) -> bool:
        """Whether there is a first event."""
        return any(event["event"] in ("start", "resume") for event in self.events)

    @cached_property
    def start(self) -> Opening:
        """The first event of the last session."""
        found: list[Opening] = [
            event for event in self.events if event["event"] == "start" or event["event"] == "resume"
        ]
        return found[-1]

    @cached_property
    def trained(self) -> list[Train]:
        """The events of training."""
        return [event for event in self.events if event["event"] == "train"]

    @cached_property
    def exchanged(self) -> list[RoundDone]:
        """The events of rounds. Methods that exchange at each step do not log every round."""
        return [event for event in self.events if event["event"] == "round"]

    @cached_property
    def finish(self) -> Finish | None:
        """The last event, if the run has finished."""
        found = [event for event in self.events if event["event"] == "finish"]
        return found[-1] if found else None

    @cached_property
    def evals(self) -> list[Eval | Finish]:
        """All validations; the last event of a finished run is one too."""
        found: list[Eval | Finish] = [event for event in self.events if event["event"] == "eval"]
        return [*found, *([self.finish] if self.finish else [])]

    @property
    def last_eval(self) -> Eval | Finish | None:
        """The newest validation."""
        return self.evals[-1] if self.evals else None

    @cached_property
    def folds(self) -> list[Resume]:
        """The moments when the run continued with another number of replicas."""
        return [event for event in self.events if event["event"] == "resume" and event["folded"]]

    @cached_property
    def _stop(self) -> Stop | Fail | None:
        stopped: list[Stop | Fail] = [event for event in self.events if event["event"] == "stop"]
        found = [*stopped, *self._failed]
        return found[-1] if found else None

    @cached_property
    def _failed(self) -> list[Fail]:
        return [event for event in self.events if event["event"] == "fail"]

    @property
    def config(self) -> dict[str, Any]:
        """The configuration, by the names of flags; they are the present names, also of an earlier version's log."""
        return toml.with_new_names(self.start["config"], str(self.path))

    @property
    def method(self) -> str:
        """The name of the method."""
        return self.start["method"]

    @property
    def seed(self) -> int:
        """The seed of initial weights and data order."""
        return int(self.config["seed"])

    @property
    def simulated(self) -> bool:
        """Whether the replicas were virtual."""
        return self.start["simulated"]

    @property
    def replicas(self) -> int:
        """How many replicas trained, in the last session."""
        return int(self.config["replicas"] if self.simulated else self.start["environment"]["world"])

    @property
    def rounds(self) -> int:
        """Rounds so far, without the last messages."""
        if self.finish is not None:
            return self.finish["rounds"]
        return max((event["index"] + 1 for event in self.exchanged), default=0)

    @property
    def steps_done(self) -> int:
        """Local steps so far."""
        return self.events[-1]["step"]

    @property
    def delay(self) -> int:
        """Local steps from the start of a round until its answer is absorbed."""
        return int(self.start["numbers"].get("delay", _UNSAID["delay"]))

    @property
    def in_store(self) -> bool:
        """Whether messages met in a store."""
        return self.start["numbers"].get("exchange") == STORE

    @property
    def has_average(self) -> bool:
        """Whether replicas exchange but never share one model. Then the mean of all replicas counts as much as replica
        0."""
        return not self.start["consensus"] and self.start["numbers"]["every"] is not None

    def metrics(self, of: MetricsOf = "metrics") -> dict[str, float]:
        """The newest validation metrics; empty if there are none."""
        return metrics_of(self.last_eval, of) if self.last_eval else {}

    def loss(self, of: MetricsOf = "metrics") -> float | None:
        """The newest validation loss; with ``of="metrics_average"``, that of the mean of all replicas."""
        return self.metrics(of).get("loss")

    @property
    def status(self) -> str:
        """finished; diverged; stopped (its log says so); or unfinished (killed, or still running)."""
        if self._divergence:
            return "diverged"
        if self.finish is not None:
            return "finished"
        return "stopped" if self._stop else "unfinished"

    @property
    def is_over(self) -> bool:
        """It has finished, or it gave up and would give up again."""
        return self.finish is not None or bool(self._failed)

    @cached_property
    def _divergence(self) -> str:
        trained, seen = [event["loss"] for event in self.trained], [event["metrics"]["loss"] for event in self.evals]
        if not all(map(math.isfinite, [*trained[-1:], *seen[-1:]])):
            return "diverged: its loss is not finite"
        if self.finish is not None and trained and seen[-1] > max(trained[0], seen[0]):
            return "diverged: it ended worse than it began"
        return ""

    @property
    def caveats(self) -> list[str]:
        """What a reader must know before comparing this run with others."""
        found = [self._divergence] if self._divergence else []
        if self.finish is None:
            how = "stopped" if self._stop else "unfinished"
            why = f": {self._stop['why']}" if self._stop else ""
            found.append(f"{how} at step {self.steps_done} of {self.start['steps']}{why}")
        if "observed" in self.start:
            found.append(f"seen by an observer from round {self.start['observed']['from_round']} on")
        found += [f"had {fold['from_replicas']} replicas up to step {fold['step']}" for fold in self.folds]
        return found

    @cached_property
    def numbers(self) -> dict[str, Any]:
        """All options that set this run apart from another of the same group, except seed and place."""
        given = {key: value for key, value in self.config.items() if key not in ASIDE and key not in _METHOD}
        numbers = {**_UNSAID, **self.start["numbers"]}
        spoken = {_WORDS.get(key, key): value for key, value in numbers.items() if key not in _SILENT}
        return {**spoken, **given}

    def command(self) -> str:
        """The command that makes this run again."""
        if "observed" in self.start:
            return shlex.join(["overtone", "follow", self.start["observed"]["store"]])
        base: Simulation | Run = Simulation() if self.simulated else Run()
        given = {key: value for key, value in self.config.items() if value is not None}
        try:
            config = toml.updated(base, given, str(self.path))
        except OvertoneError:  # a configuration of another version: show the command that the user typed then
            return shlex.join(self.start["environment"]["command"])
        config = replace(config, out=None)
        if isinstance(config, Simulation):
            config = replace(config, json=None)
        return shlex.join(["overtone", "simulate" if self.simulated else "train", *toml.flags(config, base)])


def metrics_of(event: Eval | Finish, of: MetricsOf) -> dict[str, float]:
    """The metrics of a validation: of the shared model, or of the mean of all replicas if they were measured."""
    return event["metrics"] if of == "metrics" else event.get("metrics_average", {})


_METHOD = frozenset(toml.flat(Simulation().choice))  # shown with their values in the numbers of the method
_SILENT = frozenset(("method", "signal", "rule", "codec"))
_WORDS = {"lr": "outer lr"}
# Methods list these numbers only where they differ from these values. Earlier versions had none of them.
_UNSAID = {"delay": 0, "exchange": "gathered"}


def load(path: Path) -> History:
    """The run in this directory, or with this log."""
    history = History(path, log.read(path))
    if not history.has_begun:
        raise NotALogError(f"{path}: the log has no beginning; is it the log of a run?")
    return history


def so_far(folder: Path) -> History | None:
    """A run that is still being made; None before its log has a first line."""
    if not (folder / log.NAME).exists():
        return None
    history = History(folder, log.read(folder))
    return history if history.has_begun else None


def find(paths: Sequence[Path]) -> list[Path]:
    """The runs at these paths. A path is a log, the directory of a run, or a directory with such directories below."""
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_file():
            found[path.parent if path.name == log.NAME else path] = None
            continue
        if (path / log.NAME).is_file():
            found[path] = None
            continue
        if not path.is_dir():
            raise NotALogError(f"{path}: no such file or directory; give runs, or a directory that holds some")
        below = sorted(file.parent for file in path.rglob(log.NAME))
        if not below:
            raise NotALogError(f"{path}: holds no run (no {log.NAME} in it or below)")
        found |= dict.fromkeys(below)
    if not found:
        raise NotALogError("runs: give at least one: the directory of a run, or one that holds some")
    return list({path.resolve(): path for path in found}.values())
