"""How the parameters and buffers of a model are dealt out to owners, for the sharded exchange (sharded.py).

Chunks, plain values and floating buffers are each cut into as many *parts* as there are replicas, of about equal costs.
A part of the model is a run of chunks, a run of plain values and a run of buffers. They are cut apart because plain
values cost as much in a message as in a letter, and chunks do not; and all messages to owners are padded to the longest
one. Every part has an owner, which averages it for all. The owners rotate with the rounds, so that no replica always
has the largest part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from overtone.coding.chunks import Slab


@dataclass(frozen=True)
class Piece:
    """A run of chunks of one slab that belongs to one part. ``slab`` has the run in the form of a slab."""

    part: int
    slab: Slab
    of: int  # the offset of the slab of the layout that it is a piece of


@dataclass(frozen=True)
class Deal:
    """Which piece and which buffer belongs to which part."""

    parts: int
    pieces: tuple[Piece, ...]  # in the order of the flat vector, in which plain values come last
    buffers: tuple[range, ...]  # for each part: the numbers of its buffers
    inside: dict[int, list[int]] = field(init=False)  # by the offset of a slab: the numbers of its pieces

    @classmethod
    def whole(cls, slabs: Sequence[Slab], buffers: int) -> Deal:
        """All slabs and buffers in one part, for exchanges without owners."""
        return cls(1, tuple(Piece(0, slab, slab.offset) for slab in slabs), (range(buffers),))

    def of(self, part: int) -> list[Slab]:
        """The pieces of a part."""
        return [piece.slab for piece in self.pieces if piece.part == part]

    def __post_init__(self) -> None:
        # A frozen dataclass can set its own fields only in this way.
        object.__setattr__(self, "inside", self._by_slab())

    def _by_slab(self) -> dict[int, list[int]]:
        inside: dict[int, list[int]] = {}
        for number, piece in enumerate(self.pieces):
            inside.setdefault(piece.of, []).append(number)
        return inside


def deal(slabs: Sequence[Slab], buffers: Sequence[int], parts: int, bits_of: Callable[[Slab], int]) -> Deal:
    """Cut slabs and buffers (given by their numbers of values) into parts of about equal cost.

    ``bits_of`` is the cost of a slab. All is computed in whole numbers: every replica must find the same.
    """
    pieces: list[Piece] = []
    for plain in (False, True):
        pieces += _cut([slab for slab in slabs if slab.plain is plain], parts, bits_of)
    # Each buffer belongs to the part in which its middle lies.
    owned: list[list[int]] = [[] for _ in range(parts)]
    before, total = 0, max(1, sum(buffers))
    for number, size in enumerate(buffers):
        owned[min(parts - 1, parts * (2 * before + size) // (2 * total))].append(number)
        before += size
    ranges = tuple(range(found[0], found[-1] + 1) if found else range(0) for found in owned)
    return Deal(parts, tuple(pieces), ranges)


def _cut(slabs: Sequence[Slab], parts: int, bits_of: Callable[[Slab], int]) -> Iterator[Piece]:
    """Cut slabs of one kind into parts of about equal cost."""
    costs = [bits_of(slab) for slab in slabs]
    share = max(1, -(-sum(costs) // parts))
    before = 0
    for slab, cost in zip(slabs, costs, strict=True):
        first, scale = 0, 2 * slab.units
        while first < slab.units:
            # A unit belongs to the part in which the middle of its cost lies: before + cost · (2 · unit + 1) / scale.
            part = min(parts - 1, (scale * before + cost * (2 * first + 1)) // (scale * share))
            end = slab.units
            if part < parts - 1:
                end = min(end, -((cost - scale * ((part + 1) * share - before)) // (2 * cost)))
            yield Piece(part, slab.part(first, end - first), slab.offset)
            first = end
        before += cost
