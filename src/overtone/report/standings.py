"""Runs set against each other: which may be compared, what each keeps of DiLoCo's gain, and for how many bytes.

Runs of one *group* trained the same model on the same data, with as many replicas, steps and samples. A *row* is one
setting over its seeds. Rows are compared within their group only, on the seeds that both have.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any, Literal

from overtone.methods import EVERY_GRADIENT, METHODS, NO_EXCHANGE, REFERENCE
from overtone.report import link_time
from overtone.report.history import History, MetricsOf
from overtone.runs.config import Network

SHARED: MetricsOf = "metrics"
AVERAGE: MetricsOf = "metrics_average"


@dataclass(frozen=True)
class Row:
    """One setting: the runs of all its seeds."""

    label: str
    runs: Sequence[History]  # of different seeds
    of: MetricsOf = SHARED

    @property
    def method(self) -> str:
        """The name of the method."""
        return self.runs[0].method

    @cached_property
    def counted(self) -> Sequence[History]:
        """The runs that count: those that have finished, or all if none has."""
        return [run for run in self.runs if run.finish] or self.runs

    @cached_property
    def finished(self) -> dict[int, float]:
        """The losses of finished runs, by seed. Only these are compared with other rows."""
        found = {run.seed: run.loss(self.of) for run in self.runs if run.finish}
        return {seed: loss for seed, loss in found.items() if loss is not None}

    @cached_property
    def losses(self) -> list[float]:
        """The losses of the runs that count."""
        return [loss for run in self.counted if (loss := run.loss(self.of)) is not None]

    @property
    def seeds(self) -> list[int]:
        """The seeds of all runs."""
        return sorted(run.seed for run in self.runs)

    @property
    def loss(self) -> float | None:
        """The mean loss."""
        return _mean(self.losses)

    @property
    def spread(self) -> float | None:
        """The difference between the best and the worst seed."""
        found = [loss for loss in self.losses if math.isfinite(loss)]
        return max(found) - min(found) if len(found) > 1 else None

    @property
    def metrics(self) -> dict[str, float]:
        """The means of all metrics except the loss."""
        last = [run.metrics(self.of) for run in self.counted if run.last_eval]
        names = [name for name in (last[0] if last else {}) if name != "loss"]
        return {name: fmean(found[name] for found in last if name in found) for name in names}

    @property
    def bytes(self) -> int | None:
        """Bytes that one replica sent; the mean over the seeds."""
        return self._mean_of("bytes_sent")

    @property
    def received(self) -> int | None:
        """Bytes that one replica received; the mean over the seeds."""
        return self._mean_of("bytes_received")

    def _mean_of(self, count: Literal["bytes_sent", "bytes_received"]) -> int | None:
        mean = _mean(run.last_eval[count] for run in self.counted if run.last_eval)
        return None if mean is None else round(mean)

    @property
    def larger(self) -> int:
        """The larger of the bytes sent and received: what is compared with other rows."""
        return max(self.bytes or 0, self.received or 0)

    @property
    def rounds(self) -> int:
        """Rounds of the longest run."""
        return max(run.rounds for run in self.counted)

    @property
    def drift(self) -> float | None:
        """The largest distance of a replica from the mean of all, if it was measured."""
        found = [run.last_eval["drift"] for run in self.counted if run.last_eval and "drift" in run.last_eval]
        return max(found) if found else None

    @property
    def waiting(self) -> float | None:
        """The share of the time in which a replica stood still for others."""
        return _mean(run.finish["waiting_share"] for run in self.counted if run.finish)

    @property
    def residual(self) -> float | None:
        """The norm of the residual after the last round."""
        return _mean(run.exchanged[-1]["residual_norm"] for run in self.counted if run.exchanged)

    @property
    def caveats(self) -> list[str]:
        """What a reader must know before comparing this row with others."""
        several = len(self.runs) > 1
        found = {f"seed {run.seed} {text}" if several else text for run in self.runs for text in run.caveats}
        if self.runs[0].has_average:
            found.add("mean of the replicas" if self.of == AVERAGE else "replica 0; there is no shared model")
        return sorted(found)


@dataclass(frozen=True)
class Versus:
    """A row compared with the well-known methods; None if there is no row to compare with."""

    less_than_diloco: float | None  # 43.5: so many times fewer bytes; infinite for a method that sends nothing
    less_than_ddp: float | None
    loss_vs_diloco: float | None  # +0.01: one per cent worse
    gain_kept: float | None  # 1: as good as DiLoCo; 0: no better than training alone; None: DiLoCo gained nothing


@dataclass(frozen=True)
class Group:
    """Runs that may be compared with each other."""

    name: str
    runs: Sequence[History]

    @property
    def facts(self) -> dict[str, Any]:
        """What these runs have in common."""
        return facts(self.runs[0])

    @cached_property
    def rows(self) -> list[Row]:
        """In the order of the method table; of one method, the row that sends most comes first, then that with the
        smallest delay."""
        settings: dict[str, list[History]] = {}
        times: Counter[str] = Counter()  # of equal runs: a run that was made twice is shown twice
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
            key=lambda row: (
                order.index(row.method) if row.method in order else len(order),
                -(row.bytes or 0),
                row.runs[0].delay,
            ),
        )

    def _of(self, method: str) -> list[Row]:
        """The rows of a method that others may be compared with: finished, with finite losses."""
        rows = [row for row in self.rows if row.method == method and row.finished]
        return [row for row in rows if all(map(math.isfinite, row.finished.values()))]

    @cached_property
    def diloco(self) -> Row | None:
        """The reference: the DiLoCo row with the smallest `every`, then with the smallest delay, then with most seeds,
        then with the lowest loss."""
        return min(
            self._of(REFERENCE),
            key=lambda row: (row.runs[0].start["numbers"]["every"], row.runs[0].delay, -len(row.finished), row.loss),
            default=None,
        )

    @cached_property
    def ddp(self) -> Row | None:
        """The row of plain data parallelism."""
        return next(iter(self._of(EVERY_GRADIENT)), None)

    @cached_property
    def alone(self) -> Row | None:
        """The row without communication."""
        return next(iter(self._of(NO_EXCHANGE)), None)

    def versus(self, row: Row) -> Versus:
        """The row compared with DiLoCo, data parallelism and training alone."""
        pair = _on_common_seeds(row, self.diloco)
        triple = _on_common_seeds(row, self.alone, self.diloco)
        return Versus(
            less_than_diloco=_fewer(row, self.diloco),
            less_than_ddp=_fewer(row, self.ddp),
            loss_vs_diloco=pair[0] / pair[1] - 1 if pair else None,
            gain_kept=_gain(*triple) if triple else None,
        )

    @cached_property
    def network(self) -> Network:
        """The virtual network of the first run. A real run has none: then the default network, with the measured time
        of a step."""
        run = self.runs[0]
        if run.simulated:
            told = {f.name: run.config.get(f.name) for f in dataclasses.fields(Network)}
            return Network(**{key: value for key, value in told.items() if value is not None and math.isfinite(value)})
        if not run.trained:
            return Network()
        last = run.trained[-1]
        step_seconds = run.start["units_per_step"] * run.replicas / last["units_per_second"]
        return Network(step_seconds=round(step_seconds * (1 - last["waiting_share"]), 4))

    def seconds(self, row: Row) -> float | None:
        """The time of the row on the group's network; the mean over the seeds that have finished."""
        link, step = self.network.link, self.network.step_seconds
        return _mean(link_time.seconds(run, run.finish, link, step) for run in row.runs if run.finish)

    @property
    def notes(self) -> list[str]:
        """What a reader must know about the group as a whole."""
        found = []
        for what, of in _PLACES.items():
            values = sorted({of(run) for run in self.runs})
            if len(values) > 1:
                found.append(f"These runs differ in {what}: {', '.join(values)}.")
        return found


# Runs of one group may differ in these. Their losses and bytes stay comparable, their seconds do not.
_PLACES: dict[str, Callable[[History], str]] = {
    "the version of overtone": lambda run: run.start["environment"]["overtone"],
    "the version of torch": lambda run: run.start["environment"]["versions"].get("torch", "unknown"),
    "how they ran": lambda run: "simulated" if run.simulated else "as processes",
}


def groups(runs: Iterable[History]) -> list[Group]:
    """The runs in groups that may be compared, in the order of their first runs. Each group has a name of its own."""
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
    """What runs must have in common to be compared."""
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
    """Why the two groups may not be compared, in words; None if they are the same."""
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
    """The label of each run: its method, and the options in which it differs from most runs of that method."""
    found = []
    for run in runs:
        others = [other for other in runs if other.method == run.method]
        words = [
            f"{_WITHOUT.get(key, 'no')} {key.replace('_', ' ')}"
            if value is None
            else f"{key.replace('_', ' ')} {value}"
            for key, value in run.numbers.items()
            if key not in leave_out and not _is_unsaid(key, value, [other.numbers.get(key) for other in others])
        ]
        if len({other.simulated for other in others}) > 1:
            words.append("simulated" if run.simulated else "as processes")
        found.append(", ".join([run.method, *words]))
    again = Counter[str]()
    for number, label in enumerate(found):
        again[label] += 1
        found[number] = label if again[label] == 1 else f"{label}, again ({again[label]})"
    return found


_WITHOUT = {"keep_down": "default"}  # None does not mean "no" here, but "chosen by overtone"


def _is_unsaid(key: str, value: Any, values: Sequence[Any]) -> bool:
    """More than half have this value. Two runs cannot both be usual where they differ, so their labels differ.

    Instead, a delay of 0 is never said, so that a run without a delay is a plain one. Any other is, unless all have it.
    """
    if key == "delay":
        return value == 0 or len(set(values)) == 1
    return 2 * sum(1 for other in values if other == value) > len(values)


def _on_common_seeds(*rows: Row | None) -> list[float] | None:
    """The mean loss of each row, over the seeds that all rows have finished."""
    there = [row for row in rows if row is not None]
    common = set.intersection(*(set(row.finished) for row in there))
    if len(there) < len(rows) or not common:
        return None
    return [fmean(row.finished[seed] for seed in common) for row in there]


def _fewer(row: Row, other: Row | None) -> float | None:
    if other is None or not other.larger or not row.finished:
        return None
    return other.larger / row.larger if row.larger else math.inf


def _gain(mine: float, alone: float, diloco: float) -> float | None:
    return (alone - mine) / (alone - diloco) if diloco < alone else None


def _mean(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return fmean(found) if found else None
