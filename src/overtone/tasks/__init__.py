"""Tasks: a model, data, and a measure of how well it does."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from overtone.common.machine_errors import OWN_TASK
from overtone.errors import TaskError
from overtone.tasks.options import Image, Language, TaskOptions
from overtone.tasks.sharding import Dealt, Deck, Feed, Samples
from overtone.tasks.sources import existing, needs, refuse_no_tokenizer
from overtone.tasks.task import Task, Tensors

__all__ = [
    "Dealt", "Deck", "Feed", "Image", "Language", "Samples", "Task", "TaskError", "TaskOptions", "Tensors", "load_task",
    "refuse_missing", "refuse_untrusted",
]  # fmt: skip

BUILT_IN = {"language": "overtone.tasks.text.task", "image": "overtone.tasks.image.task"}


def load_task(options: TaskOptions, *, to_train: bool = True) -> Task:
    """The task by name, or from a Python file that has a function ``task(options)``; to train it needs samples."""
    if options.task in BUILT_IN:
        found = needs(BUILT_IN[options.task], f"task {options.task}").task(options)
    else:
        found = _from_file(options)
    if not isinstance(found, Task):
        raise TaskError(f"task {options.task}: task(options) gave {type(found).__name__}; give an overtone.tasks.Task")
    if to_train and not len(found.valid):
        raise TaskError(f"data {options.data}: no validation samples; give some, there is no measuring without")
    return found


def refuse_untrusted(options: TaskOptions, run: Path, command: str) -> None:
    """The configuration of a run may be somebody else's: it does not decide what Python code runs here."""
    if options.task not in BUILT_IN:
        raise TaskError(
            f"{command} {run}: its {options.task} is Python code that would run here; --trust-task lets it, "
            "or name a task of your own with --task"
        )


def refuse_missing(options: TaskOptions) -> None:
    """What is named and not there, before anything is started. A task of one's own reads its data as it likes."""
    if options.task not in BUILT_IN:
        _own_file(options)
        return
    if options.data not in (None, "none") and not options.data.startswith("hub:"):
        existing(options.data, "give one that is there, or leave it out")
    if options.task == "language" and options.language.tokenizer is not None:
        refuse_no_tokenizer(options.language.tokenizer)


def _own_file(options: TaskOptions) -> Path:
    path = Path(options.task)
    if path.suffix != ".py":
        known = ", ".join(BUILT_IN)
        raise TaskError(f"task {options.task!r}: unknown; there are {known}, or give the path of a Python file")
    if not path.is_file():
        raise TaskError(f"task {path}: no such file; give a Python file with a function task(options)")
    return path


def _from_file(options: TaskOptions) -> object:
    path = _own_file(options)
    name = f"{OWN_TASK}{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that its dataclasses and pickles find their home
    spec.loader.exec_module(module)
    if not callable(getattr(module, "task", None)):
        raise TaskError(f"task {path}: has no function task(options); examples/own_task.py shows one")
    return module.task(options)
