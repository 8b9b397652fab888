"""The inner loops of the codec as whole-tensor operations. They run on any device and need only torch.

Legend: c chunks in a slab, a values in a chunk (its area), k of them kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# Packing is the same on any device, so the functions of bits.py serve as they are.
from overtone.coding.bits import (
    bytes_tensor,
    decode_positions,
    pack_codes,
    pack_positions,
    unpack_fields,
    unpack_positions,
)
from overtone.coding.transforms import Transform, full_precision

__all__ = [
    "OuterStep",
    "add",
    "add_share",
    "difference_forward",
    "forward",
    "inverse",
    "inverse_patch",
    "outer_answer",
    "outer_patches",
    "pack_codes",
    "pack_positions",
    "quantize",
    "row_hashes",
    "select",
    "unpack_grid",
    "unpack_positions",
]

# A value of more than so many times the mean of its chunk is an exception. Where the grid reaches further, the factor
# is larger.
EXCEPTIONAL = 4.0
PASSES = 3  # how often levels are assigned and the step is fitted again
FRACTION = 24  # the number of bits of a magnitude in the fit of a step


def select(coeffs: Tensor, k: int) -> Tensor:
    """(c, a) to (c, k): the positions of the k < a largest magnitudes, ascending. The lower position wins a tie.

    Magnitudes are compared by their bits, which sort as whole numbers. Infinity and NaN are the largest.
    """
    c, _ = coeffs.shape
    strength = coeffs.view(torch.int32) & 0x7FFFFFFF
    weakest = strength.topk(k, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    chosen = strength >= weakest
    if int(chosen.sum()) != c * k:  # ties at the threshold: keep just enough of them, from the front
        above = strength > weakest
        ties = strength == weakest
        room = k - above.sum(dim=1, keepdim=True)
        chosen = above | (ties & (ties.cumsum(dim=1) <= room))
    return chosen.nonzero()[:, 1].view(c, k)


# -- values: a uniform grid per chunk ------------------------------------------------------------------------------


def quantize(values: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """(c, k) values to (c,) bf16 steps, (c, k) uint8 codes, and the positions of the exceptions among the c · k values.

    Code q stands for (q − half + ½) · step with half = 2**(bits − 1). This grid is symmetric about zero. Its step is
    the best fit in least squares. In the fit, magnitudes are whole numbers of 24 bits, scaled by the chunk's largest,
    so that all sums are exact in fp64, in any order. Exceptions are too far beyond the grid and are not fitted.
    """
    _, k = values.shape
    half = 1 << (bits - 1)
    magnitude = values.abs()
    _, exponent = torch.frexp(magnitude.amax(dim=1, keepdim=True))
    scale = ((1023 + FRACTION - exponent.to(torch.int64)) << 52).view(torch.float64)  # 2**(24 − exponent), exactly
    whole = (magnitude.double() * scale).floor_()
    far = whole * k > EXCEPTIONAL * max(1.0, half / 2) * whole.sum(dim=1, keepdim=True)
    whole.masked_fill_(far, 0.0)
    level, step = _fit(whole, (~far).double(), half)
    narrow = (step / scale).clamp_(max=largest_step(bits, torch.bfloat16)).to(torch.float32).to(torch.bfloat16)
    codes = torch.where(values < 0, half - 1 - level, half + level).to(torch.uint8)
    return narrow.view(-1), codes, far.view(-1).nonzero().view(-1)


def _fit(whole: Tensor, mask: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """(c, k) levels and (c, 1) steps that minimize Σ (whole − (level + ½) · step)² over the values with mask 1."""
    level = torch.zeros_like(whole)
    if half == 1:
        return level, 2 * whole.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp_min_(1)
    step = whole.amax(dim=1, keepdim=True) / (half - 0.5)
    for _ in range(PASSES):
        level = (whole / step.masked_fill(step == 0, 1.0)).floor_().clamp_(max=half - 1)
        odd = (2 * level + 1) * mask
        step = 2 * (whole * odd).sum(dim=1, keepdim=True) / (odd * odd).sum(dim=1, keepdim=True).clamp_min_(1)
    return level, step


def largest_step(bits: int, dtype: torch.dtype) -> float:
    """The largest step for which every point of the grid is finite in ``dtype``."""
    return torch.finfo(dtype).max / max(1.0, (1 << (bits - 1)) - 0.5)


def unpack_grid(packed: bytes, step: Tensor, k: int, bits: int) -> Tensor:
    """(c, k) values from their codes and the (c,) steps."""
    codes = unpack_fields(bytes_tensor(packed, torch.uint8), len(step) * k, bits)
    return grid(codes.view(len(step), k), step, bits)


def grid(codes: Tensor, step: Tensor, bits: int) -> Tensor:
    """(q − half + ½) · step: codes (c, k), steps (c,). Exact in fp32: both factors are short."""
    return (codes.to(torch.float32) - ((1 << (bits - 1)) - 0.5)).mul_(step.float().unsqueeze(1))


# -- sums ----------------------------------------------------------------------------------------------------------


def add(here: Tensor, index: Tensor, values: Tensor) -> None:
    """here[chunk, index] += values, in place. Positions are unique within a chunk."""
    index, values = index.to(here.device), values.to(here.device)
    here.scatter_(1, index, here.gather(1, index) + values)


@dataclass(frozen=True)
class SparseGrid:
    """A block of Rice-coded positions and of codes on a grid, as it was received: c chunks, k values in each."""

    positions: tuple[int, bytes, bytes]  # see `bits.open_positions`
    k: int
    what: str  # names the positions in an error
    step: Tensor  # (c,) fp32
    codes: bytes
    bits: int
    exceptions: tuple[Tensor, Tensor] | None  # ascending places among the c · k values, and fp32 values


def add_share(here: Tensor, block: SparseGrid, count: int) -> None:
    """here += values / count, (c, a) in place. Raises `WireError` if a position is invalid.

    Each value is divided by itself, before it is added. ``here`` may then have changed in part.
    """
    c, area = here.shape
    index = decode_positions(block.positions, (c, block.k), area, block.what)
    values = unpack_grid(block.codes, block.step, block.k, block.bits)
    if block.exceptions is not None:
        far, exact = block.exceptions
        values.view(-1)[far] = exact
    # The divisor is a tensor: on GPUs, torch turns the division by a Python number into a product with its reciprocal.
    add(here, index, values / torch.tensor(float(count)))


# -- transforms ----------------------------------------------------------------------------------------------------


def difference(plus: Tensor, minus: Tensor, out: Tensor) -> float:
    """Cut plus − minus, both (down · h, across · w) in fp32, into chunks ``out`` (down, across, h, w).

    Returns the sum of their squares, to rounding: it is for reports, and nothing else depends on it.
    """
    down, across, h, w = out.shape
    torch.sub(*(matrix.view(down, h, across, w).transpose(1, 2) for matrix in (plus, minus)), out=out)
    return float(torch.linalg.vector_norm(out)) ** 2


def forward(transform: Transform, chunks: Tensor, between: Tensor, out: Tensor, *, keep: float, scale: float) -> None:
    """out ← keep · out + coefficients / scale, all (c, h, w). ``between`` is scratch; ``chunks`` stay as they are."""
    transform.forward(chunks, between, out, keep=keep, scale=scale)


def difference_forward(
    transform: Transform,
    shape: tuple[int, int],
    plus: Sequence[Tensor],
    minus: Sequence[Tensor],
    chunks: Tensor,
    between: Tensor,
    out: Tensor,
    *,
    keep: float,
    scale: float,
) -> float:
    """`difference` of each pair of patches, which fill ``chunks`` (scratch) in their order; then `forward` of all.

    Returns the sum of the squares of all differences.
    """
    (h, w), squares = shape, 0.0
    parts = chunks.split([patch.numel() // (h * w) for patch in plus])
    for here, there, part in zip(plus, minus, parts, strict=True):
        squares += difference(here, there, part.view(-1, here.shape[1] // w, h, w))
    whole, spare, place = (tensor.view(-1, h, w) for tensor in (chunks, between, out))
    forward(transform, whole, spare, place, keep=keep, scale=scale)
    return squares


def inverse(transform: Transform, coeffs: Tensor, between: Tensor, out: Tensor) -> None:
    """The values of (c, h, w) coefficients. ``between`` is scratch."""
    transform.inverse(coeffs, between, out)


def inverse_patch(transform: Transform, coeffs: Tensor, between: Tensor, out: Tensor) -> None:
    """Write the values of (down, across, h, w) coefficients directly into their part of a matrix.

    ``out`` is (down · h, across · w) in fp32. One row of chunks is written after the other, which saves a copy.
    """
    with full_precision(coeffs.device):
        for chunks, strip in zip(coeffs, out.split(coeffs.shape[2]), strict=True):
            transform.inverse_strip(chunks, between, strip)


# -- the outer step ------------------------------------------------------------------------------------------------


def outer_step(anchor: Tensor, momentum: Tensor | None, mean: Tensor, *, lr: float, mu: float) -> None:
    """M ← μ·M + u;  Θ ← Θ − η·(u + μ·M), in place. Nesterov as in ``torch.optim.SGD``: tests/test_equivalence.py.

    It is written as single elementwise operations. With ``alpha=`` or a fused multiply-add, other devices would round
    differently.
    """
    if momentum is None:
        anchor.sub_(mean.mul(lr))
        return
    momentum.mul_(mu).add_(mean)
    anchor.sub_(momentum.mul(mu).add_(mean).mul_(lr))


def carried(anchor: Tensor, residual: Tensor | None, carry: float) -> Tensor:
    """Θ − λ·E: the weights from which this replica starts the next round."""
    if residual is None or carry == 0.0:
        return anchor
    return anchor.sub(residual.mul(carry))


class OuterStep(NamedTuple):
    """What an outer step changes and what it reads: state and mean of a slab, (c, a) each, and the rule's numbers."""

    anchor: Tensor
    momentum: Tensor | None
    residual: Tensor | None
    mean: Tensor
    lr: float
    mu: float
    carry: float


def outer_answer(step: OuterStep) -> Tensor:
    """`outer_step`, then `carried`. The answer may lie in the memory of the mean, whose values are lost then."""
    outer_step(step.anchor, step.momentum, step.mean, lr=step.lr, mu=step.mu)
    return carried(step.anchor, step.residual, step.carry)


def outer_patches(
    transform: Transform, shape: tuple[int, int], step: OuterStep, between: Tensor, patches: Sequence[Tensor]
) -> None:
    """`outer_answer`, then `inverse_patch` of the answer: its chunks of this shape fill the patches in their order."""
    h, w = shape
    parts = outer_answer(step).split([patch.numel() // (h * w) for patch in patches])
    for part, patch in zip(parts, patches, strict=True):
        inverse_patch(transform, part.view(-1, patch.shape[1] // w, h, w), between, patch)


# -- fingerprints --------------------------------------------------------------------------------------------------


_ROWS = 64  # so many rows are hashed at once, so that they stay in the cache


def row_hashes(words: Tensor, weights: Tensor) -> Tensor:
    """(r, l) 64-bit words and (l,) weights to (r,) hashes: Σ weight · (word ^ word >> 32) modulo 2**64 for each row."""
    mixed = torch.empty_like(words[:_ROWS])
    hashes = torch.empty(len(words), dtype=torch.int64, device=words.device)
    for first in range(0, len(words), _ROWS):
        some = words[first : first + _ROWS]
        here = torch.bitwise_right_shift(some, 32, out=mixed[: len(some)])
        here.bitwise_and_(0xFFFFFFFF).bitwise_xor_(some).mul_(weights)  # int64 wraps, as modulo 2**64 must
        torch.sum(here, dim=1, out=hashes[first : first + _ROWS])
    return hashes
