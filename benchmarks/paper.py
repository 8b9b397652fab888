"""The table of arXiv 2510.03371 in miniature, by one command: `make paper`.

The language runs train on the embedded default text and on the King James Bible (kjv.txt), the image runs on a small
CIFAR-10 (cifar10_small.npz). Both files are looked for in the directory of the flag --data, by default `data`. Without
them there is no second text, and the images are the embedded digits. All methods run at four replicas; then `decoupled`
and DiLoCo with 2, 4, 8 and 16 replicas on equally many tokens. Rows that carry a claim have two seeds. Runs are kept
below runs/paper, so that an interrupted study continues where it stopped. At the end the logs go to
benchmarks/results/paper and the page beside it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cells import arguments, found, make
from overtone.report import comparison, history, page_data, standings
from overtone.report.comparison import Cell, Comparison
from overtone.runs import log
from overtone.runs.config import Training
from overtone.tasks import Image, Language, TaskOptions

RUNS = Path("runs/paper")
RESULTS = Path("benchmarks/results/paper")
TITLE = "The paper's table in miniature (arXiv 2510.03371)"

EVERY, REPLICAS = 10, 4
STEPS = {"language": 720, "image": 480}  # of each replica, at four of them
# outer_lr is the former name of lr; the committed logs and their directories have it.
DILOCO, DECOUPLED = "diloco:outer_lr=0.9,momentum=0.8", "decoupled:preset=first,keep=128"
GATHERED = f"{DECOUPLED},exchange=gathered"  # the default at four replicas; with more of them it is sharded
CLAIMS = (  # two seeds
    "alone",
    DILOCO,
    f"{DILOCO},every={4 * EVERY}",
    "published",
    "decoupled:preset=first,keep=512",
    DECOUPLED,
    "decoupled:preset=first,keep=32",
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
    "decoupled:preset=first,keep=128,transform=none",  # does the DCT earn its keep?
    f"decoupled:preset=first,keep=32,every={4 * EVERY}",  # how far can it go?
)


def study(place: Path) -> Iterator[Cell]:
    """All runs, with the data in the directory ``place``."""
    language = TaskOptions(valid_samples=512, language=Language(width=64, layers=2, heads=4))
    image = TaskOptions(
        task="image", data=found(place, "cifar10_small.npz"), valid_samples=1000, image=Image(flip=True)
    )
    settings = {"standard_library": language, "image": image}
    if text := found(place, "kjv.txt"):
        settings["kjv"] = replace(language, data=text)
    for name, task in settings.items():
        asked = at(REPLICAS, task)
        yield from cells(name, replace(asked, methods=CLAIMS, seeds=(0, 1)))
        yield from cells(name, replace(asked, methods=BESIDE))
    for replicas in (2, 8, 16):
        asked = replace(at(replicas, language), methods=(DILOCO, GATHERED), seeds=(0, 1))
        yield from cells(f"standard_library_{replicas}_replicas", asked)


def at(replicas: int, task: TaskOptions) -> Comparison:
    """A comparison with the same number of samples in all, whatever the number of replicas."""
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
    return comparison.cells(asked, RUNS / name)


def publish(made: Sequence[Cell]) -> list[history.History]:
    """Write the logs as they are committed: without the name of the machine, and with six digits of each number."""
    published = []
    for cell in made:
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
    args = arguments(__doc__, "kjv.txt and cifar10_small.npz").parse_args()
    begun = time.monotonic()
    all_cells = list(study(args.data))
    make(RUNS, all_cells, args.workers)
    groups = standings.groups(publish(all_cells))
    made = page_data.write(RESULTS.with_suffix(".html"), groups, title=TITLE, command="make paper")
    print(f"{len(all_cells)} runs in {(time.monotonic() - begun) / 60:.0f} min; {', '.join(map(str, made))}")


if __name__ == "__main__":
    main()
