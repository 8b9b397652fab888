"""The functions of `in_torch`, compiled for the CPU by numba: bit-identical results, several times faster.

Tensors are passed as numpy views of the same memory. The loops are in the files numba_*.py. The first use on a
machine compiles for some seconds; numba keeps the result on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from overtone.coding.bits import Reader, beyond, field_bytes, miscounted, open_positions, widths
from overtone.coding.kernels import in_torch, numba_codec, numba_fused, numba_select, numba_sums, numba_transforms
from overtone.coding.kernels.in_torch import OuterStep, SparseGrid, largest_step
from overtone.coding.transforms import DCT, HADAMARD, Transform, hadamard_gain

SIDE = numba_transforms.SIDE
# For each transform with compiled loops: its kind, the kind of its inverse, and the factor that makes it orthonormal.
_COMPILED: dict[Transform, tuple[int, int, float]] = {
    DCT: (numba_transforms.TO_COSINES, numba_transforms.FROM_COSINES, 2 / SIDE),
    HADAMARD: (numba_transforms.TO_SUMS, numba_transforms.TO_SUMS, hadamard_gain(SIDE, SIDE)),
}

_NO_PLACES, _NO_VALUES = np.empty(0, np.int64), np.empty(0, np.float32)


def select(coeffs: Tensor, k: int) -> Tensor:
    """See `in_torch.select`."""
    index = np.empty((len(coeffs), k), np.int64)
    numba_select.select(coeffs.contiguous().view(torch.int32).numpy(), k, index)
    return torch.from_numpy(index)


def pack_positions(index: Tensor, area: int) -> bytes:
    """See `bits.pack_positions`."""
    c, k = index.shape
    tried = widths(area, k)
    costs = np.empty(5, np.int64)
    numba_codec.rice_costs(index.numpy(), tried[0], costs)
    # `argmin` returns the first of equal costs: the smaller width, as in bits.py.
    best = int((costs[: len(tried)] + np.array(tried) * (c * k)).argmin())
    width = tried[best]
    low = np.zeros(field_bytes(c * k, width), np.uint8)
    high = np.zeros(field_bytes(int(costs[best]) + c * k, 1), np.uint8)
    numba_codec.rice_pack(index.numpy(), width, low, high)
    return b"".join((bytes([width]), low.tobytes(), len(high).to_bytes(4, "little"), high.tobytes()))


def unpack_positions(reader: Reader, shape: tuple[int, int], area: int, what: str) -> Tensor:
    """See `bits.unpack_positions`."""
    width, low, high = open_positions(reader, shape, area, what)
    index = np.empty(shape, np.int64)
    _verify(numba_codec.rice_unpack(*_padded(low, high), width, area, index), index.size, area, what)
    return torch.from_numpy(index)


def _padded(low: bytes, high: bytes) -> tuple[Any, Any]:
    """The parts of a Rice code as arrays. Loops read windows of four bytes of ``low``, and whole words of ``high``."""
    return np.frombuffer(low + bytes(4), np.uint8), np.frombuffer(high + bytes(-len(high) % 8), np.uint64)


def _verify(found: int, due: int, area: int, what: str) -> None:
    """Refuse positions by what the loop that read them returned."""
    if found == -2:
        raise beyond(what, area)
    if found != due:
        raise miscounted(what, due)


def quantize(values: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `in_torch.quantize`."""
    c, k = values.shape
    steps = np.empty(c, np.float32)
    codes = np.empty((c, k), np.uint8)
    far = np.empty((c, k), np.bool_)
    any_far = numba_codec.quantize(values.numpy(), bits, largest_step(bits, torch.bfloat16), steps, codes, far)
    where = torch.from_numpy(far).view(-1).nonzero().view(-1) if any_far else torch.empty(0, dtype=torch.int64)
    return torch.from_numpy(steps).to(torch.bfloat16), torch.from_numpy(codes), where


def pack_codes(codes: Tensor, bits: int) -> bytes:
    """See `bits.pack_codes`."""
    packed = np.zeros(field_bytes(codes.numel(), bits), np.uint8)
    numba_codec.pack_codes(codes.view(-1).numpy(), bits, packed)
    return packed.tobytes()


def unpack_grid(packed: bytes, step: Tensor, k: int, bits: int) -> Tensor:
    """See `in_torch.unpack_grid`."""
    values = np.empty((len(step), k), np.float32)
    numba_codec.unpack_grid(np.frombuffer(packed, np.uint8), step.float().numpy(), bits, values)
    return torch.from_numpy(values)


def add(here: Tensor, index: Tensor, values: Tensor) -> None:
    """See `in_torch.add`."""
    numba_sums.add(here.numpy(), index.numpy(), values.contiguous().numpy())


def add_share(here: Tensor, block: SparseGrid, count: int) -> None:
    """See `in_torch.add_share`. One pass over the bits of the block, without an array of positions or values."""
    width, low, high = block.positions
    far, exact = (_NO_PLACES, _NO_VALUES) if block.exceptions is None else (part.numpy() for part in block.exceptions)
    codes = np.frombuffer(block.codes, np.uint8)
    grid = codes, block.bits, block.step.numpy(), far, exact, np.float32(count)
    found = numba_codec.rice_add(*_padded(low, high), width, block.k, grid, here.numpy())
    _verify(found, len(here) * block.k, here.shape[1], block.what)


def row_hashes(words: Tensor, weights: Tensor) -> Tensor:
    """See `in_torch.row_hashes`."""
    hashes = np.empty(len(words), np.int64)
    numba_sums.row_hashes(words.numpy().view(np.uint64), weights.numpy().view(np.uint64), hashes.view(np.uint64))
    return torch.from_numpy(hashes)


# -- transforms ----------------------------------------------------------------------------------------------------


def forward(transform: Transform, chunks: Tensor, between: Tensor, out: Tensor, *, keep: float, scale: float) -> None:
    """See `in_torch.forward`."""
    if transform not in _COMPILED or not _usual(chunks, out):
        in_torch.forward(transform, chunks, between, out, keep=keep, scale=scale)
        return
    kind, _, gain = _COMPILED[transform]
    numbers = np.float32(keep), np.float32(gain / scale)
    numba_transforms.transform_chunks(kind, _flat(chunks), _scratch(), _flat(out), *numbers)


def inverse(transform: Transform, coeffs: Tensor, between: Tensor, out: Tensor) -> None:
    """See `in_torch.inverse`."""
    if transform not in _COMPILED or not _usual(coeffs, out):
        in_torch.inverse(transform, coeffs, between, out)
        return
    _, kind, gain = _COMPILED[transform]
    numba_transforms.transform_chunks(kind, _flat(coeffs), _scratch(), _flat(out), np.float32(0.0), np.float32(gain))


def inverse_patch(transform: Transform, coeffs: Tensor, between: Tensor, out: Tensor) -> None:
    """See `in_torch.inverse_patch`."""
    if transform not in _COMPILED or not _usual(coeffs):
        in_torch.inverse_patch(transform, coeffs, between, out)
        return
    _, kind, gain = _COMPILED[transform]
    across, factor = coeffs.shape[1], np.float32(gain)
    numba_transforms.inverse_patch(kind, _flat(coeffs), 0, _scratch(), *_span(out), across, factor)


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
    """See `in_torch.difference_forward`."""
    if transform not in _COMPILED or shape != (SIDE, SIDE):
        numbers = {"keep": keep, "scale": scale}
        return in_torch.difference_forward(transform, shape, plus, minus, chunks, between, out, **numbers)
    kind, _, gain = _COMPILED[transform]
    areas, factors = (_flat(chunks), _scratch(), _flat(out)), (np.float32(keep), np.float32(gain / scale))
    first, squares = 0, 0.0
    for here, there in zip(plus, minus, strict=True):
        squares += numba_fused.difference_forward(
            kind, *_span(here), *_span(there), here.shape[1], areas, first, factors
        )
        first += here.numel()
    return squares


def _usual(*chunks: Tensor) -> bool:
    """True for chunks of 64 × 64 without gaps between them."""
    return all(some.shape[-2:] == (SIDE, SIDE) and some.is_contiguous() for some in chunks)


def _flat(tensor: Tensor) -> Any:
    return tensor.view(-1).numpy()


def _scratch() -> Any:
    """Memory for a chunk with wide rows. From torch, which aligns it: vectors across two cache lines are slow."""
    return torch.empty(SIDE * numba_transforms.WIDE).numpy()


def _span(rows: Tensor) -> tuple[Any, int]:
    """All memory from the first to the last value of a part of a matrix, and the distance of two rows.

    Loops over it are faster than over a numpy array with two strides: the compiler then knows that rows have no gaps.
    """
    (height, width), stride = rows.shape, rows.stride(0)
    return rows.as_strided(((height - 1) * stride + width,), (1,)).numpy(), stride


# -- the outer step ------------------------------------------------------------------------------------------------


def outer_answer(step: OuterStep) -> Tensor:
    """See `in_torch.outer_answer`."""
    if step.momentum is None:
        return in_torch.outer_answer(step)
    anchor, momentum, mean = _flat(step.anchor), _flat(step.momentum), _flat(step.mean)
    if step.residual is None or step.carry == 0.0:
        numba_sums.nesterov(anchor, momentum, mean, _numbers(step))
        return step.anchor
    numba_sums.nesterov_carried(anchor, momentum, mean, _flat(step.residual), _numbers(step))
    return step.mean


def outer_patches(
    transform: Transform, shape: tuple[int, int], step: OuterStep, between: Tensor, patches: Sequence[Tensor]
) -> None:
    """See `in_torch.outer_patches`."""
    if transform not in _COMPILED or shape != (SIDE, SIDE) or step.momentum is None or step.residual is None:
        in_torch.outer_patches(transform, shape, step, between, patches)
        return
    _, kind, gain = _COMPILED[transform]
    state = _flat(step.anchor), _flat(step.momentum), _flat(step.residual), _flat(step.mean)
    numbers, scratch, first = _numbers(step), _scratch(), 0
    for patch in patches:
        numba_fused.outer_patch(kind, state, first, numbers, scratch, *_span(patch), patch.shape[1], np.float32(gain))
        first += patch.numel()


def _numbers(step: OuterStep) -> tuple[Any, Any, Any]:
    return np.float32(step.lr), np.float32(step.mu), np.float32(step.carry)
