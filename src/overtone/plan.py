"""What a method will do with a model's tensors, before anything runs: which are compressed, which travel densely, and
the bytes of a round. The policy itself is the codec's; here it is put into words."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rich.console import Group
from rich.table import Table

from overtone.codec import TopK
from overtone.compare import human_bytes
from overtone.layout import Slab
from overtone.methods import Method
from overtone.transport import Ledger
from overtone.wire import HEADER_BYTES, Seal


def describe(method: Method, shapes: Mapping[str, tuple[int, ...]], replicas: int) -> Group:
    """One line per tensor, then the whole message."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("tensor", "shape", "travels", "bytes"):
        shown.add_column(column, justify="right" if column == "bytes" else "left")
    total = 0.0
    for name, shape in shapes.items():
        travels, size = how(method, shape)
        total += size
        shown.add_row(name, "x".join(map(str, shape)) or "scalar", travels, human_bytes(round(size)))
    return Group(shown, "", _sum(method, total, sum(map(math.prod, shapes.values())), replicas))


def how(method: Method, shape: tuple[int, ...]) -> tuple[str, float]:
    """How a tensor travels, in words, and about how many bytes it takes in one message."""
    size = math.prod(shape)
    if method.every is None:
        return "never", 0.0
    if not isinstance(method.codec, TopK):
        return "densely, fp32", 4.0 * size
    codec = method.codec
    slabs = codec.layout([shape]).slabs
    if slabs and slabs[0].plain:
        return f"densely, {'fp32' if codec.width(slabs[0]) == 32 else 'bf16'}", codec.width(slabs[0]) * size / 8
    chunks: dict[tuple[int, int], int] = {}
    for slab in slabs:
        chunks[slab.h, slab.w] = chunks.get((slab.h, slab.w), 0) + slab.chunks
    kept = {(slab.h, slab.w): codec.kept(slab) for slab in slabs}
    words = [f"{kept[h, w]} of each {h}x{w} ({n})" for (h, w), n in chunks.items()]
    return ", ".join(words), sum(bits_of(codec, slab) for slab in slabs) / 8


def bits_of(codec: TopK, slab: Slab) -> float:
    """The least a slab can take: log2 C(a, k) for positions, k · bits for values, 16 for each scale. Messages are
    within 6 % of it while less than half of a chunk is kept: tests/test_codec.py."""
    k, width = codec.kept(slab), codec.width(slab)
    return slab.chunks * (math.log2(math.comb(slab.area, k)) + k * width + (16 if width < 16 else 0))


def _sum(method: Method, payload: float, parameters: int, replicas: int) -> str:
    if method.every is None:
        return f"{method.name}: {parameters / 1e6:.2f} M parameters, nothing is ever sent."
    message = round(payload + HEADER_BYTES + Seal().size)
    ledger = Ledger()
    if method.codec.reduces:
        ledger.summed(round(payload), replicas)
    else:
        ledger.gathered(message, replicas)
    pattern = "summed on the way" if method.codec.reduces else "gathered by all"
    sent = human_bytes(ledger.now.sent)
    dense = ""
    if isinstance(method.codec, TopK):
        codec = method.codec
        dense = (
            f"\nThe strongest coefficients of each chunk travel at {codec.bits} bit{'s' if codec.bits > 1 else ''}; "
            f"densely travel tensors of one axis and those of fewer than {codec.plain_below} values. Sizes are the "
            "least possible: real messages are within 6 % of it if at most half is kept; outliers add to it."
        )
    return (
        f"{method.name}: {parameters / 1e6:.2f} M parameters, {human_bytes(message)} per message, every "
        f"{method.every} steps, {pattern}: each of {replicas} replicas sends about {sent} a round, "
        f"{8 * payload / parameters:.3g} bits per parameter and message.{dense}"
    )
