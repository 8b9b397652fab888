"""The cells of the study, the most important first. Every option that matters is written out: defaults may change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

OUTER = ((0.7, 0.9), (0.9, 0.8), (1.2, 0.7))  # learning rate and momentum of the outer step, for all methods
INNER_LR = (1e-3, 2e-3, 4e-3)


@dataclass(frozen=True)
class Ask:
    """Runs that belong together: every entry with every seed."""

    setting: str
    entries: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)
    replicas: int = 4


def outer(lr: float, momentum: float) -> str:
    return f"lr={lr},momentum={momentum}"


def diloco(lr: float = 0.9, momentum: float = 0.8, **others: object) -> str:
    return _entry("diloco", outer(lr, momentum), others)


def decoupled(keep: int, lr: float = 0.9, momentum: float = 0.8, exchange: str = "gathered", **others: object) -> str:
    return _entry("decoupled", f"keep={keep},{outer(lr, momentum)},exchange={exchange}", others)


def _entry(name: str, settings: str, others: dict[str, object]) -> str:
    return ",".join([f"{name}:{settings}", *(f"{key}={value}" for key, value in others.items())])


def asks() -> Iterator[Ask]:
    """All cells, in the order in which they are made."""
    yield Ask("llama", (diloco(), decoupled(32), decoupled(64), decoupled(16), "alone", decoupled(8)))
    # The grid: every method with every outer step, then with every inner learning rate.
    for lr, momentum in OUTER:
        yield Ask("bible", (diloco(lr, momentum), *(decoupled(keep, lr, momentum) for keep in (128, 32, 8))))
    for rate in INNER_LR:
        yield Ask("bible", (diloco(inner_lr=rate), *(decoupled(keep, inner_lr=rate) for keep in (128, 32, 8))))
