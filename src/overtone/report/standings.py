"""Runs set against each other: which may be compared, what each keeps of DiLoCo's gain, and for how many bytes.

Runs of one *group* trained the same model on the same data, with as many replicas, steps and samples. A *row* is one
setting over its seeds. Rows are compared within their group only, on the seeds that both have.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from overtone.methods import METHODS
from overtone.report.history import History

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
    def counted(self) -> Sequence[History]:
        """The runs that the row's numbers are of: those that finished, or all if none did."""
        return [run for run in self.runs if run.finish] or self.runs

    @cached_property
    def finished(self) -> dict[int, float]:
        """Losses by seed; only these are set against other rows."""
        found = {run.seed: run.loss(self.of) for run in self.runs if run.finish}
        return {seed: loss for seed, loss in found.items() if loss is not None}

    @cached_property
    def losses(self) -> list[float]:
        return [loss for run in self.counted if (loss := run.loss(self.of)) is not None]

    @property
    def seeds(self) -> list[int]:
        return sorted(run.seed for run in self.runs)

    @property
    def loss(self) -> float | None:
        return _mean(self.losses)

    @property
    def spread(self) -> float | None:
        """Between the best and the worst seed."""
        found = [loss for loss in self.losses if math.isfinite(loss)]
        return max(found) - min(found) if len(found) > 1 else None

    @property
    def metrics(self) -> dict[str, float]:
        """Means of the other measures."""
        last = [run.last_eval.get(self.of, {}) for run in self.counted if run.last_eval]
        names = [name for name in (last[0] if last else {}) if name != "loss"]
        return {name: fmean(found[name] for found in last if name in found) for name in names}

    @property
    def bytes(self) -> int | None:
        mean = _mean(run.last_eval["bytes_sent"] for run in self.counted if run.last_eval)
        return None if mean is None else round(mean)

    @property
    def rounds(self) -> int:
        return max(run.rounds for run in self.counted)

    @property
    def drift(self) -> float | None:
        """The largest distance of a replica from the mean of all, where it was measured."""
        found = [run.last_eval["drift"] for run in self.counted if run.last_eval and "drift" in run.last_eval]
        return max(found) if found else None

    @property
    def waiting(self) -> float | None:
        return _mean(run.finish.get("waiting_share") for run in self.counted if run.finish)

    @property
    def residual(self) -> float | None:
        return _mean(run.all("round")[-1]["residual_norm"] for run in self.counted if run.all("round"))

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
    name: str
    runs: Sequence[History]

    @property
    def facts(self) -> dict[str, Any]:
        return facts(self.runs[0])

    @cached_property
    def rows(self) -> list[Row]:
        """In the order of the method table; among those of one method, what sends most comes first."""
        settings: dict[str, list[History]] = {}
        times: Counter[str] = Counter()  # a run made twice is shown twice
        for run in self.runs:
            setting = json.dumps([run.numbers, run.method, run.simulated], sort_keys=True)
            times[f"{setting} {run.seed}"] += 1
            settings.setdefault(f"{setting} {times[f'{setting} {run.seed}']}", []).append(run)
        rows = []
        for label, runs in zip(labels([runs[0] for runs in settings.values()]), settings.values(), strict=True):
            rows.append(Row(label, runs))
            if runs[0].has_average:
                rows.append(Row(f"{label}, mean", runs, AVERAGE))
        order = list(METHODS)
        return sorted(
            rows,
            key=lambda row: (order.index(row.method) if row.method in order else len(order), -(row.bytes or 0)),
        )

    def _of(self, method: str) -> list[Row]:
        """Those that others may be set against."""
        rows = [row for row in self.rows if row.method == method and row.finished]
        return [row for row in rows if all(map(math.isfinite, row.finished.values()))]

    @cached_property
    def diloco(self) -> Row | None:
        """The reference: of the DiLoCo rows that exchange most often those with most seeds, and of these the best."""
        return min(
            self._of("diloco"),
            key=lambda row: (row.runs[0].start["numbers"]["every"], -len(row.finished), row.loss),
            default=None,
        )

    @cached_property
    def ddp(self) -> Row | None:
        return next(iter(self._of("ddp")), None)

    @cached_property
    def alone(self) -> Row | None:
        return next(iter(self._of("alone")), None)

    def versus(self, row: Row) -> Versus:
        pair = _on_common_seeds(row, self.diloco)
        triple = _on_common_seeds(row, self.alone, self.diloco)
        return Versus(
            less_than_diloco=_fewer(row, self.diloco),
            less_than_ddp=_fewer(row, self.ddp),
            loss_vs_diloco=pair[0] / pair[1] - 1 if pair else None,
            gain_kept=_gain(*triple) if triple else None,
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
    """Those that may be compared together, in the order in which they come, each with a name of its own."""
    found: dict[str, list[History]] = {}
    for run in runs:
        folds = [[fold["step"], fold["from_replicas"]] for fold in run.folds]
        key = json.dumps([facts(run), run.start["data"], folds], sort_keys=True)
        found.setdefault(key, []).append(run)
    names: Counter[str] = Counter()
    made = []
    for same in found.values():
        about = facts(same[0])
        name = f"{about['data']} · {about['replicas']} replicas · {about['steps']} steps"
        names[name] += 1
        made.append(Group(name if names[name] == 1 else f"{name} ({names[name]})", same))
    return made


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
    if group is first:
        return None
    mine, other = group.facts, first.facts
    words = [
        f"{key} ({_grouped(value)} instead of {_grouped(other[key])})"
        for key, value in mine.items()
        if value != other[key]
    ]
    if not words:
        same_data = group.runs[0].start["data"] == first.runs[0].start["data"]
        words = ["replicas for a part of it" if same_data else "data (same name, other contents or split)"]
    return f"Not comparable with {first.name}: other {', '.join(words)}."


def _grouped(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def labels(runs: Sequence[History], *, leave_out: Container[str] = ()) -> list[str]:
    """The method, and what sets a run apart from most others of the same method."""
    found = []
    for run in runs:
        others = [other for other in runs if other.method == run.method]
        words = [
            f"no {key.replace('_', ' ')}" if value is None else f"{key.replace('_', ' ')} {value}"
            for key, value in run.numbers.items()
            if key not in leave_out and not _is_usual(value, [other.numbers.get(key) for other in others])
        ]
        if len({other.simulated for other in others}) > 1:
            words.append("simulated" if run.simulated else "as processes")
        found.append(", ".join([run.method, *words]))
    again = Counter[str]()
    for number, label in enumerate(found):
        again[label] += 1
        found[number] = label if again[label] == 1 else f"{label}, again ({again[label]})"
    return found


def _is_usual(value: Any, values: Sequence[Any]) -> bool:
    """More than half have it. No two runs can be usual in all that they differ in, so labels stay apart."""
    return 2 * sum(1 for other in values if other == value) > len(values)


def _on_common_seeds(*rows: Row | None) -> list[float] | None:
    """The mean loss of each, over the seeds that all have finished."""
    there = [row for row in rows if row is not None]
    common = set.intersection(*(set(row.finished) for row in there))
    if len(there) < len(rows) or not common:
        return None
    return [fmean(row.finished[seed] for seed in common) for row in there]


def _fewer(row: Row, other: Row | None) -> float | None:
    if other is None or not other.bytes or not row.finished:
        return None
    return other.bytes / row.bytes if row.bytes else math.inf


def _gain(mine: float, alone: float, diloco: float) -> float | None:
    return (alone - mine) / (alone - diloco) if diloco < alone else None


def _mean(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return fmean(found) if found else None
