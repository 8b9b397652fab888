"""What the runs have shown: one row for each, in a table that is committed. A row that is there is not made again."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from overtone.report import history

TABLE = Path("benchmarks/results/frontier.csv")

Key = tuple[str, int, str, int]  # of a run: setting, replicas, entry, seed


@dataclass(frozen=True)
class Row:
    """One run. Bytes are those of replica 0; the loss of a run that diverged is NaN."""

    setting: str
    replicas: int
    entry: str
    seed: int
    parameters: int
    rounds: int
    loss: float  # of the shared model; of a method without one, of replica 0
    accuracy: float  # of images
    loss_before: float  # before the last messages
    loss_average: float  # of the mean of all replicas, before the last messages
    sent: int
    received: int
    sent_last: int  # of these, by the last messages
    received_last: int
    seconds: float  # on one core, of a machine that is shared

    @property
    def key(self) -> Key:
        return self.setting, self.replicas, self.entry, self.seed


Rows = dict[Key, Row]


def row(setting: str, replicas: int, entry: str, seed: int, folder: Path) -> Row | None:
    """The row of a run that is over; None if it is not."""
    run = history.so_far(folder)
    if run is None or not run.is_over:
        return None
    about = (setting, replicas, entry, seed, run.start["parameters"], run.rounds)
    end = run.finish
    if end is None:
        return Row(*about, math.nan, math.nan, math.nan, math.nan, 0, 0, 0, 0, 0.0)
    last = end["bytes"]["finish"]
    return Row(
        *about,
        end["metrics"]["loss"],
        end["metrics"].get("top1", math.nan),
        end["metrics_anchor"]["loss"],
        end["metrics_average"]["loss"],
        end["bytes_sent"],
        end["bytes_received"],
        last["sent"],
        last["received"],
        round(end["seconds"], 1),
    )


def load() -> Rows:
    """The rows so far."""
    if not TABLE.exists():
        return {}
    kinds = {f.name: {"int": int, "float": float, "str": str}[str(f.type)] for f in fields(Row)}
    with TABLE.open(newline="") as file:
        rows = [Row(**{name: kinds[name](text) for name, text in line.items()}) for line in csv.DictReader(file)]
    return {one.key: one for one in rows}


def save(rows: Iterable[Row]) -> None:
    """Write the table, in an order that does not depend on when a run was made."""
    with TABLE.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow([f.name for f in fields(Row)])
        table.writerows([_short(value) for value in astuple(one)] for one in sorted(rows, key=lambda one: one.key))


def _short(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value
