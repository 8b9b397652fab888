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

BANDS = 8  # in each direction of a grid


def gaussian_share(part: float) -> float:
    """The share of the energy that the strongest ``part`` of many Gaussian values has: 2 · (t·φ(t) + Q(t)), where
    2 · Q(t) = part.

    It is the level of a signal without any structure. Sampled values agree: tests/test_spectrum.py.
    """
    normal = NormalDist()
    t = normal.inv_cdf(1.0 - part / 2)
    return 2 * (t * normal.pdf(t) + 1.0 - normal.cdf(t))


def energy_of_strongest(coeffs: Tensor, counts: Sequence[int]) -> Tensor:
    """The energy of the strongest values of each chunk: (c, a) coefficients to (c, len(counts))."""
    strongest = coeffs.double().square().topk(max(counts), dim=1).values.cumsum(1)
    return strongest[:, [count - 1 for count in counts]]


def strongest_only(coeffs: Tensor, count: int) -> Tensor:
    """The energy of each value of (c, a) that is among the ``count`` strongest of its chunk, and 0 for the others."""
    energy = coeffs.double().square()
    found = energy.topk(count, dim=1)
    return torch.zeros_like(energy).scatter_(1, found.indices, found.values)


def over_frequencies(energy: Tensor) -> Tensor:
    """The energy of each chunk over a grid of bands: (c, h, w) to (c, BANDS, BANDS), low frequencies first."""
    c, h, w = energy.shape
    rows = energy.new_zeros(c, BANDS, w).index_add_(1, bands(h, energy.device), energy)
    return energy.new_zeros(c, BANDS, BANDS).index_add_(2, bands(w, energy.device), rows)


def over_places(energy: Tensor, slab: Slab, shapes: Sequence[tuple[int, int]]) -> Tensor:
    """The energy of each tensor over a grid of its rows and columns: (c, a) to (tensors, BANDS, BANDS).

    ``shapes`` are those of the tensors as matrices.
    """
    found = energy.new_zeros(len(shapes), BANDS, BANDS)
    for patch in (patch for bundle in slab.bundles for patch in bundle):
        rows, cols = shapes[patch.tensor]
        down, across = patch.down * slab.h, patch.across * slab.w
        chunks = energy[patch.first : patch.first + patch.down * patch.across]
        matrix = chunks.view(patch.down, patch.across, slab.h, slab.w).transpose(1, 2).reshape(down, across)
        in_rows = bands(rows, energy.device)[patch.row : patch.row + down]
        in_cols = bands(cols, energy.device)[patch.col : patch.col + across]
        found[patch.tensor].index_add_(1, in_cols, energy.new_zeros(BANDS, across).index_add_(0, in_rows, matrix))
    return found


def bands(length: int, device: torch.device) -> Tensor:
    """The band of each of ``length`` places. Some bands are empty if there are fewer places than bands."""
    return torch.arange(length, device=device) * BANDS // length


def products(one: Tensor, other: Tensor, units: int) -> Tensor:
    """The sum of the products of two vectors over each unit of a slab (a chunk, or a single plain value)."""
    return (one.double() * other.double()).reshape(units, -1).sum(1)


def tensors_of(slab: Slab, device: torch.device) -> Tensor:
    """For each unit of a slab, the index of the tensor that it belongs to."""
    patches = [patch for bundle in slab.bundles for patch in bundle]
    tensors = torch.tensor([patch.tensor for patch in patches], device=device)
    return tensors.repeat_interleave(torch.tensor([patch.down * patch.across for patch in patches], device=device))
