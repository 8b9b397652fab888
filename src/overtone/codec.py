"""From a vector of coefficients to a payload and back. A codec may lose information, and says exactly what it lost:
what `encode` returns as sent is, to the bit, what every receiver decodes.

Legend: c chunks in a group, a values in a chunk (its area), k of them kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from overtone import dct
from overtone.bits import Reader, pack_fields, pack_gaps, tensor_bytes
from overtone.errors import MethodError, WireError
from overtone.layout import Group, Layout

BITS = (1, 2, 4, 8, 16, 32)
EXCEPTIONAL = 4.0  # a value this many times its chunk's mean (more, where the grid reaches further) is an exception
FULL_CHUNK = 64 * 64  # `keep` counts coefficients per chunk of this area; other chunks keep in proportion


@dataclass(frozen=True)
class Part:
    """What one group contributes: values (c, k) and where in its chunk each belongs, None for «all, in order»."""

    group: Group
    index: Tensor | None  # (c, k) int64
    values: Tensor  # (c, k) float32


@dataclass(frozen=True)
class Sparse:
    """A decoded payload."""

    parts: tuple[Part, ...]

    def add_to(self, flat: Tensor, scale: float = 1.0) -> None:
        """flat += scale · self. Two elementwise operations in a fixed order, so the result is the same everywhere."""
        for part in self.parts:
            here, values = part.group.of(flat), part.values.to(flat.device)
            if scale != 1.0:
                values = values * scale
            if part.index is None:
                here.add_(values)
            else:
                index = part.index.to(flat.device)
                here.scatter_(1, index, here.gather(1, index) + values)  # indices are unique within a chunk

    def ones(self) -> Sparse:
        """1 wherever this payload has a value."""
        return Sparse(tuple(replace(part, values=torch.ones_like(part.values)) for part in self.parts))


Payload = bytes | Tensor  # bytes to gather, or numbers to sum


class Codec(Protocol):
    """Frozen numbers and three verbs."""

    @property
    def lossless(self) -> bool: ...

    @property
    def reduces(self) -> bool:
        """True: payloads are plain numbers that the network may sum on the way (all-reduce)."""
        ...

    def layout(self, shapes: Sequence[Sequence[int]]) -> Layout: ...

    def encode(self, flat: Tensor, layout: Layout) -> tuple[Payload, Sparse]: ...

    def decode(self, payload: Payload, layout: Layout) -> Sparse: ...


@dataclass(frozen=True)
class Dense:
    """Every value, exact, in fp32: the honest no-op. The payload is plain numbers, so it can be summed on the way."""

    lossless = True
    reduces = True

    def layout(self, shapes: Sequence[Sequence[int]]) -> Layout:
        return Layout.flat(shapes)

    def encode(self, flat: Tensor, layout: Layout) -> tuple[Payload, Sparse]:
        sent = flat.clone()
        return sent, self.decode(sent, layout)

    def decode(self, payload: Payload, layout: Layout) -> Sparse:
        assert isinstance(payload, Tensor)
        return Sparse(tuple(Part(group, None, group.of(payload)) for group in layout.groups))


@dataclass(frozen=True)
class TopK:
    """The ``keep`` strongest coefficients of each chunk, at ``bits`` bits each with one scale per chunk.

    ``keep`` counts per chunk of 64 × 64; smaller and larger chunks keep in proportion to their area, at least one.
    Tensors of one axis and tensors of fewer than ``plain_below`` values are sent whole, in bf16 (fp32 if ``bits`` is
    32): compressing them would save little and hurt much.
    """

    keep: int = 128
    bits: int = 1
    chunk: int = 64
    transform: str = "dct"
    plain_below: int = 1024

    reduces = False

    def __post_init__(self) -> None:
        for name in ("keep", "bits", "chunk", "plain_below"):
            if type(getattr(self, name)) is not int:
                raise MethodError(f"{name}={getattr(self, name)!r}: a whole number")
        if self.chunk < 1:
            raise MethodError(f"chunk={self.chunk}: the side of a chunk is at least 1; 64 is the default")
        if not 1 <= self.keep <= FULL_CHUNK:
            raise MethodError(f"keep={self.keep}: coefficients kept of each {FULL_CHUNK}; use 1 to {FULL_CHUNK}")
        if self.bits not in BITS:
            raise MethodError(f"bits={self.bits}: a value travels in {', '.join(map(str, BITS))} bits")
        if self.transform not in dct.TRANSFORMS:
            raise MethodError(f"transform={self.transform!r}: choose one of {', '.join(dct.TRANSFORMS)}")
        if self.plain_below < 0:
            raise MethodError(f"plain_below={self.plain_below}: a number of values, 0 or more")

    @property
    def lossless(self) -> bool:
        return self.keep == FULL_CHUNK and self.bits == 32

    @property
    def whole(self) -> TopK:
        """The same chunks with every coefficient kept, one bit each: what `finish` drains residuals with."""
        return replace(self, keep=FULL_CHUNK, bits=1)

    def layout(self, shapes: Sequence[Sequence[int]]) -> Layout:
        basis = dct.TRANSFORMS[self.transform]
        return Layout(shapes, chunk=self.chunk, plain_below=self.plain_below, basis=basis)

    def kept(self, group: Group) -> int:
        """k: how many values of each chunk of the group travel."""
        if group.plain:
            return group.area
        return min(group.area, max(1, round(self.keep * group.area / FULL_CHUNK)))

    def width(self, group: Group) -> int:
        """Bits per value of the group."""
        return max(self.bits, 16) if group.plain else self.bits

    def encode(self, flat: Tensor, layout: Layout) -> tuple[Payload, Sparse]:
        payload, parts = bytearray(), []
        for group in layout.groups:
            coeffs = group.of(flat)
            index = select(coeffs, self.kept(group))
            chosen = coeffs if index is None else coeffs.gather(1, index)
            if index is not None:
                gaps = torch.diff(index.cpu(), dim=1, prepend=torch.tensor(-1).expand(group.chunks, 1)) - 1
                payload += pack_gaps(gaps.view(-1), guess_width(group.area, self.kept(group)))
            data, values = quantise(chosen, self.width(group))
            payload += data
            parts.append(Part(group, index, values))
        return bytes(payload), Sparse(tuple(parts))

    def decode(self, payload: Payload, layout: Layout) -> Sparse:
        assert isinstance(payload, bytes)
        reader, parts = Reader(payload), []
        for group in layout.groups:
            k = self.kept(group)
            what = f"chunks of {group.h}x{group.w}"
            index = None
            if k < group.area:
                gaps = reader.gaps(group.chunks * k, group.area, f"indices of {what}").view(group.chunks, k)
                index = (gaps + 1).cumsum(1) - 1
                if int(index[:, -1].max()) >= group.area:
                    raise WireError(f"indices of {what}: beyond the chunk's {group.area} values; message is corrupt")
            values = dequantise(reader, (group.chunks, k), self.width(group), f"values of {what}")
            parts.append(Part(group, index, values))
        reader.end()
        return Sparse(tuple(parts))


def select(coeffs: Tensor, k: int) -> Tensor | None:
    """(c, a) to (c, k): positions of the k largest magnitudes, ascending; the lower position wins a tie.

    None when everything is kept.
    """
    c, a = coeffs.shape
    if k >= a:
        return None
    strength = coeffs.abs()
    weakest = strength.topk(k, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    chosen = strength >= weakest
    if int(chosen.sum()) != c * k:  # ties at the threshold: keep just enough of them, from the front
        above = strength > weakest
        ties = strength == weakest
        room = k - above.sum(dim=1, keepdim=True)
        chosen = above | (ties & (ties.cumsum(dim=1) <= room))
    return chosen.nonzero()[:, 1].view(c, k)


def guess_width(area: int, k: int) -> int:
    """The Rice width that suits gaps between k of ``area`` positions if they are spread evenly."""
    return max(0, (area // k).bit_length() - 1)


def quantise(values: Tensor, bits: int) -> tuple[bytes, Tensor]:
    """(c, k) values to their bytes and to what those bytes decode to.

    16 and 32 bits are bf16 and fp32 as they are. Fewer are codes q on the uniform grid (q + ½) · step, symmetric about
    zero, with one step per chunk: the step that fits the chunk best in least squares. At one bit the value is sign ×
    mean magnitude of the chunk. Values far beyond the grid follow as a list of exceptions: without it a coefficient
    that always drifts faster than its chunk would never be sent in full, and its residual would grow without bound.
    """
    if bits == 32:
        return tensor_bytes(values), values.clone()
    if bits == 16:
        narrow = narrow_bf16(values)
        return tensor_bytes(narrow), narrow.float()
    half = 1 << (bits - 1)
    magnitude = values.abs().double()  # fp64: huge and tiny chunks must neither overflow nor vanish in a sum
    beyond = magnitude > EXCEPTIONAL * max(1.0, half / 2) * magnitude.mean(dim=1, keepdim=True)
    level, step = fit_grid(magnitude, ~beyond, half)
    step16 = narrow_bf16(step.squeeze(1), largest_factor=max(1.0, half - 0.5))
    code = torch.where(values < 0, half - 0.5 - level, half - 0.5 + level).to(torch.int64)  # 0 … 2·half − 1
    decoded = grid(code, step16.float(), half)
    data = tensor_bytes(step16) + tensor_bytes(pack_fields(code.view(-1).cpu(), bits))
    return data + _pack_exceptions(values, beyond, decoded), decoded


def dequantise(reader: Reader, shape: tuple[int, int], bits: int, what: str) -> Tensor:
    """(c, k) values from their bytes: the inverse of `quantise`."""
    c, k = shape
    if bits >= 16:
        values = reader.tensor(c * k, {16: torch.bfloat16, 32: torch.float32}[bits], what).float().view(shape)
    else:
        step = reader.tensor(c, torch.bfloat16, f"scales, {what}").float()
        if bool((step < 0).any()):
            raise WireError(f"scales, {what}: a negative scale; the message is corrupt")
        values = grid(reader.fields(c * k, bits, what).view(shape), step, 1 << (bits - 1))
        _read_exceptions(reader, values, f"exceptions, {what}")
    if not bool(torch.isfinite(values).all()):
        raise WireError(f"{what}: not finite; the message is corrupt")
    return values


def _pack_exceptions(values: Tensor, beyond: Tensor, decoded: Tensor) -> bytes:
    """How many, where (gaps), and their values in bf16, which are put into ``decoded`` as well."""
    where = beyond.view(-1).nonzero().view(-1)
    count = where.numel().to_bytes(4, "little")
    if not where.numel():
        return count
    exact = narrow_bf16(values.reshape(-1)[where])
    decoded.view(-1)[where] = exact.float()
    gaps = torch.diff(where.cpu(), prepend=torch.tensor([-1])) - 1
    return count + pack_gaps(gaps, guess_width(values.numel(), where.numel())) + tensor_bytes(exact)


def _read_exceptions(reader: Reader, values: Tensor, what: str) -> None:
    count = int.from_bytes(reader.take(4, what), "little")
    if count > values.numel():
        raise WireError(f"{what}: {count} of {values.numel()} values; the message is corrupt")
    if not count:
        return
    where = (reader.gaps(count, values.numel(), what) + 1).cumsum(0) - 1
    if int(where[-1]) >= values.numel():
        raise WireError(f"{what}: beyond the {values.numel()} values; the message is corrupt")
    values.view(-1)[where] = reader.tensor(count, torch.bfloat16, what).float()


def grid(code: Tensor, step: Tensor, half: int) -> Tensor:
    """(code − half + ½) · step: codes (c, k), steps (c,)."""
    return (code.to(torch.float32) - (half - 0.5)) * step.unsqueeze(1)


def fit_grid(magnitude: Tensor, mask: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """(c, k) levels ½, 1½ … and (c, 1) steps that minimise Σ (magnitude − level · step)² over each chunk's mask."""
    magnitude = magnitude * mask
    level = torch.full_like(magnitude, 0.5)
    step = best_step(magnitude, level, mask)
    if half > 1:
        step = magnitude.amax(dim=1, keepdim=True) / (half - 0.5)
        for _ in range(3):  # assign and refit: converges in a few passes
            level = (magnitude / step.clamp_min(1e-300)).floor().clamp_max(half - 1) + 0.5
            step = best_step(magnitude, level, mask)
    return level, step


def best_step(magnitude: Tensor, level: Tensor, mask: Tensor) -> Tensor:
    """(c, 1): the step for these levels; 0 where nothing is left to fit."""
    squares = (mask * level * level).sum(dim=1, keepdim=True)
    return (magnitude * level).sum(dim=1, keepdim=True) / squares.clamp_min(0.25)


def narrow_bf16(values: Tensor, largest_factor: float = 1.0) -> Tensor:
    """Nearest bf16, kept small enough that ``largest_factor`` times it is finite (the rest is residual)."""
    most = torch.finfo(torch.bfloat16).max / largest_factor
    return values.clamp(-most, most).to(torch.float32).to(torch.bfloat16)


def mean(payloads: Sequence[Sparse], layout: Layout, device: torch.device, *, over_senders: bool) -> Tensor:
    """Flat mean of payloads, summed in the order given: over all of them, or per value over those that sent it."""
    total = layout.empty(device)
    for payload in payloads:
        payload.add_to(total)
    if not over_senders:
        # By a tensor: on GPUs a Python number would be turned into a product with its reciprocal.
        return total.div_(torch.tensor(float(len(payloads)), device=device))
    counts = layout.empty(device)
    for payload in payloads:
        payload.ones().add_to(counts)
    return total.div_(counts.clamp_min_(1))
