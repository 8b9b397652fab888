"""`overtone simulate`."""

from __future__ import annotations

import os

import torch

from overtone.cli.console import check_writable, out, progress_bar, write_json
from overtone.report.format import summary
from overtone.runs.config import Simulation
from overtone.runs.simulate import simulate


def run_simulate(flags: Simulation) -> None:
    """Simulate one run; print a summary, and write the result if a file was given."""
    if "OMP_NUM_THREADS" not in os.environ:
        # Small models train faster on one thread than on two, and a run is then repeatable on any machine.
        torch.set_num_threads(1)
    if flags.json is not None:
        check_writable(flags.json)
    with progress_bar() as bar:
        task = bar.add_task(flags.choice.method, total=flags.training.steps, note="")
        result = simulate(flags, lambda step, loss: bar.update(task, completed=step, note=f"loss {loss:.3f}"))
    if flags.json is not None:
        write_json(flags.json, result)
    out.print(summary(result))
