"""The inner loops of the codec, in two implementations with bit-identical results: tests/test_kernels.py.

`in_torch` runs on any device and needs only torch. `in_numba` is several times faster on a CPU. Every value that
affects the bytes of a message is computed in whole numbers or in single exact operations, never in sums whose order
matters. Only the transform `dct` is a matrix product in torch and a fast algorithm in numba. The two agree to rounding:
numba_transforms.py says why this is enough.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from overtone.coding.bits import Reader
from overtone.coding.kernels import in_torch
from overtone.coding.kernels.in_torch import OuterStep
from overtone.coding.transforms import Transform
from overtone.errors import MethodError

NUMBA_FROM = 1 << 22  # for models of at least so many values, the faster loops are worth the time to load them


class Kernels(Protocol):
    """The functions of an implementation. Each implementation is a module: `in_torch` or `in_numba`."""

    def select(self, coeffs: Tensor, k: int) -> Tensor:
        """The positions of the k strongest coefficients of each chunk."""
        ...

    def pack_positions(self, index: Tensor, area: int) -> bytes:
        """The Rice code of positions."""
        ...

    def unpack_positions(self, reader: Reader, shape: tuple[int, int], area: int, what: str) -> Tensor:
        """Read positions from their Rice code."""
        ...

    def quantize(self, values: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
        """The steps, codes and exceptions of values."""
        ...

    def pack_codes(self, codes: Tensor, bits: int) -> bytes:
        """Pack codes of so many bits."""
        ...

    def unpack_grid(self, packed: bytes, step: Tensor, k: int, bits: int) -> Tensor:
        """The values that packed codes stand for."""
        ...

    def add(self, here: Tensor, index: Tensor, values: Tensor) -> None:
        """Add sparse values to chunks, in place."""
        ...

    def add_share(self, here: Tensor, block: in_torch.SparseGrid, count: int) -> None:
        """Add the values of a block, divided by a number, to chunks."""
        ...

    def forward(
        self, transform: Transform, chunks: Tensor, between: Tensor, out: Tensor, *, keep: float, scale: float
    ) -> None:
        """Add the coefficients of chunks to ``out``."""
        ...

    def difference_forward(
        self,
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
        """Add the coefficients of differences of parts of matrices to ``out``. Returns the sum of their squares."""
        ...

    def inverse(self, transform: Transform, coeffs: Tensor, between: Tensor, out: Tensor) -> None:
        """The values of coefficients."""
        ...

    def inverse_patch(self, transform: Transform, coeffs: Tensor, between: Tensor, out: Tensor) -> None:
        """The values of coefficients, directly in a matrix."""
        ...

    def outer_answer(self, step: OuterStep) -> Tensor:
        """Step the anchor, and return the coefficients of the next weights."""
        ...

    def outer_patches(
        self,
        transform: Transform,
        shape: tuple[int, int],
        step: OuterStep,
        between: Tensor,
        patches: Sequence[Tensor],
    ) -> None:
        """Step the anchor, and write the next weights directly into parts of matrices."""
        ...

    def row_hashes(self, words: Tensor, weights: Tensor) -> Tensor:
        """The hash of each row of words, for fingerprints."""
        ...


def kernels_for(size: int, device: torch.device) -> Kernels:
    """The implementation for a model of ``size`` values: numba if it is installed and the model is large enough.

    The environment variable ``OVERTONE_KERNELS``, set to ``torch`` or ``numba``, overrides the choice.
    """
    wish = os.environ.get("OVERTONE_KERNELS", "")
    if wish not in ("", "torch", "numba"):
        raise MethodError(f"OVERTONE_KERNELS={wish}: choose torch or numba, or leave it unset")
    # `find_spec` instead of an import: importing numba takes long, also where it is not used.
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
