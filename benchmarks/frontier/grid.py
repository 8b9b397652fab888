"""The cells of the study, by the question that they answer, the most important first.

Every option that matters is written out: defaults may change. A cell that several questions need is made once. What it
costs, on one core: library and bible 3 to 4 minutes, images about 6, llama 16, wide 35. In all about 20 hours of one
core, ten of two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

OUTER = ((0.9, 0.8), (0.7, 0.9), (1.2, 0.7))  # learning rate and momentum of the outer step, for all methods
INNER_LR = (1e-3, 2e-3, 4e-3)
SEEDS = (0, 1, 2)
SMALL = ("bible", "library")


@dataclass(frozen=True)
class Ask:
    """Runs that belong together: every entry with every seed."""

    question: str
    setting: str
    entries: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)
    replicas: int = 4


def entry(name: str, **options: object) -> str:
    return f"{name}:" + ",".join(f"{key}={value}" for key, value in options.items())


def diloco(lr: float = 0.9, momentum: float = 0.8, **others: object) -> str:
    return entry("diloco", lr=lr, momentum=momentum, **others)


def decoupled(keep: int, lr: float = 0.9, momentum: float = 0.8, exchange: str = "gathered", **others: object) -> str:
    return entry("decoupled", keep=keep, lr=lr, momentum=momentum, exchange=exchange, **others)


def asks() -> Iterator[Ask]:
    """All cells, in the order in which they are made."""
    # Depth first: it carries the claims, and takes longest. What the presets are compared with, then the two ends.
    yield Ask("grid", "llama", (diloco(), diloco(inner_lr=1e-3), diloco(1.2, 0.7)))
    yield Ask("keep", "llama", (diloco(), "alone", diloco(every=40)), SEEDS)
    yield Ask("grid", "llama", (diloco(0.7, 0.9), diloco(inner_lr=4e-3), decoupled(32), decoupled(32, inner_lr=4e-3)))
    yield Ask("ends", "llama", ("ddp",))
    yield Ask("keep", "llama", tuple(decoupled(keep) for keep in (128, 32, 16)), SEEDS)
    # Breadth.
    for setting in SMALL:
        yield Ask("keep", setting, (diloco(), *(decoupled(keep) for keep in (128, 32, 16, 8)), "alone"), SEEDS)
    for outer in OUTER:
        yield Ask("grid", "bible", (diloco(*outer), *(decoupled(keep, *outer) for keep in (128, 32, 8))))
    for rate in INNER_LR:
        yield Ask("grid", "bible", (diloco(inner_lr=rate), *(decoupled(keep, inner_lr=rate) for keep in (128, 32, 8))))
    # The same run twice, but for a learning rate that differs in the fifth digit: how far apart chance takes them.
    yield Ask("chance", "bible", tuple(decoupled(16, inner_lr=rate) for rate in (0.0019999, 0.0020001)))
    transforms = tuple(decoupled(16, transform=transform) for transform in ("hadamard", "none"))
    yield Ask("transform", "bible", (*transforms, *(decoupled(16, chunk=chunk) for chunk in (32, 128))), SEEDS)
    yield Ask("plain", "bible", (decoupled(16, plain_keep=512),), SEEDS)
    yield Ask("drain", "bible", (decoupled(16, drain=1), decoupled(16, drain=0)), SEEDS)
