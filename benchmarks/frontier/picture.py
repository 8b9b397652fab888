"""The picture of docs/frontier.md: how much loss against DiLoCo's each method has for how many times fewer bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from frontier.grid import PRESETS, diloco, ours
from frontier.results import Rows
from frontier.tables import NAMES, Group, grouped

PICTURE = Path("docs/frontier.svg")
SETTING, REPLICAS = "llama", 4
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 420, 80, 40, 60, 60
LEAST, MOST = 0.8, 1200.0  # times fewer bytes
LOW, HIGH = -1.0, 8.0  # per cent of loss
OURS, OTHERS, TEXT = "#d55e00", "#8a8f99", "#24292f"


def draw(rows: Rows) -> None:
    """Draw what the rows of the setting show so far."""
    groups = grouped(row for row in rows.values() if (row.setting, row.replicas) == (SETTING, REPLICAS))
    by_entry = {group.entry: group for group in groups}
    reference = by_entry[diloco()]
    presets = {name: by_entry[ours(keep)] for name, keep in PRESETS.items() if ours(keep) in by_entry}
    others = [group for group in groups if _belongs(group) and group.entry not in NAMES]
    parts = [*_axes(), *(_point(group, reference, 3.5, OTHERS) for group in others)]
    line = " ".join("{:.1f},{:.1f}".format(*_xy(group, reference)) for group in presets.values())
    parts.append(f'<polyline points="{line}" fill="none" stroke="{OURS}" stroke-width="2"/>')
    for name, group in presets.items():
        parts += [_point(group, reference, 6, OURS), _name(group, reference, name, OURS)]
    parts += [_point(reference, reference, 6, TEXT), _name(reference, reference, "DiLoCo", TEXT)]
    if rarely := by_entry.get(diloco(every=40)):
        parts += [_point(rarely, reference, 6, TEXT), _name(rarely, reference, "DiLoCo, every 40", TEXT)]
    PICTURE.write_text("\n".join((_HEAD, *parts, "</svg>", "")))


_HEAD = (
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="13">\n'
    f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n'
    f'<text x="{LEFT}" y="30" font-size="16" font-weight="bold" fill="{TEXT}">Loss against DiLoCo, and how many times '
    "fewer bytes</text>\n"
    f'<text x="{LEFT}" y="48" fill="{TEXT}">Llama of 3.7 M parameters, 4 replicas, 300 rounds; grey: other numbers '
    "that were tried</text>"
)


def _belongs(group: Group) -> bool:
    """Only trials of `decoupled` with the inner learning rate of the setting."""
    return group.entry.startswith("decoupled:") and "inner_lr" not in group.entry and "every=" not in group.entry


def _place(fewer: float, loss: float) -> tuple[float, float]:
    x = LEFT + (WIDTH - LEFT - RIGHT) * math.log(fewer / LEAST) / math.log(MOST / LEAST)
    return x, TOP + (HEIGHT - TOP - BOTTOM) * (HIGH - min(loss, HIGH)) / (HIGH - LOW)


def _xy(group: Group, reference: Group) -> tuple[float, float]:
    """Losses are paired by seed, as in the tables."""
    seeds = group.runs.keys() & reference.runs.keys()
    ratios = [group.runs[seed].loss / reference.runs[seed].loss for seed in seeds]
    return _place(reference.bytes / group.bytes, 100 * (sum(ratios) / len(ratios) - 1))


def _point(group: Group, reference: Group, radius: float, color: str) -> str:
    x, y = _xy(group, reference)
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{color}"/>'


def _name(group: Group, reference: Group, name: str, color: str) -> str:
    x, y = _xy(group, reference)
    return f'<text x="{x + 9:.1f}" y="{y + 18:.1f}" fill="{color}" font-weight="bold">{name}</text>'


def _axes() -> Iterable[str]:
    for fewer in (1, 4, 16, 64, 128, 300, 600):
        x, bottom = _place(fewer, LOW)
        yield f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom:.1f}" stroke="#e5e7eb"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 18:.1f}" text-anchor="middle" fill="{TEXT}">{fewer}x</text>'
    for loss in range(int(LOW), int(HIGH) + 1):
        left, y = _place(LEAST, loss)
        color = "#e5e7eb" if loss else "#9ca3af"
        yield f'<line x1="{left}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="{color}"/>'
        yield f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end" fill="{TEXT}">{loss:+d} %</text>'
    yield f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 14}" text-anchor="end" fill="{TEXT}">times fewer bytes</text>'
