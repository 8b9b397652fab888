"""What the study has found, as tables: every method of a setting against the best DiLoCo, by bytes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

import paired
from frontier.grid import PRESETS, ours
from frontier.results import Row, Rows
from frontier.settings import EVERY

# Numbers that most entries have are not said in their labels.
UNSAID = ("preset=first", "lr=0.9", "momentum=0.8", "exchange=gathered")
NAMES = {ours(keep): name for name, keep in PRESETS.items()}


@dataclass(frozen=True)
class Group:
    """The runs of one entry, by seed."""

    entry: str
    runs: Mapping[int, Row]

    @property
    def losses(self) -> dict[int, float]:
        return {seed: row.loss for seed, row in self.runs.items()}

    @property
    def loss(self) -> float:
        return fmean(self.losses.values())

    @property
    def accuracy(self) -> float:
        return fmean(row.accuracy for row in self.runs.values())

    @property
    def bytes(self) -> float:
        """The larger of sent and received of a replica in a whole run, the last messages included."""
        return fmean(max(row.sent, row.received) for row in self.runs.values())

    @property
    def label(self) -> str:
        """The entry in words."""
        if self.entry in NAMES:
            return f"**decoupled, {NAMES[self.entry]}** (keep {PRESETS[NAMES[self.entry]]})"
        name, _, options = self.entry.partition(":")
        said = [option for option in options.split(",") if option and option not in UNSAID]
        return f"{name} {', '.join(option.replace('=', ' ') for option in said)}".strip()

    @property
    def every(self) -> int:
        """The local steps between two rounds."""
        options = dict(option.split("=") for option in self.entry.partition(":")[2].split(",") if option)
        return int(options.get("every", EVERY))


def grouped(rows: Iterable[Row]) -> list[Group]:
    """The runs by their entry."""
    found: dict[str, dict[int, Row]] = defaultdict(dict)
    for row in rows:
        found[row.entry][row.seed] = row
    return [Group(entry, runs) for entry, runs in found.items()]


def best(groups: Iterable[Group], every: int) -> Group | None:
    """The best DiLoCo with so many steps between rounds, on the seed that all its settings have."""
    return _lowest(group for group in groups if group.entry.startswith("diloco:") and group.every == every)


def _lowest(groups: Iterable[Group]) -> Group | None:
    """The group with the lowest loss on the first seed."""
    finite = [group for group in groups if 0 in group.runs and math.isfinite(group.runs[0].loss)]
    return min(finite, key=lambda group: group.runs[0].loss, default=None)


def page(rows: Rows, about: Mapping[str, str]) -> str:
    """All tables. ``about`` has the settings in words."""
    lines = [
        "# The frontier: loss against bytes",
        "",
        "Made by `make frontier` (benchmarks/frontier/). A round every "
        f"{EVERY} steps if not said otherwise; outer learning rate 0.9 and momentum 0.8 if not said otherwise. Bytes "
        "are those of a whole run, the larger of sent and received of a replica, the last messages included. Losses "
        "and bytes are compared with the best DiLoCo of the table that has as many steps between rounds, if there is "
        "one, paired by seed, with a 95 % interval (Student's t) where there are several seeds. *Gain kept*: the share "
        "of that DiLoCo's gain over the best `alone` of the table.",
    ]
    for setting, replicas in sorted({(row.setting, row.replicas) for row in rows.values()}):
        here = grouped(row for row in rows.values() if (row.setting, row.replicas) == (setting, replicas))
        if usual := best(here, EVERY):
            lines += ["", f"## {setting}, {replicas} replicas: {about.get(setting, '')}", "", *_table(here, usual)]
    return "\n".join(lines) + "\n"


def _table(groups: list[Group], usual: Group) -> list[str]:
    alone = _lowest(group for group in groups if group.entry.startswith("alone"))
    images = not math.isnan(usual.accuracy)
    lines = [
        f"| method | seeds | loss | against DiLoCo |{' top-1 |' if images else ''} fewer bytes | gain kept |",
        f"|---|---|---|---|{'---|' if images else ''}---|---|",
    ]
    for group in sorted(groups, key=lambda group: (-group.bytes, group.loss)):
        reference = best(groups, group.every) or usual
        fewer = f"{reference.bytes / group.bytes:.4g}x" if group.bytes else "none sent"
        accuracy = f" {100 * group.accuracy:.1f} % ({_points(group, reference)}) |" if images else ""
        lines.append(
            f"| {group.label} | {len(group.runs)} | {group.loss:.4f} | {paired.shown(group.losses, reference.losses)} "
            f"|{accuracy} {fewer} | {_gain(group, reference, alone)} |"
        )
    return lines


def _points(group: Group, reference: Group) -> str:
    """The difference in top-1, in points, over the seeds that both have."""
    seeds = group.runs.keys() & reference.runs.keys()
    return f"{100 * fmean(group.runs[seed].accuracy - reference.runs[seed].accuracy for seed in seeds):+.1f}"


def _gain(group: Group, reference: Group, alone: Group | None) -> str:
    """The share of DiLoCo's gain over `alone`, over the seeds that all three have."""
    if alone is None or not (seeds := group.runs.keys() & reference.runs.keys() & alone.runs.keys()):
        return ""
    ends = [fmean(one.runs[seed].loss for seed in seeds) for one in (alone, group, reference)]
    return f"{(ends[0] - ends[1]) / (ends[0] - ends[2]):.0%}"
