"""The data of the report page, gathered from the logs of any runs; and the files of a report: page, Markdown, CSV."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from overtone.errors import ConfigError
from overtone.report import link_time, page, table
from overtone.report.history import History, metrics_of
from overtone.report.standings import AVERAGE, Group, Row, labels
from overtone.runs.config import Network
from overtone.runs.directory import write_whole
from overtone.runs.events import Event, Finish
from overtone.version import __version__

T = TypeVar("T")

MOST = 400  # points in a small chart of one run: more cannot be told apart, and the page must stay small


def write(file: Path, found: Sequence[Group], *, title: str, command: str | None = None) -> list[Path]:
    """Write the page, and beside it the table as Markdown and CSV; return the three paths."""
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
    """Everything that the page shows, as JSON."""
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
        "link": _link(group.network),
        "rows": [_row(group, row, [indexes[id(run)] for run in row.runs]) for row in group.rows],
        "runs": [_run(run, names[id(run)]) for run in group.runs],
    }


def _link(network: Network) -> dict[str, float]:
    up, down = network.rates
    return {"up": up, "down": down, "latency": network.latency, "step_seconds": network.step_seconds}


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
        "received": row.received,
        **vars(group.versus(row)),
        "drift": row.drift,
        "rounds": row.rounds,
        "waiting": row.waiting,
        "reference": row is group.diloco,
        "has_diloco": group.diloco is not None,
        "has_ddp": group.ddp is not None,
        "marks": row.caveats,
    }


def _run(run: History, label: str) -> dict[str, Any]:
    trained, rounds = _thinned(run.trained), _thinned(run.exchanged)
    drifts = [event for event in run.evals if "drift" in event]
    return {
        "label": label,
        "seed": run.seed,
        "status": run.status,
        "simulated": run.simulated,
        "in_store": run.in_store,
        "marks": run.caveats,
        "curve": _curve(run),
        "train": {"step": _steps(trained), "loss": [event["loss"] for event in trained]},
        "rounds": {
            "step": _steps(rounds),
            "bytes": [event["bytes_sent"] for event in rounds],
            "drift": [event["drift_norm"] for event in rounds],
            "residual": [event["residual_norm"] for event in rounds],
            "waiting": [event["seconds_waiting"] for event in rounds],
            "hidden": [event["seconds_hidden"] for event in rounds],
        },
        "rounds_done": run.rounds,
        "spread_of_replicas": {"step": _steps(drifts), "value": [event["drift"] for event in drifts]}
        if drifts
        else None,
        "finish": run.finish and _end(run.finish),
        "config": {key: str(value) if value == math.inf else value for key, value in run.config.items()},
        "environment": run.start["environment"],
        "command": run.command(),
    }


def _end(finish: Finish) -> dict[str, Any]:
    return {
        "rounds": finish["rounds"],
        "rounds_finish": finish["rounds_finish"],
        "waiting_share": finish["waiting_share"],
        "bytes": finish["bytes"],
        "shares": finish["shares"],
    }


def _curve(run: History) -> dict[str, list[Any]]:
    """One value per validation in each column: the cost so far, and every metric."""
    points = run.evals
    columns: dict[str, list[Any]] = {
        "step": _steps(points),
        "bytes": [point["bytes_sent"] for point in points],
        "received": [point["bytes_received"] for point in points],
        "hops": [point["hops"] for point in points],
        "seconds": [point["seconds"] for point in points],
    }
    if run.delay:
        columns["overlapped"] = [link_time.overlapped(run, point) for point in points]
    for name in dict.fromkeys(name for point in points for name in point["metrics"]):
        columns[name] = [point["metrics"].get(name) for point in points]
    if run.has_average:
        columns["average"] = [metrics_of(point, AVERAGE).get("loss") for point in points]
    return columns


def _steps(events: Sequence[Event]) -> list[int]:
    return [event["step"] for event in events]


def _thinned(events: Sequence[T]) -> Sequence[T]:
    """Every so many events, and the last."""
    stride = -(-len(events) // MOST) or 1
    return events if stride == 1 else [*events[:-1:stride], events[-1]]


def _scaling(found: Sequence[Group]) -> dict[str, Any] | None:
    """Final loss against the number of replicas, for settings that were run with several numbers of replicas on the
    same data and as many samples; None if there are none."""
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


WITH_REPLICAS = ("steps", "warmup")  # change with the number of replicas, so that the samples stay as many


def _setting(row: Row) -> str:
    numbers = {key: value for key, value in row.runs[0].numbers.items() if key not in WITH_REPLICAS}
    return json.dumps([numbers, row.method, row.of], sort_keys=True)
