"""The compiled loops over whole slabs: differences, sums, the outer step, fingerprints."""

from __future__ import annotations

from typing import Any

import numpy as np

from overtone.coding.kernels.compiled import compiled


@compiled
def difference(plus: Any, plus_stride: int, minus: Any, minus_stride: int, chunks: Any) -> float:
    """Chunks (down, across, h, w) of plus − minus, and the sum of their squares.

    Rows of the matrices are a stride apart.
    Squares are summed in one place for each column of a chunk: a single sum would have to be made value by value.
    """
    down, across, h, w = chunks.shape
    squares, total = np.zeros(w, np.float32), 0.0
    # Row by row of the matrices, not chunk by chunk: memory is fastest if it is read in order.
    for row in range(down * h):
        for chunk in range(across):
            a, b = row * plus_stride + chunk * w, row * minus_stride + chunk * w
            ours, theirs, here = plus[a : a + w], minus[b : b + w], chunks[row // h, chunk, row % h]
            for i in range(w):
                value = ours[i] - theirs[i]
                here[i] = value
                squares[i] += value * value
        if row % h == h - 1:  # a strip is complete; the sums go on in fp64
            for i in range(w):
                total += np.float64(squares[i])
                squares[i] = np.float32(0.0)
    return total


@compiled
def add(here: Any, index: Any, values: Any) -> None:
    for r in range(index.shape[0]):
        row = here[r]
        for i in range(index.shape[1]):
            row[np.uint64(index[r, i])] += values[r, i]


@compiled
def row_hashes(words: Any, weights: Any, hashes: Any) -> None:
    # Unsigned words wrap modulo 2**64, with the same bits as torch's signed ones.
    for r in range(words.shape[0]):
        row = words[r]
        total = np.uint64(0)
        for i in range(row.size):
            total += (row[i] ^ (row[i] >> np.uint64(32))) * weights[i]
        hashes[r] = total


@compiled
def nesterov(anchor: Any, momentum: Any, mean: Any, numbers: Any) -> None:
    """See `in_torch.outer_step`. Each operation is rounded by itself, in the same order. ``numbers`` are lr and mu."""
    lr, mu = numbers[0], numbers[1]
    for i in range(anchor.size):
        m = momentum[i] * mu + mean[i]
        momentum[i] = m
        anchor[i] = anchor[i] - (m * mu + mean[i]) * lr


@compiled
def nesterov_carried(anchor: Any, momentum: Any, mean: Any, residual: Any, numbers: Any) -> None:
    """`nesterov`, and in the same pass mean ← anchor − carry · residual. ``numbers`` are lr, mu and carry."""
    lr, mu, carry = numbers[0], numbers[1], numbers[2]
    for i in range(anchor.size):
        m = momentum[i] * mu + mean[i]
        momentum[i] = m
        a = anchor[i] - (m * mu + mean[i]) * lr
        anchor[i] = a
        mean[i] = a - residual[i] * carry
