"""Compiled loops that do two steps on a few chunks at a time, so that values stay in the second-level cache between.

numba's cache on disk notices changes of this file only. After a change of a loop that is used here, touch this file.
"""

from __future__ import annotations

from typing import Any

from overtone.coding.kernels.compiled import compiled
from overtone.coding.kernels.numba_sums import nesterov_carried
from overtone.coding.kernels.numba_transforms import AREA, SIDE, inverse_patch

RUN = 16 * AREA  # values at a time: with fewer, memory is read in runs that are too short


@compiled
def outer_patch(
    kind: int, state: Any, first: int, numbers: Any, between: Any, out: Any, stride: int, width: int, factor: Any
) -> None:
    """`nesterov_carried`, then `inverse_patch` of its answer, for the values from ``first`` on that fill ``out``."""
    anchor, momentum, residual, mean = state
    across, last = width // SIDE, first + ((out.size - width) // stride + 1) * width
    for start in range(first, last, RUN):
        end = min(start + RUN, last)
        answer = mean[start:end]
        nesterov_carried(anchor[start:end], momentum[start:end], answer, residual[start:end], numbers)
        inverse_patch(kind, answer, (start - first) // AREA, between, out, stride, across, factor)
