"""The sharded exchange and the delay, measured: `make exchange`.

1. Bytes of a round for K = 2 to 64 replicas, on a transformer of 3.2 M parameters: gathered, sharded, DiLoCo's ring.
2. Loss at K = 8 (keep 64), 16 and 32 (keep 32): sharded against gathered at the same `keep`, two texts, three seeds.
3. Loss with a delay of half a round and of a whole one against none, on two texts, three seeds each, with the outer
   momentum that is best without a delay and with a milder one.

The texts are the embedded default and the King James Bible (kjv.txt, looked for in the directory of the flag --data).
Runs are kept below runs/exchange, so that an interrupted study continues where it stopped. The results go to
benchmarks/results/exchange.md and exchange.csv.
"""

from __future__ import annotations

import csv
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import torch

import overtone
import paired
from cells import arguments, found, make
from overtone import Cluster
from overtone.report import comparison, history
from overtone.report.comparison import Cell, Comparison
from overtone.runs.config import Training
from overtone.tasks import Language, TaskOptions, load_task

RUNS = Path("runs/exchange")
RESULTS = Path("benchmarks/results/exchange.md")
SEEDS = (0, 1, 2)
EVERY = 10

KEEP = {8: 64, 16: 32, 32: 32}  # by replicas
# At four replicas: the bytes that sharded may cost at 8 and more.
LIMIT = "decoupled:preset=first,keep=128,exchange=gathered"
# By delay and outer momentum.
DELAYS = {
    (delay, momentum): f"decoupled:preset=first,keep=128,exchange=gathered,momentum={momentum},delay={delay}"
    for delay in (0, EVERY // 2, EVERY)
    for momentum in (0.8, 0.7)
}
NONE = DELAYS[0, 0.8]


def texts(place: Path, language: Language) -> dict[str, TaskOptions]:
    """The task on each text."""
    task = TaskOptions(valid_samples=512, language=language)
    settings = {"standard library": task}
    if text := found(place, "kjv.txt"):
        settings["King James Bible"] = replace(task, data=text)
    return settings


def study(place: Path) -> Iterator[tuple[str, str, int, list[Cell]]]:
    """Name, text, replicas and runs of each group."""
    for text, task in texts(place, Language(width=128, layers=2, heads=4)).items():
        yield "shards", text, 4, cells(f"shards/{text}/4", 4, task, 400, 4, (LIMIT,))
        for replicas, keep in KEEP.items():
            methods = [
                f"decoupled:preset=first,keep={keep},exchange={exchange}" for exchange in ("gathered", "sharded")
            ]
            yield "shards", text, replicas, cells(f"shards/{text}/{replicas}", replicas, task, 400, 4, methods)
    for text, task in texts(place, Language(width=64, layers=2, heads=4)).items():
        yield "delay", text, 4, cells(f"delay/{text}", 4, task, 1000, 4, tuple(DELAYS.values()))


def cells(name: str, replicas: int, task: TaskOptions, steps: int, batch: int, methods: Sequence[str]) -> list[Cell]:
    asked = Comparison(
        methods=tuple(methods),
        seeds=SEEDS,
        every=EVERY,
        replicas=replicas,
        task=task,
        training=Training(steps=steps, batch=batch),
        eval_every=steps // 4,
        log_every=100,
    )
    return comparison.cells(asked, RUNS / name.replace(" ", "_"))


# -- 1: bytes --------------------------------------------------------------------------------------------------------


METHODS: dict[str, Callable[[], overtone.Method]] = {
    "DiLoCo": lambda: overtone.diloco(every=1),
    "gathered, keep 64": lambda: overtone.decoupled(every=1, preset="first", keep=64, exchange="gathered"),
    "sharded, keep 32": lambda: overtone.decoupled(every=1, preset="first", keep=32, exchange="sharded"),
    "sharded, keep 64": lambda: overtone.decoupled(every=1, preset="first", keep=64, exchange="sharded"),
    "sharded, keep 128": lambda: overtone.decoupled(every=1, preset="first", keep=128, exchange="sharded"),
}


@dataclass(frozen=True)
class Traffic:
    """Bytes of one replica in a round."""

    replicas: int
    method: str
    parameters: int
    sent: float
    received: float

    @property
    def most(self) -> float:
        return max(self.sent, self.received)


def traffic(replicas: int, name: str, method: overtone.Method) -> Traffic:
    """Two rounds of a transformer of 3.2 M parameters, from the ledger.

    The gradients are noise. So replicas agree in nothing, and letters have as many values as they may: the most bytes.
    """
    task = load_task(TaskOptions(data="none", language=Language(width=256, layers=4, heads=4)), to_train=False)

    def build(_: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = task.model()
        return model, torch.optim.SGD(model.parameters(), lr=1e-3)

    cluster = Cluster(build, method, replicas=replicas)
    # A generator for each replica: `build` has set the random states of all replicas alike.
    dice = [torch.Generator().manual_seed(1 + rank) for rank in range(replicas)]
    for _ in range(2):
        for replica in cluster.turns():
            for p in replica.model.parameters():
                p.grad = torch.randn(p.shape, generator=dice[replica.transport.rank])
        cluster.step()
    counts = [replica.transport.ledger.counts["rounds"] for replica in cluster.replicas]
    size = sum(p.numel() for p in cluster.replicas[0].model.parameters())
    rounds = [Traffic(replicas, name, size, count.sent / 2, count.received / 2) for count in counts]
    return max(rounds, key=lambda found: found.most)


def all_traffic() -> list[Traffic]:
    os.environ["OVERTONE_KERNELS"] = "numba"  # for larger models only by default, but here there are many of them
    kept = RUNS / "traffic"
    kept.mkdir(parents=True, exist_ok=True)
    found = []
    for replicas in (2, 4, 8, 16, 32, 64):
        for name, method in METHODS.items():
            file = kept / f"{name}-{replicas}.json"
            if not file.exists():
                file.write_text(json.dumps(vars(traffic(replicas, name, method()))))
            found.append(Traffic(**json.loads(file.read_text())))
    return found


# -- 2 and 3: loss ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """One run."""

    part: str
    text: str
    replicas: int
    method: str
    seed: int
    loss: float
    sent: int
    received: int


def results(part: str, text: str, replicas: int, made: Sequence[Cell]) -> Iterator[Result]:
    for cell in made:
        run = history.load(cell.folder)
        assert run.finish is not None
        loss = run.loss("metrics")
        assert loss is not None
        finish = run.finish
        yield Result(part, text, replicas, cell.entry, run.seed, loss, finish["bytes_sent"], finish["bytes_received"])


def shown(rows: Sequence[Result], other: Sequence[Result]) -> str:
    return paired.shown(*({row.seed: row.loss for row in some} for some in (rows, other)))


def report(bytes_of: Sequence[Traffic], found: Sequence[Result]) -> str:
    at = {(t.replicas, t.method): t for t in bytes_of}
    size, names = bytes_of[0].parameters, [name for name in METHODS if name != "DiLoCo"]
    lines = [
        "# The sharded exchange and the delay",
        "",
        "Made by `make exchange` (benchmarks/exchange.py). Bytes are from the ledger of one replica.",
        "",
        f"## Bytes of a round, {size / 1e6:.1f} M parameters",
        "",
        "The larger of sent and received, and how many times fewer than DiLoCo's ring sends.",
        "",
        f"| replicas | DiLoCo | {' | '.join(names)} |",
        "|---|---|" + "---|" * len(names),
    ]
    for replicas in sorted({t.replicas for t in bytes_of}):
        ring = at[replicas, "DiLoCo"].sent
        columns = [f"{at[replicas, name].most / 1e3:.0f} kB, {ring / at[replicas, name].most:.1f}x" for name in names]
        lines.append(f"| {replicas} | {ring / 1e6:.1f} MB | {' | '.join(columns)} |")
    lines += ["", "| growth of bytes | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for few in (4, 8):
        columns = [f"{at[64, name].most / at[few, name].most:.2f}x" for name in names]
        lines.append(f"| from {few} to 64 replicas | {' | '.join(columns)} |")
    return "\n".join(lines + (_losses(found) if found else [])) + "\n"


def _losses(found: Sequence[Result]) -> list[str]:
    lines = ["", "## Loss: sharded against gathered at the same keep", ""]
    lines += [
        "| text | replicas, keep | gathered | sharded | difference | MB sent | MB, gathered, keep 128, 4 replicas |"
    ]
    lines += ["|---|---|---|---|---|---|---|"]
    shards = [r for r in found if r.part == "shards"]
    for text in dict.fromkeys(r.text for r in shards):
        limit = fmean(r.sent for r in shards if r.text == text and r.replicas == 4)
        for replicas, keep in KEEP.items():
            rows = [r for r in shards if (r.text, r.replicas) == (text, replicas)]
            gathered, sharded = ([r for r in rows if pick in r.method] for pick in ("gathered", "sharded"))
            losses = " | ".join(f"{fmean(r.loss for r in group):.4f}" for group in (gathered, sharded))
            lines.append(
                f"| {text} | {replicas}, {keep} | {losses} | {shown(sharded, gathered)} "
                f"| {fmean(r.sent for r in sharded) / 1e6:.2f} | {limit / 1e6:.2f} |"
            )
    lines += ["", "## Loss with a delay, every 10, keep 128, 4 replicas, by outer momentum", ""]
    others = [key for key, name in DELAYS.items() if name != NONE]
    titles = " | ".join(f"{f'delay {delay}' if delay else 'none'}, {momentum}" for delay, momentum in others)
    lines += [f"| text | none, 0.8 | {titles} |", "|---|---|" + "---|" * len(others)]
    delays = [r for r in found if r.part == "delay"]
    for text in dict.fromkeys(r.text for r in delays):
        rows = {name: [r for r in delays if r.text == text and r.method == name] for name in DELAYS.values()}
        none = rows[NONE]
        columns = " | ".join(shown(rows[DELAYS[key]], none) for key in others)
        lines.append(f"| {text} | {fmean(r.loss for r in none):.4f} | {columns} |")
    lines += ["", "Differences are means of three seeds, paired by seed, with a 95 % interval (Student's t)."]
    return lines


def main() -> None:
    parser = arguments(__doc__, "kjv.txt")
    parser.add_argument("--bytes", action="store_true", help="only the first part, which takes some minutes")
    args = parser.parse_args()
    begun = time.monotonic()
    if args.bytes:
        RESULTS.write_text(report(all_traffic(), []))
        return
    groups = list(study(args.data))
    make(RUNS, [cell for *_, made in groups for cell in made], args.workers)
    found = [result for group in groups for result in results(*group)]
    bytes_of = all_traffic()
    RESULTS.write_text(report(bytes_of, found))
    with RESULTS.with_suffix(".csv").open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["part", "text", "replicas", "method", "seed", "loss", "bytes sent", "bytes received"])
        table.writerows([*vars(result).values()] for result in found)
    print(f"{len(found)} runs in {(time.monotonic() - begun) / 60:.0f} min; {RESULTS}")


if __name__ == "__main__":
    main()
