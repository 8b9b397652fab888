"""Loss against bytes, on models of 0.4 to 10 M parameters: `make frontier`.

The cells are in grid.py, the models and their data in settings.py. A finished run becomes a row of
benchmarks/results/frontier.csv, and is not made again; frontier.md beside it has the tables, and docs/frontier.svg is
the picture. An interrupted study continues with the runs that are left. `--status` only says how many are done. The
texts and images are looked for in the directory of --data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from cells import arguments, make
from frontier import picture, results, tables
from frontier.grid import asks
from frontier.results import Key
from frontier.settings import settings
from overtone.report import comparison
from overtone.report.comparison import Cell

RUNS = Path("runs/frontier")
PAGE = Path("benchmarks/results/frontier.md")


def cells(place: Path, only: str) -> Iterator[tuple[Key, Cell]]:
    """Every cell once, in the order of the grid."""
    known = settings(place, RUNS)
    seen: set[Key] = set()
    for ask in asks():
        if ask.setting not in known or only not in ("", ask.setting):
            continue
        asked = replace(known[ask.setting].at(ask.replicas), methods=ask.entries, seeds=ask.seeds)
        for cell in comparison.cells(asked, RUNS / ask.setting / f"K{ask.replicas}"):
            key = (ask.setting, ask.replicas, cell.entry, cell.seed)
            if key not in seen:
                seen.add(key)
                yield key, cell


def collect(found: list[tuple[Key, Cell]]) -> results.Rows:
    """The rows of the table, and of all runs that have ended since."""
    rows = results.load()
    for key, cell in found:
        if key not in rows and (row := results.row(*key, cell.folder)):
            rows[key] = row
    return rows


def main() -> None:
    parser = arguments(__doc__, "kjv.txt and cifar10_small.npz")
    parser.add_argument("--only", default="", help="only this setting, such as llama")
    parser.add_argument("--status", action="store_true", help="make nothing: say what is done")
    args = parser.parse_args()
    found = list(cells(args.data, args.only))
    rows = collect(found)
    if not args.status:
        left = [cell for key, cell in found if key not in rows]
        make(RUNS, left, args.workers)
        rows = collect(found)
    results.save(rows.values())
    PAGE.write_text(tables.page(rows, {one.name: one.about for one in settings(args.data, RUNS).values()}))
    picture.draw(rows)
    print(f"{len([key for key, _ in found if key in rows])} of {len(found)} cells are done; {results.TABLE}")


if __name__ == "__main__":
    main()
