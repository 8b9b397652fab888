"""The inner loops of the codec, in two implementations with the same results to the bit: tests/test_kernels.py.

`in_torch` runs on any device and needs nothing but torch. `in_numba` is several times faster on a CPU. Whatever decides
bytes is worked out in whole numbers or in single exact operations, never in sums whose order matters.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Protocol

import torch
from torch import Tensor

from overtone.coding.bits import Reader
from overtone.coding.kernels import in_torch
from overtone.errors import MethodError

NUMBA_FROM = 1 << 22  # values of a model from which compiled loops are worth loading


class Kernels(Protocol):
    """What an implementation offers. Each is a module: `in_torch` or `in_numba`."""

    def select(self, coeffs: Tensor, k: int) -> Tensor: ...

    def pack_positions(self, index: Tensor, area: int) -> bytes: ...

    def unpack_positions(self, reader: Reader, shape: tuple[int, int], area: int, what: str) -> Tensor: ...

    def quantize(self, values: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]: ...

    def pack_codes(self, codes: Tensor, bits: int) -> bytes: ...

    def unpack_grid(self, packed: bytes, step: Tensor, k: int, bits: int) -> Tensor: ...

    def add(self, here: Tensor, index: Tensor, values: Tensor) -> None: ...

    def row_hashes(self, words: Tensor, weights: Tensor) -> Tensor: ...


def kernels_for(size: int, device: torch.device) -> Kernels:
    """The implementation for a model of ``size`` values: the compiled one where numba is installed and it pays.

    The environment variable ``OVERTONE_KERNELS``, set to ``torch`` or ``numba``, overrides the choice.
    """
    wish = os.environ.get("OVERTONE_KERNELS", "")
    if wish not in ("", "torch", "numba"):
        raise MethodError(f"OVERTONE_KERNELS={wish}: choose torch or numba, or leave it unset")
    pays = size >= NUMBA_FROM and importlib.util.find_spec("numba") is not None
    if device.type != "cpu" or wish == "torch" or not (pays or wish == "numba"):
        return in_torch
    try:
        from overtone.coding.kernels import in_numba
    except ImportError as error:
        if wish:
            raise MethodError(f"OVERTONE_KERNELS=numba: {error}; pip install 'overtone[fast]'") from error
        return in_torch  # numba is installed, but not for this Python or numpy
    return in_numba
