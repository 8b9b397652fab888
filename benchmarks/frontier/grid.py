"""The cells of the study, by the question that they answer, the most important first.

Every option that matters is written out: defaults may change. A cell that several questions need is made once. What it
costs, on one core: library and bible 3 minutes, images 6, llama 8, wide 25. In all about 14 hours of one core, seven of
two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from overtone import methods
from overtone.codec import TopK
from overtone.rules import Outer

OUTER = ((0.9, 0.8), (0.7, 0.9), (1.2, 0.7))  # learning rate and momentum of the outer step
SUM = (4, 0)  # of four replicas: the anchor moves by the sum of what they send, at once
SEEDS = (0, 1, 2)
PRESETS = {name: methods.PRESETS[name].keep for name in ("near", "balanced", "thin", "thinnest")}
BALANCED = PRESETS["balanced"]
# Bytes of a round of `balanced`, gathered: the controller gets as many.
BUDGETS = {"bible": "21486B", "llama": "174452B"}
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


def turning(keep: int, decay: float, lr: float, momentum: float = 0, **others: object) -> str:
    """A basis that turns, and a residual that fades."""
    numbers = {"transform": "turning", "plain_keep": 512, "drain": 1, **({"decay": decay} if decay < 1 else {})}
    return decoupled(keep, lr, momentum, **{**numbers, **others})


def ours(keep: int = BALANCED, *, decay: float = 0.95, momentum: float = 0, bits: int = 1, **others: object) -> str:
    """As the presets have it, with the outer learning rate that follows from these numbers."""
    lr = Outer(None, momentum, decay).among(4, TopK(keep, bits).energy_share()).lr
    assert lr is not None
    if bits > 1:
        others["bits"] = bits
    return turning(keep, decay, lr, momentum, **{"drain": 0, **others})


def asks() -> Iterator[Ask]:
    """All cells, in the order in which they are made."""
    # What carries the claims: one seed of everything first, to see early what does not hold.
    yield from _claims((0,))
    yield from _near()
    yield from _claims(SEEDS)
    presets = tuple(ours(keep) for keep in PRESETS.values())
    yield Ask("presets", "library", (diloco(), *presets, "alone"), SEEDS)
    yield from _questions()
    yield from _on_the_llama()
    yield from _grid_of_the_bible()


def _claims(seeds: tuple[int, ...]) -> Iterator[Ask]:
    presets = {name: ours(keep) for name, keep in PRESETS.items()}
    yield Ask("presets", "llama", (*presets.values(), diloco(), diloco(every=40)), seeds)
    # DDP sends a round's bytes in every step: `every` times the saving against DiLoCo is 3000.
    yield Ask("3000x", "llama", (diloco(every=100), ours(280, every=100)), seeds)
    yield from _replicas(16, seeds)
    # With 16 replicas, keep 48 is what 70 times fewer bytes allow.
    yield Ask("replicas", "llama", (diloco(), ours(48, exchange="auto")), seeds, 16)
    yield Ask("replicas", "llama", ("alone",), replicas=16)
    yield Ask("presets", "bible", (diloco(), *presets.values(), "alone"), seeds)
    images = {name: cell for name, cell in presets.items() if name != "thinnest"}
    yield Ask("presets", "images", (diloco(), *images.values()), seeds)
    yield Ask("presets", "images", ("alone",))
    for setting, budget in BUDGETS.items():
        yield Ask("control", setting, (entry("decoupled", budget=budget, exchange="gathered"),), seeds)
    yield Ask("wide", "wide", (diloco(), ours(), "alone"))


def _near() -> Iterator[Ask]:
    """What `near` lacks: the grid of inner learning rates that DiLoCo had, and what a residual does to its owner."""
    rates = tuple(ours(keep, inner_lr=rate) for rate in (3.5e-4, 7e-4) for keep in (PRESETS["near"], BALANCED))
    yield Ask("near", "llama", rates)
    near = PRESETS["near"]
    yield Ask("near", "llama", (ours(near, carry=0), ours(near, momentum=0.5), turning(near, 0.95, 3.75, drain=0)))
    yield Ask("near", "llama", (turning(near, 0.9, 4.390625, drain=0),))


def _replicas(replicas: int, seeds: tuple[int, ...] = (0,)) -> Iterator[Ask]:
    """More replicas, with as many samples in all."""
    many = tuple(ours(PRESETS[name], exchange="auto") for name in ("near", "balanced"))
    yield Ask("replicas", "bible", (diloco(), *many, "alone"), seeds, replicas)


def _questions() -> Iterator[Ask]:
    """One number of `balanced` after the other is another one, on a small model."""
    yield Ask("transform", "bible", tuple(ours(transform=one) for one in ("dct", "hadamard", "none")), SEEDS)
    # As many bytes in all: more bits and fewer values, or fewer rounds and more values.
    yield Ask("bits", "bible", (ours(49, bits=2), ours(40, bits=4)), SEEDS)
    for every in (30, 100):
        yield Ask("every", "bible", (diloco(every=every), ours(BALANCED * every // 10, every=every)), SEEDS)
    yield Ask("outer", "bible", (ours(momentum=0.5), ours(carry=0), ours(carry=0.5)), SEEDS)
    yield Ask("dense", "bible", (ours(drain=2), ours(plain_keep=4096), ours(first_rounds=30, first_keep=512)), SEEDS)
    yield Ask("exchange", "bible", (ours(exchange="sharded"), ours(delay=5), ours(delay=10)), SEEDS)
    yield Ask("skew", "bible", (diloco(skew=1), ours(skew=1), "alone:skew=1"), SEEDS)
    for replicas in (8, 2, 32):
        yield from _replicas(replicas)
    yield Ask("transform", "bible", (ours(chunk=32), ours(chunk=128)))
    yield Ask("muon", "bible", (diloco(inner="muon"), ours(inner="muon")))
    sparse = {"keep": 50, "bits": 2, "decay": 0.95}
    yield Ask("others", "bible", tuple(entry("sparse_loco", **sparse, lr=lr, momentum=0) for lr in (0.7, 1, 3.5)))
    yield Ask("others", "bible", tuple(entry("published", keep=56, lr=lr, decay=0.9) for lr in (0.4, 0.7, 1)))


def _on_the_llama() -> Iterator[Ask]:
    """The ends, the grid of DiLoCo, and the trials that led to the presets."""
    yield Ask("ends", "llama", ("alone", "alone:inner_lr=0.001", "alone:inner_lr=0.002"))
    yield Ask("ends", "llama", ("ddp",))
    yield Ask("grid", "llama", tuple(diloco(*outer) for outer in OUTER))
    yield Ask("grid", "llama", tuple(diloco(inner_lr=rate) for rate in (2.5e-4, 1e-3, 2e-3, 4e-3)))
    yield Ask("grid", "llama", (diloco(0.7, 0.9, inner_lr=2e-3), diloco(1, 0.5, inner_lr=1e-3)))
    yield Ask("3000x", "llama", (diloco(every=30), ours(72, every=30)), SEEDS)
    yield Ask("forgetting", "llama", tuple(turning(32, decay, lr) for decay, lr in FORGETTING))
    yield Ask("forgetting", "llama", (turning(56, 0.84, 10),))
    # Dense messages lose something that bytes do not explain. How far may a round move the anchor?
    steps = tuple(turning(128, 0.95, lr, drain=0) for lr in (3.046875, 4.390625, 5.6))
    yield Ask("near", "llama", (*steps, turning(56, 0.95, 6.609375, drain=0), turning(128, 1, 4.390625, drain=0)))
    yield Ask("near", "llama", (turning(128, 1, 0.9, 0.8, drain=0),))
    yield Ask("near", "llama", tuple(turning(128, 0.95, lr, drain=0, carry=0.5) for lr in (3.046875, 4.390625)))
    # The first trials: with momentum, with the sum of all messages, at other learning rates.
    yield Ask("outer", "llama", (decoupled(32, *SUM), decoupled(32, *SUM, transform="turning")))
    yield Ask("outer", "llama", (decoupled(64, *SUM, transform="turning", plain_keep=512),))
    yield Ask("outer", "llama", (decoupled(32, *SUM, transform="turning", decay=0.97),))
    yield Ask("outer", "llama", tuple(decoupled(32, inner_lr=rate) for rate in (1e-3, 2e-3, 4e-3)))
    yield Ask("outer", "llama", (decoupled(32, *SUM, inner_lr=1e-3),))
    yield Ask("every", "llama", (ours(80, every=40),))
    every_5 = decoupled(48, *SUM, transform="turning", plain_keep=512, every=5, drain=1)
    yield Ask("every", "llama", (every_5, diloco(every=5)))


def _grid_of_the_bible() -> Iterator[Ask]:
    """Learning rates and forgetting on the small model, and how much of a difference is chance."""
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
    yield Ask("transform", "bible", (decoupled(16, chunk=128),))
    for lr, decay in ((4, 1), (8, 1), (10, 0.9), (20, 0.9)):
        yield Ask("replicas", "bible", (turning(32, decay, lr),), replicas=16)
