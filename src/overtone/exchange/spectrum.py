"""The record of a look at a round's signal, and the sums that it is made of. docs/spectrum.md explains the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import torch
from torch import Tensor

FORMAT = 1  # of the records
STRONGEST = (8, 32, 128, 512)  # values of each chunk of 64 × 64; other chunks count in proportion to their area
DIGITS = 5  # significant ones of each number in a record

Share = float | None  # None: there is nothing to take a share of
Energy = dict[str, list[Share]]  # by basis: the share of the energy in the strongest values, one for each of STRONGEST


class Seen(TypedDict, total=False):
    """The numbers of one layer, or of all layers together. A number that has no meaning there is left out."""

    drift: float
    residual: float
    gaussian: list[Share]
    energy: dict[str, Energy]  # of the "drift", and of what is "owed": drift plus residual, before sending
    frequencies: list[Share]
    places: list[Share]
    agreement: Share
    cosine: Share
    repeated: Share


class Layer(Seen):
    """One tensor."""

    name: str
    shape: list[int]


class Spectrum(TypedDict):
    """The record of one look."""

    format: int
    round: int
    step: int  # local steps when the drift was measured
    replicas: int
    basis: str | None  # in which the method selects; None if it sends everything
    keep: int
    strongest: list[int]
    whole: Seen
    layers: list[Layer]


Name = str | tuple[str, str]  # of a sum; a pair is a vector and the basis in which its strongest values were found


class Sums:
    """Sums by tensor, in fp64, so that memory does not grow with the model. The numbers of a record come from them."""

    def __init__(self, tensors: int, device: torch.device) -> None:
        self.tensors = tensors
        self.device = device
        self._sums: dict[Name, Tensor] = {}  # (tensors, …)

    def add(self, name: Name, owners: Tensor, quantities: Tensor) -> None:
        """Add one quantity (or several) of each unit to the sums of the tensors that own the units."""
        if name not in self._sums:
            shape = (self.tensors, *quantities.shape[1:])
            self._sums[name] = torch.zeros(shape, dtype=torch.float64, device=self.device)
        self._sums[name].index_add_(0, owners, quantities)

    def norms(self, tensors: Sequence[int]) -> Seen:
        """The norms of these tensors, as if they were one."""
        found: Seen = {"drift": _rounded(self._total("drift", tensors).sqrt())}
        if "residual" in self._sums:
            found["residual"] = _rounded(self._total("residual", tensors).sqrt())
        return found

    def seen(self, tensors: Sequence[int]) -> Seen:
        """All numbers of these tensors, which are cut into chunks, as if they were one."""
        found = self.norms(tensors)
        found["gaussian"] = self._shares("gaussian", "values", tensors)
        found["energy"] = {}
        for name in self._sums:
            if isinstance(name, tuple):
                of, basis = name
                found["energy"].setdefault(of, {})[basis] = self._shares(name, f"{of} in chunks", tensors)
        found["frequencies"] = self._shares("frequencies", "frequencies", tensors)
        found["places"] = self._shares("places", "places", tensors)
        if "sent" in self._sums:
            found["agreement"] = _share(self._total("heard", tensors), self._total("sent", tensors))
        if "before" in self._sums:
            lengths = self._total("drift", tensors).sqrt() * self._total("before", tensors).sqrt()
            found["cosine"] = _share(self._total("both", tensors), lengths)
        if "positions" in self._sums:
            found["repeated"] = _share(self._total("again", tensors), self._total("positions", tensors))
        return found

    def _total(self, name: Name, tensors: Sequence[int]) -> Tensor:
        return self._sums[name][list(tensors)].sum(0)

    def _shares(self, parts: Name, whole: Name, tensors: Sequence[int]) -> list[Share]:
        total = self._total(whole, tensors).sum()
        return [_share(part, total) for part in self._total(parts, tensors).flatten()]


def _share(part: Tensor, whole: Tensor) -> Share:
    return _rounded(part / whole) if float(whole) else None


def _rounded(value: Tensor | float) -> float:
    return float(f"{float(value):.{DIGITS}g}")
