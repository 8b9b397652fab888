"""The first science check: do our own numbers confirm what the design was built on?

    python benchmarks/first_check.py --text tinyshakespeare.txt

runs every row below on the embedded default and on each text given, one file of results per cell under
benchmarks/results/first_check/, and writes the table beside it. Cells that are there already are kept, so that an
interrupted check goes on where it stopped. Four replicas, a round every 10 steps, 1000 steps, 0.36 M parameters.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from overtone.commands import write_json
from overtone.compare import ratio, run_side_by_side, share_of_gain
from overtone.config import MethodChoice, Simulation
from overtone.tasks import TaskOptions
from overtone.words import human_bytes

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Row:
    label: str
    choice: MethodChoice
    seeds: int = 1


def diloco(every: int, lr: float, momentum: float) -> MethodChoice:
    return MethodChoice("diloco", every=every, outer_lr=lr, momentum=momentum)


def decoupled(keep: int, transform: str | None = None) -> MethodChoice:
    return MethodChoice("decoupled", every=10, keep=keep, bits=1, outer_lr=0.9, momentum=0.8, transform=transform)


ROWS = (
    Row("diloco, H=10, outer (0.9, 0.8)", diloco(10, 0.9, 0.8), seeds=2),
    Row("decoupled, keep 512, 1 bit", decoupled(512), seeds=2),
    Row("decoupled, keep 128, 1 bit", decoupled(128), seeds=2),
    Row("decoupled, keep 32, 1 bit", decoupled(32), seeds=2),
    Row("alone", MethodChoice("alone"), seeds=2),
    Row("published, keep 32, decay 0.9", MethodChoice("published", every=10, keep=32, decay=0.9)),
    Row("published, keep 32, decay 0.5", MethodChoice("published", every=10, keep=32, decay=0.5)),
    Row("diloco, H=10, outer (0.7, 0.9)", diloco(10, 0.7, 0.9), seeds=2),
    Row("ddp", MethodChoice("ddp")),
    Row("sparse_loco, keep 64, 2 bits", MethodChoice("sparse_loco", every=10)),
    Row("diloco, H=40, outer (0.9, 0.8)", diloco(40, 0.9, 0.8)),
    Row("decoupled, keep 32, 1 bit, no transform", decoupled(32, "none"), seeds=2),
    Row("decoupled, keep 128, 1 bit, no transform", decoupled(128, "none"), seeds=2),
)
SHOWN = ("alone", "ddp", "diloco", "local_sgd", "sparse_loco", "published", "decoupled")


def cell_name(row: Row, seed: int) -> str:
    words = "".join(c if c.isalnum() or c == "." else " " for c in row.label).split()
    return f"{'-'.join(words)}-seed{seed}.json"


def collect(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Results by row, those that are there."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in ROWS:
        paths = [folder / cell_name(row, seed) for seed in range(row.seeds)]
        results = [json.loads(path.read_text()) for path in paths if path.exists()]
        if results:
            found[row.label] = results
    return found


def table(folder: Path) -> str:
    """Markdown. Means over seeds; a row is compared with `alone` and the best DiLoCo on the seeds it has itself."""
    found = collect(folder)

    def loss_of(label: str, seeds: int) -> float:
        return float(mean(r["val_loss"] for r in found[label][:seeds]))

    reference = found["diloco, H=10, outer (0.9, 0.8)"][0]["bytes_sent"]
    lines = [
        "| method | loss | seeds | against best DiLoCo | gain kept | bytes sent | against DiLoCo | before | drift |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for label in sorted(found, key=lambda label: [label.startswith(name) for name in SHOWN].index(True)):
        results = found[label]
        seeds, sent = len(results), results[0]["bytes_sent"]
        best = min(loss_of(other, seeds) for other in found if other.startswith("diloco, H=10"))
        alone = loss_of("alone", seeds)
        versions = {label: "val_loss"}
        if not results[0]["consensus"] and results[0]["rounds"]:
            versions = {f"{label}: replica 0": "val_loss", f"{label}: mean of replicas": "val_loss_average"}
        for name, key in versions.items():
            losses = [r[key] for r in results]
            loss = mean(losses)
            spread = " / ".join(f"{x:.3f}" for x in losses) if seeds > 1 else "0 only"
            before = mean(r["val_loss_anchor"] for r in results)
            drift = max(r["max_drift"] for r in results)
            lines.append(
                f"| {name} | {loss:.3f} | {spread} | {loss / best - 1:+.1%} | "
                f"{share_of_gain(loss, alone=alone, diloco=best)} | {human_bytes(sent)} | {ratio(reference, sent)} | "
                f"{before:.3f} | {drift:.1%} |"
            )
    return "\n".join(lines)


def report(folders: Sequence[Path]) -> str:
    parts = [
        "# First science check\n",
        "`python benchmarks/first_check.py --text tinyshakespeare.txt` wrote this page from the files beside it.\n",
        "Four replicas, a round every H = 10 steps unless said otherwise, 1000 steps of 16 x 64 bytes per replica, a",
        "byte-level transformer of 0.36 M parameters, inner AdamW 2e-3 with warm-up and cosine. Loss is in nats per",
        "byte on held-out text after `finish()`; bytes are those one replica sends over the run; *gain kept* is the",
        "share of the best DiLoCo's gain over `alone`; *before* is the loss of the anchor before `finish()`.\n",
    ]
    for folder in folders:
        if (folder / cell_name(ROWS[0], 0)).exists() and (folder / cell_name(ROWS[4], 0)).exists():
            parts += [f"## {folder.name}\n", table(folder), ""]
    return "\n".join(parts)


def _task(source: Path | None) -> TaskOptions:
    return TaskOptions(data=None if source is None else str(source))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, action="append", default=[], help="a text file; may be given again")
    parser.add_argument("--workers", type=int, default=2, help="cells at a time, one thread each")
    args = parser.parse_args()
    sources: list[Path | None] = [*args.text, None]
    folders = [RESULTS / "first_check" / (source.stem if source else "standard_library") for source in sources]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    cells = {
        str(folder / cell_name(row, seed)): Simulation(choice=row.choice, task=_task(source), seed=seed)
        for row in ROWS
        for source, folder in zip(sources, folders, strict=True)
        for seed in range(row.seeds)
        if not (folder / cell_name(row, seed)).exists()
    }
    print(f"{len(cells)} cells to run", flush=True)

    def done(cell: str, result: dict[str, Any]) -> None:
        write_json(Path(cell), result)
        (RESULTS / "first_check.md").write_text(report(folders))
        where = Path(cell).relative_to(RESULTS)
        print(f"{where}: {result['val_loss']:.4f}, {result['wall_seconds']:.0f} s", flush=True)

    run_side_by_side(cells, workers=args.workers, progress=lambda *_: None, done=done)
    (RESULTS / "first_check.md").write_text(report(folders))


if __name__ == "__main__":
    main()
