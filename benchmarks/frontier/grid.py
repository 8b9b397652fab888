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
SEEDS = (0, 1, 2)
# The presets: keep, and the outer learning rate that rules.Outer computes for it.
PRESETS = {"near": (128, 4.390625), "balanced": (56, 5.140625), "thin": (18, 7.53125), "thinnest": (7, 12.296875)}
# Decay and outer learning rate, at keep 32.
FORGETTING = ((1, 4), (0.97, 5.5), (0.95, 6), (0.95, 8), (0.9, 10))


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
    return entry("decoupled", preset="first", keep=keep, lr=lr, momentum=momentum, exchange=exchange, **others)


def turning(keep: int, decay: float, lr: float, drain: int = 1, **others: object) -> str:
    """No momentum, a basis that turns, a residual that fades."""
    numbers = {"transform": "turning", "plain_keep": 512, "drain": drain, **({"decay": decay} if decay < 1 else {})}
    return decoupled(keep, lr, 0, **numbers, **others)


def preset(name: str, **others: object) -> str:
    keep, lr = PRESETS[name]
    return turning(keep, 0.95, lr, drain=0, **others)


def asks() -> Iterator[Ask]:
    """All cells, in the order in which they are made."""
    presets = tuple(preset(name) for name in PRESETS)
    # Depth first: it carries the claims, and takes longest.
    yield Ask("presets", "llama", (*presets, diloco()), SEEDS)
    yield Ask("presets", "llama", (diloco(every=40),), SEEDS)
    yield Ask("ends", "llama", ("alone", "alone:inner_lr=0.001", "alone:inner_lr=0.002"))
    yield Ask("ends", "llama", ("ddp",))
    yield Ask("grid", "llama", tuple(diloco(*outer) for outer in OUTER))
    yield Ask("grid", "llama", tuple(diloco(inner_lr=rate) for rate in (2.5e-4, 1e-3, 2e-3, 4e-3)))
    yield Ask("grid", "llama", (diloco(0.7, 0.9, inner_lr=2e-3), diloco(1, 0.5, inner_lr=1e-3)))
    yield Ask("forgetting", "llama", tuple(turning(32, decay, lr) for decay, lr in FORGETTING))
    yield Ask("forgetting", "llama", (turning(56, 0.84, 10),))
    # Dense messages lose something that bytes do not explain: a larger step, or the momentum of the first version?
    momentum = decoupled(128, transform="turning", plain_keep=512, drain=0)
    yield Ask("near", "llama", (turning(128, 0.95, 5.6, drain=0), momentum))
    # DDP sends a round's bytes in every step: `every` times the saving against DiLoCo is 3000.
    for every, keep, lr in ((100, 280, 2.96875), (30, 72, 4.859375)):
        yield Ask("3000x", "llama", (diloco(every=every), turning(keep, 0.95, lr, drain=0, every=every)))
    # The first trials: with momentum, with the sum of all messages, at other learning rates.
    yield Ask("outer", "llama", (decoupled(32, *SUM), decoupled(32, *SUM, transform="turning")))
    yield Ask("outer", "llama", (decoupled(64, *SUM, transform="turning", plain_keep=512),))
    yield Ask("outer", "llama", (decoupled(32, *SUM, transform="turning", decay=0.97),))
    yield Ask("outer", "llama", tuple(decoupled(32, inner_lr=rate) for rate in (1e-3, 2e-3, 4e-3)))
    yield Ask("outer", "llama", (decoupled(32, *SUM, inner_lr=1e-3),))
    yield Ask("taper", "llama", (decoupled(64, *SUM, taper=2, plain_keep=512, drain=1),))
    every_5 = decoupled(48, *SUM, transform="turning", plain_keep=512, every=5, drain=1)
    yield Ask("every", "llama", (every_5, diloco(every=5)))
    # Breadth.
    for setting in ("bible", "library", "images"):
        yield Ask("presets", setting, (diloco(), *presets, "alone"), SEEDS)
    for rate in (None, 5e-4):
        others = {} if rate is None else {"inner_lr": rate}
        for decay, lr in ((1, 4), (0.95, 6), (0.9, 10)):
            yield Ask("forgetting", "bible", (turning(32, decay, lr, **others),))
    yield Ask("grid", "bible", tuple(diloco(inner_lr=rate) for rate in (5e-4, 1e-3, 4e-3)))
    for outer in OUTER[:2]:
        yield Ask("grid", "bible", (diloco(*outer), *(decoupled(keep, *outer) for keep in (128, 32, 8))))
    yield Ask("outer", "bible", (decoupled(8, *SUM),))
    # The same run twice, but for a learning rate that differs in the fifth digit: how far apart chance takes them.
    yield Ask("chance", "bible", tuple(decoupled(16, inner_lr=rate) for rate in (0.0019999, 0.0020001)))
    transforms = ("dct", "hadamard", "none", "turning")
    yield Ask("transform", "bible", tuple(decoupled(16, *SUM, transform=one) for one in transforms), SEEDS)
    yield Ask("transform", "bible", (decoupled(16, chunk=128),))
    # More replicas, with as many samples in all.
    for replicas in (8, 16):
        many = (diloco(), preset("near"), preset("balanced"), "alone")
        yield Ask("replicas", "bible", many, SEEDS, replicas)
    for lr, decay in ((4, 1), (8, 1), (10, 0.9), (20, 0.9)):
        yield Ask("replicas", "bible", (turning(32, decay, lr),), replicas=16)
    yield Ask("wide", "wide", (diloco(), preset("balanced"), "alone"))
