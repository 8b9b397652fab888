"""How the parameters and buffers of a model are dealt out to owners, for the sharded exchange (sharded.py).

The flat vector of all coefficients (coding/chunks.py), followed by the floating buffers, is cut into as many *parts* as
there are replicas. Parts have about equal costs. A cut lies between two chunks, two plain values or two buffers. Every
part has an owner, which averages it for all. The owners rotate with the rounds, so that no replica always has the
largest part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from overtone.coding.chunks import Slab

BUFFER_BITS = 64  # the cost of a value of a buffer: fp32 to its owner, and fp32 back


@dataclass(frozen=True)
class Piece:
    """A run of chunks of one slab that belongs to one part. ``slab`` has the run in the form of a slab."""

    part: int
    slab: Slab


@dataclass(frozen=True)
class Deal:
    """Which piece and which buffer belongs to which part."""

    parts: int
    pieces: tuple[Piece, ...]  # in the order of the flat vector
    buffers: tuple[range, ...]  # for each part: the numbers of its buffers

    @classmethod
    def whole(cls, slabs: Sequence[Slab], buffers: int) -> Deal:
        """All slabs and buffers in one part, for exchanges without owners."""
        return cls(1, tuple(Piece(0, slab) for slab in slabs), (range(buffers),))

    def of(self, part: int) -> list[Slab]:
        """The pieces of a part."""
        return [piece.slab for piece in self.pieces if piece.part == part]

    def inside(self, slab: Slab) -> Iterator[int]:
        """The numbers of the pieces into which a slab of the layout is cut."""
        end = slab.offset + slab.size
        return (n for n, piece in enumerate(self.pieces) if slab.offset <= piece.slab.offset < end)


def deal(slabs: Sequence[Slab], buffers: Sequence[int], parts: int, bits_of: Callable[[Slab], int]) -> Deal:
    """Cut slabs and buffers (given by their numbers of values) into parts of about equal cost.

    ``bits_of`` is the cost of a slab. All is computed in whole numbers: every replica must find the same.
    """
    costs = [bits_of(slab) for slab in slabs]
    share = max(1, -(-(sum(costs) + BUFFER_BITS * sum(buffers)) // parts))
    pieces, before = [], 0
    for slab, cost in zip(slabs, costs, strict=True):
        first, scale = 0, 2 * slab.units
        while first < slab.units:
            # A unit belongs to the part in which the middle of its cost lies: before + cost · (2 · unit + 1) / scale.
            part = min(parts - 1, (scale * before + cost * (2 * first + 1)) // (scale * share))
            end = slab.units
            if part < parts - 1:
                end = min(end, -((cost - scale * ((part + 1) * share - before)) // (2 * cost)))
            pieces.append(Piece(part, slab.part(first, end - first)))
            first = end
        before += cost
    starts: list[list[int]] = [[] for _ in range(parts)]
    for number, size in enumerate(buffers):
        starts[min(parts - 1, (before + BUFFER_BITS * size // 2) // share)].append(number)
        before += BUFFER_BITS * size
    ranges = tuple(range(found[0], found[-1] + 1) if found else range(0) for found in starts)
    return Deal(parts, tuple(pieces), ranges)
