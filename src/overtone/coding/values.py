"""Values as bytes: positions, codes on a grid, exceptions. The codecs of messages and of letters are made of this.

All bytes are verified while they are read. docs/wire.md specifies them.

Legend: c chunks, a values in a chunk, k of them kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from overtone.coding.bits import Reader, field_bytes, tensor_bytes
from overtone.coding.kernels import Kernels, in_torch
from overtone.coding.kernels.in_torch import grid, largest_step
from overtone.errors import NotFiniteError, WireError

MOST_BF16 = torch.finfo(torch.bfloat16).max  # a larger value is sent as this one; the rest stays in the residual
NO_EXCEPTIONS = bytes(4)  # their number is 0

Values = Callable[[], Tensor]  # computes the values of a block whose bytes are verified


def encode_values(
    coeffs: Tensor, bits: int, kernels: Kernels = in_torch, k: int | None = None
) -> tuple[bytes, Tensor, Tensor | None]:
    """Encode the ``k`` strongest coefficients of each row of (c, a); all of them by default.

    Returns their bytes, the (c, k) values that these bytes decode to, and their positions (None if all are kept).

    With 16 and 32 bits, values are sent as bf16 and fp32. With fewer bits, values are codes on a uniform grid with one
    step per chunk; at one bit the grid is sign × mean magnitude of the chunk. Values far beyond the grid follow as a
    list of exceptions. Without this list, a coefficient that always drifts faster than its chunk would never be sent in
    full, and its residual would grow without bound.
    """
    index, values = None, coeffs
    if k is not None and k < coeffs.shape[1]:
        index = kernels.select(coeffs, k)
        values = coeffs.gather(1, index)
    # NaN and infinity compare as the strongest values, so the selection contains them and no others need a check.
    # The sum is a fast first test. Finite values may have an infinite sum, so each value is tested then.
    if not math.isfinite(float(values.sum())) and not bool(torch.isfinite(values).all()):
        raise NotFiniteError(-1)
    if bits == 32:
        # A copy: without a selection, `values` is the residual itself, which changes when the sent part leaves it.
        data, decoded = tensor_bytes(values), values.clone()
    elif bits == 16:
        # Clamped first: a large finite fp32 value would round to infinity in bf16.
        narrow = values.clamp(-MOST_BF16, MOST_BF16).to(torch.bfloat16)
        data, decoded = tensor_bytes(narrow), narrow.float()
    else:
        step, codes, far = kernels.quantize(values, bits)
        # Decoded from the bf16 step that is sent, so that the sender and the receivers hold the same values.
        decoded = grid(codes, step, bits)
        exceptions = pack_exceptions(values, decoded, far, kernels) if far.numel() else NO_EXCEPTIONS
        data = b"".join((tensor_bytes(step), kernels.pack_codes(codes, bits), exceptions))
    if index is not None:
        data = kernels.pack_positions(index, coeffs.shape[1]) + data
    return data, decoded, index


def open_values(
    reader: Reader, shape: tuple[int, int], bits: int, where: str, kernels: Kernels = in_torch, area: int | None = None
) -> tuple[Tensor | None, Values]:
    """Read positions and (c, k) values: the inverse of `encode_values`. ``area`` is a, the length of a row.

    All bytes are verified here. The values are computed only when the returned function is called, so that `check` does
    not pay for them.
    """
    c, k = shape
    index = None
    if area is not None and k < area:
        index = kernels.unpack_positions(reader, shape, area, f"positions, {where}")
    what = f"values, {where}"
    if bits >= 16:
        dtype = {16: torch.bfloat16, 32: torch.float32}[bits]
        given = reader.finite(c * k, dtype, what)
        return index, lambda: given.to(torch.float32).view(shape)
    step = open_steps(reader, c, bits, where)
    codes = reader.take(field_bytes(c * k, bits), what)
    exceptions = open_exceptions(reader, c * k, where, kernels)
    if exceptions is None:
        return index, lambda: kernels.unpack_grid(codes, step, k, bits)
    far, exact = exceptions

    def values() -> Tensor:
        decoded = kernels.unpack_grid(codes, step, k, bits)
        decoded.view(-1)[far] = exact
        return decoded

    return index, values


def open_steps(reader: Reader, c: int, bits: int, where: str) -> Tensor:
    """Read the steps of c grids, as fp32."""
    step = reader.tensor(c, torch.bfloat16, f"scales, {where}").float()
    most = largest_step(bits, torch.float32)
    low, high = torch.aminmax(step)
    if not (float(low) >= 0.0 and float(high) <= most):  # NaN fails both comparisons
        raise WireError(f"scales, {where}: not all from 0 to {most:.3g}; the message is corrupt")
    return step


def open_exceptions(reader: Reader, n: int, where: str, kernels: Kernels) -> tuple[Tensor, Tensor] | None:
    """Read the exceptions among n values: their places and the values themselves. None if there are none."""
    what = f"exceptions, {where}"
    count = reader.number(4, what)
    if count > n:  # checked before any memory is reserved for so many
        raise WireError(f"{what}: {count} of {n} values; the message is corrupt")
    if not count:
        return None
    far = kernels.unpack_positions(reader, (1, count), n, what).view(-1)
    return far, reader.finite(count, torch.bfloat16, what).float()


def pack_exceptions(values: Tensor, decoded: Tensor, far: Tensor, kernels: Kernels) -> bytes:
    """The exceptions at the places ``far`` of a list of values: their bytes. ``decoded`` gets what they decode to."""
    exact = values.reshape(-1)[far].clamp(-MOST_BF16, MOST_BF16).to(torch.bfloat16)
    decoded.view(-1)[far] = exact.float()
    places = kernels.pack_positions(far.view(1, -1), values.numel())
    return b"".join((far.numel().to_bytes(4, "little"), places, tensor_bytes(exact)))
