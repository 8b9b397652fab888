"""Limits of the numbers in a configuration. A number beyond its limit is refused where it is read.

Limits are generous. They refuse a number that nobody can mean (a million threads) and a number that would fail only
later, inside torch (a learning rate of 1e300); they refuse nothing that somebody may need.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from overtone.errors import OvertoneError
from overtone.exchange.message import MOST_REPLICAS


@dataclass(frozen=True)
class Limit:
    """From ``low`` to ``high``; ``above`` excludes ``low`` itself, ``endless`` includes infinity."""

    what: str
    low: float
    high: float
    above: bool = False
    endless: bool = False

    def takes(self, value: float) -> bool:
        """True if the value is within the limit."""
        inside = self.low < value if self.above else self.low <= value  # never true of a NaN
        return inside and (value <= self.high or (self.endless and value == math.inf))

    def __str__(self) -> str:
        start = f"above {self.low:g}, at most" if self.above else f"from {_number(self.low)} to"
        return f"{self.what}, {start} {_number(self.high)}{', or inf' if self.endless else ''}"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def check(settings: object, limits: Mapping[str, Limit], error: type[OvertoneError]) -> None:
    """Refuse a field of ``settings`` that is beyond its limit. None stands for a default, and is not checked."""
    for name, limit in limits.items():
        value = getattr(settings, name)
        if value is not None and not limit.takes(value):
            raise error(f"{name}={shown(value)}: {limit}")


def shown(value: object) -> str:
    """The value in a message. Of a number of a thousand digits the first twenty are enough."""
    return f"{str(value)[:20]}…" if isinstance(value, int) and abs(value) > 10**40 else str(value)


def memory() -> int:
    """Bytes of main memory that this machine has, or the container in which this process runs."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no such file, or "max"
        there = min(there, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return there


def refuse_beyond_memory(size: int, what: str, way_out: str, error: type[OvertoneError]) -> None:
    """Refuse data that cannot fit into this machine's memory: the kernel would kill the process without a message."""
    there = memory()
    if size > there:
        raise error(f"{what}: takes {human_bytes(size)}, and this machine has {human_bytes(there)}; {way_out}")


def human_bytes(count: float) -> str:
    """The number of bytes with three digits and a unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


COUNT = 10**12  # the largest number of anything that is only counted: steps, samples
SIZES = {  # of a transformer
    "width": Limit("the width of the transformer", 1, 1 << 16),
    "layers": Limit("the layers of the transformer", 1, 4096),
    "heads": Limit("the attention heads of a layer", 1, 1 << 16),
    "context": Limit("tokens of a window", 1, 1 << 24),
}
WRITING = {
    "eval_every": Limit("steps between validations", 1, COUNT),
    "log_every": Limit("steps between lines of the run log", 1, COUNT),
    "spectrum": Limit("rounds whose signal is looked at", 0, COUNT),
}
STEPS = Limit("local steps of every replica", 1, COUNT)
BATCH = Limit("samples of a replica and step", 1, 10**9)
REPLICAS = Limit("replicas that exchange", 1, MOST_REPLICAS)
THREADS = Limit("CPU threads of a replica", 1, 1024)
WORKERS = Limit("runs at a time", 1, 1024)
SEED = Limit("the seed of weights and data order", 0, 2**40 - 1)
