"""The table of arXiv 2510.03371 in miniature, by one command: `make paper`.

Language on the embedded default and on the King James Bible, images on a small CIFAR-10 if they are there (a directory
`data`, here or shared with other projects beside this one), else on the embedded digits. All methods at four replicas;
then `decoupled` against DiLoCo with 2, 4, 8 and 16 replicas on equally many tokens. Two seeds where a row carries a
claim. Runs are kept below runs/paper, so that an interrupted study goes on where it stopped; when all are there, their
logs go to benchmarks/results/paper and the page beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from overtone.report import compare, history, page_data, standings
from overtone.report.compare import Cell
from overtone.report.live_table import LiveTable
from overtone.runs import directory, log
from overtone.runs.config import Comparison, Training
from overtone.tasks import Image, Language, TaskOptions

ROOT = Path(__file__).parent.parent
RUNS = Path("runs/paper")
RESULTS = Path("benchmarks/results/paper")
DATA = Path("data")  # how the runs name their data, wherever it lies
PLACES = (ROOT / DATA, ROOT.parent / "shared" / DATA)
TITLE = "The paper's table in miniature (arXiv 2510.03371)"

EVERY, REPLICAS = 10, 4
STEPS = {"language": 720, "image": 480}  # of each replica, at four of them
DILOCO, DECOUPLED = "diloco:outer_lr=0.9,momentum=0.8", "decoupled:keep=128"
CLAIMS = (  # two seeds
    "alone",
    DILOCO,
    f"{DILOCO},every={4 * EVERY}",
    "published",
    "decoupled:keep=512",
    DECOUPLED,
    "decoupled:keep=32",
)
BESIDE = (  # one
    "ddp",
    # Signs are a step of their own: no Adam on top, and no clipping, which would scale them away. The learning rate is
    # the best of 1e-4, 2e-4 and 5e-4 on a shorter run of the first text.
    "demo:inner=sgd,inner_lr=2e-4,clip=inf",
    "sparse_loco",
    "sparse_loco:outer_lr=0.9,momentum=0.8",
    "diloco:outer_lr=0.7,momentum=0.9",
    "published:outer_lr=0.9,decay=0.8",
    "decoupled:keep=128,transform=none",  # does the DCT earn its keep?
    f"decoupled:keep=32,every={4 * EVERY}",  # how far can it go?
)


def found(name: str) -> str | None:
    """A data set by the name that the logs shall have, if it is anywhere: a link below `data` leads there."""
    for place in PLACES:
        if (place / name).exists():
            link = DATA / name
            if not link.exists():
                link.parent.mkdir(exist_ok=True)
                link.symlink_to((place / name).resolve())
            return str(link)
    return None


def study() -> Iterator[Cell]:
    language = TaskOptions(valid_samples=512, language=Language(width=64, layers=2, heads=4))
    image = TaskOptions(task="image", data=found("cifar10_small.npz"), valid_samples=1000, image=Image(flip=True))
    settings = {"standard_library": language, "image": image}
    if text := found("kjv.txt"):
        settings["kjv"] = replace(language, data=text)
    for name, task in settings.items():
        asked = at(REPLICAS, task)
        yield from cells(name, replace(asked, methods=CLAIMS, seeds=(0, 1)))
        yield from cells(name, replace(asked, methods=BESIDE))
    for replicas in (2, 8, 16):
        asked = replace(at(replicas, language), methods=(DILOCO, DECOUPLED), seeds=(0, 1))
        yield from cells(f"standard_library_{replicas}_replicas", asked)


def at(replicas: int, task: TaskOptions) -> Comparison:
    """With as many samples in all, whatever the number of replicas."""
    steps = STEPS[task.task] * REPLICAS // replicas
    return Comparison(
        every=EVERY,
        replicas=replicas,
        task=task,
        training=Training(steps=steps),
        eval_every=4 * EVERY * REPLICAS // replicas,
        log_every=40,
    )


def cells(name: str, asked: Comparison) -> list[Cell]:
    return compare.cells(asked, RUNS / name)


def publish(found: Sequence[Cell]) -> list[history.History]:
    """The logs as they are committed: without the name of the machine, and no more digits than mean anything."""
    published = []
    for cell in found:
        folder = RESULTS / cell.folder.relative_to(RUNS).parent.parent / cell.folder.name
        folder.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(_short(_anonymous(record))) for record in log.read(cell.folder)]
        (folder / log.NAME).write_text("\n".join(lines) + "\n")
        published.append(history.load(folder))
    return published


def _anonymous(record: Mapping[str, Any]) -> Mapping[str, Any]:
    if "environment" not in record:
        return record
    environment = {key: value for key, value in record["environment"].items() if key not in ("hosts", "platform")}
    return {**record, "environment": environment}


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: inner if key == "time" else _short(inner) for key, inner in value.items()}
    return [_short(inner) for inner in value] if isinstance(value, list) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, one thread each")
    args = parser.parse_args()
    begun = time.monotonic()
    all_cells = list(study())
    try:
        with directory.claim(RUNS), LiveTable(Console(stderr=True), all_cells) as live:
            states = compare.make(all_cells, workers=args.workers, watch=live)
    except KeyboardInterrupt:
        sys.exit("interrupted; `make paper` goes on with what is left")
    failed = [f"{folder}: {state.words}" for folder, state in states.items() if state.state == "failed"]
    if failed:
        sys.exit("\n".join(failed))
    groups = standings.groups(publish(all_cells))
    made = page_data.write(RESULTS.with_suffix(".html"), groups, title=TITLE, command="make paper")
    print(f"{len(all_cells)} runs in {(time.monotonic() - begun) / 60:.0f} min; {', '.join(map(str, made))}")


if __name__ == "__main__":
    main()
