"""How the tensors of a model lie in one flat vector of coefficients.

Every tensor is seen as a matrix and cut into chunks, 64 × 64 by default; what remains at an edge is a chunk of its own
with its own shorter basis, so nothing is ever padded. Chunks of equal shape, whatever tensor they come from, form one
`Group` and are transformed, selected and packed together. Tensors too small or too flat to compress (norms, biases)
form one plain group: no transform, every value sent.

    flat = [ group 0: chunks × area | group 1: … | plain values ]          float32

Legend: h, w chunk shape; down, across how many chunks a patch has in each direction.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from overtone import dct

SLAB = 1 << 21  # values transformed at once: bounds the temporary memory, and stays in the cache


@dataclass(frozen=True)
class Patch:
    """A rectangle of one tensor that is cut into ``down × across`` chunks of one group, starting at ``first``."""

    tensor: int
    row: int
    col: int
    down: int
    across: int
    first: int


@dataclass(frozen=True)
class Group:
    """All chunks of one shape. A plain group is one chunk that is never transformed."""

    h: int
    w: int
    chunks: int
    offset: int
    plain: bool
    patches: tuple[Patch, ...]

    @property
    def area(self) -> int:
        return self.h * self.w

    def of(self, flat: Tensor) -> Tensor:
        """This group's part of a flat vector, as (chunks, area)."""
        return flat[self.offset : self.offset + self.chunks * self.area].view(self.chunks, self.area)


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """The matrix a tensor is seen as: axes of length one dropped, then the first axis against all others.

    (out, in, 3, 3) is (out, in·9); (1, 197, 768) is (197, 768); a vector is one row; a scalar is 1 × 1.
    """
    axes = [n for n in shape if n != 1]
    if len(axes) < 2:
        return 1, math.prod(axes)
    return axes[0], math.prod(axes[1:])


class Layout:
    """The map between tensors and their flat vector of coefficients: `read` and `write`."""

    def __init__(
        self, shapes: Sequence[Sequence[int]], *, chunk: int, plain_below: int, basis: dct.Basis | None
    ) -> None:
        self.shapes = [tuple(shape) for shape in shapes]
        self.basis = basis
        self.groups = _group(self.shapes, chunk, plain_below)
        self.size = sum(group.chunks * group.area for group in self.groups)

    @classmethod
    def flat(cls, shapes: Sequence[Sequence[int]]) -> Layout:
        """Everything plain, in the order given."""
        return cls(shapes, chunk=1, plain_below=1 << 62, basis=None)

    def empty(self, device: torch.device) -> Tensor:
        return torch.zeros(self.size, dtype=torch.float32, device=device)

    def read(self, tensors: Sequence[Tensor], out: Tensor, *, minus: Sequence[Tensor] | None = None) -> Tensor:
        """Coefficients of ``tensors`` (less ``minus``) into ``out``; the subtraction happens in fp32."""
        for group in self.groups:
            chunks = group.of(out)
            for patch in group.patches:
                place = _place(chunks, group, patch)
                place.copy_(_region(_as_matrix(tensors[patch.tensor]), group, patch))
                if minus is not None:
                    place.sub_(_region(_as_matrix(minus[patch.tensor]), group, patch).to(place.device))
            if self.basis is not None and not group.plain:
                for slab in _slabs(chunks, group):
                    slab.copy_(dct.forward(slab, self.basis))
        return out

    def write(self, flat: Tensor, tensors: Sequence[Tensor]) -> None:
        """The tensors whose coefficients are ``flat``, rounded to each tensor's own type."""
        # A tensor that is no matrix in memory (channels_last, a transposed view) is filled by way of a copy.
        targets = [t if t.is_contiguous() else torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in tensors]
        for group in self.groups:
            values = group.of(flat)
            if self.basis is not None and not group.plain:
                values = values.clone()
                for slab in _slabs(values, group):
                    slab.copy_(dct.inverse(slab, self.basis))
            for patch in group.patches:
                _region(_as_matrix(targets[patch.tensor]), group, patch).copy_(_place(values, group, patch))
        for target, tensor in zip(targets, tensors, strict=True):
            if target is not tensor:
                tensor.copy_(target)


def _group(shapes: Sequence[tuple[int, ...]], chunk: int, plain_below: int) -> tuple[Group, ...]:
    patches: dict[tuple[int, int], list[Patch]] = defaultdict(list)
    chunks: dict[tuple[int, int], int] = defaultdict(int)
    plain: list[Patch] = []
    plain_size = 0
    for index, shape in enumerate(shapes):
        rows, cols = matrix_shape(shape)
        if rows == 1 or rows * cols < plain_below:
            # A plain tensor is a patch of one-value chunks: `across` is its length, `first` its place.
            plain.append(Patch(index, 0, 0, 1, rows * cols, plain_size))
            plain_size += rows * cols
            continue
        for row, h, down in _cuts(rows, chunk):
            for col, w, across in _cuts(cols, chunk):
                patches[h, w].append(Patch(index, row, col, down, across, chunks[h, w]))
                chunks[h, w] += down * across
    groups = []
    offset = 0
    for h, w in sorted(patches, reverse=True):
        groups.append(Group(h, w, chunks[h, w], offset, False, tuple(patches[h, w])))
        offset += chunks[h, w] * h * w
    if plain_size:
        groups.append(Group(1, plain_size, 1, offset, True, tuple(plain)))
    return tuple(groups)


def _cuts(length: int, chunk: int) -> Iterator[tuple[int, int, int]]:
    """(start, chunk length, number of chunks): the whole chunks, then what remains at the edge."""
    whole, rest = divmod(length, chunk)
    if whole:
        yield 0, chunk, whole
    if rest:
        yield whole * chunk, rest, 1


def _as_matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(matrix_shape(tensor.shape))


def _region(matrix: Tensor, group: Group, patch: Patch) -> Tensor:
    """The patch's part of a tensor, as (down, across, h, w)."""
    if group.plain:
        return matrix.reshape(1, matrix.numel(), 1, 1)
    part = matrix[patch.row : patch.row + patch.down * group.h, patch.col : patch.col + patch.across * group.w]
    cut: Tensor = part.unflatten(0, (patch.down, group.h)).unflatten(2, (patch.across, group.w))
    return cut.transpose(1, 2)


def _place(chunks: Tensor, group: Group, patch: Patch) -> Tensor:
    """The patch's part of the group's chunks, as (down, across, h, w)."""
    last = patch.first + patch.down * patch.across
    if group.plain:
        return chunks[0, patch.first : last].view(1, patch.across, 1, 1)
    return chunks[patch.first : last].view(patch.down, patch.across, group.h, group.w)


def _slabs(chunks: Tensor, group: Group) -> Iterator[Tensor]:
    yield from chunks.view(-1, group.h, group.w).split(max(1, SLAB // group.area))
