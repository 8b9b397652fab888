"""One page of any runs, from their logs: what `overtone.page` shows, and the same table as Markdown and CSV."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from overtone import page, table
from overtone.config import ConfigError, Network
from overtone.files import write_whole
from overtone.history import History
from overtone.runlog import Record
from overtone.standings import AVERAGE, SHARED, Group, Row, difference, groups
from overtone.version import __version__

ROUND_COLUMNS = {
    "step": "step", "bytes": "bytes_sent", "drift": "drift_norm", "residual": "residual_norm",
    "waiting": "seconds_waiting",
}  # fmt: skip
MOST_ROUNDS = 400  # points of one run's charts per round: more cannot be told apart, and the page must stay small


def write(file: Path, runs: Sequence[History], *, title: str, command: str | None = None) -> list[Path]:
    """The page, and beside it the table as Markdown and CSV."""
    found = groups(runs)
    texts = {
        file: page.html(data(found, title=title, command=command)),
        file.with_suffix(".md"): f"# {title}\n\n{table.markdown(found)}",
        file.with_suffix(".csv"): table.as_csv(found),
    }
    try:
        for path, text in texts.items():
            write_whole(path, text)
    except OSError as error:
        raise ConfigError(f"report {file}: {error.strerror}; give a file that can be written") from error
    return list(texts)


def data(found: Sequence[Group], *, title: str, command: str | None = None) -> dict[str, Any]:
    return {
        "title": title,
        "made": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "version": __version__,
        "command": command,
        "legend": list(table.LEGEND),
        "groups": [_group(group, found[0]) for group in found],
        "scaling": _scaling(found),
    }


def _group(group: Group, first: Group) -> dict[str, Any]:
    indexes = {id(run): number for number, run in enumerate(group.runs)}
    labels = {id(run): row.label for row in reversed(group.rows) for run in row.runs}
    apart = difference(group, first)
    return {
        "name": group.name,
        "note": " ".join([*([apart] if apart else []), *group.notes]) or None,
        "facts": group.facts,
        "link": _link(group.runs[0]),
        "rows": [_row(group, row, [indexes[id(run)] for run in row.runs]) for row in group.rows],
        "runs": [_run(run, labels[id(run)]) for run in group.runs],
    }


def _row(group: Group, row: Row, indexes: list[int]) -> dict[str, Any]:
    return {
        "label": row.label,
        "method": row.method,
        "runs": indexes,
        "of": "average" if row.of == AVERAGE else "loss",
        "seeds": row.seeds,
        "loss": row.loss,
        "spread": row.spread,
        "losses": [row.losses.get(seed) for seed in row.seeds],
        "metrics": row.metrics,
        "bytes": row.bytes,
        **vars(group.versus(row)),
        "drift": row.drift,
        "rounds": row.rounds,
        "waiting": row.waiting,
        "residual": row.residual,
        "reference": row is group.diloco,
        "marks": row.marks,
    }


def _run(run: History, label: str) -> dict[str, Any]:
    rounds = run.all("round")
    rounds = rounds[:: -(-len(rounds) // MOST_ROUNDS) or 1]
    drifts = [r for r in run.evals if "drift" in r]
    return {
        "label": label,
        "seed": run.seed,
        "status": "running" if run.status == "cut off" else run.status,
        "simulated": run.simulated,
        "marks": run.marks,
        "curve": _curve(run),
        "train": _columns(run.all("train"), step="step", loss="loss"),
        "rounds": _columns(rounds, **ROUND_COLUMNS),
        "spread_of_replicas": _columns(drifts, step="step", value="drift") if drifts else None,
        "finish": run.finish and {key: run.finish.get(key) for key in ("rounds", "rounds_finish", "bytes", "shares")},
        "config": {key: str(value) if value == math.inf else value for key, value in run.config.items()},
        "environment": run.start["environment"],
        "command": run.command(),
    }


def _curve(run: History) -> dict[str, list[Any]]:
    points = run.evals
    columns = _columns(points, step="step", bytes="bytes_sent", received="bytes_received", hops="hops",
                       seconds="seconds")  # fmt: skip
    for name in dict.fromkeys(name for point in points for name in point[SHARED]):
        columns[name] = [point[SHARED].get(name) for point in points]
    if run.has_average:
        columns["average"] = [point.get(AVERAGE, {}).get("loss") for point in points]
    return columns


def _columns(records: Sequence[Record], **names: str) -> dict[str, list[Any]]:
    return {column: [record.get(key) for record in records] for column, key in names.items()}


def _link(run: History) -> dict[str, float]:
    """The virtual network of the run. A real run has none: then the default one, and the step it really took."""
    keys = ("bandwidth", "latency", "step_seconds")
    if run.simulated:
        return {key: run.config[key] for key in keys}
    link = {key: getattr(Network(), key) for key in keys}
    if run.finish and run.finish.get("seconds"):
        link["step_seconds"] = round(
            run.finish["seconds"] * run.finish["shares"]["inner steps"] / run.finish["step"], 4
        )
    return link


def _scaling(found: Sequence[Group]) -> dict[str, Any] | None:
    """Final loss against the number of replicas, for settings that were run with several on equal data and samples."""
    alike: dict[str, list[Group]] = {}
    for group in found:
        about = group.facts
        name = f"{about['data']}, {about['parameters']:,} parameters, {about['units']:,} {about['unit']} in all"
        alike.setdefault(name, []).append(group)
    name, most = max(alike.items(), key=lambda item: len(item[1]))
    if len(most) < 2:
        return None
    series: dict[str, dict[int, Row]] = {}
    for group in most:
        for row in group.rows:
            if row.loss is not None:
                series.setdefault(_essence(row), {})[group.facts["replicas"]] = row
    return {
        "title": "More replicas, the same data",
        "note": f"Loss at the end ({name}): twice the replicas take half as many steps each.",
        "x": "replicas",
        "series": [
            {
                "label": label,
                "x": sorted(rows),
                "loss": [rows[k].loss for k in sorted(rows)],
                "low": [min(rows[k].losses.values()) for k in sorted(rows)],
                "high": [max(rows[k].losses.values()) for k in sorted(rows)],
            }
            for label, rows in series.items()
            if len(rows) > 1
        ],
    }


def _essence(row: Row) -> str:
    """The method and its own numbers, as far as they matter when the number of replicas does not."""
    numbers = row.runs[0].numbers
    words = [f"{key} {numbers[key]}" for key in ("every", "keep", "outer lr") if numbers.get(key) is not None]
    return ", ".join([row.method, *words, *(["mean"] if row.of == AVERAGE else [])])
