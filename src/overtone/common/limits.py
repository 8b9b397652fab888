"""What a number may be: told where it is read, before anything is done with it.

Limits are generous: they keep out what cannot be meant (a million threads) and what torch would only trip over later
(a learning rate of 1e300), and nothing that somebody may need.
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
    """From ``low`` to ``high``; ``above`` leaves ``low`` itself out, ``endless`` takes infinity too."""

    what: str
    low: float
    high: float
    above: bool = False
    endless: bool = False

    def takes(self, value: float) -> bool:
        inside = self.low < value if self.above else self.low <= value  # never true of a NaN
        return inside and (value <= self.high or (self.endless and value == math.inf))

    def __str__(self) -> str:
        start = f"above {self.low:g}, at most" if self.above else f"from {_number(self.low)} to"
        return f"{self.what}, {start} {_number(self.high)}{', or inf' if self.endless else ''}"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def check(settings: object, limits: Mapping[str, Limit], error: type[OvertoneError]) -> None:
    """Refuse a number of ``settings`` that is beyond its limit. None is a number that was left to its default."""
    for name, limit in limits.items():
        value = getattr(settings, name)
        if value is not None and not limit.takes(value):
            raise error(f"{name}={shown(value)}: {limit}")


def shown(value: object) -> str:
    """A number of a thousand digits is not read by anybody."""
    return f"{str(value)[:20]}…" if isinstance(value, int) and abs(value) > 10**40 else str(value)


def memory() -> int:
    """Bytes of this machine, or of the container this process is in."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no such file, or "max"
        there = min(there, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return there


def refuse_beyond_memory(size: int, what: str, way_out: str, error: type[OvertoneError]) -> None:
    """Refuse what cannot fit into this machine's memory: the kernel would end the process without a word."""
    there = memory()
    if size > there:
        raise error(f"{what}: takes {human_bytes(size)}, and this machine has {human_bytes(there)}; {way_out}")


def human_bytes(count: float) -> str:
    """Three digits and a unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


COUNT = 10**12  # the most of anything that is only counted: steps, samples
SIZES = {  # of a transformer
    "width": Limit("the width of the transformer", 1, 1 << 16),
    "layers": Limit("its layers", 1, 4096),
    "heads": Limit("its heads", 1, 1 << 16),
    "context": Limit("tokens of a window", 1, 1 << 24),
}
WRITING = {
    "eval_every": Limit("steps between validations", 1, COUNT),
    "log_every": Limit("steps between lines of the run log", 1, COUNT),
}
STEPS = Limit("local steps of every replica", 1, COUNT)
BATCH = Limit("samples of a replica and step", 1, 10**9)
REPLICAS = Limit("replicas that exchange", 1, MOST_REPLICAS)
THREADS = Limit("CPU threads of a replica", 1, 1024)
WORKERS = Limit("runs at a time", 1, 1024)
SEED = Limit("the seed of weights and data order", 0, 2**40 - 1)
