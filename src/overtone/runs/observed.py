"""A run in a store, as `overtone follow`, `replay` and `prune` open it: the task and method that its settings tell."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from overtone.errors import OvertoneWarning, StoreError, TaskError
from overtone.runs.config import Run
from overtone.runs.stored import config_of
from overtone.swarm.archive import Archive
from overtone.swarm.observer import Observer
from overtone.swarm.outline import outline
from overtone.tasks import Task, TaskOptions, load_task, refuse_untrusted
from overtone.tasks.loading import BUILT_IN


@dataclass(frozen=True)
class OnThisHost:
    """Where this host has what the settings of a run name by a path."""

    data: str | None = None
    """The data of the run on this host. By default they are read where the run's founder has them."""
    model: str | None = None
    """The config.json of the model on this host. By default it is read where the run's founder has it."""
    tokenizer: Path | None = None
    """The tokenizer.json of the run on this host. By default it is read where the run's founder has it."""
    task: str | None = None
    """The task of the run on this host, if it is a Python file of your own."""
    trust_task: bool = False
    """Run the Python file that the settings of the run name as its task."""


def config_in(archive: Archive) -> Run:
    """The configuration that the members of a run train with."""
    settings = archive.founded.settings
    if "config" not in settings:
        raise StoreError(
            f"store {archive.url}: a program of its own has founded the run, and has left no configuration there; look "
            "at the run from Python, with overtone.swarm.observer.Observer"
        )
    return config_of(settings, f"store {archive.url}").resolved()


def task_in(archive: Archive, config: Run, here: OnThisHost, command: str) -> Task:
    """The task of a run, with the data that this host has. ``command`` wants it."""
    options = config.task
    given: dict[str, Any] = {
        name: value for name in ("data", "model", "task") if (value := getattr(here, name)) is not None
    }
    if here.tokenizer is not None:
        given["language"] = replace(options.language, tokenizer=here.tokenizer)
    options = replace(options, **given)
    if here.task is None and not here.trust_task:
        refuse_untrusted(options, archive.url, command)
    _refuse_elsewhere(config.task, here, archive.url)
    task = load_task(options)
    _warn_of_other_data(task, archive)
    return task


def observer_of(archive: Archive, config: Run, task: Task, device: torch.device) -> Observer:
    """An observer with the model of the task."""
    return Observer(task.model().to(device), config.choice.build(), archive)


def auditor_of(archive: Archive) -> Observer:
    """An observer without the task: its model has the shapes that the store tells, and no code."""
    return Observer(outline(archive.founded.description), config_in(archive).choice.build(), archive)


def _refuse_elsewhere(options: TaskOptions, here: OnThisHost, url: str) -> None:
    """Refuse paths of the founder's host that lead to nothing here, if no others were given."""
    if (here.task or options.task) not in BUILT_IN:
        return  # what its data means is its own affair
    paths = {"data": options.data, "model": options.model, "tokenizer": options.language.tokenizer}
    for flag, value in paths.items():
        # A name (none, hub:NAME, a preset) is no absolute path; the settings have no other ones.
        elsewhere = value is not None and Path(value).is_absolute() and not Path(value).exists()
        if elsewhere and getattr(here, flag) is None:
            raise TaskError(f"{flag} {value}: the run in {url} has it there, and this host has not; give --{flag} PATH")


def _warn_of_other_data(task: Task, archive: Archive) -> None:
    fixed, mine = archive.founded.settings.get("fixed"), task.about()
    here = mine.get("fingerprint", mine.get("name"))
    there = fixed.get("data") if isinstance(fixed, Mapping) else None
    if there not in (None, here):
        told = f"data {task.name}: not what the members of {archive.url} train on; the metrics are of other data"
        warnings.warn(OvertoneWarning(told), stacklevel=2)
