"""How tensors are cut into chunks, and chunks into slabs: whole numbers only, no tensor is touched.

Every tensor is seen as a matrix and cut into chunks, 64 × 64 by default; what remains at an edge is a chunk of its own
with its own shorter basis, so nothing is ever padded. Chunks of equal shape, whatever tensor they come from, lie
together and are cut into *slabs*, which are transformed, selected and packed one at a time: big enough to batch many
small tensors, small enough for the cache. Tensors too small or too flat to compress (norms, biases) lie in plain slabs:
no transform, every value sent.

    flat = [ slab 0: chunks × area | slab 1: … | plain values ]          float32

The order of the slabs is part of the wire format: docs/wire.md.

Legend: h, w chunk shape; down, across how many chunks a patch has in each direction.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

SMALL = 1 << 16  # values of a patch below which it is moved together with others like it
SLAB = 1 << 20  # values worked on at once: bounds the temporary memory, and stays in the cache


@dataclass(frozen=True)
class Patch:
    """A rectangle of one tensor that is cut into ``down × across`` chunks, the first at place ``first`` of its slab.

    In a plain slab chunks are single values: ``col`` is where in the tensor the patch begins, ``across`` its length.
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
    bundles: tuple[tuple[Patch, ...], ...]  # patches that are moved together, see `_bundles`

    area: int = field(init=False)  # values of a chunk
    size: int = field(init=False)  # values of all chunks

    def __post_init__(self) -> None:
        object.__setattr__(self, "area", self.h * self.w)
        object.__setattr__(self, "size", self.chunks * self.area)

    def tensor_of(self, chunk: int, position: int) -> int:
        """Which tensor a value comes from."""
        place = position if self.plain else chunk
        patches = [patch for bundle in self.bundles for patch in bundle]
        return next(patch.tensor for patch in reversed(patches) if patch.first <= place)


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """The matrix a tensor is seen as: axes of length one dropped, then the first axis against all others.

    (out, in, 3, 3) is (out, in·9); (1, 197, 768) is (197, 768); a vector is one row; a scalar is 1 × 1.
    """
    axes = [n for n in shape if n != 1]
    if len(axes) < 2:
        return 1, math.prod(axes)
    return axes[0], math.prod(axes[1:])


def slabs_of(shapes: Sequence[Sequence[int]], chunk: int, plain_below: int) -> Iterator[Slab]:
    """Chunks of equal shape together, larger shapes first, plain tensors last; within that, in the tensors' order."""
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
    """(start, chunk length, number of chunks): the whole chunks, then what remains at the edge."""
    whole, rest = divmod(length, chunk)
    if whole:
        yield 0, chunk, whole
    if rest:
        yield whole * chunk, rest, 1


def _runs(patches: Sequence[Patch], h: int, w: int, most: int) -> Iterator[list[Patch]]:
    """The patches in runs of ``most`` chunks (the last may be shorter), cut where a run is full."""
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
    """Rectangles that follow each other in the patch's own order of chunks (row by row) and fill runs of ``most``
    chunks, ``room`` of them for the first."""
    at, end = 0, patch.down * patch.across
    while at < end:
        down, across = divmod(at, patch.across)
        left = min(room, end - at)
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
    """Small patches of equal form that follow each other, together: one operation for many small tensors."""
    for (down, across), run in itertools.groupby(patches, lambda patch: (patch.down, patch.across)):
        if down * across * area >= SMALL:
            yield from ((patch,) for patch in run)
        else:
            yield tuple(run)
