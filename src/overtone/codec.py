"""A codec turns the coefficients of a slab into a block of bytes, and back.

A codec may lose information. It reports the loss exactly: the values that `encode` returns as sent are, bit for bit,
the values that every receiver decodes.

Legend: c chunks in a slab, a values in a chunk (its area), k of them kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from statistics import NormalDist
from typing import Protocol

import torch
from torch import Tensor

from overtone.coding.bits import Reader, field_bytes, open_positions
from overtone.coding.chunks import Slab
from overtone.coding.kernels import Kernels, in_torch
from overtone.coding.kernels.in_torch import SparseGrid
from overtone.coding.layout import Layout
from overtone.coding.spectrum import gaussian_share
from overtone.coding.transforms import TRANSFORMS, TURNING, is_power_of_two
from overtone.coding.values import Values, encode_values, open_exceptions, open_steps, open_values
from overtone.errors import MethodError, NotFiniteError

BITS = (1, 2, 4, 8, 16, 32)
FULL_CHUNK = 64 * 64  # `keep` counts coefficients per chunk of this area; other chunks keep in proportion
MOST_CHUNK = 1024  # sums over larger chunks would not be exact any more (kernels.quantize)


class Payload(Enum):
    """The kind of payload that a codec makes, and so the pattern that its messages can follow."""

    BYTES = "bytes"  # for an all-gather: every replica reads the payloads of all replicas
    NUMBERS = "numbers"  # plain fp32 values, which an all-reduce can sum


@dataclass(frozen=True)
class Block:
    """The payload of one slab. ``numbers`` is set if the codec's payload can be summed, ``packed`` otherwise."""

    packed: bytes = b""
    numbers: Tensor | None = None


@dataclass(frozen=True)
class Decoded:
    """The contribution of one payload to a slab: (c, k) values, and the position of each value in its chunk.

    An ``index`` of None means that all values of a chunk are present, in order. Where chunks have different numbers of
    values, the slab counts as one long chunk: (1, n) values, and positions among all values of the slab.
    """

    index: Tensor | None  # (c, k) int64, each position once
    values: Tensor  # (c, k) float32
    kernels: Kernels = in_torch

    def add_to(self, here: Tensor, scale: float = 1.0) -> None:
        """here += scale · self. Two elementwise operations in a fixed order give the same result on every replica."""
        values = self.values if scale == 1.0 else self.values * scale
        if self.index is None:
            here.add_(values.to(here.device))
        else:
            self.kernels.add(here.view(len(self.index), -1), self.index, values)


class Codec(Protocol):
    """A codec is a set of frozen numbers with a few operations. It keeps no state between rounds.

    A payload consists of the blocks of all slabs, in the order of the layout.
    """

    @property
    def lossless(self) -> bool:
        """True if receivers decode exactly the values that were encoded."""
        ...

    @property
    def payload(self) -> Payload:
        """The kind of payload that this codec makes."""
        ...

    @property
    def turns(self) -> bool:
        """True if the basis is another one in each round."""
        ...

    @property
    def whole(self) -> Codec | None:
        """The codec of the draining messages: every coefficient at one bit. None if this codec leaves no residual."""
        ...

    def layout(self, shapes: Sequence[Sequence[int]]) -> Layout:
        """The layout that this codec uses for tensors of these shapes."""
        ...

    def describe(self) -> str:
        """What is sent, in sentences for people."""
        ...

    def kept(self, slab: Slab) -> int:
        """k: the number of values that are sent of each chunk of the slab."""
        ...

    def width(self, slab: Slab) -> int:
        """The number of bits of each value that is sent of the slab."""
        ...

    def energy_share(self) -> float:
        """The share of a residual's energy that one message takes."""
        ...

    def bits_of(self, slab: Slab) -> int:
        """About the least number of bits of a block of this slab."""
        ...

    def encode(self, coeffs: Tensor, slab: Slab, kernels: Kernels = in_torch) -> tuple[Block, Decoded]:
        """Return the block of a slab's coefficients (c, a), and the values that receivers will decode from it."""
        ...

    def decode(self, reader: Reader, slab: Slab, kernels: Kernels = in_torch) -> Decoded:
        """Decode the next block. Raises `WireError` if it is invalid. Time and memory are bounded for any bytes."""
        ...

    def check(self, reader: Reader, slab: Slab, kernels: Kernels = in_torch) -> None:
        """Validate the next block and read past it. Raises `WireError` exactly if `decode` would."""
        ...

    def decode_own(self, block: Block, slab: Slab, kernels: Kernels = in_torch) -> Decoded:
        """Return the values that receivers decode from a block that `encode` made on this replica."""
        ...


@dataclass(frozen=True)
class Dense:
    """No compression: every value is sent exactly, in fp32.

    Blocks are plain numbers, so an all-reduce can sum them. They can be gathered as well.
    """

    lossless = True
    turns = False
    payload = Payload.NUMBERS
    whole = None

    def layout(self, shapes: Sequence[Sequence[int]]) -> Layout:
        return Layout.flat(shapes)

    def describe(self) -> str:
        return "Every value is sent, in fp32."

    def kept(self, slab: Slab) -> int:
        return slab.area

    def width(self, slab: Slab) -> int:  # noqa: ARG002
        return 32

    def energy_share(self) -> float:
        return 1.0

    def bits_of(self, slab: Slab) -> int:
        return 32 * slab.size

    def encode(self, coeffs: Tensor, slab: Slab, kernels: Kernels = in_torch) -> tuple[Block, Decoded]:  # noqa: ARG002
        sent = coeffs.clone()
        return Block(numbers=sent), Decoded(None, sent)

    def decode(self, reader: Reader, slab: Slab, kernels: Kernels = in_torch) -> Decoded:  # noqa: ARG002
        return Decoded(None, reader.finite(slab.size, torch.float32, "values").view(slab.chunks, slab.area))

    def check(self, reader: Reader, slab: Slab, kernels: Kernels = in_torch) -> None:
        self.decode(reader, slab, kernels)

    def decode_own(self, block: Block, slab: Slab, kernels: Kernels = in_torch) -> Decoded:  # noqa: ARG002
        assert block.numbers is not None, "a block of another codec"
        return Decoded(None, block.numbers)


@dataclass(frozen=True)
class TopK:
    """Sends the ``keep`` strongest coefficients of each chunk, at ``bits`` bits each, with one scale per chunk.

    ``keep`` is the number for a chunk of 64 × 64. Smaller and larger chunks keep in proportion to their area, and at
    least one. Tensors of one axis and tensors of fewer than ``plain_below`` values are *plain*: they are not
    transformed, and of each 4096 values the strongest ``plain_keep`` are sent, in bf16 (fp32 if ``bits`` is 32). One
    bit would not do: a value that does not change must not be touched.
    """

    keep: int = 128
    bits: int = 1
    chunk: int = 64
    transform: str = "dct"
    plain_below: int = 1024
    plain_keep: int = FULL_CHUNK

    payload = Payload.BYTES

    def __post_init__(self) -> None:
        for name in ("keep", "bits", "chunk", "plain_below", "plain_keep"):
            # Not `isinstance`: it would accept True and False.
            if type(getattr(self, name)) is not int:
                raise MethodError(f"{name}={getattr(self, name)!r}: a whole number")
        if not 1 <= self.chunk <= MOST_CHUNK:
            raise MethodError(f"chunk={self.chunk}: the side of a chunk, from 1 to {MOST_CHUNK}; 64 is the default")
        for name in ("keep", "plain_keep"):
            if not 1 <= getattr(self, name) <= FULL_CHUNK:
                raise MethodError(
                    f"{name}={getattr(self, name)}: coefficients kept of each {FULL_CHUNK}; use 1 to {FULL_CHUNK}"
                )
        if self.bits not in BITS:
            raise MethodError(f"bits={self.bits}: a value travels in {', '.join(map(str, BITS))} bits")
        if not isinstance(self.transform, str) or self.transform not in TRANSFORMS:
            raise MethodError(f"transform={self.transform!r}: choose one of {', '.join(TRANSFORMS)}")
        if self.turns and not is_power_of_two(self.chunk):
            raise MethodError(f"chunk={self.chunk}: only sides that are powers of two can turn; use 32, 64 or 128")
        if self.plain_below < 0:
            raise MethodError(f"plain_below={self.plain_below}: a number of values, 0 or more")

    @property
    def turns(self) -> bool:
        """True if each round selects in another basis: coding/turns.py."""
        return self.transform == TURNING

    @property
    def lossless(self) -> bool:
        return self.keep == self.plain_keep == FULL_CHUNK and self.bits == 32

    @property
    def whole(self) -> TopK:
        """The same chunks with every coefficient kept at one bit. `finish` drains the residuals with it."""
        return replace(self, keep=FULL_CHUNK, bits=1, plain_keep=FULL_CHUNK)

    def layout(self, shapes: Sequence[Sequence[int]]) -> Layout:
        transform = TRANSFORMS[self.transform]
        return Layout(shapes, chunk=self.chunk, plain_below=self.plain_below, transform=transform)

    def describe(self) -> str:
        share = self.plain_keep / FULL_CHUNK
        densely = (
            "travel densely" if share == 1 else f"are not transformed, and the strongest {share:.0%} of them travel"
        )
        return (
            f"The strongest coefficients of each chunk travel at {self.bits} bit{'s' if self.bits > 1 else ''}; "
            f"tensors of one axis and those of fewer than {self.plain_below} values {densely}. Sizes are the "
            "least possible: real messages are within 6 % of them if at most half is kept, and outliers add to them."
        )

    def kept(self, slab: Slab) -> int:
        """k: the number of values that are sent of each chunk of the slab."""
        keep = self.plain_keep if slab.plain else self.keep
        return min(slab.area, max(1, round(keep * slab.area / FULL_CHUNK)))

    def width(self, slab: Slab) -> int:
        """The number of bits of each value that is sent. Plain slabs have 16 at least."""
        return max(self.bits, 16) if slab.plain else self.bits

    def bits_of(self, slab: Slab) -> int:
        """log2 C(a, k) for the positions of each chunk, k · bits for its values, 16 for its scale.

        Messages are within 6 % of it if less than half of a chunk is kept: tests/test_codec.py.
        """
        k, width = self.kept(slab), self.width(slab)
        return slab.chunks * (position_bits(slab.area, k) + k * width + (16 if width < 16 else 0))

    def energy_share(self) -> float:
        """The share of a residual's energy that one message takes, if the coefficients are Gaussian.

        A transform that mixes makes them so: docs/spectrum.md. Of the strongest p = keep / 4096 it takes the whole
        energy, and at one bit the square of their mean magnitude only.
        """
        p, bell = self.keep / FULL_CHUNK, NormalDist()
        if self.bits > 1:
            return gaussian_share(p)
        least = -bell.inv_cdf(p / 2)  # a fraction p lies beyond ± this
        return (2 * bell.pdf(least)) ** 2 / p

    def encode(self, coeffs: Tensor, slab: Slab, kernels: Kernels = in_torch) -> tuple[Block, Decoded]:
        k, width = self.kept(slab), self.width(slab)
        try:
            data, values, index = encode_values(coeffs, width, kernels, k)
        except NotFiniteError:
            # Only now, on the way to an error, is it worth a pass to find the tensor at fault.
            bad = (~torch.isfinite(coeffs)).nonzero()
            chunk, position = bad[0].tolist()
            raise NotFiniteError(slab.tensor_of(chunk, position)) from None
        return Block(data), Decoded(index, values, kernels)

    def decode(self, reader: Reader, slab: Slab, kernels: Kernels = in_torch) -> Decoded:
        index, values = self._open(reader, slab, kernels)
        return Decoded(index, values(), kernels)

    def check(self, reader: Reader, slab: Slab, kernels: Kernels = in_torch) -> None:
        self._open(reader, slab, kernels)

    def decode_own(self, block: Block, slab: Slab, kernels: Kernels = in_torch) -> Decoded:
        return self.decode(Reader(block.packed), slab, kernels)

    def is_sparse_grid(self, slab: Slab) -> bool:
        """True if blocks of this slab are positions and codes on a grid."""
        return self.kept(slab) < slab.area and self.width(slab) < 16

    def open_sparse_grid(self, reader: Reader, slab: Slab, kernels: Kernels) -> SparseGrid:
        """Read the parts of the next block. The positions are verified when they are used."""
        k, bits, where = self.kept(slab), self.width(slab), f"chunks of {slab.h}x{slab.w}"
        what = f"positions, {where}"
        coded = open_positions(reader, (slab.chunks, k), slab.area, what)
        step = open_steps(reader, slab.chunks, bits, where)
        codes = reader.take(field_bytes(slab.chunks * k, bits), f"values, {where}")
        return SparseGrid(coded, k, what, step, codes, bits, open_exceptions(reader, slab.chunks * k, where, kernels))

    def _open(self, reader: Reader, slab: Slab, kernels: Kernels) -> tuple[Tensor | None, Values]:
        k, where = self.kept(slab), f"chunks of {slab.h}x{slab.w}"
        return open_values(reader, (slab.chunks, k), self.width(slab), where, kernels, slab.area)


@lru_cache(maxsize=1024)
def position_bits(area: int, k: int) -> int:
    """The least number of bits for k of ``area`` positions: log2 C(area, k), rounded up.

    It is computed in whole numbers, so that all replicas find the same. The exact number takes long for a large area;
    then this is about the length of a Rice code.
    """
    if area <= FULL_CHUNK:
        return (math.comb(area, k) - 1).bit_length()
    return 0 if k == area else k * ((area // k).bit_length() + 1)


def check_payload(codec: Codec, reader: Reader, layout: Layout, kernels: Kernels = in_torch) -> None:
    """Read a whole payload and discard it. Raises `WireError` if it would not decode."""
    for slab in layout.slabs:
        codec.check(reader, slab, kernels)
    reader.end()


def mean_of_blocks(
    codec: Codec,
    readers: Sequence[Reader],
    slab: Slab,
    count: int,
    out: Tensor,
    *,
    over_senders: bool,
    kernels: Kernels,
) -> Tensor:
    """`mean` of the next block of each reader. Where a codec can, it adds a block without unpacking it first."""
    if over_senders or not isinstance(codec, TopK) or not codec.is_sparse_grid(slab):
        decoded = (codec.decode(reader, slab, kernels) for reader in readers)
        return mean(decoded, count, out, over_senders=over_senders)
    out.zero_()
    for reader in readers:
        kernels.add_share(out, codec.open_sparse_grid(reader, slab, kernels), count)
    return out


def mean(decoded: Iterable[Decoded], count: int, out: Tensor, *, over_senders: bool) -> Tensor:
    """Write the mean of ``count`` payloads of a slab into ``out`` (c, a), summed in the order given.

    The mean is over all payloads, or with ``over_senders``, for each value over the payloads that contain it. In the
    mean over all payloads, sparse values are divided before they are summed. This needs far fewer divisions, and the
    result is the same on every replica.
    """
    # The divisor is a tensor: on GPUs, torch turns the division by a Python number into a product with its reciprocal.
    everybody = torch.tensor(float(count), device=out.device)
    out.zero_()
    senders = torch.zeros_like(out) if over_senders else None
    dense = False
    for one in decoded:
        dense = one.index is None
        if senders is not None:
            one.add_to(out)
            replace(one, values=torch.ones_like(one.values)).add_to(senders)
        elif dense:
            one.add_to(out)
        else:
            replace(one, values=one.values / everybody.to(one.values.device)).add_to(out)
    if senders is not None:
        return out.div_(senders.clamp_min_(1))  # a value that no replica sent stays 0
    return out.div_(everybody) if dense else out
