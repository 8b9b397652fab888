"""Where metrics go besides the run log: TensorBoard always, Weights & Biases or trackio if asked. Each hears the same
records and keeps the numbers of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from overtone.coding import fingerprint
from overtone.errors import ConfigError, RunLogError
from overtone.runs.log import Sink
from overtone.tasks.sources import first_line

SHOWN = ("train", "round", "eval", "finish")  # events with numbers worth a curve


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """``event/name`` of every number in a record that is worth a curve."""
    if record["event"] not in SHOWN:
        return {}
    skip = ("step", "time", "index")
    return {
        f"{record['event']}/{name}": float(value)
        for name, value in record.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name not in skip
    }


def _quieten() -> None:
    """The library's thread keeps what went wrong for the next call, which tells it, and lets its traceback be printed
    besides: that is left out."""
    before = threading.excepthook

    def hook(trouble: threading.ExceptHookArgs) -> None:
        theirs = trouble.thread is not None and type(trouble.thread).__module__.startswith("tensorboard.")
        if not (theirs and isinstance(trouble.exc_value, OSError)):
            before(trouble)

    threading.excepthook = hook


class TensorBoard:
    def __init__(self, folder: Path, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError("train: needs tensorboard; pip install 'overtone[train]'") from error
        _quieten()
        place = folder / "tensorboard"
        try:
            # After a resume, what the lost steps had written is not shown.
            self.writer = SummaryWriter(str(place), purge_step=step + 1 if step else None)
        except OSError as error:
            raise RunLogError(f"{place}: {error.strerror}; move it away, or make room") from error

    def write(self, record: Mapping[str, Any]) -> None:
        for name, value in numbers(record).items():
            self.writer.add_scalar(name, value, record["step"])
        if record.get("sample"):
            self.writer.add_text("sample", f"```\n{record['sample']}\n```", record["step"])

    def close(self) -> None:
        self.writer.close()


class Wandb:
    def __init__(self, folder: Path) -> None:
        wandb = _library("wandb")
        identity = fingerprint.of_text(str(folder.resolve())).hex()  # a resumed run goes on in the same curves
        self.run = wandb.init(project="overtone", name=folder.name, dir=str(folder), resume="allow", id=identity,
                              settings=wandb.Settings(silent=True))  # fmt: skip

    def write(self, record: Mapping[str, Any]) -> None:
        if record["event"] == "start":
            self.run.config.update(record["config"], allow_val_change=True)
        if found := numbers(record):
            self.run.log({**found, "local_step": record["step"]})

    def close(self) -> None:
        self.run.finish()


class Trackio:
    def __init__(self, folder: Path) -> None:
        self.run = _library("trackio").init(project="overtone", name=folder.name, resume="allow", embed=False)

    def write(self, record: Mapping[str, Any]) -> None:
        if found := numbers(record):
            self.run.log({**found, "local_step": record["step"]})

    def close(self) -> None:
        self.run.finish()


def _library(name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(f"track={name}: not installed; pip install {name}") from error


TRACKERS: dict[str, Callable[[Path], Sink]] = {"wandb": Wandb, "trackio": Trackio}


def sinks(folder: Path, track: str, step: int) -> list[Sink]:
    """For a run that begins, or goes on, after ``step`` steps."""
    found: list[Sink] = [TensorBoard(folder, step)]
    if track in TRACKERS:
        try:
            found.append(TRACKERS[track](folder))
        except ConfigError:
            raise
        except Exception as error:  # whatever a service says: no login, no network
            raise ConfigError(f"track={track}: {first_line(error)}") from error
    return found
