"""The compiled selection of the strongest values of a chunk.

What is strongest changes from chunk to chunk, so no processor can foresee it. Branches that depend on values are
avoided: each one that is guessed wrong costs as much as the comparison of 500 values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from overtone.coding.kernels.compiled import compiled

WORD = 64  # magnitudes that are compared at a time
MAGNITUDE = np.int32(0x7FFFFFFF)  # magnitudes are compared by their bits, which sort as whole numbers
BEYOND = 1 << 31  # more than any magnitude


@intrinsic
def trailing_zeros(typing_context: Any, word: Any) -> Any:  # noqa: ARG001
    """The place of the lowest one of a word; 64 if it has none."""

    def build(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), build


@intrinsic
def _ones(typing_context: Any, word: Any) -> Any:  # noqa: ARG001
    def build(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), build


@intrinsic
def _reaching(_typing: Any, row: Any, start: Any, least: Any) -> Any:  # noqa: ARG001
    """A word with a one for each of the 64 magnitudes from ``start`` on that reach ``least``."""
    number, many = ir.IntType(32), ir.VectorType(ir.IntType(32), WORD)

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        values = builder.load(builder.bitcast(builder.gep(data, [arguments[1]]), many.as_pointer()))
        values.align = 4
        magnitudes = builder.and_(values, ir.Constant(many, [ir.Constant(number, int(MAGNITUDE))] * WORD))
        one = builder.insert_element(ir.Constant(many, ir.Undefined), arguments[2], ir.Constant(number, 0))
        limit = builder.shuffle_vector(one, one, ir.Constant(many, [ir.Constant(number, 0)] * WORD))
        return builder.bitcast(builder.icmp_signed(">=", magnitudes, limit), ir.IntType(64))

    return types.uint64(types.Array(types.int32, 1, "C"), types.int64, types.int32), build


@compiled
def select(rows: Any, k: int, index: Any) -> None:
    """The k strongest of each row.

    A row is folded into 4 k columns or more. At first, only the strongest value of each column counts. A threshold that
    k columns reach is reached by at least k values, and by not many more. Then only these few candidates are tested.
    """
    c, a = rows.shape
    columns = WORD
    while columns < 4 * k:
        columns *= 2
    if a % columns or columns == a:
        columns = a  # no folding: each value is a column
    # With room for whole words, and for one place beyond the last.
    tops, strength = np.zeros(columns + WORD, np.int32), np.empty(a + WORD, np.int32)
    candidates = np.empty(a + WORD, np.int64)
    guess = 0  # the threshold of the last row is a good guess for the next
    for r in range(c):
        row = rows[r]
        _fold(row, tops[:columns])
        guess, ties = _threshold(tops, columns, k, guess)
        threshold, found = guess, _candidates(row, np.int32(guess), candidates)
        for j in range(found):
            strength[j] = row[np.uint64(candidates[j])] & MAGNITUDE
        if found > k:
            strength[found : found + WORD] = 0
            threshold, ties = _threshold(strength, found, k, threshold)
        n = 0
        for j in range(found):  # what is kept moves to the front, in place
            candidates[n] = candidates[j]
            equal = strength[j] == threshold
            n += (strength[j] > threshold) | (equal & (ties > 0))
            ties -= equal
        for j in range(k):
            index[r, j] = candidates[j]


@compiled
def _fold(row: Any, tops: Any) -> None:
    """The largest magnitude of each column."""
    for j in range(tops.size):
        tops[j] = row[j] & MAGNITUDE
    for start in range(tops.size, row.size, tops.size):
        part = row[start : start + tops.size]
        for j in range(tops.size):
            value = np.int32(part[j] & MAGNITUDE)
            tops[j] = value if value > tops[j] else tops[j]


@compiled
def _candidates(row: Any, least: Any, places: Any) -> int:
    """The places of all values that reach ``least``, and their number."""
    found, whole = 0, row.size // WORD * WORD
    for start in range(0, whole, WORD):
        word: Any = _reaching(row, start, least)
        # Few words have more than two. The first two are written in any case, and count only if they exist.
        for _ in range(2):
            places[found] = start + np.int64(trailing_zeros(word))
            found += word != np.uint64(0)
            word &= word - np.uint64(1)  # clears the lowest one
        while word != np.uint64(0):
            places[found] = start + np.int64(trailing_zeros(word))
            found += 1
            word &= word - np.uint64(1)
    for i in range(whole, row.size):  # the rest, if a row is no multiple of 64
        places[found] = i
        found += (row[i] & MAGNITUDE) >= least
    return found


@compiled
def _threshold(strength: Any, size: int, k: int, guess: int) -> Any:
    """A threshold, and the number of values equal to it that are kept. Together with all larger values they are k.

    It is found by bisection from a guess, which is rarely far away. Any threshold that exactly k values reach is good.
    Zeros follow the values up to a whole word.
    """
    low, high, n_high = 0, BEYOND, 0  # more than k reach low, fewer than k reach high
    stride = 1 << 19  # the first steps away from the guess, doubled each time, until k is enclosed
    threshold = guess if guess > 0 else (low + high) >> 1
    while high - low > 1:
        n = 0
        for start in range(0, size, WORD):  # a threshold is above 0, so the zeros do not count
            n += np.int64(_ones(_reaching(strength, start, np.int32(threshold))))
        if n == k:
            return threshold, size  # room for all ties: exactly k values reach it
        if n > k:
            low = threshold
            guess = threshold + stride
        else:
            high = threshold
            n_high = n
            guess = threshold - stride
        stride <<= 1
        enclosed = low > 0 and high < BEYOND
        threshold = guess if low < guess < high and not enclosed else (low + high) >> 1
    return low, k - n_high
