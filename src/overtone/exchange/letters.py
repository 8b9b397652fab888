"""The codec of an owner's letter: the mean of a part, made sparse again.

It differs from the codec of messages in one point. The mean of few messages has fewer values than the letter may have,
and zeros would only cost bytes. So a letter has *up to* ``keep`` values of each chunk. Chunks then have different
numbers of values, and positions are counted through the whole piece. docs/wire.md specifies the bytes.

Legend: c chunks in a piece, a values in a chunk, n values that the letter has of all chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from overtone.codec import MOST_BF16, Block, Decoded, TopK, Values, open_exceptions, open_steps, pack_exceptions
from overtone.coding.bits import Reader, bytes_tensor, field_bytes, tensor_bytes, unpack_fields
from overtone.coding.chunks import Slab
from overtone.coding.kernels import Kernels
from overtone.coding.kernels.in_torch import EXCEPTIONAL, FRACTION, PASSES, grid, largest_step
from overtone.errors import NotFiniteError, WireError


@dataclass(frozen=True)
class LetterCodec:
    """Sends up to ``top_k.keep`` of the strongest values of each chunk, without zeros.

    Where all values are sent (plain values, or all coefficients), the letter has the block of `TopK`.
    """

    top_k: TopK

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
        return self._pack(positions[some].cpu(), values[some].cpu(), piece, kernels)

    def _pack(self, positions: Tensor, values: Tensor, piece: Slab, kernels: Kernels) -> tuple[Block, Decoded]:
        n, bits = values.numel(), self.top_k.bits
        data = n.to_bytes(4, "little")
        if n == 0:
            return Block(data), Decoded(positions.view(1, -1), values.view(1, -1), kernels)
        data += kernels.pack_positions(positions.view(1, -1), piece.size)
        if bits >= 16:
            sent = values if bits == 32 else values.clamp(-MOST_BF16, MOST_BF16).to(torch.bfloat16)
            decoded = sent.float()
            data += tensor_bytes(sent)
        else:
            chunk = positions // piece.area
            step, codes, far = quantize(values, chunk, piece.chunks, bits)
            decoded = grid(codes.view(-1, 1), step[chunk], bits).view(-1)
            data += tensor_bytes(step) + kernels.pack_codes(codes, bits)
            data += pack_exceptions(values, decoded, far, kernels)
        return Block(data), Decoded(positions.view(1, -1), decoded.view(1, -1), kernels)

    def decode(self, reader: Reader, piece: Slab, kernels: Kernels) -> Decoded:
        """Decode the next block. Raises `WireError` if it is invalid. Time and memory are bounded for any bytes."""
        if self.top_k.kept(piece) == piece.area:
            return self.top_k.decode(reader, piece, kernels)
        index, values = self._open(reader, piece, kernels)
        return Decoded(index, values(), kernels)

    def check(self, reader: Reader, piece: Slab, kernels: Kernels) -> None:
        """Validate the next block and read past it. Raises `WireError` exactly if `decode` would."""
        if self.top_k.kept(piece) == piece.area:
            self.top_k.check(reader, piece, kernels)
        else:
            self._open(reader, piece, kernels)

    def _open(self, reader: Reader, piece: Slab, kernels: Kernels) -> tuple[Tensor, Values]:
        bits, where = self.top_k.bits, f"chunks of {piece.h}x{piece.w}"
        n, most = reader.number(4, f"values, {where}"), piece.chunks * self.top_k.kept(piece)
        if n > most:  # checked before any memory is reserved for so many
            raise WireError(f"values, {where}: {n}, where {most} are the most; the message is corrupt")
        if n == 0:
            return torch.empty(1, 0, dtype=torch.int64), lambda: torch.empty(1, 0)
        index = kernels.unpack_positions(reader, (1, n), piece.size, f"positions, {where}")
        if bits >= 16:
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


def quantize(values: Tensor, chunk: Tensor, c: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """(n,) values with the number of the chunk of each, to (c,) bf16 steps, (n,) codes, and the places of exceptions.

    The same fit as `coding.kernels.in_torch.quantize`, for chunks with different numbers of values: all sums are exact.
    """
    half = 1 << (bits - 1)

    def total(numbers: Tensor) -> Tensor:
        return torch.zeros(c, dtype=torch.float64).index_add_(0, chunk, numbers)

    def largest(numbers: Tensor) -> Tensor:
        return torch.zeros(c, dtype=numbers.dtype).scatter_reduce_(0, chunk, numbers, "amax")

    magnitude = values.abs()
    _, exponent = torch.frexp(largest(magnitude))
    scale = ((1023 + FRACTION - exponent.to(torch.int64)) << 52).view(torch.float64)  # 2**(24 − exponent), exactly
    whole = (magnitude.double() * scale[chunk]).floor_()
    count = total(torch.ones_like(whole))
    far = whole * count[chunk] > EXCEPTIONAL * max(1.0, half / 2) * total(whole)[chunk]
    whole.masked_fill_(far, 0.0)
    fitted = (~far).double()
    level = torch.zeros_like(whole)
    if half == 1:
        step = 2 * total(whole) / total(fitted).clamp_min_(1)
    else:
        step = largest(whole) / (half - 0.5)
        for _ in range(PASSES):
            level = (whole / step.masked_fill(step == 0, 1.0)[chunk]).floor_().clamp_(max=half - 1)
            odd = (2 * level + 1) * fitted
            step = 2 * total(whole * odd) / total(odd * odd).clamp_min_(1)
    narrow = (step / scale).clamp_(max=largest_step(bits, torch.bfloat16)).to(torch.float32).to(torch.bfloat16)
    codes = torch.where(values < 0, half - 1 - level, half + level).to(torch.uint8)
    return narrow, codes, far.nonzero().view(-1)
