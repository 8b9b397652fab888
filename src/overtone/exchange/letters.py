"""The codec of an owner's letter: the mean of a part, made sparse again.

It differs from the codec of messages in two points. The mean of few messages has fewer values than the letter may have,
and zeros would only cost bytes: so a letter has *up to* ``keep`` values of each chunk, and positions are counted
through the whole piece. And the mean has values of several sizes: what two replicas sent is twice as large as what one
did, and one bit would make them equal. So a letter has *layers*: the strong values, then the others. A layer has signs,
and one magnitude for each chunk. docs/wire.md specifies the bytes.

Legend: c chunks in a piece, a values in a chunk, n values of all chunks in a layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from overtone.codec import FULL_CHUNK, Block, Decoded, TopK
from overtone.coding.bits import Reader, bytes_tensor, field_bytes, tensor_bytes, unpack_fields
from overtone.coding.chunks import Slab
from overtone.coding.kernels import Kernels
from overtone.coding.kernels.in_torch import EXCEPTIONAL, FRACTION, grid, largest_step
from overtone.coding.values import MOST_BF16, NO_EXCEPTIONS, Values, open_exceptions, open_steps, pack_exceptions
from overtone.errors import NotFiniteError, WireError

ENOUGH = 512  # coefficients of a letter, of each 64 x 64 chunk: what 8 replicas send with keep 64
FLAT_FROM = 16  # replicas; with more of them letters shrink, so that a replica's bytes do not grow
PASSES = 4  # how often values are assigned to layers, and the mean magnitudes of the layers are computed again


@dataclass(frozen=True)
class LetterCodec:
    """Sends up to ``top_k.keep`` of the strongest values of each chunk, without zeros: in two layers of one bit if
    messages have one bit per value, else in one layer of bf16 or fp32.

    Where all values are sent (plain values, or all coefficients), the letter has the block of `TopK`.
    """

    top_k: TopK

    def bits_of(self, piece: Slab) -> int:
        """About the number of bits of a block that is full."""
        k = self.top_k.kept(piece)
        bits = self.top_k.bits_of(piece)
        if k == piece.area or self.top_k.width(piece) > 1:
            return bits
        return bits + piece.chunks * (16 + 7 * k // 10)  # which layer a value is in takes about 0.7 bits

    # -- writing -----------------------------------------------------------------------------------------------------

    def encode(self, mean: Tensor, piece: Slab, kernels: Kernels) -> tuple[Block, Decoded]:
        """The block of the mean (c, a) of a piece, and the values that all replicas will decode from it."""
        k = self.top_k.kept(piece)
        if k == piece.area:
            return self.top_k.encode(mean, piece, kernels)
        rows = torch.arange(piece.chunks, device=mean.device).unsqueeze(1) * piece.area
        positions = (kernels.select(mean, k).to(mean.device) + rows).view(-1)
        values = mean.view(-1)[positions]
        if not bool(torch.isfinite(values).all()):
            bad = (~torch.isfinite(values)).nonzero()[0]
            raise NotFiniteError(piece.tensor_of(*divmod(int(positions[bad]), piece.area)))
        some = values != 0
        positions, values = positions[some].cpu(), values[some].cpu()
        blocks, decoded = [], torch.empty_like(values)
        for layer in self._layers(values, positions // piece.area, piece):
            data, decoded[layer] = self._pack(positions[layer], values[layer], piece, kernels)
            blocks.append(data)
        return Block(b"".join(blocks)), Decoded(positions.view(1, -1), decoded.view(1, -1), kernels)

    def _layers(self, values: Tensor, chunk: Tensor, piece: Slab) -> list[Tensor]:
        """Which values are in each layer."""
        if self.top_k.width(piece) > 1:
            return [torch.ones_like(values, dtype=torch.bool)]
        strong = are_strong(values, chunk, piece.chunks)
        return [strong, ~strong]

    def _pack(self, positions: Tensor, values: Tensor, piece: Slab, kernels: Kernels) -> tuple[bytes, Tensor]:
        """The bytes of a layer, and the values that they decode to."""
        n, bits = values.numel(), self.top_k.width(piece)
        data = n.to_bytes(4, "little")
        if n == 0:
            return data, values
        data += kernels.pack_positions(positions.view(1, -1), piece.size)
        if bits > 1:
            sent = values if bits == 32 else values.clamp(-MOST_BF16, MOST_BF16).to(torch.bfloat16)
            return data + tensor_bytes(sent), sent.float()
        chunk = positions // piece.area
        step, far = steps_of(values, chunk, piece.chunks)
        codes = (values >= 0).to(torch.uint8)
        decoded = grid(codes.view(-1, 1), step[chunk], bits).view(-1)
        data += tensor_bytes(step) + kernels.pack_codes(codes, bits)
        exceptions = pack_exceptions(values, decoded, far, kernels) if far.numel() else NO_EXCEPTIONS
        return data + exceptions, decoded

    # -- reading -----------------------------------------------------------------------------------------------------

    def decode(self, reader: Reader, piece: Slab, kernels: Kernels) -> Decoded:
        """Decode the next block. Raises `WireError` if it is invalid. Time and memory are bounded for any bytes."""
        if self.top_k.kept(piece) == piece.area:
            return self.top_k.decode(reader, piece, kernels)
        layers = self._open(reader, piece, kernels)
        index = torch.cat([index for index, _ in layers], dim=1)
        return Decoded(index, torch.cat([values() for _, values in layers], dim=1), kernels)

    def check(self, reader: Reader, piece: Slab, kernels: Kernels) -> None:
        """Validate the next block and read past it. Raises `WireError` exactly if `decode` would."""
        if self.top_k.kept(piece) == piece.area:
            self.top_k.check(reader, piece, kernels)
        else:
            self._open(reader, piece, kernels)

    def _open(self, reader: Reader, piece: Slab, kernels: Kernels) -> list[tuple[Tensor, Values]]:
        layers = [self._open_layer(reader, piece, kernels) for _ in range(2 if self.top_k.width(piece) == 1 else 1)]
        if len(layers) == 2:
            (first, _), (second, _) = layers
            if bool(marks(first, piece)[second].any()):
                raise WireError(
                    f"positions, chunks of {piece.h}x{piece.w}: one is in both layers; the message is corrupt"
                )
        return layers

    def _open_layer(self, reader: Reader, piece: Slab, kernels: Kernels) -> tuple[Tensor, Values]:
        bits, where = self.top_k.width(piece), f"chunks of {piece.h}x{piece.w}"
        n, most = reader.number(4, f"values, {where}"), piece.chunks * self.top_k.kept(piece)
        if n > most:  # checked before any memory is reserved for so many
            raise WireError(f"values, {where}: {n}, where {most} are the most; the message is corrupt")
        if n == 0:
            return torch.empty(1, 0, dtype=torch.int64), lambda: torch.empty(1, 0)
        index = kernels.unpack_positions(reader, (1, n), piece.size, f"positions, {where}")
        if bits > 1:
            given = reader.finite(n, torch.bfloat16 if bits == 16 else torch.float32, f"values, {where}")
            return index, lambda: given.float().view(1, -1)
        step = open_steps(reader, piece.chunks, bits, where)
        packed = bytes_tensor(reader.take(field_bytes(n, bits), f"values, {where}"), torch.uint8)
        exceptions = open_exceptions(reader, n, where, kernels)

        def values() -> Tensor:
            codes = unpack_fields(packed, n, bits).view(-1, 1)
            decoded = grid(codes, step[index.view(-1) // piece.area], bits).view(1, -1)
            if exceptions is not None:
                decoded.view(-1)[exceptions[0]] = exceptions[1]
            return decoded

        return index, values


def marks(index: Tensor, piece: Slab) -> Tensor:
    """A flag for each place of a piece: True at these positions. Much faster than to sort or to search."""
    flags = torch.zeros(piece.size, dtype=torch.bool)
    flags[index.view(-1)] = True
    return flags


def letters_for(codec: TopK, keep_down: int | None, members: int) -> LetterCodec:
    """The codec of the owners' letters among so many replicas."""
    # Letters have layers of one bit, or values that are as exact as those of messages.
    bits = {1: 1, 2: 1, 32: 32}.get(codec.bits, 16)
    keep = keep_down or default_keep_down(codec.keep, members)
    return LetterCodec(replace(codec, keep=keep, bits=bits, plain_keep=min(FULL_CHUNK, members * codec.plain_keep)))


def default_keep_down(keep: int, members: int) -> int:
    """How many coefficients of a 64 x 64 chunk a letter has: as many as all messages together, at most 512 (twice as
    many as a message, if that is more). With more than 16 replicas it falls towards half of that.
    """
    most = min(FULL_CHUNK, max(ENOUGH, 2 * keep), members * keep)
    if members <= FLAT_FROM:
        return most
    return max(keep, most * (members + FLAT_FROM) // (2 * members))


# -- magnitudes ------------------------------------------------------------------------------------------------------


def are_strong(values: Tensor, chunk: Tensor, c: int) -> Tensor:
    """Which of the (n,) values belong to the layer of strong ones. ``chunk`` has the number of the chunk of each.

    In each chunk the values fall into two groups by magnitude, such that the squared distances to the groups' means are
    small (Lloyd's algorithm).
    """
    whole, _ = _whole(values, chunk, c)
    # From above the mean: at the mean itself, values that one replica sent, which hardly differ, would be split in two.
    limit = 1.5 * _mean(whole, torch.ones_like(whole), chunk, c)
    for _ in range(PASSES):
        strong = (whole > limit[chunk]).double()
        limit = (_mean(whole, strong, chunk, c) + _mean(whole, 1 - strong, chunk, c)) / 2
    return whole > limit[chunk]


def steps_of(values: Tensor, chunk: Tensor, c: int) -> tuple[Tensor, Tensor]:
    """(c,) bf16 steps of a grid of one bit for (n,) values, and the places of exceptions.

    As `coding.kernels.in_torch.quantize`, but for chunks with different numbers of values.
    """
    whole, scale = _whole(values, chunk, c)
    mean = _mean(whole, torch.ones_like(whole), chunk, c)
    far = whole > EXCEPTIONAL * mean[chunk]
    step = 2 * _mean(whole, (~far).double(), chunk, c)
    narrow = (step / scale).clamp_(max=largest_step(1, torch.bfloat16)).to(torch.float32).to(torch.bfloat16)
    return narrow, far.nonzero().view(-1)


def _whole(values: Tensor, chunk: Tensor, c: int) -> tuple[Tensor, Tensor]:
    """The magnitudes as whole numbers of 24 bits, scaled by the largest of each chunk; and the (c,) scales.

    Sums of them are exact, so that no order of summation matters.
    """
    magnitude = values.abs()
    _, exponent = torch.frexp(torch.zeros(c).scatter_reduce_(0, chunk, magnitude, "amax"))
    scale = ((1023 + FRACTION - exponent.to(torch.int64)) << 52).view(torch.float64)  # 2**(24 − exponent), exactly
    return (magnitude.double() * scale[chunk]).floor_(), scale


def _mean(whole: Tensor, counts: Tensor, chunk: Tensor, c: int) -> Tensor:
    """The (c,) means of those that count 1 and not 0. The mean of none is 0."""
    total = torch.zeros(c, dtype=torch.float64).index_add_(0, chunk, whole * counts)
    return total / torch.zeros(c, dtype=torch.float64).index_add_(0, chunk, counts).clamp_min_(1)
