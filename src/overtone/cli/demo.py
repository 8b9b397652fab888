"""`overtone demo`: a comparison that is small enough to wait for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from overtone.cli.compare import make_and_show
from overtone.common import limits
from overtone.errors import ConfigError
from overtone.report.comparison import Comparison
from overtone.runs.config import Training
from overtone.tasks.options import Language, TaskOptions


@dataclass(frozen=True)
class Demo:
    """Compare five methods on one small task, in about a minute."""

    steps: int = 600
    """Local steps of every replica."""
    workers: int | None = None
    """Number of methods at the same time, each in a process of one thread. By default one for each core."""
    out: Path | None = None
    """Directory for the runs and the page. By default a new directory below runs/."""

    def __post_init__(self) -> None:
        limits.check(self, {"steps": limits.STEPS, "workers": limits.WORKERS}, ConfigError)


def run_demo(flags: Demo) -> None:
    """Make the comparison, and show it."""
    asked = Comparison(
        task=TaskOptions(language=Language(width=64, layers=2, heads=4)),
        training=Training(steps=flags.steps, batch=8),
        workers=flags.workers,
        title="overtone: five methods, one small task",
    )
    make_and_show(asked, flags.out, "demo")
