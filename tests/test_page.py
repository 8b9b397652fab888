"""The report page in a real browser: every promise of the page, on data as a comparison gives it."""

from __future__ import annotations

import csv
import io
import math
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import browser as web
import pytest

from overtone import page

HOSTILE = "</script><img src=x onerror=alert(1)>"
STEPS = list(range(0, 601, 50))
NAN = float("nan")


def run(label: str, seed: int, end: float, per_step: int, *, until: int = 600, status: str = "finished", top1: bool = False) -> dict[str, Any]:
    """A run whose loss falls from 5.5 towards ``end``, sending ``per_step`` bytes a step in rounds of ten."""
    dice = random.Random(f"{label} {seed}")
    step = [s for s in STEPS if s <= until]
    loss = [end + (5.5 - end) * math.exp(-s / 90) + dice.gauss(0, 0.008) for s in step]
    if status == "diverged":
        loss = [x + max(0, s - 150) ** 2 / 4e3 for s, x in zip(step, loss, strict=True)]
        loss[-1] = NAN
    curve: dict[str, Any] = {
        "step": step, "loss": loss, "average": [x - 0.1 for x in loss], "bytes": [s * per_step for s in step],
        "received": [3 * s * per_step for s in step], "hops": [s // 10 * 2 * bool(per_step) for s in step],
        "seconds": [0.05 * s for s in step],
    }  # fmt: skip
    if top1:
        curve["top1"] = [1 - math.exp(-s / 200) + dice.gauss(0, 0.01) for s in step]
    rounds = list(range(10, until + 1, 10)) if per_step else []
    return {
        "label": label, "seed": seed, "status": status, "simulated": True,
        "marks": [] if status == "finished" else [f"{status} at step {until} of 600"],
        "curve": curve,
        "train": {"step": step, "loss": [x - 0.1 for x in loss]},
        "rounds": {
            "step": rounds, "bytes": [10 * per_step for _ in rounds], "drift": [2 / math.sqrt(s) for s in rounds],
            "residual": [None for _ in rounds], "waiting": [0.01 for _ in rounds],
        },
        "spread_of_replicas": {"step": step, "value": [0.01 * math.sqrt(s) for s in step]} if per_step else None,
        "finish": {
            "rounds": len(rounds), "rounds_finish": 3,
            "bytes": {"rounds": {"sent": until * per_step, "received": 3 * until * per_step, "waiting": 1.5}},
            "shares": {"inner steps": 0.9, "rounds": 0.1},
        } if status == "finished" else None,
        "config": {"method.every": 10, "method.keep": None, "data": HOSTILE, "training.steps": 600},
        "environment": {"versions": {"torch": "2.13.0", "overtone": "0.1.0"}, "host": "a-host-with-a-rather-long-name.example.internal"},
        "command": f"overtone simulate --method {label} --seed {seed} --replicas 4 --every 10 --steps 600 --json runs/{label}-{seed}.json",
    }  # fmt: skip


def group(name: str, methods: list[tuple[Any, ...]], *, top1: bool = False, seeds: int = 2, note: str | None = None) -> dict[str, Any]:
    runs: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for label, method, end, per_step, *how in methods:
        more = dict(how[0]) if how else {}
        mine = [run(label, seed, end + 0.02 * seed, per_step, top1=top1, **more) for seed in range(seeds)]
        losses = [one["curve"]["loss"][-1] for one in mine]
        sent = mine[0]["curve"]["bytes"][-1]
        row = {
            "label": label, "method": method, "runs": list(range(len(runs), len(runs) + seeds)), "of": "loss",
            "seeds": list(range(seeds)), "loss": sum(losses) / seeds, "spread": 0.01 if seeds > 1 else None, "losses": losses,
            "metrics": {"top1": mine[0]["curve"]["top1"][-1]} if top1 else {}, "bytes": sent,
            "less_than_diloco": 72e3 / per_step if per_step else math.inf, "less_than_ddp": 72e4 / per_step if per_step else None,
            "loss_vs_diloco": sum(losses) / seeds / 2.22 - 1, "gain_kept": (2.31 - sum(losses) / seeds) / 0.09,
            "drift": 0.013 if per_step else 0.267, "rounds": 60 if per_step else 0, "waiting": 0.2 if per_step else None,
            "residual": None, "reference": label == "diloco", "marks": list(mine[0]["marks"]),
        }  # fmt: skip
        rows.append(row)
        if method == "published":
            row["marks"] = ["replica 0; no shared model"]
            rows.append({**row, "label": f"{label}, mean", "of": "average", "marks": ["mean of the replicas"]})
        runs += mine
    facts = {"data": "standard library", "model": "gpt-neox, 2 layers of 64", "parameters": 119424, "replicas": 4, "steps": 600, "units": 307200, "unit": "tokens"}
    link = {"bandwidth": 50.0, "latency": 20.0, "step_seconds": 0.1}
    return {"name": name, "note": note, "facts": facts, "link": link, "rows": rows, "runs": runs}


def example() -> dict[str, Any]:
    text = [
        ("alone", "alone", 2.311, 0),
        ("ddp", "ddp", 2.089, 717_000),
        ("diloco", "diloco", 2.218, 72_000),
        ("published", "published", 2.492, 2_200),
        ("decoupled", "decoupled", 2.204, 1_650),
        ("decoupled, keep 8", "decoupled", 2.262, 480),
        ("sparse_loco", "sparse_loco", 2.3, 9_000, {"status": "diverged"}),
        ("local_sgd", "local_sgd", 2.35, 72_000, {"until": 300, "status": "stopped"}),
        (HOSTILE, HOSTILE, 2.4, 5_000),
    ]
    image = [("alone", "alone", 1.2, 0), ("diloco", "diloco", 0.9, 40_000), ("decoupled", "decoupled", 0.91, 1_000)]
    series = [
        {"label": label, "x": [2, 4, 8, 16], "loss": [end + 0.01 * k for k in range(4)], "low": [end - 0.02] * 4, "high": [end + 0.05] * 3 + [None]}
        for label, end in (("diloco", 2.22), ("decoupled", 2.2))
    ]
    return {
        "title": "Loss against bytes <b>", "made": "2026-11-16 09:00 UTC", "version": "0.1.0", "command": "overtone compare --seeds 0 1",
        "legend": ["loss: nats per byte on held-out text, after finish().", "bytes sent: by one replica over the whole run."],
        "groups": [
            group("standard library · 4 replicas · 600 steps", text),
            group("digits · 4 replicas", image, top1=True, seeds=1, note="Other data than the first group: compare within the group only."),
        ],
        "scaling": {"title": "More replicas", "note": "Final loss after the same number of steps.", "x": "replicas", "series": series},
    }  # fmt: skip
