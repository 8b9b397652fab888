"""The compiled loops of the codec: selection, positions, values.

Loops that read untrusted bytes check every count before they write.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from overtone.coding.kernels.compiled import compiled
from overtone.coding.kernels.in_torch import EXCEPTIONAL, FRACTION, PASSES


@intrinsic
def _trailing_zeros(typing_context: Any, word: Any) -> Any:  # noqa: ARG001
    def build(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), build


@intrinsic
def _reaching(_typing: Any, row: Any, start: Any, least: Any) -> Any:  # noqa: ARG001
    """A word with a one for each of the 64 magnitudes from ``start`` on that reach ``least``."""
    number, many = ir.IntType(32), ir.VectorType(ir.IntType(32), 64)

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        values = builder.load(builder.bitcast(builder.gep(data, [arguments[1]]), many.as_pointer()))
        values.align = 4
        magnitudes = builder.and_(values, ir.Constant(many, [ir.Constant(number, 0x7FFFFFFF)] * 64))
        one = builder.insert_element(ir.Constant(many, ir.Undefined), arguments[2], ir.Constant(number, 0))
        limit = builder.shuffle_vector(one, one, ir.Constant(many, [ir.Constant(number, 0)] * 64))
        return builder.bitcast(builder.icmp_signed(">=", magnitudes, limit), ir.IntType(64))

    return types.uint64(types.Array(types.int32, 1, "C"), types.int64, types.int32), build


@compiled
def _count(strength: Any, threshold: int) -> int:
    """The number of values at or above the threshold."""
    # A 32-bit counter: with it, the compiler can use vector instructions.
    threshold32 = np.int32(threshold)
    n = np.uint32(0)
    for i in range(strength.size):
        n = np.uint32(n + np.uint32(strength[i] >= threshold32))
    return int(n)


@compiled
def select(rows: Any, k: int, index: Any) -> None:
    """The k strongest of each row. Magnitudes are compared by their bits, which sort as whole numbers.

    A row is folded into 4 k columns or more. At first, only the strongest value of each column counts. A threshold that
    k columns reach is reached by at least k values, and by not many more. Then only these few candidates are tested.
    """
    c, a = rows.shape
    columns = 64
    while columns < 4 * k:
        columns *= 2
    if a % columns or columns == a:
        columns = a  # no folding: each value is a column
    whole = a // 64 * 64
    strength = np.empty(a + 1, np.int32)
    candidates = np.empty(a + 1, np.int64)
    tops = np.empty(columns, np.int32)
    magnitude = np.int32(0x7FFFFFFF)
    guess = np.int64(0)  # the threshold of the last row is a good guess for the next
    for r in range(c):
        row = rows[r]
        for j in range(columns):
            tops[j] = row[j] & magnitude
        for start in range(columns, a, columns):
            part = row[start : start + columns]
            for j in range(columns):
                value = np.int32(part[j] & magnitude)
                tops[j] = value if value > tops[j] else tops[j]
        guess, ties = _threshold(tops, k, guess)
        least = np.int32(guess)
        found = 0
        for start in range(0, whole, 64):
            word: Any = _reaching(row, start, least)
            while word != np.uint64(0):
                i = start + np.int64(_trailing_zeros(word))
                word &= word - np.uint64(1)  # clears the lowest one
                candidates[found] = i
                strength[found] = row[i] & magnitude
                found += 1
        for i in range(whole, a):  # the rest, if a row is no multiple of 64
            candidates[found] = i
            strength[found] = row[i] & magnitude
            found += strength[found] >= least
        threshold = np.int64(least)
        if found > k:
            threshold, ties = _threshold(strength[:found], k, threshold)
        n = 0
        for j in range(found):
            i = candidates[j]
            value = strength[j]
            if value > threshold or (value == threshold and ties > 0):
                index[r, n] = i
                n += 1
                ties -= value == threshold


@compiled
def _threshold(strength: Any, k: int, guess: int) -> Any:
    """A threshold, and the number of values equal to it that are kept. Together with all larger values they are k.

    It is found by bisection from a guess, which is rarely far away. Any threshold that exactly k values reach is good.
    """
    top = np.int32(0)
    for i in range(strength.size):
        top = strength[i] if strength[i] > top else top
    low, high = np.int64(0), np.int64(top) + 1  # more than k reach low, fewer than k reach high
    n_high = 0
    stride = np.int64(1) << 19  # the first steps away from the guess, doubled each time, until k is enclosed
    threshold = guess if low < guess < high else (low + high) >> 1
    while high - low > 1:
        n = _count(strength, threshold)
        if n == k:
            return threshold, strength.size  # room for all ties: exactly k values reach it
        if n > k:
            low = threshold
            guess = threshold + stride
        else:
            high = threshold
            n_high = n
            guess = threshold - stride
        stride <<= 1
        threshold = guess if low < guess < high and (low == 0 or high > top) else (low + high) >> 1
    return low, k - n_high


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
        one = ((at - np.uint64(1)) << np.uint64(6)) + _trailing_zeros(word)
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
