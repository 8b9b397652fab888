"""Copies tensors to the slabs of one flat vector, and back. chunks.py defines how tensors are cut."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from overtone.coding.chunks import Patch, Slab, matrix_shape, slabs_of
from overtone.coding.kernels import Kernels, in_torch
from overtone.coding.kernels.in_torch import OuterStep
from overtone.coding.pages import in_large_pages, zeros
from overtone.coding.transforms import Transform


def part_of(flat: Tensor, slab: Slab) -> Tensor:
    """A slab's part of a flat vector, as (chunks, area)."""
    return flat[slab.offset : slab.offset + slab.size].view(slab.chunks, slab.area)


def parts_of(vectors: Mapping[str, Tensor], slab: Slab) -> dict[str, Tensor]:
    """A slab's part of several flat vectors, by name."""
    return {name: part_of(vector, slab) for name, vector in vectors.items()}


def inner_part(values: Tensor, slab: Slab, piece: Slab) -> Tensor:
    """A piece's part of the values of its slab, as (chunks, area)."""
    first = piece.offset - slab.offset
    return values.view(-1)[first : first + piece.size].view(piece.chunks, piece.area)


class Layout:
    """The map between tensors and their flat vector of coefficients. It reads and writes one slab, or all of them."""

    def __init__(
        self, shapes: Sequence[Sequence[int]], *, chunk: int, plain_below: int, transform: Transform | None
    ) -> None:
        self._matrix_shapes = [matrix_shape(shape) for shape in shapes]
        self.transform = transform
        self.slabs = tuple(slabs_of(shapes, chunk, plain_below))
        self.size = sum(slab.size for slab in self.slabs)
        self._scratch: dict[torch.device, Tensor] = {}

    @classmethod
    def flat(cls, shapes: Sequence[Sequence[int]]) -> Layout:
        """A layout without chunks: all tensors are plain, in the order given."""
        return cls(shapes, chunk=1, plain_below=1 << 62, transform=None)

    def empty(self, device: torch.device) -> Tensor:
        """A flat vector of zeros."""
        return zeros(self.size, device)

    def scratch(self, slab: Slab, index: int, device: torch.device) -> Tensor:
        """One of four scratch areas, as large as the slab.

        They are used again, because new memory costs more time than the work in it.
        """
        if device not in self._scratch:
            largest = max((slab.size for slab in self.slabs), default=0)
            areas = torch.empty(4, largest, dtype=torch.float32, device=device)
            self._scratch[device] = in_large_pages(areas)
        return self._scratch[device][index, : slab.size].view(slab.chunks, slab.area)

    # -- a slab at a time ------------------------------------------------------------------------------------------

    def matrices(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors as matrices, for `read_slab` and `target`.

        They are views where possible. A tensor that is not contiguous (channels_last, a transposed view) is copied.
        """
        return [
            tensor if tensor.shape == shape and tensor.is_contiguous() else tensor.contiguous().view(shape)
            for tensor, shape in zip(tensors, self._matrix_shapes, strict=True)
        ]

    def read_slab(
        self,
        slab: Slab,
        plus: Sequence[Tensor],
        minus: Sequence[Tensor] | None = None,
        device: torch.device | None = None,
        kernels: Kernels = in_torch,
        scale: float = 1.0,
    ) -> SlabSignal:
        """The slab's part of ``plus`` (minus ``minus``), both given as `matrices`, over ``scale``."""
        return SlabSignal(self, slab, plus, minus, device or plus[0].device, kernels, scale)

    def target(self, slab: Slab, matrices: Sequence[Tensor], kernels: Kernels = in_torch) -> SlabTarget:
        """The slab's part of tensors, given as `matrices`, to be written."""
        return SlabTarget(self, slab, matrices, kernels)

    # -- all at once -----------------------------------------------------------------------------------------------

    def read(self, tensors: Sequence[Tensor], out: Tensor) -> Tensor:
        """Write the coefficients of all tensors into the flat vector ``out``."""
        matrices = self.matrices(tensors)
        for slab in self.slabs:
            self.read_slab(slab, matrices).into(part_of(out, slab))
        return out

    def write(self, flat: Tensor, tensors: Sequence[Tensor]) -> None:
        """Write all tensors from their coefficients ``flat``."""
        matrices = self.matrices(tensors)
        for slab in self.slabs:
            self.target(slab, matrices).write(part_of(flat, slab))
        for matrix, tensor in zip(matrices, tensors, strict=True):
            if matrix.data_ptr() != tensor.data_ptr():  # `matrices` had to make a copy
                tensor.copy_(matrix.view(tensor.shape))


@dataclass
class SlabSignal:
    """The signal of one slab: plus − minus over the loss scale, in fp32.

    It is read and transformed only when a rule asks for its coefficients, and directly into the rule's own tensor.
    Values lie in a scratch area, which the next slab overwrites.
    """

    layout: Layout
    slab: Slab
    plus: Sequence[Tensor]
    minus: Sequence[Tensor] | None
    device: torch.device
    kernels: Kernels
    scale: float
    _squares: float | None = None  # the sum of the squares of plus − minus, if it is known
    _values: Tensor | None = None  # plus − minus, if it was needed

    def norm(self) -> Tensor | float:
        """The norm of the signal. A transform does not change it. It is known at once after `into`, in most cases."""
        known = None if self._squares is None else math.sqrt(self._squares)
        return (torch.linalg.vector_norm(self.values()) if known is None else known) / self.scale

    def coefficients(self) -> Tensor:
        """The coefficients, (chunks, area), in a scratch area."""
        if self._transform is None and self.scale == 1.0:
            return self.values()
        return self.into(self.layout.scratch(self.slab, 2, self.device))

    def into(self, out: Tensor, keep: float = 0.0) -> Tensor:
        """out ← keep · out + coefficients."""
        slab, transform = self.slab, self._transform
        if transform is None:
            values = self.values() if self.scale == 1.0 else self.values() / self.scale
            return out.copy_(values) if keep == 0.0 else out.mul_(keep).add_(values)
        between, numbers = self.layout.scratch(slab, 1, self.device), {"keep": keep, "scale": self.scale}
        if self.minus is not None and all(_is_direct(slab, b, out, self.plus, self.minus) for b in slab.bundles):
            here, there = ([_rectangles(side, slab, b)[0] for b in slab.bundles] for side in (self.plus, self.minus))
            chunks = self.layout.scratch(slab, 0, self.device)
            self._squares = self.kernels.difference_forward(
                transform, (slab.h, slab.w), here, there, chunks, between, out, **numbers
            )
            return out
        chunks, between, place = (t.view(slab.chunks, slab.h, slab.w) for t in (self.values(), between, out))
        self.kernels.forward(transform, chunks, between, place, **numbers)
        return out

    def values(self) -> Tensor:
        """plus − minus, (chunks, area), in a scratch area."""
        if self._values is not None:
            return self._values
        slab, self._values = self.slab, self.layout.scratch(self.slab, 0, self.device)
        for bundle in slab.bundles:
            place, here = _place(self._values, slab, bundle), _join(self.plus, slab, bundle, self.device)
            if self.minus is None:
                place.copy_(here)
            else:
                # Converted to fp32: a difference in bf16 would lose small drifts.
                torch.sub(here.float(), _join(self.minus, slab, bundle, self.device).float(), out=place)
        return self._values

    @property
    def _transform(self) -> Transform | None:
        return None if self.slab.plain else self.layout.transform


@dataclass(frozen=True)
class SlabTarget:
    """One slab's part of the tensors, to be written from coefficients, rounded to the type of each tensor."""

    layout: Layout
    slab: Slab
    matrices: Sequence[Tensor]
    kernels: Kernels

    def write(self, coeffs: Tensor) -> None:
        """Write the values of the coefficients."""
        slab, values, transform = self.slab, coeffs, self.layout.transform
        if transform is not None and not slab.plain:
            # Only areas 0 and 1: a round keeps the mean, and with it perhaps the coefficients, in area 2.
            between, values = (self.layout.scratch(slab, i, coeffs.device) for i in range(2))
            if self._is_direct(coeffs):
                for bundle in slab.bundles:
                    (rectangle,) = _rectangles(self.matrices, slab, bundle)
                    self.kernels.inverse_patch(transform, _place(coeffs, slab, bundle)[0], between, rectangle)
                return
            shape = (slab.chunks, slab.h, slab.w)
            self.kernels.inverse(transform, coeffs.view(shape), between.view(shape), values.view(shape))
        for bundle in slab.bundles:
            rectangles, place = _rectangles(self.matrices, slab, bundle), _place(values, slab, bundle)
            if slab.plain:
                parts = place.split([rectangle.numel() for rectangle in rectangles])
            else:
                parts = place.transpose(2, 3).reshape(len(bundle), *rectangles[0].shape).unbind(0)
            torch._foreach_copy_(rectangles, list(parts))  # one call for many small tensors

    def outer_step(self, step: OuterStep) -> None:
        """Step the anchor, and write the next weights. Where it can be, both are done while values are in the cache."""
        slab, transform = self.slab, self.layout.transform
        carries = step.momentum is not None and step.residual is not None and step.carry != 0.0
        if transform is None or not carries or not self._is_direct(step.mean):
            self.write(self.kernels.outer_answer(step))
            return
        between = self.layout.scratch(slab, 0, step.mean.device)
        patches = [_rectangles(self.matrices, slab, bundle)[0] for bundle in slab.bundles]
        self.kernels.outer_patches(transform, (slab.h, slab.w), step, between, patches)

    def _is_direct(self, coeffs: Tensor) -> bool:
        return all(_is_direct(self.slab, bundle, coeffs, self.matrices) for bundle in self.slab.bundles)


def _rectangles(matrices: Sequence[Tensor], slab: Slab, bundle: Sequence[Patch]) -> list[Tensor]:
    """Views of each patch's part of its matrix. For a plain tensor, the view has the shape (length,)."""
    if slab.plain:
        return [matrices[p.tensor].view(-1)[p.col : p.col + p.across] for p in bundle]
    rows, cols = bundle[0].down * slab.h, bundle[0].across * slab.w
    return [
        matrix if matrix.shape == (rows, cols) else matrix[p.row : p.row + rows, p.col : p.col + cols]
        for p in bundle
        for matrix in (matrices[p.tensor],)
    ]


def _join(matrices: Sequence[Tensor], slab: Slab, bundle: Sequence[Patch], device: torch.device) -> Tensor:
    """The patches of a bundle as one tensor, in the shape of `_place`."""
    rectangles = [rectangle.to(device) for rectangle in _rectangles(matrices, slab, bundle)]
    if slab.plain:
        return torch.cat(rectangles)
    joined = rectangles[0].unsqueeze(0) if len(rectangles) == 1 else torch.stack(rectangles)
    return joined.view(len(bundle), bundle[0].down, slab.h, bundle[0].across, slab.w).transpose(2, 3)


def _is_direct(slab: Slab, bundle: Sequence[Patch], chunks: Tensor, *sides: Sequence[Tensor]) -> bool:
    """True if chunks are read from, or written to, matrices without a copy between.

    Only on a CPU: a GPU is faster with few large operations. Only for a single patch: many small ones are joined.
    """
    targets = [matrices[bundle[0].tensor] for matrices in sides]
    plain = all(target.dtype == torch.float32 and target.device.type == "cpu" for target in targets)
    return plain and chunks.device.type == "cpu" and len(bundle) == 1 and not slab.plain


def _place(chunks: Tensor, slab: Slab, bundle: Sequence[Patch]) -> Tensor:
    """The bundle's part of the slab's chunks: (length,) if plain, else (patches, down, across, h, w)."""
    first, last = bundle[0], bundle[-1]
    end = last.first + last.down * last.across
    if slab.plain:
        return chunks[0, first.first : end]
    return chunks[first.first : end].view(len(bundle), first.down, first.across, slab.h, slab.w)
