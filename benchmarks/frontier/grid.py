"""The cells of the study, by the question that they answer, the most important first.

Every option that matters is written out: defaults may change. A cell that several questions need is made once. What it
costs, on one core: library and bible 3 to 4 minutes, images about 6, llama 16, wide 35. In all about 20 hours of one
core, ten of two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

OUTER = ((0.9, 0.8), (0.7, 0.9), (1.2, 0.7))  # learning rate and momentum of the outer step
SUM = (4, 0)  # of four replicas: the anchor moves by the sum of what they send, at once
INNER_LR = {"llama": (2.5e-4, 1e-3, 2e-3), "bible": (5e-4, 1e-3, 4e-3)}  # beside the setting's own
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


def thin(keep: int, **others: object) -> str:
    """The numbers that trials found best for thin messages."""
    return decoupled(keep, *SUM, transform="turning", plain_keep=512, **others)


def asks() -> Iterator[Ask]:
    """All cells, in the order in which they are made."""
    # Depth first: it carries the claims, and takes longest.
    yield Ask("keep", "llama", (diloco(), thin(64), thin(32), thin(16), thin(128), "alone", thin(8)))
    yield Ask("outer", "llama", (decoupled(32, *SUM), decoupled(32, *SUM, transform="turning")))
    yield Ask("taper", "llama", (decoupled(64, *SUM, taper=2, plain_keep=512, drain=1),))
    yield Ask("decay", "llama", (decoupled(32, *SUM, transform="turning", decay=0.97),))
    yield Ask("every", "llama", (thin(48, every=5, drain=1), diloco(every=5)))
    yield Ask("grid", "llama", (*(diloco(*outer) for outer in OUTER),))
    for rate in INNER_LR["llama"]:
        yield Ask("grid", "llama", (diloco(inner_lr=rate), thin(32, inner_lr=rate)))
    yield Ask("keep", "llama", (diloco(), thin(64), thin(32), thin(16), "alone", diloco(every=40), thin(8)), SEEDS)
    yield Ask("ends", "llama", ("ddp",))
    # Trials at learning rates that proved too high, kept as a part of the grid.
    yield Ask("grid", "llama", (diloco(0.7, 0.9, inner_lr=2e-3), diloco(inner_lr=4e-3)))
    yield Ask("grid", "llama", tuple(decoupled(32, inner_lr=rate) for rate in (1e-3, 2e-3, 4e-3)))
    yield Ask("grid", "llama", (decoupled(32, *SUM, inner_lr=1e-3),))
    # Breadth.
    for setting in SMALL:
        yield Ask("keep", setting, (diloco(), *(thin(keep) for keep in (128, 64, 32, 16, 8)), "alone"), SEEDS)
    for outer in OUTER:
        yield Ask("grid", "bible", (diloco(*outer), *(decoupled(keep, *outer) for keep in (128, 32, 8))))
    for rate in INNER_LR["bible"]:
        yield Ask("grid", "bible", (diloco(inner_lr=rate), *(thin(keep, inner_lr=rate) for keep in (128, 32, 8))))
    yield Ask("outer", "bible", (decoupled(8, *SUM),))
    # The same run twice, but for a learning rate that differs in the fifth digit: how far apart chance takes them.
    yield Ask("chance", "bible", tuple(decoupled(16, inner_lr=rate) for rate in (0.0019999, 0.0020001)))
    transforms = tuple(decoupled(16, *SUM, transform=transform) for transform in ("dct", "hadamard", "none", "turning"))
    yield Ask("transform", "bible", (*transforms, decoupled(16, *SUM, transform="turning", chunk=128)), SEEDS)
    yield Ask("transform", "bible", (decoupled(16, chunk=128),))
    yield Ask("drain", "bible", (thin(16, drain=1), thin(16, drain=0)), SEEDS)
