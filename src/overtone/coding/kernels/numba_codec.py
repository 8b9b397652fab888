"""The compiled loops of the codec: positions, values, the blocks of both.

Loops that read untrusted bytes check every count before they write.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from overtone.coding.kernels.compiled import compiled
from overtone.coding.kernels.in_torch import EXCEPTIONAL, FRACTION, PASSES
from overtone.coding.kernels.numba_select import trailing_zeros


@compiled
def rice_costs(index: Any, width: int, costs: Any) -> None:
    """Σ gap >> w for five widths w, from the given one up."""
    c, k = index.shape
    n0, n1, n2, n3, n4 = np.int64(0), np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    for r in range(c):
        last = np.int64(-1)
        for i in range(k):
            gap = (index[r, i] - last - 1) >> width
            last = index[r, i]
            n0 += gap
            n1 += gap >> 1
            n2 += gap >> 2
            n3 += gap >> 3
            n4 += gap >> 4
    costs[0], costs[1], costs[2], costs[3], costs[4] = n0, n1, n2, n3, n4


@compiled
def rice_pack(index: Any, width: int, low: Any, high: Any) -> None:
    """Write the low bits of the gaps into ``low``, and the ones of their unary parts into ``high``."""
    c, k = index.shape
    mask = np.uint64((1 << width) - 1)
    held, n_held, at, end = np.uint64(0), np.uint64(0), 0, np.int64(-1)
    for r in range(c):
        last = np.int64(-1)
        for i in range(k):
            gap = np.uint64(index[r, i] - last - 1)
            last = index[r, i]
            held |= (gap & mask) << n_held
            n_held += np.uint64(width)
            while n_held >= np.uint64(8):
                low[at] = np.uint8(held & np.uint64(255))
                at += 1
                held >>= np.uint64(8)
                n_held -= np.uint64(8)
            end += np.int64(gap >> np.uint64(width)) + 1
            high[end >> 3] |= np.uint8(1 << (end & 7))
    if n_held:
        low[at] = np.uint8(held)


# A place in a Rice code: the word of the unary part with the ones already read cleared, the number of words read, the
# next bit of the low part, the bit after the last one, and the number of positions read. All but the last are unsigned:
# for a signed index, numba would test each time if it counts from the end.
START = np.uint64(0), np.uint64(0), np.uint64(0), np.uint64(0), np.int64(0)


@compiled
def rice_unpack(low: Any, high: Any, width: int, area: int, index: Any) -> Any:
    """Read positions into ``index``, and return their number.

    It is smaller than expected if ``high`` has too few ones, −1 if ``high`` has too many, and −2 if a position is
    beyond the area. ``low`` ends with four spare bytes; ``high`` consists of 64-bit words.
    """
    c, k = index.shape
    place = START
    for r in range(c):
        place = _read_row(low, high, width, area, place, index[r])
        if place[4] != (r + 1) * k:
            return place[4]
    return place[4] if _is_end(high, place) else -1


@compiled
def rice_add(low: Any, high: Any, width: int, k: int, grid: Any, here: Any) -> Any:
    """`rice_unpack`, but the values of a row are divided and added to ``here`` (c, a) as soon as it is read."""
    codes, bits, steps, far, exact, count = grid
    c, area = here.shape
    index, values, n_far, place = np.empty(k, np.int64), np.empty(k, np.float32), 0, START
    for r in range(c):
        place = _read_row(low, high, width, area, place, index)
        if place[4] != (r + 1) * k:
            return place[4]
        _grid_row(codes, r * k * bits, bits, steps[r], values)
        while n_far < far.size and far[n_far] < (r + 1) * k:
            values[far[n_far] - r * k] = exact[n_far]
            n_far += 1
        row = here[r]
        for i in range(k):
            row[np.uint64(index[i])] += values[i] / count
    return place[4] if _is_end(high, place) else -1


@compiled
def _read_row(low: Any, high: Any, width: int, area: int, place: Any, row: Any) -> Any:
    """Read the positions of one chunk, from a place of the code to the next one."""
    word, at, bit, before, n = place
    wide, mask = np.uint64(width), (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    position = np.uint64(0)  # the place after the last position
    for i in range(row.size):
        while word == np.uint64(0):
            if at == np.uint64(high.size):
                return word, at, bit, before, n
            word = high[at]
            at += np.uint64(1)
        one = ((at - np.uint64(1)) << np.uint64(6)) + trailing_zeros(word)
        word &= word - np.uint64(1)  # clears the lowest one
        b = bit >> np.uint64(3)
        window = (
            np.uint64(low[b])
            | np.uint64(low[b + np.uint64(1)]) << np.uint64(8)
            | np.uint64(low[b + np.uint64(2)]) << np.uint64(16)
            | np.uint64(low[b + np.uint64(3)]) << np.uint64(24)
        )
        position += ((one - before) << wide) + ((window >> (bit & np.uint64(7))) & mask)
        if position >= np.uint64(area):  # tested for each position: untrusted bytes must not lead beyond the chunk
            return word, at, bit, before, np.int64(-2)
        row[i] = position
        position += np.uint64(1)
        before = one + np.uint64(1)
        bit += wide
        n += 1
    return word, at, bit, before, n


@compiled
def _is_end(high: Any, place: Any) -> Any:
    """True if no one is left. Any one that is left means that the message is corrupt."""
    word, at = place[0], place[1]
    while word == np.uint64(0) and at < np.uint64(high.size):
        word = high[at]
        at += np.uint64(1)
    return word == np.uint64(0)


@compiled
def _total(numbers: Any) -> float:
    """The sum of whole numbers. It is exact in any order, so four sums grow side by side."""
    a, b, c, d, whole = 0.0, 0.0, 0.0, 0.0, numbers.size // 4 * 4
    for i in range(0, whole, 4):
        a += numbers[i]
        b += numbers[i + 1]
        c += numbers[i + 2]
        d += numbers[i + 3]
    for i in range(whole, numbers.size):
        a += numbers[i]
    return (a + b) + (c + d)


@compiled
def quantize(values: Any, bits: int, most: float, steps: Any, codes: Any, far: Any) -> bool:
    """Fill steps, codes and the mask of exceptions, as `in_torch.quantize` does. True if there is any exception."""
    c, k = values.shape
    half = 1 << (bits - 1)
    reach, most_level = EXCEPTIONAL * max(1.0, half / 2), np.float64(half - 1)
    whole = np.empty(k, np.float64)
    level = np.zeros(k, np.float64)
    products, squares = np.empty(k, np.float64), np.empty(k, np.float64)
    any_far = False
    for r in range(c):
        top = 0.0
        for i in range(k):
            top = max(top, abs(np.float64(values[r, i])))
        # Magnitudes become whole numbers below 2**24, so that their sums are exact and no order matters.
        scale = math.ldexp(1.0, FRACTION - math.frexp(top)[1])
        for i in range(k):
            whole[i] = np.floor(abs(np.float64(values[r, i])) * scale)
        total = _total(whole)
        largest, kept_total, kept = 0.0, 0.0, 0
        for i in range(k):
            far[r, i] = whole[i] * k > reach * total
            if far[r, i]:
                any_far = True
                whole[i] = 0.0
            else:
                kept += 1
                kept_total += whole[i]
                largest = max(largest, whole[i])
        if half == 1:
            step = 2.0 * kept_total / max(kept, 1)
        else:
            step = largest / (half - 0.5)
            for _ in range(PASSES):
                divisor = step if step != 0.0 else 1.0
                for i in range(k):
                    level[i] = min(np.floor(whole[i] / divisor), most_level)
                    odd = 0.0 if far[r, i] else 2.0 * level[i] + 1.0
                    products[i] = whole[i] * odd
                    squares[i] = odd * odd
                step = 2.0 * _total(products) / max(_total(squares), 1.0)
        steps[r] = np.float32(min(step / scale, most))
        for i in range(k):
            n = int(level[i])
            codes[r, i] = np.uint8(half - 1 - n if values[r, i] < 0 else half + n)
    return any_far


@compiled
def pack_codes(codes: Any, bits: int, packed: Any) -> None:
    each = 8 // bits
    whole = codes.size // each
    for b in range(whole):
        byte = 0
        for i in range(each):
            byte |= codes[b * each + i] << (bits * i)
        packed[b] = np.uint8(byte)
    for i in range(whole * each, codes.size):
        packed[whole] |= np.uint8(codes[i] << (bits * (i - whole * each)))


@compiled
def unpack_grid(packed: Any, step: Any, bits: int, values: Any) -> None:
    c, k = values.shape
    for r in range(c):
        _grid_row(packed, r * k * bits, bits, step[r], values[r])


@compiled
def _grid_row(packed: Any, bit: int, bits: int, step: Any, values: Any) -> None:
    """The values of one chunk, whose first code starts at ``bit``."""
    mask, middle = np.int32((1 << bits) - 1), np.float32((1 << (bits - 1)) - 0.5)
    at = np.uint64(bit)
    for i in range(values.size):
        code = np.int32(packed[at >> np.uint64(3)]) >> np.int32(at & np.uint64(7)) & mask
        values[i] = (np.float32(np.int32(code)) - middle) * step
        at += np.uint64(bits)
