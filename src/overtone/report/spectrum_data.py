"""The data of the page of the signal, gathered from the records of any runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from overtone.report import history, page, standings
from overtone.report.history import History
from overtone.runs import spectrum
from overtone.runs.directory import write_whole
from overtone.version import __version__

DIGITS = 3  # of a number on the page: no chart shows more, and the page must stay small


def find(paths: Sequence[Path]) -> list[History]:
    """The runs at these paths that have records. A path without any is refused, with what is wrong with its first."""
    found: list[History] = []
    for path in paths:
        there = history.find([path])
        recorded = [run for run in there if (run / spectrum.NAME).exists()]
        if not recorded:
            spectrum.read(there[0])  # raises
        found += map(history.load, recorded)
    return list({run.path.resolve(): run for run in found}.values())


def write(file: Path, runs: Sequence[History], title: str) -> None:
    """Write the page."""
    write_whole(file, page.spectrum_html(data(runs, title)))


def data(runs: Sequence[History], title: str) -> dict[str, Any]:
    """Everything that the page shows, as JSON."""
    several = len({run.seed for run in runs}) > 1
    names = zip(runs, standings.labels(runs), strict=True)
    return {
        "title": title,
        "made": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "version": __version__,
        "runs": [_run(run, f"{label}, seed {run.seed}" if several else label) for run, label in names],
    }


def _run(run: History, label: str) -> dict[str, Any]:
    records = spectrum.read(run.path)
    last = records[-1]
    return {
        "label": label,
        "facts": standings.facts(run),
        "basis": last["basis"],
        "keep": last["keep"],
        "strongest": last["strongest"],
        "records": [
            _short({key: record[key] for key in ("round", "step", "replicas", "whole", "layers")}) for record in records
        ],
    }


def _short(value: Any) -> Any:
    """The same with fewer digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    return [_short(item) for item in value] if isinstance(value, list) else value
