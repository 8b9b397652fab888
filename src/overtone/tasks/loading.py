"""Find a task by its name: a built-in one, or a Python file of the user's own."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from overtone.common.machine_errors import OWN_TASK
from overtone.errors import TaskError
from overtone.tasks.options import TaskOptions
from overtone.tasks.sources import check_tokenizer_file, existing_path, require
from overtone.tasks.task import Task

# Modules with a function task(options). They are imported when they are used: the image task needs transformers.
BUILT_IN = {"language": "overtone.tasks.text.task", "image": "overtone.tasks.image.task"}


def load_task(options: TaskOptions, *, to_train: bool = True) -> Task:
    """Build the task that ``options.task`` names. Without ``to_train`` it may have no samples, as in a dry run."""
    if options.task in BUILT_IN:
        found = require(BUILT_IN[options.task], f"task {options.task}").task(options)
    else:
        found = _from_file(options)
    if not isinstance(found, Task):
        raise TaskError(
            f"task {options.task}: task(options) returned {type(found).__name__}; return an overtone.tasks.Task"
        )
    if to_train and not len(found.valid):
        raise TaskError(f"data {options.data}: no validation samples; add some, the loss is measured on them")
    return found


def refuse_untrusted(options: TaskOptions, run: Path | str, command: str) -> None:
    """Refuse to run the Python file that a run's configuration names: the run may be somebody else's. ``run`` is its
    directory, or its place in a store."""
    if options.task not in BUILT_IN:
        raise TaskError(
            f"{command} {run}: its task is the Python file {options.task}, which would run here; allow that with "
            "--trust-task, or name a task of your own with --task"
        )


def refuse_missing(options: TaskOptions) -> None:
    """Refuse files that are named in the options and do not exist, before anything is started.

    Data of a task of the user's own is not checked: ``options.data`` means what that task makes of it.
    """
    if options.task not in BUILT_IN:
        _own_file(options)
        return
    if options.data not in (None, "none") and not options.data.startswith("hub:"):
        existing_path(options.data, "give one that exists, or leave --data out")
    if options.task == "language" and options.language.tokenizer is not None:
        check_tokenizer_file(options.language.tokenizer)


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
    # An error that passes through a module with this prefix shows its traceback: see common/machine_errors.py.
    name = f"{OWN_TASK}{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up here
    spec.loader.exec_module(module)
    if not callable(getattr(module, "task", None)):
        raise TaskError(f"task {path}: has no function task(options); examples/own_task.py shows one")
    return module.task(options)
