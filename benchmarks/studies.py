"""Small studies behind the choices that docs/log.md records: warm-up, exceptions, transform, drain.

    python benchmarks/studies.py --text tinyshakespeare.txt

Four replicas, a round every 10 steps, 400 steps of 8 x 64 bytes. One file per run under benchmarks/results/studies/;
runs that are there already are kept.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from overtone import codec
from overtone.cli.console import write_json
from overtone.report.format import human_bytes
from overtone.runs.config import MethodChoice, Simulation, Training
from overtone.runs.simulate import simulate
from overtone.tasks import TaskOptions

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Study:
    question: str
    label: str
    choice: MethodChoice
    warmup: int | None = None
    exceptional: float = codec.EXCEPTIONAL
    seed: int = 0

    @property
    def file(self) -> Path:
        return RESULTS / "studies" / f"{self.question}-{self.label.replace(' ', '-')}-seed{self.seed}.json"


def decoupled(keep: int, *, transform: str | None = None, drain: int | None = None) -> MethodChoice:
    return MethodChoice("decoupled", every=10, preset="first", keep=keep, transform=transform, drain=drain)


DILOCO = MethodChoice("diloco", every=10, lr=0.9, momentum=0.8)
STUDIES = (
    *(Study("warmup", f"diloco {steps} of 400", DILOCO, warmup=steps) for steps in (20, 80)),
    *(
        Study("exceptions", f"keep {keep} {name}", decoupled(keep), exceptional=limit)
        for keep in (512, 128)
        for name, limit in (("with", codec.EXCEPTIONAL), ("without", math.inf))
    ),
    *(
        Study("transform", f"keep 32 {name}", decoupled(32, transform=name), seed=seed)
        for name in ("dct", "random", "none")
        for seed in (0, 1)
    ),
    *(Study("drain", f"keep 32 drain {count}", decoupled(32, drain=count)) for count in (0, 1, 2, 4)),
)


def run(study: Study, text: Path) -> dict[str, Any]:
    codec.EXCEPTIONAL = study.exceptional
    training = Training(steps=400, batch=8, warmup=study.warmup)
    task = TaskOptions(data=str(text))
    return simulate(Simulation(choice=study.choice, task=task, seed=study.seed, training=training))


def report() -> str:
    lines = [
        "# Studies\n",
        "`python benchmarks/studies.py --text tinyshakespeare.txt` wrote this page from the files beside it.\n",
        "| question | run | seed | loss | anchor before finish | mean of replicas | bytes sent | of them in finish |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for study in STUDIES:
        if study.file.exists():
            r = json.loads(study.file.read_text())
            losses = " | ".join(f"{r[key]:.4f}" for key in ("val_loss", "val_loss_anchor", "val_loss_average"))
            sent = " | ".join(human_bytes(r[key]) for key in ("bytes_sent", "bytes_finish"))
            lines.append(f"| {study.question} | {study.label} | {study.seed} | {losses} | {sent} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="a text file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    (RESULTS / "studies").mkdir(parents=True, exist_ok=True)
    for study in STUDIES:
        if not study.file.exists():
            result = run(study, args.text)
            write_json(study.file, result)
            print(f"{study.file.name}: {result['val_loss']:.4f}", flush=True)
            (RESULTS / "studies.md").write_text(report())


if __name__ == "__main__":
    main()
