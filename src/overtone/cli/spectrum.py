"""`overtone spectrum`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from overtone.cli.console import check_writable, out
from overtone.errors import ConfigError
from overtone.report import spectrum_data


@dataclass(frozen=True)
class Spectrum:
    """Draw the signal of runs that were made with --spectrum, per layer and over time, on one page."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Directories of runs, or directories that contain runs, such as a comparison's."""
    out: Path = Path("spectrum.html")
    """File for the page."""
    title: str = "overtone: the signal itself"
    """Title of the page."""


def run_spectrum(flags: Spectrum) -> None:
    """Read the records and write the page."""
    if flags.out.suffix != ".html":
        raise ConfigError(f"out {flags.out}: a page ends in .html; choose such a name")
    check_writable(flags.out, "out")
    if not flags.runs:
        raise ConfigError("runs: give at least one: the directory of a run, or one that holds some")
    runs = spectrum_data.find(flags.runs)
    spectrum_data.write(flags.out, runs, flags.title)
    for run in runs:
        out.print(f"{run.path}: {run.method}, {run.replicas} replicas", markup=False)
    out.print(f"page: {flags.out}", markup=False)
