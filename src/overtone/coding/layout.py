"""Copies tensors to the slabs of one flat vector, and back. chunks.py defines how tensors are cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from overtone.coding import dct
from overtone.coding.chunks import Patch, Slab, matrix_shape, slabs_of


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
        self, shapes: Sequence[Sequence[int]], *, chunk: int, plain_below: int, basis: dct.Basis | None
    ) -> None:
        self._matrix_shapes = [matrix_shape(shape) for shape in shapes]
        self.basis = basis
        self.slabs = tuple(slabs_of(shapes, chunk, plain_below))
        self.size = sum(slab.size for slab in self.slabs)
        self._scratch: dict[torch.device, Tensor] = {}

    @classmethod
    def flat(cls, shapes: Sequence[Sequence[int]]) -> Layout:
        """A layout without chunks: all tensors are plain, in the order given."""
        return cls(shapes, chunk=1, plain_below=1 << 62, basis=None)

    def empty(self, device: torch.device) -> Tensor:
        """A flat vector of zeros."""
        return torch.zeros(self.size, dtype=torch.float32, device=device)

    def scratch(self, slab: Slab, index: int, device: torch.device) -> Tensor:
        """One of three scratch areas, as large as the slab.

        They are used again, because new memory costs more time than the work in it.
        """
        if device not in self._scratch:
            largest = max((slab.size for slab in self.slabs), default=0)
            self._scratch[device] = torch.empty(3, largest, dtype=torch.float32, device=device)
        return self._scratch[device][index, : slab.size].view(slab.chunks, slab.area)

    # -- a slab at a time ------------------------------------------------------------------------------------------

    def matrices(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors as matrices, for `read_slab` and `write_slab`.

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
    ) -> dct.SlabSignal:
        """The slab's part of ``plus`` (minus ``minus``), both given as `matrices`. The subtraction is done in fp32.

        The result lies in a scratch area, which the next slab overwrites.
        """
        device = device or plus[0].device
        values, between, out = (self.scratch(slab, i, device) for i in range(3))
        for bundle in slab.bundles:
            place = _place(values, slab, bundle)
            here = _join(plus, slab, bundle, device)
            if minus is None:
                place.copy_(here)
                continue
            there = _join(minus, slab, bundle, device)
            if here.dtype == there.dtype == torch.float32:
                torch.sub(here, there, out=place)
            else:
                # Converted to fp32 first: a difference in bf16 would lose small drifts.
                place.copy_(here).sub_(there)
        basis = None if slab.plain else self.basis
        return dct.SlabSignal(values, (slab.chunks, slab.h, slab.w), basis, between, out)

    def write_slab(self, slab: Slab, coeffs: Tensor, matrices: Sequence[Tensor]) -> None:
        """Write the slab's part of the tensors from its coefficients, rounded to the type of each tensor."""
        values = coeffs
        if self.basis is not None and not slab.plain:
            if all(_takes_strips(bundle, matrices, coeffs) for bundle in slab.bundles):
                with dct.full_precision(coeffs.device):
                    for (patch,) in slab.bundles:
                        self._write_strips(slab, patch, coeffs, matrices[patch.tensor])
                return
            shape = (slab.chunks, slab.h, slab.w)
            # Only areas 0 and 1: a round keeps the mean, and with it perhaps the coefficients, in area 2.
            between, values = (self.scratch(slab, i, coeffs.device) for i in range(2))
            dct.inverse(coeffs.view(shape), self.basis, between.view(shape), values.view(shape))
        for bundle in slab.bundles:
            rectangles, place = _rectangles(matrices, slab, bundle), _place(values, slab, bundle)
            if slab.plain:
                parts = place.split([rectangle.numel() for rectangle in rectangles])
            else:
                parts = place.transpose(2, 3).reshape(len(bundle), *rectangles[0].shape).unbind(0)
            torch._foreach_copy_(rectangles, list(parts))  # one call for many small tensors

    def _write_strips(self, slab: Slab, patch: Patch, coeffs: Tensor, matrix: Tensor) -> None:
        """Write the patch directly into the matrix, one row of chunks after the other. This saves a copy."""
        assert self.basis is not None
        h, wide = slab.h, patch.across * slab.w
        between = self.scratch(slab, 0, coeffs.device).view(-1)[: h * wide]
        for i in range(patch.down):
            first, row = patch.first + i * patch.across, patch.row + i * h
            chunks = coeffs[first : first + patch.across].view(patch.across, h, slab.w)
            dct.inverse_strip(chunks, self.basis, between, matrix[row : row + h, patch.col : patch.col + wide])

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
            self.write_slab(slab, part_of(flat, slab), matrices)
        for matrix, tensor in zip(matrices, tensors, strict=True):
            if matrix.data_ptr() != tensor.data_ptr():  # `matrices` had to make a copy
                tensor.copy_(matrix.view(tensor.shape))


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


def _takes_strips(bundle: Sequence[Patch], matrices: Sequence[Tensor], coeffs: Tensor) -> bool:
    """True if the slab can be written in strips. Only on a CPU: a GPU is faster with few large products."""
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
