"""Exports the model that the replicas of a run share, in a form that other libraries load."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from torch import nn

from overtone.errors import CheckpointError, RunError, UnfitRunError
from overtone.replica import Replica
from overtone.runs import directory, log, optimizers, toml
from overtone.runs.checkpoint import format
from overtone.runs.checkpoint.index import CheckpointId, complete, file_of, present
from overtone.runs.config import Run
from overtone.runs.evaluate import evaluate
from overtone.tasks import Task, load_task, refuse_untrusted
from overtone.transport import Solo


def export(
    run: Path, folder: Path, *, task: str | None = None, trust_task: bool = False
) -> tuple[int, dict[str, float]]:
    """Write the shared model of the newest complete checkpoint into ``folder``. Return its step and its validation
    metrics.

    If the run's task is a Python file, the user must name the file in ``task``, or allow with ``trust_task`` that the
    file named in the run's configuration is executed.
    """
    directory.refuse_unused(run, "export")
    refuse_existing(folder)
    config = toml.load(run / directory.CONFIG, Run())
    if task is not None:
        config = replace(config, task=replace(config.task, task=task))
    elif not trust_task:
        refuse_untrusted(config.task, run, "export")
    checkpoint = _newest(run)
    file = file_of(run / directory.CHECKPOINTS, checkpoint, 0)
    tree = format.read(file)
    loaded = load_task(config.task)
    model = loaded.model()
    replica = Replica(model, optimizers.build(model, config.training), config.choice.build(), Solo())
    with format.reading(file, "model or optimizer"):
        format.restore(replica, tree)
    with replica.anchor() as shared:
        metrics = write_model(loaded, shared, folder)
    return checkpoint.step, metrics


def refuse_existing(folder: Path) -> None:
    """Refuse a folder that exists: nothing of it is to be lost, or mixed with the model."""
    if folder.exists():
        raise UnfitRunError(f"export {folder}: exists already; give a new folder")


def write_model(task: Task, model: nn.Module, folder: Path) -> dict[str, float]:
    """Write a model into a new folder, the whole folder or nothing. Returns its validation metrics."""
    beside = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        beside.mkdir(parents=True)
        model.eval()
        task.export(model, beside)
        metrics = evaluate(task, model)
        beside.rename(folder)
    except OSError as error:
        raise RunError(f"export {folder}: {error.strerror or error}; nothing was written") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return metrics


def _newest(run: Path) -> CheckpointId:
    """The newest complete checkpoint.

    If the hosts have disks of their own, only some files are here. Then the log tells which checkpoints were complete,
    and the file of replica 0 is enough: it holds everything that the replicas share.
    """
    folder = run / directory.CHECKPOINTS
    saved = log.last(run, "saved") or {"step": -1}
    found = [*complete(folder), *(m for m, rank, _ in present(folder) if rank == 0 and m.step <= saved["step"])]
    if not found:
        raise CheckpointError(f"{run}: no complete checkpoint to export; train on with --resume {run}")
    return max(found)
