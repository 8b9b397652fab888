"""Runs set against each other: which may be compared, what each keeps of DiLoCo's gain, and for how many bytes.

Runs of one *group* trained the same model on the same data, with as many replicas, steps and samples. A *row* is one
setting over its seeds. Rows are compared within their group only, on the seeds that both have.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from overtone.history import History
from overtone.methods import METHODS

SHARED, AVERAGE = "metrics", "metrics_average"  # of the shared model (or replica 0), of the mean of the replicas


@dataclass(frozen=True)
class Row:
    label: str
    runs: Sequence[History]  # of different seeds
    of: str = SHARED

    @property
    def method(self) -> str:
        return self.runs[0].method

    @cached_property
    def losses(self) -> dict[int, float]:
        """By seed; those of runs that were validated at least once."""
        found = {run.seed: run.loss(self.of) for run in self.runs}
        return {seed: loss for seed, loss in found.items() if loss is not None}

    @property
    def seeds(self) -> list[int]:
        return sorted(run.seed for run in self.runs)

    @property
    def loss(self) -> float | None:
        return fmean(self.losses.values()) if self.losses else None

    @property
    def spread(self) -> float | None:
        """Between the best and the worst seed."""
        found = self.losses.values()
        return max(found) - min(found) if len(found) > 1 else None

    @property
    def metrics(self) -> dict[str, float]:
        """Means of the other measures."""
        last = [run.last_eval.get(self.of, {}) for run in self.runs if run.last_eval]
        names = [name for name in (last[0] if last else {}) if name != "loss"]
        return {name: fmean(found[name] for found in last if name in found) for name in names}

    @property
    def bytes(self) -> int:
        return round(fmean((run.last_eval or {}).get("bytes_sent", 0) for run in self.runs))

    @property
    def rounds(self) -> int:
        return max(
            sum(1 for _ in run.all("round")) if run.finish is None else run.finish["rounds"] for run in self.runs
        )

    @property
    def drift(self) -> float | None:
        """The largest distance of a replica from the mean of all, where it was measured."""
        found = [run.last_eval["drift"] for run in self.runs if run.last_eval and "drift" in run.last_eval]
        return max(found) if found else None

    @property
    def waiting(self) -> float | None:
        return _mean(run.finish.get("waiting_share") for run in self.runs if run.finish)

    @property
    def residual(self) -> float | None:
        return _mean(run.all("round")[-1]["residual_norm"] for run in self.runs if run.all("round"))

    @property
    def marks(self) -> list[str]:
        found = {f"seed {run.seed} {mark}" if len(self.runs) > 1 else mark for run in self.runs for mark in run.marks}
        if self.runs[0].has_average:
            found.add("mean of the replicas" if self.of == AVERAGE else "replica 0; there is no shared model")
        return sorted(found)


@dataclass(frozen=True)
class Versus:
    """A row against those that everybody knows; None where there is nothing to compare with."""

    less_than_diloco: float | None  # 43.5: so many times fewer bytes; infinite for a method that sends nothing
    less_than_ddp: float | None
    loss_vs_diloco: float | None  # +0.01: one per cent worse
    gain_kept: float | None  # 1: as good as DiLoCo; 0: no better than training alone; None: DiLoCo gained nothing


@dataclass(frozen=True)
class Group:
    runs: Sequence[History]

    @property
    def facts(self) -> dict[str, Any]:
        return facts(self.runs[0])

    @property
    def name(self) -> str:
        about = self.facts
        return f"{about['data']} · {about['replicas']} replicas · {about['steps']} steps"

    @cached_property
    def rows(self) -> list[Row]:
        """In the order of the method table; among those of one method, what sends most comes first."""
        settings: dict[str, list[History]] = {}
        for run in self.runs:
            settings.setdefault(_setting(run), []).append(run)
        labels = _labels([runs[0] for runs in settings.values()])
        rows = []
        for label, runs in zip(labels, settings.values(), strict=True):
            rows.append(Row(label, runs))
            if runs[0].has_average:
                rows.append(Row(f"{label}, mean", runs, AVERAGE))
        order = list(METHODS)
        return sorted(rows, key=lambda row: (order.index(row.method), -row.bytes, row.label))

    def _of(self, method: str) -> list[Row]:
        return [row for row in self.rows if row.method == method and row.losses]

    @cached_property
    def diloco(self) -> Row | None:
        """The reference: of the DiLoCo rows that exchange most often, the one with the lowest loss."""
        found = self._of("diloco")
        most = min((row.runs[0].start["numbers"]["every"] for row in found), default=0)
        often = [row for row in found if row.runs[0].start["numbers"]["every"] <= most]
        return min(often, key=lambda row: row.loss or 0.0, default=None)

    def versus(self, row: Row) -> Versus:
        alone, ddp = (next(iter(self._of(name)), None) for name in ("alone", "ddp"))
        pair = _on_common_seeds(row, self.diloco)
        return Versus(
            less_than_diloco=_fewer(row, self.diloco),
            less_than_ddp=_fewer(row, ddp),
            loss_vs_diloco=pair[0] / pair[1] - 1 if pair else None,
            gain_kept=_gain(row, alone, self.diloco),
        )

    @property
    def notes(self) -> list[str]:
        """What a reader must know of the group as a whole."""
        found = []
        for what, of in _PLACES.items():
            values = sorted({of(run) for run in self.runs})
            if len(values) > 1:
                found.append(f"These runs differ in {what}: {', '.join(values)}.")
        return found


# Two runs of one group may have these in common or not; the numbers stay comparable, the seconds do not.
_PLACES: dict[str, Callable[[History], str]] = {
    "the version of overtone": lambda run: run.start["environment"]["overtone"],
    "the version of torch": lambda run: run.start["environment"]["versions"].get("torch", "unknown"),
    "how they ran": lambda run: "simulated" if run.simulated else "as processes",
}


def groups(runs: Iterable[History]) -> list[Group]:
    """Those that may be compared together, in the order in which they come."""
    found: dict[str, list[History]] = {}
    for run in runs:
        found.setdefault(json.dumps([facts(run), run.start["data"]], sort_keys=True), []).append(run)
    return [Group(same) for same in found.values()]


def facts(run: History) -> dict[str, Any]:
    """What runs must share to be compared."""
    start = run.start
    return {
        "data": start["data"]["name"],
        "model": f"{start['config'].get('model') or start['data'].get('model') or start['config']['task']} model",
        "parameters": start["parameters"],
        "replicas": run.replicas,
        "steps": start["steps"],
        "units": start["units_per_step"] * start["steps"] * run.replicas,
        "unit": start["unit"],
    }


def difference(group: Group, first: Group) -> str | None:
    """Why the two may not be compared with each other, in words."""
    mine, other = group.facts, first.facts
    words = [
        f"{key} ({_grouped(value)} instead of {_grouped(other[key])})"
        for key, value in mine.items()
        if value != other[key]
    ]
    if not words and group.runs[0].start["data"] != first.runs[0].start["data"]:
        words = ["data (same name, other contents or split)"]
    return f"Not comparable with the first group: other {', '.join(words)}." if words else None


def _grouped(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _setting(run: History) -> str:
    return json.dumps([run.numbers, run.method, run.simulated], sort_keys=True)


def _labels(runs: Sequence[History]) -> list[str]:
    """The method, and what sets a run apart from most others of the same method."""
    labels = []
    for run in runs:
        others = [other for other in runs if other.method == run.method]
        words = [
            f"{key.replace('_', ' ')} {value}"
            for key, value in run.numbers.items()
            if value is not None and not _is_usual(value, [other.numbers.get(key) for other in others])
        ]
        if len({other.simulated for other in others}) > 1:
            words.append("simulated" if run.simulated else "as processes")
        labels.append(", ".join([run.method, *words]))
    return labels


def _is_usual(value: Any, values: Sequence[Any]) -> bool:
    """More than half have it. No two runs can be usual in all that they differ in, so labels stay apart."""
    return 2 * sum(1 for other in values if other == value) > len(values)


def _on_common_seeds(*rows: Row | None) -> list[float] | None:
    """The mean loss of each, over the seeds that all have."""
    there = [row for row in rows if row is not None]
    common = set.intersection(*(set(row.losses) for row in there))
    if len(there) < len(rows) or not common:
        return None
    return [fmean(row.losses[seed] for seed in common) for row in there]


def _fewer(row: Row, other: Row | None) -> float | None:
    if other is None:
        return None
    return other.bytes / row.bytes if row.bytes else float("inf")


def _gain(row: Row, alone: Row | None, diloco: Row | None) -> float | None:
    found = _on_common_seeds(row, alone, diloco)
    if found is None:
        return None
    mine, floor, best = found
    return (floor - mine) / (floor - best) if best < floor else None


def _mean(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return fmean(found) if found else None
