import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overtone import bits, wire
from overtone.codec import TopK
from overtone.errors import WireError
from overtone.wire import Expected, Header, Kind

SCHEMA, ANCHOR = b"schema..", b"anchor.."
EXPECTED = Expected(7, SCHEMA)


def header(**changes: object) -> Header:
    fields: dict[str, object] = {
        "kind": Kind.ROUND,
        "sender": 2,
        "round": 7,
        "steps": 70,
        "schema": SCHEMA,
        "anchor": ANCHOR,
    }
    return Header(**{**fields, "counters": bytes(8), **changes})  # type: ignore[arg-type]


def test_round_trip_with_padding() -> None:
    message = wire.seal(header(), b"body")
    assert wire.unseal(message + bytes(9), EXPECTED, 2) == (header(), b"body")


def test_every_flipped_bit_is_refused() -> None:
    message = wire.seal(header(), bytes(range(50)))
    for position in range(len(message) * 8):
        damaged = bytearray(message)
        damaged[position // 8] ^= 1 << position % 8
        with pytest.raises(WireError):
            wire.unseal(bytes(damaged), EXPECTED, 2)


def test_every_cut_is_refused() -> None:
    message = wire.seal(header(), bytes(range(1, 50)))
    for length in range(len(message)):
        with pytest.raises(WireError):
            wire.unseal(message[:length], EXPECTED, 2)


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (wire.seal(header(round=6), b""), "round: 6.*replayed"),
        (wire.seal(header(sender=1), b""), "sender: says 1, came from rank 2"),
        (wire.seal(header(schema=b"another."), b""), "schema.*another model, method or run"),
        (wire.seal(header(), b"") + b"x", "more came"),
        (b"HTTP/1.1 200 OK\r\n" + bytes(60), "magic"),
        (b"", "shorter than the header"),
    ],
)
def test_foreign_messages_are_refused_by_field(message: bytes, told: str) -> None:
    with pytest.raises(WireError, match=told):
        wire.unseal(message, EXPECTED, 2)


def test_slots_survive_a_sum() -> None:
    total = sum(wire.slots(header(sender=rank), rank, 3) for rank in range(3))
    assert isinstance(total, torch.Tensor)
    assert wire.read_slots(total, EXPECTED) == [header(sender=rank) for rank in range(3)]


@pytest.mark.parametrize("damage", [float("nan"), float("inf"), -1.0, 0.5, 70000.0])
def test_damaged_slots_are_refused(damage: float) -> None:
    slots = wire.slots(header(sender=0), 0, 2)
    slots[4] = damage
    with pytest.raises(WireError):
        wire.read_slots(slots, EXPECTED)


@settings(max_examples=100, deadline=None)
@given(values=st.lists(st.integers(0, 300), min_size=1, max_size=200), guess=st.integers(0, 9))
def test_gaps_round_trip(values: list[int], guess: int) -> None:
    packed = bits.pack_gaps(torch.tensor(values), guess)
    reader = bits.Reader(packed)
    assert reader.gaps(len(values), 4096, "gaps").tolist() == values
    reader.end()


@settings(max_examples=100, deadline=None)
@given(width=st.integers(0, 16), count=st.integers(0, 100), seed=st.integers(0, 999))
def test_fields_round_trip(width: int, count: int, seed: int) -> None:
    values = torch.randint(1 << width, (count,), generator=torch.Generator().manual_seed(seed))
    packed = bits.pack_fields(values, width)
    assert packed.numel() == bits.field_bytes(count, width)
    assert torch.equal(bits.unpack_fields(packed, count, width), values)


@pytest.mark.parametrize("k", [8, 32, 64, 128, 512])
def test_rice_code_is_near_the_entropy(k: int) -> None:
    dice = torch.Generator().manual_seed(0)
    rows = torch.stack([torch.randperm(4096, generator=dice)[:k].sort().values for _ in range(200)])
    gaps = torch.diff(rows, dim=1, prepend=torch.full((200, 1), -1)) - 1
    spent = 8 * len(bits.pack_gaps(gaps.view(-1), (4096 // k).bit_length() - 1))
    assert spent <= 1.05 * 200 * math.log2(math.comb(4096, k))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_decoding_damaged_payloads_is_safe(data: st.DataObject) -> None:
    """Behind a checksum nobody should get here; still, no damage may do anything but raise `WireError` or decode."""
    codec = TopK(keep=20, bits=2, plain_below=30)
    layout = codec.layout([(70, 70), (9,)])
    payload, _ = codec.encode(torch.randn(layout.size, generator=torch.Generator().manual_seed(0)), layout)
    damaged = bytearray(payload)  # type: ignore[arg-type]
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    del damaged[data.draw(st.integers(len(damaged) // 2, len(damaged))) :]
    try:
        sparse = codec.decode(bytes(damaged), layout)
    except WireError:
        return
    sparse.add_to(layout.empty(torch.device("cpu")))
