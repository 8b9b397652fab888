"""How tensors are cut into chunks, and how chunks are grouped into slabs. This module computes only with shapes.

Every tensor is treated as a matrix and cut into chunks, 64 × 64 by default. The rest at an edge is a chunk of its own
with a shorter basis, so nothing is padded. Chunks of equal shape, from any tensor, lie together and are cut into
*slabs*. Slabs are transformed, selected and packed one at a time. A slab is large enough to batch many small tensors,
and small enough for the cache. Tensors that are too small or too flat to compress (norms, biases) lie in plain slabs:
they are not transformed, and every value is sent.

    flat = [ slab 0: chunks × area | slab 1: … | plain values ]          float32

The order of the slabs is part of the wire format: docs/wire.md.

Legend: h, w shape of a chunk; down, across number of chunks of a patch in each direction.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

SMALL = 1 << 16  # a patch of fewer values is copied together with others of the same form
SLAB = 1 << 20  # the most values of a slab: it limits the temporary memory, and fits the cache


@dataclass(frozen=True)
class Patch:
    """A rectangle of one tensor that is cut into ``down × across`` chunks, the first at place ``first`` of its slab.

    In a plain slab, chunks are single values: ``col`` is the start of the patch in the tensor, ``across`` its length.
    """

    tensor: int
    row: int
    col: int
    down: int
    across: int
    first: int


@dataclass(frozen=True)
class Slab:
    """A run of chunks of one shape. A plain slab is one chunk that is never transformed."""

    h: int
    w: int
    chunks: int
    offset: int
    plain: bool
    bundles: tuple[tuple[Patch, ...], ...]  # patches that are copied together, see `_bundles`

    area: int = field(init=False)  # values of a chunk
    size: int = field(init=False)  # values of all chunks

    def __post_init__(self) -> None:
        # A frozen dataclass can set its own fields only in this way.
        object.__setattr__(self, "area", self.h * self.w)
        object.__setattr__(self, "size", self.chunks * self.area)

    def tensor_of(self, chunk: int, position: int) -> int:
        """The index of the tensor from which a value comes."""
        place = position if self.plain else chunk
        patches = [patch for bundle in self.bundles for patch in bundle]
        return next(patch.tensor for patch in reversed(patches) if patch.first <= place)

    @property
    def units(self) -> int:
        """The number of units into which the slab can be cut: its chunks, or the values of a plain slab."""
        return self.area if self.plain else self.chunks

    def part(self, first: int, units: int) -> Slab:
        """A run of the slab's units as a slab of its own, for a codec. No tensor can be read or written by it."""
        shifted = (tuple(replace(p, first=p.first - first) for bundle in self.bundles for p in bundle),)
        if self.plain:
            return Slab(1, units, 1, self.offset + first, True, shifted)
        return Slab(self.h, self.w, units, self.offset + first * self.area, False, shifted)


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """The shape of the matrix for a tensor: axes of length one are dropped, then all axes but the first are merged.

    (out, in, 3, 3) is (out, in·9); (1, 197, 768) is (197, 768); a vector is one row; a scalar is 1 × 1.
    """
    axes = [n for n in shape if n != 1]
    if len(axes) < 2:
        return 1, math.prod(axes)
    return axes[0], math.prod(axes[1:])


def slabs_of(shapes: Sequence[Sequence[int]], chunk: int, plain_below: int) -> Iterator[Slab]:
    """The slabs of all tensors: larger chunk shapes first, plain tensors last. Equal shapes keep the tensors' order.

    The order depends only on the shapes and on the two settings, so it is the same on all replicas.
    """
    patches: dict[tuple[int, int], list[Patch]] = defaultdict(list)
    plain: list[Patch] = []
    for index, shape in enumerate(shapes):
        rows, cols = matrix_shape(shape)
        if rows * cols == 0:
            continue
        if rows == 1 or rows * cols < plain_below:
            plain.append(Patch(index, 0, 0, 1, rows * cols, 0))
            continue
        for row, h, down in _cuts(rows, chunk):
            for col, w, across in _cuts(cols, chunk):
                patches[h, w].append(Patch(index, row, col, down, across, 0))
    offset = 0
    for h, w in sorted(patches, reverse=True):
        for run in _runs(patches[h, w], h, w, max(1, SLAB // (h * w))):
            chunks = run[-1].first + run[-1].down * run[-1].across
            slab = Slab(h, w, chunks, offset, False, tuple(_bundles(run, h * w)))
            offset += slab.size
            yield slab
    for run in _runs(plain, 1, 1, SLAB):
        slab = Slab(1, run[-1].first + run[-1].across, 1, offset, True, (tuple(run),))
        offset += slab.size
        yield slab


def _cuts(length: int, chunk: int) -> Iterator[tuple[int, int, int]]:
    """(start, chunk length, number of chunks): first for the whole chunks, then for the rest at the edge."""
    whole, rest = divmod(length, chunk)
    if whole:
        yield 0, chunk, whole
    if rest:
        yield whole * chunk, rest, 1


def _runs(patches: Sequence[Patch], h: int, w: int, most: int) -> Iterator[list[Patch]]:
    """Group the patches into runs of ``most`` chunks; the last may be shorter. A patch is cut where a run is full."""
    run: list[Patch] = []
    used = 0
    for patch in patches:
        for piece in _pieces(patch, h, w, most, most - used):
            run.append(replace(piece, first=used))
            used += piece.down * piece.across
            if used == most:
                yield run
                run, used = [], 0
    if run:
        yield run


def _pieces(patch: Patch, h: int, w: int, most: int, room: int) -> Iterator[Patch]:
    """Cut a patch into rectangles that follow each other in its order of chunks (row by row).

    The rectangles fill runs of ``most`` chunks. The first run has room for ``room`` chunks.
    """
    at, end = 0, patch.down * patch.across
    while at < end:
        down, across = divmod(at, patch.across)
        left = min(room, end - at)
        # Not every run of chunks is a rectangle: a rest of a row and whole rows become pieces of their own.
        if across or left < patch.across:  # part of one row of chunks
            size = min(left, patch.across - across)
            piece = (down, across, 1, size)
        else:
            size = left // patch.across * patch.across
            piece = (down, 0, left // patch.across, patch.across)
        yield Patch(patch.tensor, patch.row + piece[0] * h, patch.col + piece[1] * w, piece[2], piece[3], 0)
        at += size
        room = room - size or most


def _bundles(patches: Sequence[Patch], area: int) -> Iterator[tuple[Patch, ...]]:
    """Group small neighbouring patches of equal form, so that one operation copies many small tensors."""
    for (down, across), run in itertools.groupby(patches, lambda patch: (patch.down, patch.across)):
        if down * across * area >= SMALL:
            yield from ((patch,) for patch in run)
        else:
            yield tuple(run)
