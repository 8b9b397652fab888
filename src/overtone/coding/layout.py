"""How the tensors of a model lie in one flat vector of coefficients.

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
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from overtone.coding import dct

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

    @property
    def area(self) -> int:
        return self.h * self.w

    @property
    def size(self) -> int:
        return self.chunks * self.area

    def of(self, flat: Tensor) -> Tensor:
        """This slab's part of a flat vector, as (chunks, area)."""
        return flat[self.offset : self.offset + self.size].view(self.chunks, self.area)

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


class Layout:
    """The map between tensors and their flat vector of coefficients: `read` and `write`, a slab or all at a time."""

    def __init__(
        self, shapes: Sequence[Sequence[int]], *, chunk: int, plain_below: int, basis: dct.Basis | None
    ) -> None:
        self._matrix_shapes = [matrix_shape(shape) for shape in shapes]
        self.basis = basis
        self.slabs = tuple(_slabs(shapes, chunk, plain_below))
        self.size = sum(slab.size for slab in self.slabs)
        self._rooms: dict[torch.device, Tensor] = {}

    @classmethod
    def flat(cls, shapes: Sequence[Sequence[int]]) -> Layout:
        """Everything plain, in the order given."""
        return cls(shapes, chunk=1, plain_below=1 << 62, basis=None)

    def empty(self, device: torch.device) -> Tensor:
        return torch.zeros(self.size, dtype=torch.float32, device=device)

    def room(self, slab: Slab, index: int, device: torch.device) -> Tensor:
        """One of three lasting scratch areas as large as the slab: fresh memory costs more than the work in it."""
        if device not in self._rooms:
            largest = max((slab.size for slab in self.slabs), default=0)
            self._rooms[device] = torch.empty(3, largest, dtype=torch.float32, device=device)
        return self._rooms[device][index, : slab.size].view(slab.chunks, slab.area)

    # -- a slab at a time ------------------------------------------------------------------------------------------

    def matrices(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors as `Reading` and `write_slab` want them: views, or copies of those that are no matrix in
        memory (channels_last, a transposed view); `land` brings copies home."""
        return [
            tensor if tensor.shape == shape and tensor.is_contiguous() else tensor.contiguous().view(shape)
            for tensor, shape in zip(tensors, self._matrix_shapes, strict=True)
        ]

    def land(self, matrices: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        for matrix, tensor in zip(matrices, tensors, strict=True):
            if matrix.data_ptr() != tensor.data_ptr():
                tensor.copy_(matrix.view(tensor.shape))

    def write_slab(self, slab: Slab, coeffs: Tensor, matrices: Sequence[Tensor]) -> None:
        """The part of the tensors whose coefficients are ``coeffs``, rounded to each tensor's own type."""
        if self.basis is None or slab.plain:
            self._spread(slab, coeffs, matrices)
            return
        if all(_takes_strips(bundle, matrices, coeffs) for bundle in slab.bundles):
            with dct.full_precision(coeffs.device):
                for (patch,) in slab.bundles:
                    self._write_strips(slab, patch, coeffs, matrices[patch.tensor])
            return
        shape = (slab.chunks, slab.h, slab.w)
        between, values = (self.room(slab, i, coeffs.device) for i in range(2))
        dct.inverse(coeffs.view(shape), self.basis, between.view(shape), values.view(shape))
        self._spread(slab, values, matrices)

    def _spread(self, slab: Slab, values: Tensor, matrices: Sequence[Tensor]) -> None:
        for bundle in slab.bundles:
            rectangles, place = _rectangles(matrices, slab, bundle), _place(values, slab, bundle)
            if slab.plain:
                parts = place.split([rectangle.numel() for rectangle in rectangles])
            else:
                parts = place.transpose(2, 3).reshape(len(bundle), *rectangles[0].shape).unbind(0)
            torch._foreach_copy_(rectangles, list(parts))

    def _write_strips(self, slab: Slab, patch: Patch, coeffs: Tensor, matrix: Tensor) -> None:
        """Straight into the matrix, one row of chunks after the other: a copy less."""
        assert self.basis is not None
        h, wide = slab.h, patch.across * slab.w
        between = self.room(slab, 0, coeffs.device).view(-1)[: h * wide]
        for i in range(patch.down):
            first, row = patch.first + i * patch.across, patch.row + i * h
            chunks = coeffs[first : first + patch.across].view(patch.across, h, slab.w)
            dct.inverse_strip(chunks, self.basis, between, matrix[row : row + h, patch.col : patch.col + wide])

    # -- all at once -----------------------------------------------------------------------------------------------

    def read(self, tensors: Sequence[Tensor], out: Tensor, *, minus: Sequence[Tensor] | None = None) -> Tensor:
        """Coefficients of all tensors (less ``minus``) into the flat vector ``out``."""
        plus = self.matrices(tensors)
        less = None if minus is None else self.matrices(minus)
        for slab in self.slabs:
            Reading(self, slab, plus, less).into(slab.of(out))
        return out

    def write(self, flat: Tensor, tensors: Sequence[Tensor]) -> None:
        """The tensors whose coefficients are ``flat``."""
        matrices = self.matrices(tensors)
        for slab in self.slabs:
            self.write_slab(slab, slab.of(flat), matrices)
        self.land(matrices, tensors)


class Reading:
    """The coefficients of one slab of ``plus`` (less ``minus``, over ``scale``), read when asked for, straight to where
    they are needed. The tensors are given as `Layout.matrices`; the subtraction happens in fp32."""

    def __init__(
        self,
        layout: Layout,
        slab: Slab,
        plus: Sequence[Tensor],
        minus: Sequence[Tensor] | None = None,
        scale: float = 1.0,
        device: torch.device | None = None,
        measures: bool = False,
    ) -> None:
        self.device = device or plus[0].device
        self.layout, self.slab, self.plus, self.minus, self.scale = layout, slab, plus, minus, scale
        self.measures = measures
        self.norm = torch.zeros(())  # of what was read, if it was to be measured

    def tensor(self) -> Tensor:
        """(chunks, area), in a scratch area that the next slab will use again."""
        return self.into(self.layout.room(self.slab, 2, self.device))

    def into(self, out: Tensor, keep: float = 0.0) -> Tensor:
        """out ← keep · out + what is read."""
        slab, basis = self.slab, None if self.slab.plain else self.layout.basis
        straight = basis is None and keep == 0.0
        values = out if straight else self.layout.room(slab, 0, out.device)
        for bundle in slab.bundles:
            self._read(bundle, _place(values, slab, bundle))
        if self.measures:
            self.norm = torch.linalg.vector_norm(values) / self.scale  # the transform does not change it
        if basis is None:
            values = values if self.scale == 1.0 else values.div_(self.scale)
            return values if straight else out.mul_(keep).add_(values)
        shape = (slab.chunks, slab.h, slab.w)
        between = self.layout.room(slab, 1, out.device).view(shape)
        dct.forward(values.view(shape), basis, between, out.view(shape), keep=keep, scale=self.scale)
        return out

    def _read(self, bundle: Sequence[Patch], place: Tensor) -> None:
        here = _join(self.plus, self.slab, bundle, place.device)
        if self.minus is None:
            place.copy_(here)
            return
        there = _join(self.minus, self.slab, bundle, place.device)
        if here.dtype == there.dtype == torch.float32:
            torch.sub(here, there, out=place)
        else:
            place.copy_(here).sub_(there)


def _slabs(shapes: Sequence[Sequence[int]], chunk: int, plain_below: int) -> Iterator[Slab]:
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


def _rectangles(matrices: Sequence[Tensor], slab: Slab, bundle: Sequence[Patch]) -> list[Tensor]:
    """Each patch's part of its matrix, as it lies there; of a plain tensor, as (length,)."""
    if slab.plain:
        return [matrices[p.tensor].view(-1)[p.col : p.col + p.across] for p in bundle]
    rows, cols = bundle[0].down * slab.h, bundle[0].across * slab.w
    return [
        matrix if matrix.shape == (rows, cols) else matrix[p.row : p.row + rows, p.col : p.col + cols]
        for p in bundle
        for matrix in (matrices[p.tensor],)
    ]


def _join(matrices: Sequence[Tensor], slab: Slab, bundle: Sequence[Patch], device: torch.device) -> Tensor:
    """The patches of a bundle as one tensor, shaped as its `_place`."""
    rectangles = [rectangle.to(device) for rectangle in _rectangles(matrices, slab, bundle)]
    if slab.plain:
        return torch.cat(rectangles)
    joined = rectangles[0].unsqueeze(0) if len(rectangles) == 1 else torch.stack(rectangles)
    return joined.view(len(bundle), bundle[0].down, slab.h, bundle[0].across, slab.w).transpose(2, 3)


def _takes_strips(bundle: Sequence[Patch], matrices: Sequence[Tensor], coeffs: Tensor) -> bool:
    """On a CPU only: a GPU would rather have few large products."""
    target = matrices[bundle[0].tensor]
    on_cpu = target.device.type == coeffs.device.type == "cpu"
    return len(bundle) == 1 and target.dtype == torch.float32 and on_cpu


def _place(chunks: Tensor, slab: Slab, bundle: Sequence[Patch]) -> Tensor:
    """The bundle's part of the slab's chunks: (length,) if plain, else (patches, down, across, h, w)."""
    first, last = bundle[0], bundle[-1]
    end = last.first + last.down * last.across
    if slab.plain:
        return chunks[0, first.first : end]
    return chunks[first.first : end].view(len(bundle), first.down, first.across, slab.h, slab.w)
