"""One page of any runs, from their logs: what `overtone.report.page` shows, and the same table as Markdown and CSV."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from overtone.errors import ConfigError
from overtone.report import page, table
from overtone.report.history import History
from overtone.report.standings import AVERAGE, SHARED, Group, Row, labels
from overtone.runs.config import Network
from overtone.runs.directory import write_whole
from overtone.runs.log import Record
from overtone.version import __version__

ROUND_COLUMNS = {
    "step": "step", "bytes": "bytes_sent", "drift": "drift_norm", "residual": "residual_norm",
    "waiting": "seconds_waiting",
}  # fmt: skip
FINISH_KEYS = ("rounds", "rounds_finish", "waiting_share", "bytes", "shares")
MOST = 400  # points of one run's small charts: more cannot be told apart, and the page must stay small


def write(file: Path, found: Sequence[Group], *, title: str, command: str | None = None) -> list[Path]:
    """The page, and beside it the table as Markdown and CSV."""
    if file.suffix != ".html":
        raise ConfigError(f"report {file}: a page ends in .html; beside it go .md and .csv")
    texts = {
        file: page.html(data(found, title=title, command=command)),
        file.with_suffix(".md"): f"# {table.plain(title)}\n\n{table.markdown(found)}",
        file.with_suffix(".csv"): table.as_csv(found),
    }
    for path in texts:
        if path.exists() and not file.exists():
            raise ConfigError(
                f"report {file}: {path.name} is there already, and not of an earlier report; choose another"
            )
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
        "legend": table.legend(found),
        "groups": [_group(group, found[0]) for group in found],
        "scaling": _scaling(found),
    }


def _group(group: Group, first: Group) -> dict[str, Any]:
    indexes = {id(run): number for number, run in enumerate(group.runs)}
    names = {id(run): row.label for row in reversed(group.rows) for run in row.runs}
    return {
        "name": group.name,
        "note": " ".join(table.notes(group, first)) or None,
        "facts": group.facts,
        "link": _link(group.runs[0]),
        "rows": [_row(group, row, [indexes[id(run)] for run in row.runs]) for row in group.rows],
        "runs": [_run(run, names[id(run)]) for run in group.runs],
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
        "metrics": row.metrics,
        "bytes": row.bytes,
        **vars(group.versus(row)),
        "drift": row.drift,
        "rounds": row.rounds,
        "waiting": row.waiting,
        "reference": row is group.diloco,
        "has_diloco": group.diloco is not None,
        "has_ddp": group.ddp is not None,
        "marks": row.marks,
    }


def _run(run: History, label: str) -> dict[str, Any]:
    drifts = [r for r in run.evals if "drift" in r]
    return {
        "label": label,
        "seed": run.seed,
        "status": run.status,
        "simulated": run.simulated,
        "marks": run.marks,
        "curve": _curve(run),
        "train": _columns(_thinned(run.all("train")), step="step", loss="loss"),
        "rounds": _columns(_thinned(run.all("round")), **ROUND_COLUMNS),
        "rounds_done": run.rounds,
        "spread_of_replicas": _columns(drifts, step="step", value="drift") if drifts else None,
        "finish": run.finish and {key: run.finish.get(key) for key in FINISH_KEYS},
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


def _thinned(records: Sequence[Record]) -> Sequence[Record]:
    """Every so many, and the last."""
    stride = -(-len(records) // MOST) or 1
    return records if stride == 1 else [*records[:-1:stride], records[-1]]


def _columns(records: Sequence[Record], **names: str) -> dict[str, list[Any]]:
    return {column: [record.get(key) for record in records] for column, key in names.items()}


def _link(run: History) -> dict[str, float]:
    """The virtual network of the run. A real run has none: then the default one, and the step it really took."""
    link = {key: getattr(Network(), key) for key in ("bandwidth", "latency", "step_seconds")}
    if run.simulated:
        link |= {key: run.config[key] for key in link if math.isfinite(run.config[key])}
    elif trained := run.all("train"):
        last = trained[-1]
        step_seconds = run.start["units_per_step"] * run.replicas / last["units_per_second"]
        link["step_seconds"] = round(step_seconds * (1 - last["waiting_share"]), 4)
    return link


def _scaling(found: Sequence[Group]) -> dict[str, Any] | None:
    """Final loss against the number of replicas, for settings that were run with several on equal data and samples."""
    alike: dict[str, list[Group]] = {}
    for group in found:
        about = group.facts
        same = {key: value for key, value in about.items() if key not in ("replicas", "steps")}
        alike.setdefault(json.dumps([same, group.runs[0].start["data"]], sort_keys=True), []).append(group)
    most = max(alike.values(), key=len)
    rows: dict[str, dict[int, Row]] = {}
    for group in most:
        for row in group.rows:
            if row.finished:
                rows.setdefault(_setting(row), {})[group.facts["replicas"]] = row
    several = {setting: sizes for setting, sizes in rows.items() if len(sizes) > 1}
    if not several:
        return None
    firsts = [next(iter(sizes.values())) for sizes in several.values()]
    names = labels([row.runs[0] for row in firsts], leave_out=WITH_REPLICAS)
    about = most[0].facts
    return {
        "title": "More replicas, the same data",
        "note": f"Loss at the end on {about['data']}: {about['units']:,} {about['unit']} for all of them together.",
        "x": "replicas",
        "series": [
            {
                "label": f"{name}, mean" if row.of == AVERAGE else name,
                "x": sorted(sizes),
                "loss": [sizes[k].loss for k in sorted(sizes)],
                "low": [min(sizes[k].losses) for k in sorted(sizes)],
                "high": [max(sizes[k].losses) for k in sorted(sizes)],
            }
            for name, row, sizes in zip(names, firsts, several.values(), strict=True)
        ],
    }


WITH_REPLICAS = ("steps", "warmup")  # change with their number where the samples are to stay as many


def _setting(row: Row) -> str:
    numbers = {key: value for key, value in row.runs[0].numbers.items() if key not in WITH_REPLICAS}
    return json.dumps([numbers, row.method, row.of], sort_keys=True)
