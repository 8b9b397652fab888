"""`overtone export`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from overtone.cli.console import out
from overtone.runs.export import export
from overtone.runs.live import metrics_line


@dataclass(frozen=True)
class Export:
    """Write the model of a run into a folder that other programs can load.

    A model of Hugging Face transformers is written in their format: `from_pretrained` loads the folder.
    """

    run: tyro.conf.Positional[Path]
    """Directory of the run."""
    folder: tyro.conf.Positional[Path]
    """Folder to write. It must not exist yet."""
    task: str | None = None
    """The task of the run, if it is a Python file of your own."""
    trust_task: tyro.conf.FlagCreatePairsOff[bool] = False
    """Run the Python file that the configuration of the run names as its task."""


def run_export(flags: Export) -> None:
    """Export the newest checkpoint, and print its validation metrics."""
    step, metrics = export(flags.run, flags.folder, task=flags.task, trust_task=flags.trust_task)
    out.print(f"{flags.folder}: the model of {flags.run} at step {step}; {metrics_line(metrics)}", markup=False)
