"""What the lines of a run log say, alike for real and for simulated runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch import nn

from overtone.ledger import Ledger, Round
from overtone.methods import Method
from overtone.runs import log, toml
from overtone.runs.config import Run, Simulation
from overtone.runs.log import Record
from overtone.tasks import Task


def beginning(config: Run | Simulation, method: Method, task: Task, model: nn.Module, hosts: Sequence[Any]) -> Record:
    """Everything that is known before the first step."""
    training = config.training
    return {
        "simulated": isinstance(config, Simulation),
        "method": method.name,
        "numbers": method.numbers(),
        "consensus": method.consensus,
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": training.steps,
        "unit": task.unit,
        "units_per_step": training.samples * task.units(),
        "data": task.about(),
        "config": toml.flat(config),
        "environment": log.environment(hosts),
    }


def worth_telling(rounds: Sequence[Round], *, due: bool) -> list[Round]:
    """Those to write down: all of them, but where every step ends in one only when a line is due anyway."""
    return [record for record in rounds if due or record.local_steps > 1]


def by_phase(ledger: Ledger) -> Record:
    return {phase: asdict(count) for phase, count in ledger.counts.items()}


def so_far(ledger: Ledger, units: int, seconds: float) -> Record:
    """What it cost: the method's own bytes through this replica's interface, and how often it had to wait a latency."""
    return {
        "bytes_sent": ledger.sent,
        "bytes_received": ledger.received,
        "hops": ledger.hops,
        "units": units,
        "seconds": seconds,
    }
