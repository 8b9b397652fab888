"""docs/wire.md suffices: a decoder written from that page alone, in plain Python, reads the vectors.

Everything above the line "Against overtone" knows nothing of this package and needs the standard library only (and
pytest); what is below it holds this decoder and overtone to each other on data that no vector has.
"""

import hashlib
import hmac
import json
import math
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import pytest

VECTORS = Path(__file__).parent / "vectors"
MESSAGES: dict[str, dict] = json.loads((VECTORS / "messages.json").read_text())
PAYLOADS: dict[str, dict] = json.loads((VECTORS / "payloads.json").read_text())
DEALS: dict[str, dict] = json.loads((VECTORS / "deals.json").read_text())
LETTERS: dict[str, dict] = json.loads((VECTORS / "letters.json").read_text())
VERDICT: dict = json.loads((VECTORS / "fingerprints.json").read_text())["verdict"]

# --- The decoder: section 1, messages ---------------------------------------------------------------------------------

HEADER = struct.Struct("<4sBBHIIQ8s8s8s8s")
KINDS = range(15)
KEYED = 0x80
KEEP = 96  # of a method whose `keep` falls with the drift


@dataclass(frozen=True)
class Message:
    """The fields of a message, the flag of the seal's sort apart."""

    kind: int
    sender: int
    round: int
    steps: int
    run: bytes
    schema: bytes
    anchor: bytes
    counters: bytes
    body: bytes


def seal_of(data: bytes, key: bytes) -> bytes:
    """The seal of header and body: HMAC-SHA-256 cut to 16 bytes, or CRC-32 where there is no key."""
    return hmac.digest(key, data, "sha256")[:16] if key else struct.pack("<I", zlib.crc32(data))


def write_message(message: Message, key: bytes) -> bytes:
    """The bytes of a message."""
    kind = message.kind | (KEYED if key else 0)
    prints = (message.run, message.schema, message.anchor, message.counters)
    head = (b"OVTN", 3, kind, message.sender, message.round, message.steps, len(message.body))
    data = HEADER.pack(*head, *prints) + message.body
    return data + seal_of(data, key)


def read_message(data: bytes, key: bytes, **expected: int | bytes) -> Message:
    """The message in these bytes; a ValueError for each reason that section 1 lists."""
    if len(data) < HEADER.size:
        raise ValueError("shorter than a header")
    magic, version, flagged, sender, number, steps, length, *prints = HEADER.unpack_from(data)
    if magic != b"OVTN":
        raise ValueError("another magic")
    if version != 3:
        raise ValueError("another version")
    if bool(flagged & KEYED) != bool(key):
        raise ValueError("a seal of the other sort")
    kind = flagged & ~KEYED
    if kind not in KINDS:
        raise ValueError("an unknown kind")
    end = HEADER.size + length
    past = end + (16 if key else 4)
    if past > len(data):
        raise ValueError("a length beyond what came")
    if any(data[past:]):
        raise ValueError("something after the seal")
    if not hmac.compare_digest(data[end:past], seal_of(data[:end], key)):
        raise ValueError("a seal that does not match")
    message = Message(kind, sender, number, steps, *prints, body=data[HEADER.size : end])
    for name, value in expected.items():
        if getattr(message, name) != value:
            raise ValueError(f"another {name}")
    return message


# --- The decoder: section 3.1, which value lies where -----------------------------------------------------------------

SLAB = 1 << 20
Place = tuple[int, int]  # a tensor, and a value of it in memory order


@dataclass(frozen=True)
class Patch:
    """A rectangle of equal chunks of one tensor, seen as a matrix."""

    tensor: int
    columns: int  # of the whole matrix
    top: int
    left: int
    down: int  # chunks
    across: int
    height: int  # of a chunk
    width: int

    def places(self) -> Iterator[Place]:
        """Chunks row by row, values of a chunk row by row."""
        for i in range(self.down):
            for j in range(self.across):
                for row in range(self.top + i * self.height, self.top + (i + 1) * self.height):
                    first = row * self.columns + self.left + j * self.width
                    yield from ((self.tensor, first + column) for column in range(self.width))


@dataclass(frozen=True)
class Slab:
    """Chunks of one shape that share a block."""

    chunks: int
    values: int  # in one chunk
    plain: bool


def matrix_of(shape: list[int]) -> tuple[int, int]:
    """Rows and columns of a tensor: the first axis longer than 1, and all others."""
    axes = [length for length in shape if length != 1]
    return (axes[0], math.prod(axes[1:])) if len(axes) > 1 else (1, math.prod(axes))


def arrange(shapes: list[list[int]], chunk: int, plain_below: int) -> tuple[list[list[Patch]], list[Place]]:
    """The patches, listed by the shape of their chunks in flat order, and the plain tensors with their sizes."""
    groups: dict[tuple[int, int], list[Patch]] = {}
    plain = []
    for tensor, shape in enumerate(shapes):
        rows, columns = matrix_of(shape)
        if rows == 1 or rows * columns < plain_below:
            plain.append((tensor, rows * columns))
            continue
        down, low = divmod(rows, chunk)
        across, rest = divmod(columns, chunk)
        for top, many, height in ((0, down, chunk), (down * chunk, 1, low)):
            for left, wide, width in ((0, across, chunk), (across * chunk, 1, rest)):
                if many * wide * height * width:
                    patch = Patch(tensor, columns, top, left, many, wide, height, width)
                    groups.setdefault((height, width), []).append(patch)
    return [groups[shape] for shape in sorted(groups, reverse=True)], plain


def flat_order(shapes: list[list[int]], chunk: int, plain_below: int) -> list[Place]:
    """Which value of which tensor lies at each place of the flat vector."""
    groups, plain = arrange(shapes, chunk, plain_below)
    places = [place for group in groups for patch in group for place in patch.places()]
    return places + [(tensor, index) for tensor, size in plain for index in range(size)]


def slabs_of(shapes: list[list[int]], chunk: int, plain_below: int) -> list[Slab]:
    """The slabs of the flat vector, in order."""
    groups, plain = arrange(shapes, chunk, plain_below)
    slabs = []
    for group in groups:
        values = group[0].height * group[0].width
        chunks = sum(patch.down * patch.across for patch in group)
        run = max(1, SLAB // values)
        slabs += [Slab(min(run, chunks - start), values, False) for start in range(0, chunks, run)]
    total = sum(size for _, size in plain)
    return slabs + [Slab(1, min(SLAB, total - start), True) for start in range(0, total, SLAB)]


# --- The decoder: sections 3.2 to 3.4, payloads -----------------------------------------------------------------------

LARGEST = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]


class Bytes:
    """A string of bytes that is read from its beginning."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, count: int) -> bytes:
        """The next bytes, exactly as many as asked for."""
        if count > len(self.data) - self.at:
            raise ValueError("the payload ends too early")
        self.at += count
        return self.data[self.at - count : self.at]

    def end(self) -> None:
        """Refuse bytes that are left."""
        if self.at != len(self.data):
            raise ValueError("the payload goes on after the last block")

    def number(self, size: int) -> int:
        """An unsigned number of so many bytes."""
        return int.from_bytes(self.take(size), "little")

    def fields(self, count: int, width: int) -> list[int]:
        """Fields of `width` bits, least significant first."""
        data = self.take((count * width + 7) // 8)
        spans = ((i * width, i * width + width) for i in range(count))
        return [(int.from_bytes(data[b // 8 : (e + 7) // 8], "little") >> b % 8) & ((1 << width) - 1) for b, e in spans]

    def fp32(self, count: int) -> list[float]:
        """Numbers of binary32."""
        return list(struct.unpack(f"<{count}f", self.take(4 * count)))

    def bf16(self, count: int) -> list[float]:
        """Numbers of which only the upper 16 bits of a binary32 are there."""
        halves = struct.unpack(f"<{count}H", self.take(2 * count))
        return list(struct.unpack(f"<{count}f", struct.pack(f"<{count}I", *(half << 16 for half in halves))))


def fp32(value: float) -> float:
    """The nearest binary32."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


def finite(values: list[float], what: str) -> list[float]:
    """The same values, none of which is infinite or NaN."""
    if not all(map(math.isfinite, values)):
        raise ValueError(f"{what} that is not finite")
    return values


def read_flags(source: Bytes, parameters: int) -> list[bool]:
    """Section 2: which parameters have a gradient."""
    return [bool(flag) for flag in source.fields(parameters, 1)]


Buffer = list[float] | None  # None: it did not change


def read_buffers(source: Bytes, sizes: list[int], shared: list[list[float]]) -> list[Buffer]:
    """Section 2: of buffers with so many values each, those that changed."""
    found: list[Buffer] = []
    for changed, size, old in zip(source.fields(len(sizes), 1), sizes, shared, strict=True):
        values = source.fp32(size) if changed else None
        if values and any(not math.isfinite(new) and new != before for new, before in zip(values, old, strict=True)):
            raise ValueError("a buffer that is not finite")
        found.append(values)
    return found


def mean_of_buffers(sent: list[list[Buffer]], shared: list[list[float]]) -> list[Buffer]:
    """Section 2: the mean of each buffer over the messages that count."""
    means: list[Buffer] = []
    for old, *values in zip(shared, *sent, strict=True):
        total = [0.0] * len(old)
        for value in values:
            total = [fp32(a + b) for a, b in zip(total, old if value is None else value, strict=True)]
        changed = any(value is not None for value in values)
        means.append([fp32(a / len(values)) for a in total] if changed else None)
    return means


def read_positions(source: Bytes, c: int, k: int, a: int) -> list[list[int]]:
    """Section 3.3: of each of c chunks, k ascending positions below a."""
    n = c * k
    r = source.number(1)
    g = (a // k).bit_length() - 1
    if not max(0, g - 2) <= r <= g + 2:
        raise ValueError("a width out of range")
    low = source.fields(n, r)
    length = source.number(4)
    if length > (n + c * (a >> r) + 7) // 8:
        raise ValueError("unary parts that are too long")
    unary = source.take(length)
    if unary[-1:] == b"\0":
        raise ValueError("unary parts that end with a zero byte")
    ones = [place for place in range(8 * length) if unary[place // 8] >> place % 8 & 1]
    if len(ones) != n:
        raise ValueError("another number of ones")
    high = [one - before - 1 for before, one in zip([-1, *ones], ones, strict=False)]
    gaps = [(h << r) + rest for h, rest in zip(high, low, strict=True)]
    chunks = []
    for start in range(0, n, k):
        position, positions = -1, []
        for gap in gaps[start : start + k]:
            position += gap + 1
            positions.append(position)
        if position >= a:
            raise ValueError("a position beyond the chunk")
        chunks.append(positions)
    return chunks


def read_values(source: Bytes, c: int, k: int, bits: int) -> list[float]:
    """Section 3.4: the values of c chunks of k each."""
    n = c * k
    if bits == 32:
        return finite(source.fp32(n), "a value")
    if bits == 16:
        return finite(source.bf16(n), "a value")
    half = 2 ** (bits - 1)
    steps = source.bf16(c)
    for step in steps:
        if not 0 <= step <= LARGEST / max(1, half - 0.5):  # NaN is not
            raise ValueError("a step out of range")
    values = [fp32((q - half + 0.5) * steps[i // k]) for i, q in enumerate(source.fields(n, bits))]
    m = source.number(4)
    if m > n:
        raise ValueError("too many exceptions")
    if m:
        (places,) = read_positions(source, 1, m, n)
        for place, value in zip(places, finite(source.bf16(m), "an exception"), strict=True):
            values[place] = value
    return values


@dataclass(frozen=True)
class Keep:
    """`keep` and `plain_keep`, of messages or of letters."""

    chunks: int
    plain: int = 4096


def read_payload(
    data: bytes, shapes: list[list[int]], keep: int, bits: int, chunk: int, plain_below: int, plain_keep: int = 4096
) -> dict[int, float]:
    """Section 3.2: by place in the flat vector, every value that a payload holds."""
    source = Bytes(data)
    decoded: dict[int, float] = {}
    first = 0
    for slab in slabs_of(shapes, chunk, plain_below):
        decoded |= read_block(source, slab, Keep(keep, plain_keep), bits, first)
        first += slab.chunks * slab.values
    source.end()
    return decoded


def read_block(source: Bytes, slab: Slab, keep: Keep, bits: int, first: int) -> dict[int, float]:
    """The values of one slab, the first value of which has this place in the flat vector."""
    c, a, k = slab.chunks, slab.values, kept_of(slab, keep)
    positions = read_positions(source, c, k, a) if k < a else [range(a)] * c
    values = iter(read_values(source, c, k, width_of(slab, bits)))
    return {first + i * a + position: next(values) for i, kept in enumerate(positions) for position in kept}


def kept_of(slab: Slab, keep: Keep) -> int:
    """k of section 3.2."""
    a = slab.values
    return min(a, max(1, rounded((keep.plain if slab.plain else keep.chunks) * a, 4096)))


def width_of(slab: Slab, bits: int) -> int:
    """Bits per value of section 3.2."""
    return max(bits, 16) if slab.plain else bits


def rounded(over: int, under: int) -> int:
    """The whole number nearest to a fraction, the even one of two."""
    whole, rest = divmod(over, under)
    return whole + (2 * rest > under or (2 * rest == under and whole % 2 == 1))


# --- The decoder: section 7, the fingerprint of a tensor --------------------------------------------------------------

WORD = (1 << 64) - 1


def fold(z: int) -> int:
    """s(z) of section 7."""
    return z ^ (z >> 32)


def fingerprint(data: bytes) -> bytes:
    """The fingerprint of a tensor that has these bytes."""
    digests = (hashlib.blake2b(lane.to_bytes(4, "little"), digest_size=8).digest() for lane in range(1024))
    lanes = [int.from_bytes(digest, "little") | 1 for digest in digests]
    total = 0
    for row, start in enumerate(range(0, len(data), 8192)):
        words = struct.unpack("<1024Q", data[start : start + 8192].ljust(8192, b"\0"))
        h = sum(v * fold(word) for v, word in zip(lanes, words, strict=True)) + (row + 1) * 0x5851F42D4C957F2D
        total += fold(fold(h & WORD) * 0xD6E8FEB86659FD93 & WORD)
    return ((total & WORD) ^ (len(data) * 0x9E3779B97F4A7C15 & WORD)).to_bytes(8, "little")


# --- The decoder: section 4, verdict and mean ------------------------------------------------------------------------


def verdict_of(run: bytes, number: int, marks: dict[int, str], key: bytes) -> bytes:
    """The verdict over the marks of all ranks."""
    told = "{" + ", ".join(f'"{rank}": "{marks[rank]}"' for rank in sorted(marks)) + "}"
    keyed = hashlib.sha256(key).digest() if key else b""
    return hashlib.blake2b(run + struct.pack("<I", number) + told.encode(), digest_size=8, key=keyed).digest()


def mean_of(sent: list[dict[int, float]], members: int, *, dense: bool) -> dict[int, float]:
    """The mean of the values of a slab, by their places, over the messages that count."""
    mean: dict[int, float] = {}
    for one in sent:
        for place, value in one.items():
            mean[place] = fp32(mean.get(place, 0.0) + (value if dense else fp32(value / members)))
    return {place: fp32(value / members) for place, value in mean.items()} if dense else mean


# --- The decoder: section 8, a sharded round --------------------------------------------------------------------------


@dataclass(frozen=True)
class Numbers:
    """`keep` and `bits` of messages, and those of letters."""

    keep: Keep
    bits: int
    keep_down: Keep
    bits_down: int


@dataclass(frozen=True)
class Piece:
    """A run of the units of a slab: a slab of its own, and the place of its first value in the flat vector."""

    first: int
    slab: Slab


@dataclass
class Part:
    """What one replica owns in a round: pieces, and numbers of buffers."""

    pieces: list[Piece]
    buffers: list[int]


def numbers_of(keep: int, bits: int, keep_down: int | None, members: int, plain_keep: int = 4096) -> Numbers:
    """Section 8.5."""
    bits_down = {1: 1, 2: 1, 4: 16, 8: 16, 16: 16, 32: 32}[bits]
    most = min(4096, max(512, 2 * keep), members * keep)
    down = most if members <= 16 else max(keep, most * (members + 16) // (2 * members))
    letters = Keep(down if keep_down is None else keep_down, min(4096, members * plain_keep))
    return Numbers(Keep(keep, plain_keep), bits, letters, bits_down)


@lru_cache
def position_cost(a: int, k: int) -> int:
    """P(a, k) of section 8.1."""
    if a <= 4096:
        return (math.comb(a, k) - 1).bit_length()
    return 0 if k == a else k * ((a // k).bit_length() + 1)


def message_cost(slab: Slab, keep: Keep, bits: int) -> int:
    """Section 8.1: the cost of a slab in a message."""
    k, w = kept_of(slab, keep), width_of(slab, bits)
    return slab.chunks * (position_cost(slab.values, k) + k * w + (16 if w < 16 else 0))


def letter_cost(slab: Slab, keep: Keep, bits: int) -> int:
    """Section 8.1: the cost of a slab in a letter, with `keep` and `bits` of letters."""
    k = kept_of(slab, keep)
    layers = slab.chunks * (16 + 7 * k // 10) if k < slab.values and width_of(slab, bits) == 1 else 0
    return message_cost(slab, keep, bits) + layers


def deal(slabs: list[Slab], buffers: list[int], members: int, numbers: Numbers) -> list[Part]:
    """Section 8.1: the parts."""
    parts = [Part([], []) for _ in range(members)]
    costs = [
        message_cost(slab, numbers.keep, numbers.bits) + letter_cost(slab, numbers.keep_down, numbers.bits_down)
        for slab in slabs
    ]
    place = 0
    before = {False: 0, True: 0}
    for slab, cost in zip(slabs, costs, strict=True):
        same = sum(other for one, other in zip(slabs, costs, strict=True) if one.plain == slab.plain)
        share = max(1, -(-same // members))
        units, values = (slab.values, 1) if slab.plain else (slab.chunks, slab.values)
        belongs = [
            min(members - 1, (2 * units * before[slab.plain] + cost * (2 * unit + 1)) // (2 * units * share))
            for unit in range(units)
        ]
        for part in sorted(set(belongs)):
            run = belongs.count(part)
            piece = Slab(1, run, True) if slab.plain else Slab(run, slab.values, False)
            parts[part].pieces.append(Piece(place, piece))
            place += run * values
        before[slab.plain] += cost
    total = max(1, sum(buffers))
    for number, size in enumerate(buffers):
        parts[min(members - 1, members * (2 * sum(buffers[:number]) + size) // (2 * total))].buffers.append(number)
    return parts


def costs(slabs: list[Slab], buffers: list[int], members: int, numbers: Numbers) -> dict[str, int]:
    """Section 8.5: the bytes of a round, by pattern."""
    whole = sum(message_cost(slab, numbers.keep, numbers.bits) for slab in slabs) + 32 * sum(buffers)
    longest = 0
    for cost, keep, bits in (
        (message_cost, numbers.keep, numbers.bits),
        (letter_cost, numbers.keep_down, numbers.bits_down),
    ):
        longest += 60 + max(
            (sum(cost(piece.slab, keep, bits) for piece in part.pieces) + 32 * sum(buffers[i] for i in part.buffers))
            // 8
            for part in deal(slabs, buffers, members, numbers)
        )
    return {"gathered": (members - 1) * (whole // 8 + 60), "sharded": (members - 1) * longest}


def chosen(slabs: list[Slab], buffers: list[int], members: int, numbers: Numbers) -> str:
    """Section 8.5: what `auto` stands for."""
    found = costs(slabs, buffers, members, numbers)
    return "sharded" if 10 * found["sharded"] < 9 * found["gathered"] else "gathered"


@dataclass
class Decider:
    """Section 9, for a budget in bytes: the next `keep`. A tell is a tuple of its fields in order."""

    budget: int
    cost: Callable[[int], int]
    account: int = 0

    def next_keep(self, now: int, tells: list[tuple]) -> int:
        wanted = self.wanted(now, tells)
        return min(wanted, 2 * now) if wanted > now else max(wanted, (now + 1) // 2)

    def wanted(self, now: int, tells: list[tuple]) -> int:
        spent = max(tell[1] for tell in tells) or self.cost(now)
        self.account = max(-4 * self.budget, min(4 * self.budget, self.account + self.budget - spent))
        lag = sum(tell[2] for tell in tells) / max(sum(tell[3] for tell in tells), 1e-300)
        base = base_of(self.budget, self.cost)
        if lag < 2 or self.account + self.budget < self.cost(base):
            return max(1, base // 2)
        return 2 * base if base < 4096 and self.account + self.budget >= self.cost(2 * base) else base


def base_of(budget: int, cost: Callable[[int], int]) -> int:
    """The largest power of two that a budget pays for."""
    base = 1
    while base < 4096 and cost(2 * base) <= budget:
        base *= 2
    return base


def read_part(
    data: bytes, part: Part, keep: Keep, bits: int, shared: list[list[float]]
) -> tuple[list[Buffer], list[dict[int, float]]]:
    """Section 8.3: the buffers of a part, and the values of each of its pieces."""
    source = Bytes(data)
    mine = [shared[number] for number in part.buffers]
    buffers = read_buffers(source, list(map(len, mine)), mine)
    values = [read_block(source, piece.slab, keep, bits, piece.first) for piece in part.pieces]
    source.end()
    return buffers, values


def read_letter(
    data: bytes, part: Part, keep: Keep, bits: int, shared: list[list[float]]
) -> tuple[list[Buffer], list[dict[int, float]]]:
    """Section 8.4: the same of a letter, with `keep` and `bits` of letters."""
    source = Bytes(data)
    mine = [shared[number] for number in part.buffers]
    buffers = read_buffers(source, list(map(len, mine)), mine)
    values = []
    for piece in part.pieces:
        if kept_of(piece.slab, keep) == piece.slab.values:
            values.append(read_block(source, piece.slab, keep, bits, piece.first))
            continue
        found: dict[int, float] = {}
        width = width_of(piece.slab, bits)
        for _ in range(2 if width == 1 else 1):
            layer = read_layer(source, piece, keep, width)
            if found.keys() & layer.keys():
                raise ValueError("a position in both layers")
            found |= layer
        values.append(found)
    source.end()
    return buffers, values


def read_layer(source: Bytes, piece: Piece, keep: Keep, bits: int) -> dict[int, float]:
    """One layer of a block of a letter."""
    c, a = piece.slab.chunks, piece.slab.values
    n = source.number(4)
    if n > c * kept_of(piece.slab, keep):
        raise ValueError("too many values")
    if n == 0:
        return {}
    (positions,) = read_positions(source, 1, n, c * a)
    if bits == 1:
        steps = source.bf16(c)
        if not all(0 <= step <= LARGEST for step in steps):
            raise ValueError("a step out of range")
        codes = source.fields(n, 1)
        values = [(q - 0.5) * steps[i // a] for i, q in zip(positions, codes, strict=True)]
        m = source.number(4)
        if m > n:
            raise ValueError("too many exceptions")
        if m:
            (places,) = read_positions(source, 1, m, n)
            for place, value in zip(places, finite(source.bf16(m), "an exception"), strict=True):
                values[place] = value
    else:
        values = finite(source.fp32(n) if bits == 32 else source.bf16(n), "a value")
    return {piece.first + i: value for i, value in zip(positions, values, strict=True)}


# --- The vectors ------------------------------------------------------------------------------------------------------


def message_vector(name: str) -> tuple[Message, bytes, bytes]:
    """The fields, the key and the bytes of a message vector."""
    vector = MESSAGES[name]
    prints = {field: bytes.fromhex(vector[field]) for field in ("run", "schema", "anchor", "counters", "body")}
    numbers = {field: vector[field] for field in ("kind", "sender", "round", "steps")}
    return Message(**numbers, **prints), bytes.fromhex(vector["key"]), bytes.fromhex(vector["message"])


def payload_vector(name: str) -> tuple[bytes, Callable[[bytes], dict[int, float]]]:
    """The bytes of a payload vector, and what reads others with the same codec and shapes."""
    vector = PAYLOADS[name]
    settings = {key: vector[key] for key in ("shapes", "keep", "bits", "chunk", "plain_below", "plain_keep")}
    return bytes.fromhex(vector["payload"]), lambda data: read_payload(data, **settings)


def without_zeros(decoded: dict[int, float]) -> dict[int, float]:
    """Only the values that are not zero."""
    return {place: value for place, value in decoded.items() if value}


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_are_read_and_rebuilt(name: str) -> None:
    """Every field of a message is where the page puts it, and the fields make the same bytes again."""
    message, key, data = message_vector(name)
    assert read_message(data, key) == message
    assert read_message(data + bytes(9), key) == message  # a transport may pad
    assert write_message(message, key) == data


def test_flags_are_read() -> None:
    """One bit per parameter, the first in the lowest bit."""
    message, _, _ = message_vector("flags of a sum")
    source = Bytes(message.body)
    assert [i for i, flag in enumerate(read_flags(source, 10)) if flag] == [0, 2, 3, 9]
    assert source.at == len(message.body)


@pytest.mark.parametrize("name", PAYLOADS)
def test_payloads_are_read(name: str) -> None:
    """Every payload decodes to exactly the values in the vector, at exactly their places."""
    data, read = payload_vector(name)
    expected = {int(place): value for place, value in PAYLOADS[name]["decoded"].items()}
    assert without_zeros(read(data)) == expected


def dealt(vector: dict, buffers: list[int]) -> tuple[list[Part], Numbers]:
    """The parts and the numbers of a vector."""
    numbers = numbers_of(vector["keep"], vector["bits"], vector["keep_down"], vector["replicas"], vector["plain_keep"])
    slabs = slabs_of(vector["shapes"], vector["chunk"], vector["plain_below"])
    return deal(slabs, buffers, vector["replicas"], numbers), numbers


@pytest.mark.parametrize("name", DEALS)
def test_deals_are_found(name: str) -> None:
    """Every replica owns what the vector says, and letters have the numbers that it says."""
    vector = DEALS[name]
    parts, numbers = dealt(vector, vector["buffers"])
    letters = {"keep": numbers.keep_down.chunks, "plain_keep": numbers.keep_down.plain, "bits": numbers.bits_down}
    assert letters == vector["letters"]
    spans = [[[piece.first, piece.slab.chunks * piece.slab.values] for piece in part.pieces] for part in parts]
    assert spans == [part["pieces"] for part in vector["parts"]]
    assert [part.buffers for part in parts] == [part["buffers"] for part in vector["parts"]]


def letter_vector(name: str) -> tuple[bytes, Callable[[bytes], dict[int, float]]]:
    """The body of a letter, and what reads others of the same part."""
    vector = LETTERS[name]
    parts, numbers = dealt(vector, [])

    def read(data: bytes) -> dict[int, float]:
        _, pieces = read_letter(data, parts[vector["part"]], numbers.keep_down, numbers.bits_down, [])
        return {place: value for piece in pieces for place, value in piece.items()}

    return bytes.fromhex(vector["letter"]), read


@pytest.mark.parametrize("name", LETTERS)
def test_letters_are_read(name: str) -> None:
    """Every letter decodes to exactly the values in the vector, which lie where the mean has values."""
    data, read = letter_vector(name)
    expected = {int(place): value for place, value in LETTERS[name]["decoded"].items()}
    assert without_zeros(read(data)) == expected
    assert expected.keys() <= {int(place) for place in LETTERS[name]["mean"]}
    for length in {0, 1, len(data) // 2, len(data) - 1}:
        with pytest.raises(ValueError):  # noqa: PT011
            read(data[:length])
    with pytest.raises(ValueError, match="goes on"):
        read(data + b"\0")


def test_impossible_letters_are_refused() -> None:
    """Too many values, a position in both layers, a position beyond the piece. (The piece has 2 chunks of 64.)"""
    _, read = letter_vector("two layers")
    one = "01000000 06 05 01000000 01 803f 0040 01 00000000"  # position 5: + 0.5, the step of the first chunk is 1
    assert read(bytes.fromhex(one + "00000000")) == {5: 0.5}
    assert read(bytes.fromhex("00000000" + one.replace("06 05", "06 25").replace("01 803f", "02 803f"))) == {101: 1.0}
    for reason, letter in (
        ("both layers", one + one),
        ("beyond", one.replace("01 803f", "04 803f") + "00000000"),
        ("too many values", "21000000"),
        ("a step", one.replace("0040", "0080").replace("803f", "80bf") + "00000000"),
        ("too many exceptions", one[:-8] + "02000000"),
    ):
        with pytest.raises(ValueError, match=reason):
            read(bytes.fromhex(letter))


def test_verdicts_are_found() -> None:
    """The verdict of section 4, with a key and without."""
    marks = {int(rank): mark for rank, mark in VERDICT["marks"].items()}
    for name, key in (("plain", ""), ("keyed", VERDICT["key"])):
        found = verdict_of(bytes.fromhex(VERDICT["run"]), VERDICT["round"], marks, bytes.fromhex(key))
        assert found.hex() == VERDICT[name]


def test_the_example_of_the_page() -> None:
    """A matrix of 130 x 70 with chunks of 64 lies as section 3.1 says, and every value lies somewhere once."""
    groups, plain = arrange([[130, 70]], 64, 0)
    found = [(p.height, p.width, p.down * p.across) for group in groups for p in group]
    assert found == [(64, 64, 2), (64, 6, 2), (2, 64, 1), (2, 6, 1)]
    assert plain == []
    order = flat_order([[130, 70]], 64, 0)
    assert sorted(order) == [(0, index) for index in range(130 * 70)]
    assert order[64] == (0, 70)  # second row of the first chunk
    assert order[64 * 64] == (0, 64 * 70)  # the chunk below
    assert order[2 * 64 * 64] == (0, 64)  # upper right
    assert order[-12] == (0, 128 * 70 + 64)  # lower right


def test_flat_order_by_hand() -> None:
    """Chunks of one shape lie together whatever their tensor; plain tensors come last, in order."""
    shapes = [[3], [1, 3, 1, 2], [2, 2], []]
    whole = [(1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3)]
    assert flat_order(shapes, 2, 0) == [*whole, (1, 4), (1, 5), (0, 0), (0, 1), (0, 2), (3, 0)]
    assert slabs_of(shapes, 2, 0) == [Slab(2, 4, False), Slab(1, 2, False), Slab(1, 4, True)]
    assert slabs_of(shapes, 2, 5) == [Slab(1, 4, False), Slab(1, 2, False), Slab(1, 8, True)]
    assert slabs_of([[2048, 1025], [SLAB - 1], [2]], 1024, 0) == [
        Slab(1, SLAB, False),
        Slab(1, SLAB, False),
        Slab(2, 1024, False),
        Slab(1, SLAB, True),
        Slab(1, 1, True),
    ]


# --- Refusals ---------------------------------------------------------------------------------------------------------


def put(data: bytes, at: int, new: str) -> bytes:
    """The same bytes, but with others (in hexadecimal) from a place on."""
    other = bytes.fromhex(new)
    return data[:at] + other + data[at + len(other) :]


@pytest.mark.parametrize("name", MESSAGES)
def test_damaged_messages_are_refused(name: str) -> None:
    """A message that was cut, extended or altered anywhere is refused, with key and without."""
    message, key, data = message_vector(name)
    for length in range(len(data)):
        with pytest.raises(ValueError):  # noqa: PT011
            read_message(data[:length], key)
    for at in range(len(data)):
        with pytest.raises(ValueError):  # noqa: PT011
            read_message(put(data, at, f"{data[at] ^ 1:02x}"), key)
    with pytest.raises(ValueError, match="after the seal"):
        read_message(data + b"\0\1", key)
    with pytest.raises(ValueError, match="other sort"):
        read_message(data, b"" if key else b"a key")
    with pytest.raises(ValueError, match="does not match"):
        read_message(write_message(message, b"one key"), b"another")
    with pytest.raises(ValueError, match="does not match"):
        read_message(data[:-1] + bytes([data[-1] ^ 0x80]), key)


@pytest.mark.parametrize("name", MESSAGES)
def test_unexpected_messages_are_refused(name: str) -> None:
    """A sealed message is refused if it is of another kind, sender, run, schema, round or version."""
    message, key, data = message_vector(name)
    expected = {field: getattr(message, field) for field in ("sender", "run", "schema", "round")}
    assert read_message(data, key, **expected) == message
    others = {"sender": 7, "run": b"another.", "schema": b"another.", "round": 1}
    for field, value in others.items():
        with pytest.raises(ValueError, match=f"another {field}"):
            read_message(write_message(replace(message, **{field: value}), key), key, **expected)
    with pytest.raises(ValueError, match="unknown kind"):
        read_message(write_message(replace(message, kind=15), key), key)
    for at, new, reason in ((0, "4f56544d", "magic"), (4, "01", "version"), (16, "ff" * 8, "beyond")):
        broken = put(data[: HEADER.size + len(message.body)], at, new)
        with pytest.raises(ValueError, match=reason):
            read_message(broken + seal_of(broken, key), key)


@pytest.mark.parametrize("name", PAYLOADS)
def test_cut_and_extended_payloads_are_refused(name: str) -> None:
    """A payload has one length: without its last bytes, or with more, it is refused."""
    data, read = payload_vector(name)
    for length in {0, 1, len(data) // 2, len(data) - 1}:
        with pytest.raises(ValueError):  # noqa: PT011
            read(data[:length])
    with pytest.raises(ValueError, match="goes on"):
        read(data + b"\0")


# Of "one chunk, 1 bit": width 02, low parts 5f2d, length 03000000, unary parts a84903, step 6d40, codes 13, exceptions.
ONE_BIT = [
    ("a width out of range", "00 5f2d 03000000 a84903 6d40 13 00000000"),
    ("a width out of range", "06 000000000000 01000000 ff 6d40 13 00000000"),
    ("too long", "02 5f2d 04000000 a8490001 6d40 13 00000000"),
    ("zero byte", "02 5f2d 03000000 ff0000 6d40 13 00000000"),
    ("number of ones", "02 5f2d 03000000 a84907 6d40 13 00000000"),
    ("number of ones", "02 5f2d 03000000 a84901 6d40 13 00000000"),
    ("number of ones", "02 5f2d 00000000 6d40 13 00000000"),
    ("beyond the chunk", "02 5f2d 03000000 a84981 6d40 13 00000000"),
    ("a step", "02 5f2d 03000000 a84903 c07f 13 00000000"),
    ("a step", "02 5f2d 03000000 a84903 807f 13 00000000"),
    ("a step", "02 5f2d 03000000 a84903 6dc0 13 00000000"),
    ("too many exceptions", "02 5f2d 03000000 a84903 6d40 13 09000000"),
    ("too many exceptions", "02 5f2d 03000000 a84903 6d40 13 ffffffff"),
    ("an exception", "02 5f2d 03000000 a84903 6d40 13 01000000 03 00 01000000 01 807f"),
    ("a width out of range", "02 5f2d 03000000 a84903 6d40 13 01000000 00 01000000 01 803f"),
    ("beyond the chunk", "02 5f2d 03000000 a84903 6d40 13 01000000 03 00 01000000 02 803f"),
]


@pytest.mark.parametrize(("reason", "payload"), ONE_BIT)
def test_impossible_payloads_are_refused(reason: str, payload: str) -> None:
    """What section 3 tells receivers to refuse is refused, for that reason."""
    _, read = payload_vector("one chunk, 1 bit")
    with pytest.raises(ValueError, match=reason):
        read(bytes.fromhex(payload))


def test_exceptions_take_the_place_of_codes() -> None:
    """Exceptions are placed by the list of kept values: the last one, or all of them (then still with positions)."""
    data, read = payload_vector("one chunk, 1 bit")
    places = list(read(data))
    one = read(data[:-4] + bytes.fromhex("01000000 03 07 01000000 01 803f"))
    assert one == read(data) | {places[7]: 1.0}
    every = read(data[:-4] + bytes.fromhex("08000000 00 01000000 ff") + bytes.fromhex("803f") * 8)
    assert every == dict.fromkeys(places, 1.0)


def test_values_that_are_not_finite_are_refused() -> None:
    """Infinite and NaN values are refused at 16 and 32 bits, also in plain tensors."""
    for name, infinite, nan in (
        ("bf16", "80ff", "c07f"),
        ("fp32", "0000807f", "0100807f"),
        ("edges, 4 bits", "807f", "81ff"),
    ):
        data, read = payload_vector(name)
        for new in (infinite, nan):
            with pytest.raises(ValueError, match="a value"):
                read(put(data, len(data) - len(new) // 2, new))


def test_largest_step() -> None:
    """A step is refused only if a code could stand for more than fp32 holds: 127.5 steps at 8 bits, 7.5 at 4."""
    for name, at, largest, beyond in (("8 bits", 14, "007c", "017c"), ("edges, 4 bits", 12, "087e", "097e")):
        data, read = payload_vector(name)
        step = struct.unpack("<f", b"\0\0" + bytes.fromhex(largest))[0]
        most = max(abs(value) for value in read(put(data, at, largest)).values())
        assert 4 * step < most <= LARGEST
        with pytest.raises(ValueError, match="a step"):
            read(put(data, at, beyond))


# --- Against overtone -------------------------------------------------------------------------------------------------

SHAPES: dict[str, list[list[int]]] = {
    "one matrix": [[64, 64]],
    "edges": [[130, 70], [7], [64, 6]],
    "many axes": [[5, 1, 9], [4, 3, 3, 3], [1, 33, 1], [2, 2], [], [1, 1], [12, 8]],
    "plain only": [[100], [1, 50], [3, 3]],
}
SETTINGS = [
    (1, 1, 64),
    (100, 1, 8),
    (512, 2, 16),
    (1024, 4, 8),
    (4095, 8, 5),
    (4096, 1, 16),
    (700, 16, 64),
    (64, 32, 7),
]


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_flat_order_is_that_of_overtone(shapes: list[list[int]]) -> None:
    """The flat vector that overtone reads from tensors has each value where the page says that it lies."""
    import torch

    from overtone.codec import TopK

    for plain_below in (0, 10, 100):
        for chunk in (5, 8, 64):
            layout = TopK(chunk=chunk, transform="none", plain_below=plain_below).layout(shapes)
            tensors = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate(shapes)]
            values = [tensor.reshape(-1).tolist() for tensor in tensors]
            order = flat_order(shapes, chunk, plain_below)
            flat = layout.read(tensors, layout.empty(torch.device("cpu")))
            assert flat.tolist() == [values[tensor][index] for tensor, index in order]
            cuts = [Slab(slab.chunks, slab.area, slab.plain) for slab in layout.slabs]
            assert slabs_of(shapes, chunk, plain_below) == cuts


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("keep", "bits", "chunk"), SETTINGS)
def test_reads_what_overtone_encodes(shapes: list[list[int]], keep: int, bits: int, chunk: int) -> None:
    """A payload of random values, some far off, decodes to what its sender says it sent; damaged, to what overtone
    reads in it, and is refused exactly if overtone refuses it."""
    import torch

    from overtone.codec import TopK
    from overtone.errors import WireError
    from whole import decode_all, encode_all

    codec = TopK(keep=keep, bits=bits, chunk=chunk, transform="none", plain_below=10)
    layout = codec.layout(shapes)
    noise = torch.randn(layout.size, generator=torch.Generator().manual_seed(keep))
    payload, sent = encode_all(codec, noise**5, layout)

    def read(data: bytes) -> dict[int, float]:
        return read_payload(data, shapes, keep, bits, chunk, plain_below=10)

    def nonzero(flat: torch.Tensor) -> dict[int, float]:
        return without_zeros(dict(enumerate(flat.tolist())))

    assert without_zeros(read(payload)) == nonzero(sent)
    dice = random.Random(keep)
    for _ in range(12):
        damaged = bytearray(payload)
        # Often near the beginning, where widths and lengths are, or at the end, where exceptions are counted.
        at = dice.choice((dice.randrange(len(payload)), dice.randrange(min(8, len(payload))), -dice.randint(1, 6)))
        damaged[at] = dice.choice((0, 255, damaged[at] ^ 1 << dice.randrange(8)))
        try:
            expected = nonzero(decode_all(codec, bytes(damaged), layout))
        except WireError:
            with pytest.raises(ValueError):  # noqa: PT011
                read(bytes(damaged))
        else:
            assert without_zeros(read(bytes(damaged))) == expected


@pytest.mark.parametrize("name", ["demo", "ddp"])
def test_reads_the_gradient_rounds_of_overtone(name: str) -> None:
    """Flags, then the payload to its end where messages are gathered, and nothing else where values are summed."""
    import torch

    import overtone

    class Recorder(overtone.Solo):
        said: bytes = b""

        def gather(self, message: bytes, *, most: int | None, count: overtone.Count) -> list[bytes]:  # noqa: ARG002
            self.said = message if message[:4] == b"OVTN" else self.said
            return [message]

    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(5)))
    world = Recorder()
    method = overtone.demo(keep=512, bits=8) if name == "demo" else overtone.ddp()
    replica = overtone.Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), method, world)
    used = [0, 1, 4, 8, 9]
    for i, p in enumerate(model.parameters()):
        p.grad = torch.randn_like(p) if i in used else None
    replica.step()
    message = read_message(world.said, b"", kind=0, round=0)
    source = Bytes(message.body)
    assert [i for i, flag in enumerate(read_flags(source, 10)) if flag] == used
    if name == "demo":
        shapes = [list(p.shape) for p in model.parameters()]
        read_payload(message.body[source.at :], shapes, 512, 8, 64, plain_below=1024)
    else:
        assert source.at == len(message.body)


def test_fingerprints_are_those_of_overtone() -> None:
    """Section 7 in plain Python: several rows, one not full, one that only filling up completes, none at all."""
    import torch

    from overtone.coding.fingerprint import of_tensors

    dice = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(3, 2048, generator=dice),  # three rows, nothing left
        torch.randn(2 * 2048 + 77, generator=dice),  # two rows and some words, the last half full
        torch.randn(2047, generator=dice),  # 1024 words, the last half full
        torch.randn(4095, generator=dice).bfloat16(),
        torch.randn(4096 + 1001, generator=dice).bfloat16(),
        torch.randn(8, 8, 6, 7, generator=dice).to(memory_format=torch.channels_last),
        torch.randint(-9, 9, (5, 3), generator=dice),
        torch.tensor([True, False, True]),
        torch.tensor(1.5),
        torch.empty(0),
    ]
    prints = [fingerprint(bytes(tensor.reshape(-1).view(torch.uint8).tolist())) for tensor in tensors]
    for tensor, mine in zip(tensors, prints, strict=True):
        assert hashlib.blake2b(mine, digest_size=8).digest() == of_tensors([tensor])
    assert hashlib.blake2b(b"".join(prints), digest_size=8).digest() == of_tensors(tensors)


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_deals_are_those_of_overtone(shapes: list[list[int]]) -> None:
    """Parts, numbers of letters and the choice of `auto` are those of the package."""
    from overtone import Method
    from overtone.codec import TopK
    from overtone.exchange.choice import cost_of
    from overtone.exchange.dealing import deal as deal_of_overtone
    from overtone.exchange.letters import letters_for
    from overtone.exchange.signals import Drift
    from overtone.rules import Outer

    for (keep, bits, chunk), members in zip(SETTINGS, (2, 3, 4, 5, 8, 9, 16, 40), strict=True):
        codec = TopK(keep=keep, bits=bits, chunk=chunk, plain_below=10, plain_keep=64 * members)
        slabs, buffers = codec.layout(shapes).slabs, [chunk, 1, 0, 70][: members % 5]
        for keep_down in (None, 1, 300, 4096):
            numbers = numbers_of(keep, bits, keep_down, members, 64 * members)
            letters = letters_for(codec, keep_down, members)
            assert Keep(letters.top_k.keep, letters.top_k.plain_keep) == numbers.keep_down
            assert letters.top_k.bits == numbers.bits_down
            mine = slabs_of(shapes, chunk, 10)
            found = deal(mine, buffers, members, numbers)
            theirs = deal_of_overtone(
                slabs,
                buffers,
                members,
                lambda slab: codec.bits_of(slab) + letters.bits_of(slab),  # noqa: B023
            )
            for part, own in enumerate(found):
                pieces = [Piece(s.offset, Slab(s.chunks, s.area, s.plain)) for s in theirs.of(part)]
                assert (own.pieces, own.buffers) == (pieces, list(theirs.buffers[part]))
            rule = Outer(lr=1.0, momentum=0.0)
            method = Method("any", Drift, 1, rule, codec, exchange="sharded", keep_down=keep_down)
            assert chosen(mine, buffers, members, numbers) == cost_of(method, slabs, buffers, members).chosen("auto")


def test_letters_have_the_default_of_overtone() -> None:
    """`keep_down` for small and large `keep`, among few and many replicas."""
    from overtone.codec import TopK
    from overtone.exchange.letters import letters_for

    for keep in (1, 32, 128, 1000, 4096):
        for members in (2, 8, 9, 16, 17, 64):
            for bits in (1, 32):
                expected = letters_for(TopK(keep=keep, bits=bits), None, members).top_k
                assert numbers_of(keep, bits, None, members).keep_down == Keep(expected.keep)


ROUNDS = [
    # keep, bits, keep_down, replicas, release, key
    (300, 1, None, 3, 1.0, ""),
    (128, 2, 200, 4, 0.5, "a key"),
    (64, 4, None, 2, 1.0, ""),
    (200, 32, 4096, 3, 1.0, ""),
    (4096, 1, 500, 2, 1.0, "a key"),
    (16, 1, None, 10, 1.0, ""),
]


@pytest.mark.parametrize(("keep", "bits", "keep_down", "members", "release", "key"), ROUNDS)
def test_reads_the_sharded_rounds_of_overtone(
    keep: int, bits: int, keep_down: int | None, members: int, release: float, key: str
) -> None:
    """Two rounds, a drain and the finish: every byte of messages, letters and verdicts is what the page says; so are
    the new anchor, the new buffers and what is owed."""
    from functools import partial
    from unittest import mock

    import torch

    import overtone
    from overtone.sim.transport import SimTransport

    secret = key.encode()
    said: list[tuple[str, list]] = []  # collectives in order: what each rank said
    before: list[dict[str, list]] = []  # for each all-to-all, the state of all replicas at that time

    def build(rank: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        layers = (torch.nn.Linear(21, 60), torch.nn.BatchNorm1d(60), torch.nn.Linear(60, 19))
        model = torch.nn.Sequential(*layers)
        return model, torch.optim.SGD(model.parameters(), lr=0.3)

    method = overtone.decoupled(
        every=1,
        keep=keep,
        bits=bits,
        lr=1.0,
        transform="dct",
        chunk=8,
        plain_keep=4096,
        drain=1,
        release=release,
        exchange="sharded",
    )
    method = replace(method, keep_down=keep_down)
    with mock.patch("overtone.sim.cluster.Replica", partial(overtone.Replica, key=key or None)):
        cluster = overtone.Cluster(build, method, replicas=members)

    def snapshot() -> dict[str, list]:
        tensors = [replica.state.tensors for replica in cluster.replicas]
        return {
            "anchor": tensors[0]["anchor"].tolist(),
            "residual": [own["residual"].tolist() for own in tensors],
            "shared": [b.view(-1).tolist() for b in cluster.replicas[0].exchanger.buffers.shared],
        }

    to_all, gather = SimTransport.all_to_all, SimTransport.gather

    def all_to_all(seat: SimTransport, messages: list[bytes], **rest: object) -> list[bytes]:
        if seat.rank == 0:
            said.append(("all-to-all", []))
            before.append(snapshot())
        said[-1][1].append(list(messages))
        return to_all(seat, messages, **rest)  # type: ignore[arg-type]

    def gathering(seat: SimTransport, message: bytes, **rest: object) -> list[bytes]:
        if seat.rank == 0:
            said.append(("gather", []))
        said[-1][1].append(message)
        return gather(seat, message, **rest)  # type: ignore[arg-type]

    after: list[dict[str, list]] = []
    with (
        mock.patch.object(SimTransport, "all_to_all", all_to_all),
        mock.patch.object(SimTransport, "gather", gathering),
    ):
        for _ in range(2):
            for replica in cluster.turns():
                x = torch.randn(8, 21) * (1 + replica.transport.rank)
                replica.model(x).pow(3).mean().backward()
            cluster.step()
            after.append(snapshot())
        cluster.finish()
    after.append(before[3])  # of the drain: the state when the finish messages are sent
    after[2]["residual"] = []  # the residual is closed by then

    model = cluster.replicas[0].model
    shapes = [list(p.shape) for p in model.parameters()]
    sizes = [60, 60]  # the running mean and variance
    numbers = numbers_of(keep, bits, keep_down, members)
    parts = deal(slabs_of(shapes, 8, 1024), sizes, members, numbers)
    assert [kind for kind, _ in said] == [*(["all-to-all", "gather", "gather", "gather"] * 3), "all-to-all", "gather"]

    for number in range(3):
        drains = number == 2
        coding = Numbers(Keep(4096), 1, Keep(4096), 1) if drains else numbers
        (_, sent), (_, first), (_, raw_letters), (_, second) = said[4 * number : 4 * number + 4]
        state, then = before[number], after[number]
        owners = [(part + number) % members for part in range(members)]
        messages = [[read_message(one, secret, kind=int(drains), sender=i, round=number) for one in row]
                    for i, row in enumerate(sent)]  # fmt: skip
        letters = [read_message(one, secret, kind=8, sender=i, round=number) for i, one in enumerate(raw_letters)]
        run = messages[0][0].run
        # The first verdict: a header of length 0, as if there were no key.
        headers = [
            {one[:5] + bytes([one[5] & 0x7F]) + one[6:16] + bytes(8) + one[24:56] for one in row} for row in sent
        ]
        assert all(len(row) == 1 for row in headers)
        marks = {rank: row.pop().hex() for rank, row in enumerate(headers)}
        assert set(first) == {verdict_of(run, number, marks, secret)}
        seals = {rank: one[-(16 if key else 4) :].hex() for rank, one in enumerate(raw_letters)}
        assert set(second) == {verdict_of(run, number, seals, secret)}

        anchor, shared = list(state["anchor"]), [list(values) for values in state["shared"]]
        residual = [list(values) for values in state["residual"]]
        for part, owner in zip(parts, owners, strict=True):
            told = [read_part(row[owner].body, part, coding.keep, coding.bits, state["shared"]) for row in messages]
            buffers, passed = read_letter(
                letters[owner].body, part, coding.keep_down, coding.bits_down, state["shared"]
            )
            assert buffers == mean_of_buffers([own for own, _ in told], [state["shared"][i] for i in part.buffers])
            for i, values in zip(part.buffers, buffers, strict=True):
                shared[i] = values or shared[i]
            for at, (piece, letter) in enumerate(zip(part.pieces, passed, strict=True)):
                dense = kept_of(piece.slab, coding.keep) == piece.slab.values
                mean = mean_of([values[at] for _, values in told], members, dense=dense)
                assert letter.keys() <= mean.keys() or len(letter) == piece.slab.chunks * piece.slab.values
                for place, value in letter.items():
                    anchor[place] = fp32(anchor[place] - value)
                for rank, (_, values) in enumerate(told):
                    for place, value in values[at].items():
                        if place not in letter:
                            residual[rank][place] = fp32(residual[rank][place] + fp32(value * release))
                for place, value in letter.items():
                    owed = fp32(fp32(mean.get(place, 0.0) - value) * members)
                    residual[owner][place] = fp32(residual[owner][place] + fp32(owed * release))
        assert anchor == then["anchor"] != state["anchor"]
        assert shared == then["shared"]
        assert not then["residual"] or residual == then["residual"]

    (_, last), (_, verdicts) = said[12:]
    finishing = [read_message(one, secret, kind=4, sender=i, round=3) for i, row in enumerate(last) for one in row]
    assert all(message.body == b"" for message in finishing)
    assert len(set(verdicts)) == 1


@pytest.mark.parametrize(
    ("exchange", "budget"),
    [("gathered", 3000), ("sharded", 2500)],
)
def test_all_replicas_compute_the_keep_that_the_page_says(exchange: str, budget: int) -> None:
    """The tells in the messages (sharded: letters) of a run, and section 9, give the `keep` of each next round."""
    from unittest import mock

    import torch

    import overtone
    from overtone.sim.transport import SimTransport

    members, said = 3, []

    def build(rank: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(rank)
        model = torch.nn.Sequential(torch.nn.Linear(70, 64), torch.nn.Linear(64, 130, bias=False))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    method = overtone.decoupled(
        every=1, lr=0.9, momentum=0.8, plain_keep=4096, exchange=exchange, drain=0, budget=str(budget)
    )
    cluster = overtone.Cluster(build, method, replicas=members)
    gather, kind = SimTransport.gather, 8 if exchange == "sharded" else 0

    def gathering(seat: SimTransport, message: bytes, **rest: object) -> list[bytes]:
        if message[:4] == b"OVTN" and message[5] == kind:
            said.append(message)
        return gather(seat, message, **rest)  # type: ignore[arg-type]

    with mock.patch.object(SimTransport, "gather", gathering):
        for number in range(25):
            for replica in cluster.turns():
                replica.inner.zero_grad()
                replica.model(torch.randn(8, 70)).pow(2).mean().mul(0.8**number).backward()
            cluster.step()
    assert len(said) == 25 * members
    slabs = slabs_of([list(p.shape) for p in cluster.replicas[0].model.parameters()], 64, 1024)

    @lru_cache
    def cost(keep: int) -> int:
        return costs(slabs, [], members, numbers_of(keep, 1, None, members))[exchange]

    decider, keeps = Decider(budget, cost), []
    keep = base_of(budget, cost)
    for number in range(25):
        bodies = [read_message(one, b"", kind=kind, round=number).body for one in said[3 * number : 3 * number + 3]]
        tells = [struct.unpack("<HQ6f", body[:34]) for body in bodies]
        assert {tell[0] for tell in tells} == {keep}
        keeps.append(keep)
        keep = decider.next_keep(keep, tells)
    assert len(set(keeps)) > 1
