"""Where metrics go besides the run log: always to TensorBoard, on request to Weights & Biases or trackio.

Each tracker gets the same events and keeps their numbers."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from overtone.coding import fingerprint
from overtone.errors import ConfigError, RunLogError
from overtone.runs.events import Event
from overtone.runs.log import Sink
from overtone.tasks.sources import first_line

SHOWN = ("train", "round", "eval", "finish")  # events with numbers worth a curve


def scalars(event: Event) -> dict[str, float]:
    """Every number of an event that is worth a curve, as ``event/name``; of a validation, the metrics too.

    A NaN in the event of a round says that the number is not known, so there is nothing to draw.
    """
    if event["event"] not in SHOWN:
        return {}
    skip = ("step", "time", "index")
    metrics = event["metrics"] if event["event"] == "eval" or event["event"] == "finish" else {}
    values = {**event, **metrics}
    return {
        f"{event['event']}/{name}": float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name not in skip
        if not (event["event"] == "round" and math.isnan(value))
    }


def _quieten() -> None:
    """Keep TensorBoard's thread from printing a traceback when it cannot write. The library keeps the error and raises
    it again at the next call, where it is handled."""
    before = threading.excepthook

    def hook(trouble: threading.ExceptHookArgs) -> None:
        theirs = trouble.thread is not None and type(trouble.thread).__module__.startswith("tensorboard.")
        if not (theirs and isinstance(trouble.exc_value, OSError)):
            before(trouble)

    threading.excepthook = hook


class TensorBoard:
    """Writes curves into the run's directory."""

    def __init__(self, folder: Path, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError("train: needs tensorboard; pip install 'overtone[train]'") from error
        _quieten()
        place = folder / "tensorboard"
        try:
            # After a resume, TensorBoard does not show the points of the steps that were lost.
            self.writer = SummaryWriter(str(place), purge_step=step + 1 if step else None)
        except OSError as error:
            raise RunLogError(f"{place}: {error.strerror}; move it away, or make room") from error

    def write(self, event: Event) -> None:
        """Add the numbers of an event to their curves."""
        for name, value in scalars(event).items():
            self.writer.add_scalar(name, value, event["step"])
        if event["event"] == "finish" and event["sample"]:
            self.writer.add_text("sample", f"```\n{event['sample']}\n```", event["step"])

    def close(self) -> None:
        """Write everything to the disk."""
        self.writer.close()


class Wandb:
    """Sends curves and configuration to Weights & Biases."""

    def __init__(self, folder: Path) -> None:
        wandb = _library("wandb")
        identity = fingerprint.of_text(str(folder.resolve())).hex()  # so a resumed run continues the same curves
        self.run = wandb.init(project="overtone", name=folder.name, dir=str(folder), resume="allow", id=identity,
                              settings=wandb.Settings(silent=True))  # fmt: skip

    def write(self, event: Event) -> None:
        """Send the numbers of an event."""
        if event["event"] == "start":
            self.run.config.update(event["config"], allow_val_change=True)
        if found := scalars(event):
            self.run.log({**found, "local_step": event["step"]})

    def close(self) -> None:
        """Wait until everything is sent."""
        self.run.finish()


class Trackio:
    """Sends curves to trackio."""

    def __init__(self, folder: Path) -> None:
        self.run = _library("trackio").init(project="overtone", name=folder.name, resume="allow", embed=False)

    def write(self, event: Event) -> None:
        """Send the numbers of an event."""
        if found := scalars(event):
            self.run.log({**found, "local_step": event["step"]})

    def close(self) -> None:
        """Wait until everything is sent."""
        self.run.finish()


def _library(name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(f"track={name}: not installed; pip install {name}") from error


TRACKERS: dict[str, Callable[[Path], Sink]] = {"wandb": Wandb, "trackio": Trackio}


def sinks(folder: Path, track: str, step: int) -> list[Sink]:
    """The trackers of a run that begins, or continues, after ``step`` steps."""
    found: list[Sink] = [TensorBoard(folder, step)]
    if track in TRACKERS:
        try:
            found.append(TRACKERS[track](folder))
        except ConfigError:
            raise
        except Exception as error:  # the services raise errors of many types: no login, no network
            raise ConfigError(f"track={track}: {first_line(error)}") from error
    return found
