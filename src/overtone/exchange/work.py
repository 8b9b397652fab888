"""A round's work, slab by slab: what `Replica` does in every round, and what `overtone bench codec` measures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from overtone.codec import Block, Codec, Part
from overtone.coding.bits import Reader
from overtone.coding.kernels import Kernels
from overtone.coding.layout import Layout, Reading, Slab
from overtone.rules import Rule, State

MeanOf = Callable[[Slab, Tensor], Tensor]  # the mean of what was heard for a slab; the tensor is room for it


@dataclass(frozen=True)
class Work:
    """A rule and a codec on the slabs of one layout. Vectors of the state are flat, as long as the layout."""

    layout: Layout
    rule: Rule
    codec: Codec
    loops: Kernels
    device: torch.device

    def encode(
        self,
        state: State,
        signal: tuple[Sequence[Tensor], Sequence[Tensor] | None],
        blocks: list[Block],
        *,
        scale: float = 1.0,
        measures: bool = False,
    ) -> list[Tensor]:
        """Signal → rule → codec → ``blocks``; the norms of the signal's slabs, if they are to be measured."""
        layout, (sources, less) = self.layout, signal
        plus, minus = layout.matrices(sources), None if less is None else layout.matrices(less)
        norms = []
        for slab in layout.slabs:
            reading = Reading(layout, slab, plus, minus, scale, self.device, measures)

            def send(coeffs: Tensor, slab: Slab = slab) -> Part:
                block, part = self.codec.encode(coeffs, slab, self.loops)
                blocks.append(block)
                return part

            self.rule.propose(_of(state, slab), reading, send)
            norms.append(reading.norm)
        return norms

    def absorb(self, state: State, mean_of: MeanOf, targets: Sequence[Tensor]) -> None:
        """Mean → rule → ``targets``."""
        layout = self.layout
        matrices = layout.matrices(targets)
        for slab in layout.slabs:
            mean = mean_of(slab, layout.room(slab, 2, self.device))
            layout.write_slab(slab, self.rule.absorb(_of(state, slab), mean), matrices)
        layout.land(matrices, targets)

    def withdraw(self, state: State, blocks: Sequence[Block]) -> bool:
        """Nobody counts what the blocks said, so it is still owed. True if their signal stays in the state."""
        kept = False
        for slab, block in zip(self.layout.slabs, blocks, strict=False):
            part = (
                Part(None, block) if isinstance(block, Tensor) else self.codec.decode(Reader(block), slab, self.loops)
            )
            kept |= self.rule.withdraw(_of(state, slab), part)
        return kept


def _of(state: State, slab: Slab) -> State:
    return {name: slab.of(vector) for name, vector in state.items()}
