"""The DCT and the Hadamard transform of chunks of 64 × 64, compiled: a few sums per value instead of two products.

Each transform is written once, as a plain function on a list of 64 values of any kind that can be added and multiplied
by a number. Called with vectors of the compiler (`_Lanes`), it yields straight code for 16 columns or 16 rows at a
time. Called with tensors or numbers, it computes the same bits step by step: tests/test_transforms.py.

Nothing is fused and nothing is reordered, so the results are the same on every machine. They differ from the matrix
products of `transforms.Product` in the last bits. This harms nobody: coefficients of a drift are a replica's own, and
what all replicas share is either decoded from messages or, at the start, computed by the products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from overtone.coding.kernels.compiled import compiled

LANES = 16  # values of a vector: the compiler splits it on machines with shorter ones
SIDE = 64  # of a chunk; chunks of other shapes are transformed by torch
AREA = SIDE * SIDE
WIDE = SIDE + LANES  # from row to row of scratch: with a power of two, a column would use a quarter of the cache only
Values = list[Any]

# The transforms are defined in this file, not imported: numba's cache on disk notices changes of this file only.


# -- the transforms of 64 values -----------------------------------------------------------------------------------


def cosine_sums(x: Values) -> Values:
    """X_k = Σ x_j · cos(π(2j + 1)k / 2n), by halves: even k from sums, odd k from differences of the two ends.

    This way and `_odd_cosines` follow Plonka and Tasche (2005). All factors are cosines and sines, so rounding errors
    do not grow as they do where one divides by cosines.
    """
    if len(x) == 1:
        return x
    even, odd = cosine_sums([a + b for a, b in _ends(x)]), _odd_cosines([a - b for a, b in _ends(x)])
    return [value for pair in zip(even, odd, strict=True) for value in pair]


def _odd_cosines(x: Values) -> Values:
    """X_k = Σ x_j · cos(π(2j + 1)(2k + 1) / 4n): rotations, two transforms of half the length, sums."""
    n, half = len(x), len(x) // 2
    if n == 1:
        return [x[0] * math.sqrt(0.5)]
    first, second = [], []
    for j, (a, b) in enumerate(_ends(x)):
        angle = math.pi * (2 * j + 1) / (4 * n)
        cos, sin = math.cos(angle), math.sin(angle)
        first.append(a * cos + b * sin)
        second.append(a * sin - b * cos if j % 2 else b * cos - a * sin)
    p, q = cosine_sums(first), cosine_sums(second)
    inner = [value for k in range(1, half) for value in (p[k] - q[half - k], p[k] + q[half - k])]
    return [p[0], *inner, -q[0]]


def from_cosines(x: Values) -> Values:
    """The transpose of `cosine_sums`. `_odd_cosines` is its own transpose."""
    if len(x) == 1:
        return x
    pairs = list(zip(from_cosines(x[0::2]), _odd_cosines(x[1::2]), strict=True))
    return [a + b for a, b in pairs] + [a - b for a, b in reversed(pairs)]


def _ends(x: Values) -> list[tuple[Any, Any]]:
    """The first and the last value, the second and the last but one, and so on."""
    return list(zip(x, reversed(x), strict=True))[: len(x) // 2]


def dct(x: Values) -> Values:
    """The orthonormal DCT-II, times √(n/2)."""
    first, *others = cosine_sums(x)
    return [first * math.sqrt(0.5), *others]


def inverse_dct(x: Values) -> Values:
    """The inverse of the orthonormal DCT-II, times √(n/2)."""
    return from_cosines([x[0] * math.sqrt(0.5), *x[1:]])


def hadamard(x: Values) -> Values:
    """The sums of `transforms.butterflies`: √n times the orthonormal transform.

    The stage of the longest stride comes last. By halves, so that few values are under way at a time.
    """
    if len(x) == 1:
        return x
    pairs = list(zip(hadamard(x[: len(x) // 2]), hadamard(x[len(x) // 2 :]), strict=True))
    return [a + b for a, b in pairs] + [a - b for a, b in pairs]


# -- from lists to vector code -------------------------------------------------------------------------------------

_VECTOR = ir.VectorType(ir.FloatType(), LANES)


class _Lanes:
    """16 values in the code that is being built. An operator appends one instruction, and is never fused."""

    def __init__(self, builder: Any, value: Any) -> None:
        self.builder, self.value = builder, value

    def __add__(self, other: _Lanes) -> _Lanes:
        return _Lanes(self.builder, self.builder.fadd(self.value, other.value))

    def __sub__(self, other: _Lanes) -> _Lanes:
        return _Lanes(self.builder, self.builder.fsub(self.value, other.value))

    def __neg__(self) -> _Lanes:
        return _Lanes(self.builder, self.builder.fneg(self.value))

    def __mul__(self, factor: float) -> _Lanes:
        constant = ir.Constant(ir.FloatType(), float(np.float32(factor)))
        return self.times(_Lanes(self.builder, ir.Constant(_VECTOR, [constant] * LANES)))

    def times(self, other: _Lanes) -> _Lanes:
        return _Lanes(self.builder, self.builder.fmul(self.value, other.value))


def _place(builder: Any, start: Any, stride: Any, row: int, column: int = 0) -> Any:
    """The address of 16 values, from the address of the first row."""
    at = builder.add(builder.mul(stride, ir.Constant(ir.IntType(64), row)), ir.Constant(ir.IntType(64), column))
    return builder.bitcast(builder.gep(start, [at]), _VECTOR.as_pointer())


def _load(builder: Any, place: Any) -> _Lanes:
    value = builder.load(place)
    value.align = 4  # a row of a matrix starts anywhere
    return _Lanes(builder, value)


def _store(builder: Any, lanes: _Lanes, place: Any) -> None:
    builder.store(lanes.value, place).align = 4


def _stream(builder: Any, lanes: _Lanes, place: Any) -> None:
    """Store past the cache a vector that fills a line of it. Otherwise the line would be read first, for nothing."""
    store = builder.store(lanes.value, place)
    store.align = 4 * LANES
    store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))


def _spread(builder: Any, number: Any) -> _Lanes:
    """A number in all lanes."""
    one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), number, ir.Constant(ir.IntType(32), 0))
    lanes = _Lanes(builder, one)
    return _shuffle(lanes, lanes, [0] * LANES)


def _transpose(rows: Sequence[_Lanes]) -> list[_Lanes]:
    """Turn 16 rows of 16 into their columns, by shuffles that processors do in one step.

    First within blocks of four lanes, for four rows at a time: block b of vector 4g + j then holds column 4b + j of
    rows 4g to 4g + 3. Then the blocks change places.
    """
    pairs = _in_blocks(rows, 1, [0, 16, 1, 17], [2, 18, 3, 19])
    fours = _in_blocks(pairs, 2, [0, 1, 16, 17], [2, 3, 18, 19])
    columns = list(fours)
    for j, at in enumerate((0, 2, 1, 3)):  # `at` is where `_in_blocks` has left vector j of each group
        a, b, c, d = (fours[at + group] for group in (0, 4, 8, 12))
        for upper in (0, 1):
            ab, cd = (_shuffle(*two, _blocks(2 * upper, 2 * upper + 1)) for two in ((a, b), (c, d)))
            for block in (0, 1):
                columns[4 * (2 * upper + block) + j] = _shuffle(ab, cd, _blocks(block, block + 2))
    return columns


def _in_blocks(rows: Sequence[_Lanes], distance: int, first: Sequence[int], second: Sequence[int]) -> list[_Lanes]:
    """Combine rows at a distance, alike in each block of four lanes. A lane of 16 or more is one of the second row."""
    out = list(rows)
    for i in (i for i in range(LANES) if not i & distance):
        for place, order in ((i, first), (i + distance, second)):
            out[place] = _shuffle(rows[i], rows[i + distance], [lane + b for b in (0, 4, 8, 12) for lane in order])
    return out


def _blocks(first: int, second: int) -> list[int]:
    """The order of lanes that takes two blocks of four lanes from each of two vectors."""
    return [4 * block + lane + start for start in (0, LANES) for block in (first, second) for lane in range(4)]


def _shuffle(a: _Lanes, b: _Lanes, order: Sequence[int]) -> _Lanes:
    mask = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [ir.Constant(ir.IntType(32), i) for i in order])
    return _Lanes(a.builder, a.builder.shuffle_vector(a.value, b.value, mask))


def _down_columns(transform: Callable[[Values], Values], builder: Any, here: Any, there: Any) -> None:
    """Transform 16 columns. ``here`` and ``there`` are an address and the distance of two rows."""
    values = [_load(builder, _place(builder, *here, row)) for row in range(SIDE)]
    places = [_place(builder, *there, row) for row in range(SIDE)]
    end = builder.block
    for lanes, place in zip(transform(values), places, strict=True):
        builder.position_after(lanes.value)  # as soon as it is known: fewer values are under way
        _store(builder, lanes, place)
    builder.position_at_end(end)


def _along_rows(
    transform: Callable[[Values], Values], builder: Any, here: Any, there: Any, factor: Any, store: Any = _store
) -> None:
    """Transform 16 rows, times the factor. Rows are transposed in registers: this is faster than through memory."""
    values: Values = []
    for column in range(0, SIDE, LANES):
        values += _transpose([_load(builder, _place(builder, *here, row, column)) for row in range(LANES)])
    values, factors = transform(values), _spread(builder, factor)
    for column in range(0, SIDE, LANES):
        for row, lanes in enumerate(_transpose(values[column : column + LANES])):
            store(builder, lanes.times(factors), _place(builder, *there, row, column))


def _along_rows_streamed(
    transform: Callable[[Values], Values], builder: Any, here: Any, there: Any, factor: Any
) -> None:
    """`_along_rows` for a target in memory that is not needed soon, and that is aligned to lines of the cache."""
    _along_rows(transform, builder, here, there, factor, _stream)


def _code(way: Callable[..., None], transform: Callable[[Values], Values], *more: Any) -> Any:
    """What an `intrinsic` returns: a function of (source, its first index, its stride, the same of the target, …)."""
    array = types.Array(types.float32, 1, "C")
    signature = types.void(array, types.int64, types.int64, array, types.int64, types.int64, *more)

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        ends = []
        for i in (0, 3):
            data = context.make_array(signature.args[i])(context, builder, arguments[i]).data
            ends.append((builder.gep(data, [arguments[i + 1]]), arguments[i + 2]))
        way(transform, builder, *ends, *arguments[6:])
        return context.get_dummy_value()

    return signature, build


# Each stands at the top of the file with a name of its own: numba could not keep the code of a closure on disk.


@intrinsic
def _dct_columns(_typing: Any, a: Any, i: Any, s: Any, b: Any, j: Any, t: Any) -> Any:  # noqa: ARG001
    return _code(_down_columns, dct)


@intrinsic
def _dct_rows(_typing: Any, a: Any, i: Any, s: Any, b: Any, j: Any, t: Any, factor: Any) -> Any:  # noqa: ARG001
    return _code(_along_rows, dct, types.float32)


@intrinsic
def _back_columns(_typing: Any, a: Any, i: Any, s: Any, b: Any, j: Any, t: Any) -> Any:  # noqa: ARG001
    return _code(_down_columns, inverse_dct)


@intrinsic
def _back_rows(_typing: Any, a: Any, i: Any, s: Any, b: Any, j: Any, t: Any, factor: Any) -> Any:  # noqa: ARG001
    return _code(_along_rows, inverse_dct, types.float32)


@intrinsic
def _hadamard_columns(_typing: Any, a: Any, i: Any, s: Any, b: Any, j: Any, t: Any) -> Any:  # noqa: ARG001
    return _code(_down_columns, hadamard)


@intrinsic
def _hadamard_rows(_typing: Any, a: Any, i: Any, s: Any, b: Any, j: Any, t: Any, factor: Any) -> Any:  # noqa: ARG001
    return _code(_along_rows, hadamard, types.float32)


@intrinsic
def _back_rows_streamed(_typing: Any, a: Any, i: Any, s: Any, b: Any, j: Any, t: Any, factor: Any) -> Any:  # noqa: ARG001
    return _code(_along_rows_streamed, inverse_dct, types.float32)


@intrinsic
def _hadamard_rows_streamed(_typing: Any, a: Any, i: Any, s: Any, b: Any, j: Any, t: Any, factor: Any) -> Any:  # noqa: ARG001
    return _code(_along_rows_streamed, hadamard, types.float32)


@intrinsic
def _fence(_typing: Any) -> Any:
    """Finish what was streamed, before another thread reads it."""

    def build(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), build


# -- loops over chunks ---------------------------------------------------------------------------------------------

TO_COSINES, FROM_COSINES, TO_SUMS = 0, 1, 2  # which transform a loop computes


@compiled
def _columns(kind: int, source: Any, at: int, between: Any) -> None:
    """Transform the columns of one chunk into ``between``."""
    for lane in range(0, SIDE, LANES):
        if kind == TO_COSINES:
            _dct_columns(source, at + lane, SIDE, between, lane, WIDE)
        elif kind == FROM_COSINES:
            _back_columns(source, at + lane, SIDE, between, lane, WIDE)
        else:
            _hadamard_columns(source, at + lane, SIDE, between, lane, WIDE)


@compiled
def _rows(kind: int, between: Any, out: Any, place: int, stride: int, factor: Any) -> None:
    """Transform the rows of ``between`` into their place in ``out``."""
    for row in range(0, SIDE, LANES):
        here = place + row * stride
        if kind == TO_COSINES:
            _dct_rows(between, row * WIDE, WIDE, out, here, stride, factor)
        elif kind == FROM_COSINES:
            _back_rows(between, row * WIDE, WIDE, out, here, stride, factor)
        else:
            _hadamard_rows(between, row * WIDE, WIDE, out, here, stride, factor)


@compiled
def transform_chunks(kind: int, source: Any, between: Any, out: Any, keep: Any, factor: Any) -> None:
    """out ← keep · out + factor · sums, for chunks that follow each other. ``keep`` and ``factor`` are fp32."""
    for at in range(0, source.size, AREA):
        _columns(kind, source, at, between)
        if keep == np.float32(0.0):
            _rows(kind, between, out, at, SIDE, factor)
            continue
        _rows(kind, between, between, 0, WIDE, factor)
        # Added by a loop of its own: the transform would read `out` in an order for which memory is slow.
        for row in range(SIDE):
            first = at + row * SIDE
            here, sums = out[first : first + SIDE], between[row * WIDE : row * WIDE + SIDE]
            for i in range(SIDE):
                here[i] = here[i] * keep + sums[i]


@compiled
def inverse_patch(
    kind: int, source: Any, first: int, between: Any, out: Any, stride: int, across: int, gain: Any
) -> None:
    """Chunks from number ``first`` on become parts of a matrix: ``across`` in a row, ``stride`` from row to row."""
    aligned = out.ctypes.data % 64 == 0 and stride % LANES == 0
    for chunk in range(first, first + source.size // AREA):
        place = (chunk // across * stride + chunk % across) * SIDE
        _columns(kind, source, (chunk - first) * AREA, between)
        if not aligned:
            _rows(kind, between, out, place, stride, gain)
            continue
        for row in range(0, SIDE, LANES):
            if kind == FROM_COSINES:
                _back_rows_streamed(between, row * WIDE, WIDE, out, place + row * stride, stride, gain)
            else:
                _hadamard_rows_streamed(between, row * WIDE, WIDE, out, place + row * stride, stride, gain)
    _fence()
