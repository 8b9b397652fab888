"""A run's model for others: the weights that all replicas share, in the form that their libraries load."""

from __future__ import annotations

import shutil
from pathlib import Path

from overtone import checkpoint, optimisers, rundir, settings
from overtone.checkpoint import CheckpointError
from overtone.config import Run
from overtone.replica import Replica
from overtone.rundir import RunError
from overtone.tasks import load_task
from overtone.train import evaluate
from overtone.transport import Solo


def export(run: Path, folder: Path) -> tuple[int, dict[str, float]]:
    """The newest complete checkpoint's shared model into ``folder``; its step, and its validation metrics."""
    rundir.check(run, resume=True)
    if folder.exists():
        raise RunError(f"export {folder}: exists already; give a new folder")
    config = settings.load(run / rundir.CONFIG, Run())
    marks = checkpoint.complete(run / "checkpoints")
    if not marks:
        raise CheckpointError(f"{run}: no complete checkpoint to export; train on with --resume {run}")
    tree = checkpoint.read(checkpoint.file_of(run / "checkpoints", marks[-1], 0))
    task = load_task(config.task)
    model = task.model()
    replica = Replica(model, optimisers.build(model, config.training), config.choice.build(), Solo())
    checkpoint.restore(replica, tree)
    beside = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        beside.mkdir(parents=True)
        with replica.anchor() as shared:
            shared.eval()
            task.export(shared, beside)
            metrics = evaluate(task, shared)
        beside.rename(folder)
    except OSError as error:
        raise RunError(f"export {folder}: {error.strerror or error}; nothing was written") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return marks[-1].step, metrics
