"""Looks at the signal itself in some rounds of a run: how it is spread, who agrees on it, how it repeats and grows.

A `Probe` belongs to one replica. At each round `Exchanger` asks it for a `Look`, and gets None for most rounds. The
work on the slabs shows the look all that passes by:

    encode   measure: the drift    select: E, from which the codec selects    send: the values that were sent
    absorb   hear: u, the mean of all payloads, and the residual
    finish   end: the record is complete

A look changes nothing of what it is shown, so a run ends with the same bits with and without it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from overtone.codec import Decoded, TopK
from overtone.coding.chunks import Slab, matrix_shape
from overtone.coding.kernels import kernels_for
from overtone.coding.layout import Layout, inner_part, part_of
from overtone.coding.spectrum import (
    energy,
    energy_of_strongest,
    gaussian_share,
    over_frequencies,
    over_places,
    products,
    strongest_only,
    tensors_of,
)
from overtone.coding.transforms import DCT, TRANSFORMS
from overtone.exchange.spectrum import FORMAT, STRONGEST, Layer, Spectrum, Sums
from overtone.ledger import Round
from overtone.methods import Method
from overtone.rules import State

BASES = ("none", "dct", "hadamard")


@dataclass
class Memory:
    """What is kept of a round to compare the next one with: its drift, and which positions were sent."""

    drift: Tensor  # in the order of the probe's layout
    sent: Tensor  # bool, in the order of the method's layout
    round: int | None = None  # None until that round is over


class Probe:
    """Looks at some ``rounds`` of one replica, and gives each record to ``write``. The method must exchange drift.

    ``layout`` is the layout of the exchange, and ``shapes`` are those of the exchanged tensors, by name.
    """

    def __init__(
        self,
        method: Method,
        layout: Layout,
        shapes: Mapping[str, Sequence[int]],
        device: torch.device,
        *,
        rounds: Container[int],
        write: Callable[[Spectrum], None],
    ) -> None:
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.device = device
        self.kernels = kernels_for(layout.size, device)
        self.rounds = rounds
        self.write = write
        self.selects = isinstance(method.codec, TopK)
        # A dense method has no chunks. Its drift is measured in the chunks that a TopK codec would have.
        self.ruler = method.codec if isinstance(method.codec, TopK) else TopK(transform="none")
        self.layout = layout if self.selects else self.ruler.layout(list(self.shapes.values()))
        # A basis that turns is Hadamard's, after signs that are others in each round.
        self.own_basis = "hadamard" if self.ruler.turns else self.ruler.transform
        self.bases = tuple(dict.fromkeys((*BASES, self.own_basis)))
        # In a mean over senders, a value that only this replica sent is not smaller: no agreement can be seen in it.
        self.hears_all = not method.rule.over_senders
        self.memory: Memory | None = None
        self._exchanged = layout.size

    def look(self, index: int, replicas: int) -> Look | None:
        """The look at a round: None if neither this round nor the next one is to be looked at."""
        measures, remembers = index in self.rounds, index + 1 in self.rounds
        if not measures and not remembers:
            self.memory = None
            return None
        if remembers and self.memory is None:
            unsent = torch.zeros(self._exchanged, dtype=torch.bool, device=self.device)
            self.memory = Memory(self.layout.empty(self.device), unsent)
        compares = measures and self.memory is not None and self.memory.round == index - 1
        return Look(self, index, replicas, measures, remembers, compares)

    def chunked(self) -> list[int]:
        """The tensors that are cut into chunks."""
        slabs = [slab for slab in self.layout.slabs if not slab.plain]
        return sorted({patch.tensor for slab in slabs for bundle in slab.bundles for patch in bundle})


@dataclass
class Look:
    """One look at one round."""

    probe: Probe
    index: int
    replicas: int
    measures: bool  # else the round is only remembered, for the look at the next one
    remembers: bool
    compares: bool  # the round before was remembered
    _sums: Sums = field(init=False)
    _sent: dict[int, list[tuple[Slab, Decoded]]] = field(init=False)  # by the offset of a slab

    def __post_init__(self) -> None:
        self._sums = Sums(len(self.probe.shapes), self.probe.device)
        self._sent = defaultdict(list)

    # -- what the work on the slabs shows ------------------------------------------------------------------------------

    def measure(self, plus: Sequence[Tensor], minus: Sequence[Tensor] | None) -> None:
        """See the drift, plus − minus, both as the matrices of a layout."""
        probe, memory = self.probe, self.probe.memory
        if memory is not None:
            memory.round = None  # if this round is refused, half of the memory is of this round
        for slab in probe.layout.slabs:
            values = probe.layout.read_slab(slab, plus, minus, probe.device).values()
            owners = tensors_of(slab, probe.device)
            if self.measures:
                self._sums.add("drift", owners, energy(values, slab.units))
                self._spread("drift", slab, values, owners)
            if memory is None:
                continue
            before = part_of(memory.drift, slab)
            if self.compares:
                self._sums.add("both", owners, products(values, before, slab.units))
                self._sums.add("before", owners, energy(before, slab.units))
            if self.remembers:
                before.copy_(values)

    def select(self, slab: Slab, coeffs: Tensor, turned: Tensor | None = None) -> None:
        """See the coefficients from which the codec selects, (chunks, area). If it selects in a basis that turns, these
        are ``turned``."""
        if not self.measures or not self.probe.selects:
            return
        values, transform = coeffs, self.probe.layout.transform
        if transform is not None and not slab.plain:
            values = transform.inverse(coeffs.view(slab.chunks, slab.h, slab.w)).view(coeffs.shape)
        own = coeffs if turned is None else turned
        self._spread("owed", slab, values, tensors_of(slab, self.probe.device), own)

    def send(self, slab: Slab, piece: Slab, decoded: Decoded) -> None:
        """See the values that were sent of a piece of a slab."""
        if self.measures and self.probe.hears_all:
            self._sent[slab.offset].append((piece, decoded))
        memory, index = self.probe.memory, decoded.index
        if memory is None or index is None or piece.plain:
            return
        marks = part_of(memory.sent, piece)
        if self.compares:
            again, owners = marks.gather(1, index), self._owners(slab, piece)
            self._sums.add("again", owners, again.sum(1, dtype=torch.float64))
            self._sums.add("positions", owners, torch.full_like(owners, index.shape[1], dtype=torch.float64))
        if self.remembers:
            marks.zero_().scatter_(1, index, True)

    def hear(self, slab: Slab, mean: Tensor, state: State) -> None:
        """See the mean of all payloads for a slab, and the state of the rule, in which the residual is that after the
        round."""
        if not self.measures:
            return
        if (residual := state.get("residual")) is not None:
            self._sums.add("residual", tensors_of(slab, self.probe.device), energy(residual, slab.units))
        for piece, sent in self._sent.pop(slab.offset, ()):
            owners, here = self._owners(slab, piece), inner_part(mean, slab, piece)
            heard = here if sent.index is None else here.gather(1, sent.index)
            values = sent.values.to(heard.device)
            if piece.plain and sent.index is not None:  # each value is a unit, and some of them were sent
                owners = owners[sent.index.view(-1).to(owners.device)]
            self._sums.add("heard", owners, products(values, heard, len(owners)))
            self._sums.add("sent", owners, energy(values, len(owners)))

    def end(self, done: Round, step: int) -> None:
        """The round is over: write its record. ``step`` is the number of local steps when the drift was measured."""
        probe, sums = self.probe, self._sums
        if not self.remembers:
            probe.memory = None
        elif probe.memory is not None:
            probe.memory.round = self.index
        if not self.measures:
            return
        chunked = probe.chunked()
        layers: list[Layer] = [
            {"name": name, "shape": list(shape), **(sums.seen if i in chunked else sums.norms)([i])}
            for i, (name, shape) in enumerate(probe.shapes.items())
        ]
        every = range(len(layers))
        record: Spectrum = {
            "format": FORMAT,
            "round": done.index,
            "step": step,
            "replicas": self.replicas,
            "basis": probe.own_basis if probe.selects else None,
            "keep": probe.ruler.keep,
            "strongest": list(STRONGEST),
            # Norms are those of all tensors, the other numbers those of all tensors that are cut into chunks.
            "whole": {**(sums.seen(chunked) if chunked else {}), **sums.norms(every)},
            "layers": layers,
        }
        probe.write(record)

    # -- parts -----------------------------------------------------------------------------------------------------

    def _spread(self, of: str, slab: Slab, values: Tensor, owners: Tensor, coeffs: Tensor | None = None) -> None:
        """Add how the energy of a slab's values is spread. ``coeffs`` are those in the basis of the method, if they are
        known: the method selects from these, to the last bit."""
        if slab.plain:
            return
        probe, sums, shape = self.probe, self._sums, (slab.chunks, slab.h, slab.w)
        counts = [TopK(keep=count).kept(slab) for count in STRONGEST]
        sums.add(f"{of} in chunks", owners, energy(values, slab.chunks))
        for basis in probe.bases:
            transform, here = TRANSFORMS[basis], values
            if coeffs is not None and basis == probe.own_basis:
                here = coeffs
            elif transform is not None:
                here = transform.forward(values.view(shape)).view(values.shape)
            sums.add((of, basis), owners, energy_of_strongest(here, counts, probe.kernels))
            if of == ("owed" if probe.selects else "drift"):  # the vector that is selected from
                if transform is DCT:
                    selected = strongest_only(here, probe.ruler.kept(slab), probe.kernels).view(shape)
                    sums.add("frequencies", owners, over_frequencies(selected))
                elif transform is None:
                    self._place(slab, strongest_only(here, probe.ruler.kept(slab), probe.kernels))
        if of == "drift":
            gaussian = [slab.area * gaussian_share(count / slab.area) for count in counts]
            for name, row in (("gaussian", gaussian), ("values", [slab.area])):
                sums.add(name, owners, torch.tensor(row, dtype=torch.float64).to(owners.device).expand(len(owners), -1))

    def _place(self, slab: Slab, selected: Tensor) -> None:
        matrices = [matrix_shape(shape) for shape in self.probe.shapes.values()]
        every = torch.arange(len(matrices), device=selected.device)
        self._sums.add("places", every, over_places(selected, slab, matrices))

    def _owners(self, slab: Slab, piece: Slab) -> Tensor:
        """For each unit of a piece of a slab, the index of the tensor that it belongs to."""
        first = (piece.offset - slab.offset) // (1 if slab.plain else slab.area)
        return tensors_of(slab, self.probe.device)[first : first + piece.units]
