"""Compiled loops that do two steps on a few chunks at a time, so that values stay in the second-level cache between.

numba's cache on disk notices changes of this file only. After a change of a loop that is used here, touch this file.
"""

from __future__ import annotations

from typing import Any

from overtone.coding.kernels.compiled import compiled
from overtone.coding.kernels.numba_sums import difference, nesterov_carried
from overtone.coding.kernels.numba_transforms import AREA, SIDE, inverse_patch, transform_chunks

RUN = 16 * AREA  # values at a time: with fewer, memory is read in runs that are too short


@compiled
def difference_forward(
    kind: int,
    plus: Any,
    plus_stride: int,
    minus: Any,
    minus_stride: int,
    width: int,
    areas: Any,
    first: int,
    factors: Any,
) -> float:
    """`difference`, then `transform_chunks` of it to ``out`` from ``first`` on. Returns the sum of the squares.

    One row of chunks at a time: parts of rows would be read in runs that are too short for memory.
    """
    (chunks, between, out), (keep, factor), total = areas, factors, 0.0
    strip = chunks[: SIDE * width]
    for row in range(0, (plus.size - width) // plus_stride + 1, SIDE):
        here, there = plus[row * plus_stride :], minus[row * minus_stride :]
        total += difference(here, plus_stride, there, minus_stride, strip.reshape(1, width // SIDE, SIDE, SIDE))
        start = first + row * width
        transform_chunks(kind, strip, between, out[start : start + strip.size], keep, factor)
    return total


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
