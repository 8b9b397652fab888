"""The work of a round on each slab: a rule and a codec on one layout. `overtone bench codec` measures it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from overtone.codec import Block, Codec, Decoded
from overtone.coding.chunks import Slab
from overtone.coding.kernels import Kernels
from overtone.coding.layout import Layout, inner_part, parts_of
from overtone.coding.turns import Turn
from overtone.exchange.dealing import Deal
from overtone.exchange.probe import Look
from overtone.exchange.signals import Sources
from overtone.rules import Rule, State


class Averaged(Protocol):
    """The part of `Received` that the work on a slab uses."""

    may_return: bool

    def mean(self, slab: Slab, out: Tensor, *, over_senders: bool) -> Tensor:
        """The mean of all payloads for one slab. It may lie in ``out``."""
        ...

    def returned(self, slab: Slab) -> Iterable[tuple[Slab, Decoded]]:
        """What this replica owes again of one slab."""
        ...


@dataclass
class Energies:
    """What the controller must know of a round, as this replica finds it. Sums of squares."""

    sent: float = 0.0  # of the values in this replica's message
    mean: float = 0.0  # of the mean of all messages
    momentum: float = 0.0  # of the outer momentum before
    product: float = 0.0  # of the mean with that momentum

    @property
    def cosine(self) -> float:
        """Of the mean with the momentum; 0 if one of them is."""
        size = math.sqrt(self.mean) * math.sqrt(self.momentum)
        return self.product / size if size > 0 else 0.0

    def add_sent(self, values: Tensor) -> None:
        """Count the values that were sent of a piece."""
        self.sent += _product(values, values)

    def add_mean(self, mean: Tensor, momentum: Tensor | None) -> None:
        """Count the mean of a slab, and the momentum before it."""
        self.mean += _product(mean, mean)
        if momentum is not None:
            self.momentum += _product(momentum, momentum)
            self.product += _product(mean, momentum)


def _product(one: Tensor, other: Tensor) -> float:
    return float(torch.dot(one.reshape(-1), other.reshape(-1)))


@dataclass(frozen=True)
class SlabWork:
    """A rule and a codec at work on the slabs of a layout, each of which is dealt into pieces."""

    layout: Layout
    kernels: Kernels
    device: torch.device
    rule: Rule
    codec: Codec
    deal: Deal
    turn: Turn | None = None  # the basis of this round, if it has one of its own
    energies: Energies | None = None  # measured only where a controller asks for them
    look: Look | None = None  # sees all that passes by, if this round is looked at

    def encode(self, state: State, sources: Sources, *, scale: float = 1.0) -> tuple[list[Block], Tensor]:
        """Signal → rule → codec → blocks. Returns the blocks, and the norm of the signal in each slab."""
        layout = self.layout
        plus = layout.matrices(sources.plus)
        minus = None if sources.minus is None else layout.matrices(sources.minus)
        blocks: list[Block] = []
        norms: list[Tensor | float] = []
        if self.look is not None:
            self.look.measure(plus, minus)
        for slab in layout.slabs:
            signal = layout.read_slab(slab, plus, minus, self.device, self.kernels, scale)
            coeffs = self.rule.accumulate(parts_of(state, slab), signal)
            norms.append(signal.norm())
            turned = self.turn.forward(coeffs, slab) if self.turn is not None and not slab.plain else None
            if self.look is not None:
                self.look.select(slab, coeffs, turned)
            if turned is not None:
                coeffs = turned
            for number in self.deal.inside[slab.offset]:
                piece = self.deal.pieces[number].slab
                here = coeffs if piece is slab else inner_part(coeffs, slab, piece)
                block, decoded = self.codec.encode(here, piece, self.kernels)
                # The payload leaves the residual before anyone has read it. `withdraw` undoes this if the round is
                # refused.
                own = decoded if turned is None else self.in_state_basis(decoded, piece)
                self.rule.sent(parts_of(state, piece), own)
                if self.energies is not None:
                    self.energies.add_sent(decoded.values)
                if self.look is not None:
                    self.look.send(slab, piece, decoded)
                blocks.append(block)
        return blocks, torch.stack([torch.as_tensor(n, dtype=torch.float32, device=self.device) for n in norms])

    def absorb(self, state: State, received: Averaged, targets: Sequence[Tensor]) -> None:
        """Mean of all payloads → rule → ``targets``."""
        layout = self.layout
        matrices = layout.matrices(targets)
        for slab in layout.slabs:
            mean = received.mean(slab, layout.scratch(slab, 2, self.device), over_senders=self.rule.over_senders)
            here = parts_of(state, slab)
            if received.may_return:
                for piece, decoded in received.returned(slab):
                    self.rule.withdraw(parts_of(state, piece), self.in_state_basis(decoded, piece))
            if self.look is not None:
                self.look.hear(slab, mean, here)
            if self.turn is not None and not slab.plain:
                mean = self.turn.back(mean, slab)
            if self.energies is not None:
                self.energies.add_mean(mean, here.get("momentum"))
            self.rule.absorb(here, mean, layout.target(slab, matrices, self.kernels))
        for matrix, target in zip(matrices, targets, strict=True):
            # `matrices` had to copy a tensor that is not contiguous: the result still has to go back.
            if matrix.data_ptr() != target.data_ptr():
                target.copy_(matrix.view(target.shape))

    def withdraw(self, state: State, blocks: Sequence[Block]) -> bool:
        """Put the blocks back into the residual, because no receiver counted them.

        Returns True if their signal stays in the state.
        """
        kept = False
        # Not strict: a replica that could not encode has no blocks.
        for piece, block in zip(self.deal.pieces, blocks, strict=False):
            decoded = self.codec.decode_own(block, piece.slab, self.kernels)
            kept |= self.rule.withdraw(parts_of(state, piece.slab), self.in_state_basis(decoded, piece.slab))
        return kept

    def in_state_basis(self, decoded: Decoded, piece: Slab) -> Decoded:
        """What was decoded, in the basis of the state."""
        if self.turn is None or piece.plain:
            return decoded
        # Area 2 still has the coefficients, or the mean, of the whole slab.
        whole = self.layout.scratch(piece, 0, self.device).zero_()
        decoded.add_to(whole)
        return Decoded(None, self.turn.back(whole, piece))
