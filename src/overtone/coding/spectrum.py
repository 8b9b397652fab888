"""How the energy of a signal is spread: over its strongest values, over bands of frequencies, over tensors.

Energy is the sum of squares. An orthonormal transform does not change it, so shares of it can be compared between
bases. All sums are in fp64.

Legend: c chunks, a values in a chunk (its area), h and w its sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist

import torch
from torch import Tensor

from overtone.coding.chunks import Slab
from overtone.coding.kernels import Kernels, in_torch

BANDS = 8  # in each direction of a grid


def gaussian_share(part: float) -> float:
    """The share of the energy that the strongest ``part`` of many Gaussian values has: 2 · (t·φ(t) + Q(t)), where
    2 · Q(t) = part.

    It is the level of a signal without any structure. Sampled values agree: tests/test_spectrum.py.
    """
    normal = NormalDist()
    t = normal.inv_cdf(1.0 - part / 2)
    return 2 * (t * normal.pdf(t) + 1.0 - normal.cdf(t))


def energy_of_strongest(coeffs: Tensor, counts: Sequence[int], kernels: Kernels = in_torch) -> Tensor:
    """The energy of the strongest values of each chunk: (c, a) coefficients to (c, len(counts))."""
    strongest = _strongest(coeffs, max(counts), kernels)[1].abs()
    found: dict[int, Tensor] = {}
    for count in sorted(set(counts), reverse=True):  # each time among those that are left
        strongest = strongest.topk(count, dim=1, sorted=False).values
        found[count] = energy(strongest, len(coeffs))
    return torch.stack([found[count] for count in counts], dim=1)


def strongest_only(coeffs: Tensor, count: int, kernels: Kernels = in_torch) -> Tensor:
    """The energy of each value of (c, a) that is among the ``count`` strongest of its chunk, and 0 for the others."""
    index, values = _strongest(coeffs, count, kernels)
    return torch.zeros_like(coeffs, dtype=torch.float64).scatter_(1, index, values.double().square())


def _strongest(coeffs: Tensor, count: int, kernels: Kernels) -> tuple[Tensor, Tensor]:
    """Positions and values of the strongest values of each chunk, as a codec selects them."""
    if count == coeffs.shape[1]:
        return torch.arange(count, device=coeffs.device).expand(coeffs.shape), coeffs
    index = kernels.select(coeffs, count)
    return index, coeffs.gather(1, index)


def over_frequencies(energies: Tensor) -> Tensor:
    """The energy of each chunk over a grid of bands: (c, h, w) to (c, BANDS, BANDS), low frequencies first."""
    c, h, w = energies.shape
    rows = energies.new_zeros(c, BANDS, w).index_add_(1, bands(h, energies.device), energies)
    return energies.new_zeros(c, BANDS, BANDS).index_add_(2, bands(w, energies.device), rows)


def over_places(energies: Tensor, slab: Slab, shapes: Sequence[tuple[int, int]]) -> Tensor:
    """The energy of each tensor over a grid of its rows and columns: (c, a) to (tensors, BANDS, BANDS).

    ``shapes`` are those of the tensors as matrices.
    """
    found = energies.new_zeros(len(shapes), BANDS, BANDS)
    for patch in (patch for bundle in slab.bundles for patch in bundle):
        rows, cols = shapes[patch.tensor]
        down, across = patch.down * slab.h, patch.across * slab.w
        chunks = energies[patch.first : patch.first + patch.down * patch.across]
        matrix = chunks.view(patch.down, patch.across, slab.h, slab.w).transpose(1, 2).reshape(down, across)
        in_rows = bands(rows, energies.device)[patch.row : patch.row + down]
        in_cols = bands(cols, energies.device)[patch.col : patch.col + across]
        found[patch.tensor].index_add_(1, in_cols, energies.new_zeros(BANDS, across).index_add_(0, in_rows, matrix))
    return found


def bands(length: int, device: torch.device) -> Tensor:
    """The band of each of ``length`` places. Some bands are empty if there are fewer places than bands."""
    return torch.arange(length, device=device) * BANDS // length


def energy(values: Tensor, units: int) -> Tensor:
    """The energy of each unit of a slab: of a chunk, or of a single plain value."""
    norms: Tensor = torch.linalg.vector_norm(values.reshape(units, -1), dim=1, dtype=torch.float64)
    return norms.square()


def products(one: Tensor, other: Tensor, units: int) -> Tensor:
    """The inner product of two vectors over each unit of a slab."""
    return (one * other).reshape(units, -1).sum(1, dtype=torch.float64)


def tensors_of(slab: Slab, device: torch.device) -> Tensor:
    """For each unit of a slab, the index of the tensor that it belongs to."""
    patches = [patch for bundle in slab.bundles for patch in bundle]
    tensors = torch.tensor([patch.tensor for patch in patches], device=device)
    return tensors.repeat_interleave(torch.tensor([patch.down * patch.across for patch in patches], device=device))
