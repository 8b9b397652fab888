"""A basis that turns: each round selects its coefficients in another one.

In a fixed basis, the strongest coefficients of a residual have all been sent, and what is left is flat: a message takes
little of it. In a new basis it is a Gaussian again. So the state stays in the weights' own basis, and each round turns
every chunk: random signs that follow from the number of the round, then the Hadamard transform. Signs and sums in a
fixed order give the same bits on every machine. docs/wire.md, section 3, specifies the signs.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from overtone.coding.chunks import Slab
from overtone.coding.kernels import Kernels
from overtone.coding.layout import Layout
from overtone.coding.transforms import HADAMARD

SEED = b"overtone turn"


@dataclass(frozen=True)
class Turn:
    """The basis of one round. Results lie in scratch areas of the layout."""

    index: int  # of the round
    layout: Layout
    kernels: Kernels
    _signs: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict)

    def forward(self, values: Tensor, slab: Slab) -> Tensor:
        """The coefficients of a slab's values, (chunks, area), in area 2."""
        signed, between, out = (self.layout.scratch(slab, area, values.device) for area in (0, 1, 2))
        torch.mul(values, self.signs(slab.area, values.device), out=signed)
        shape = (slab.chunks, slab.h, slab.w)
        self.kernels.forward(HADAMARD, signed.view(shape), between.view(shape), out.view(shape), keep=0.0, scale=1.0)
        return out

    def back(self, coeffs: Tensor, slab: Slab) -> Tensor:
        """The values of a slab's coefficients, (chunks, area), in area 3. ``coeffs`` may lie in area 0 or 2."""
        between, out = (self.layout.scratch(slab, area, coeffs.device) for area in (1, 3))
        shape = (slab.chunks, slab.h, slab.w)
        self.kernels.inverse(HADAMARD, coeffs.view(shape), between.view(shape), out.view(shape))
        return out.mul_(self.signs(slab.area, coeffs.device))

    def signs(self, area: int, device: torch.device) -> Tensor:
        """The sign of each place in a chunk, ±1."""
        if (area, device) not in self._signs:
            digest = hashlib.shake_128(SEED + self.index.to_bytes(8, "little")).digest(-(-area // 8))
            bits = torch.tensor(list(digest)).unsqueeze(1).bitwise_right_shift(torch.arange(8)).bitwise_and(1)
            self._signs[area, device] = (1.0 - 2.0 * bits.view(-1)[:area]).to(device)
        return self._signs[area, device]
