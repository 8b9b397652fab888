"""The message around a payload: what is sealed opens, and nothing else does."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overtone.errors import MethodError, WireError
from overtone.exchange import message as wire
from overtone.exchange.message import Expected, Header, Kind, Seal

RUN, SCHEMA, ANCHOR = b"this run", b"schema..", b"anchor.."
EXPECTED = Expected(7, RUN, SCHEMA)
PLAIN, KEYED = Seal(), Seal(b"a key")
SEALS = pytest.mark.parametrize("seal", [PLAIN, KEYED], ids=["plain", "keyed"])


def header(**changes: object) -> Header:
    fields: dict[str, object] = {"kind": Kind.ROUND, "sender": 2, "round": 7, "steps": 70, "run": RUN}
    return Header(**{**fields, "schema": SCHEMA, "anchor": ANCHOR, "counters": bytes(8), **changes})  # type: ignore[arg-type]


def sealed(body: bytes = b"body", seal: Seal = PLAIN, **changes: object) -> bytes:
    return wire.seal_message(header(**changes), body, seal)


@SEALS
@pytest.mark.parametrize("body", [b"", b"body", bytes(40)])
def test_round_trip_with_padding(body: bytes, seal: Seal) -> None:
    message = sealed(body, seal)
    assert len(message) == wire.HEADER_BYTES + len(body) + (16 if seal.key else 4)
    letter = wire.unseal_message(message + bytes(9), EXPECTED, 2, seal)
    assert (letter.header, letter.body) == (header(), body)
    assert message.endswith(letter.seal)


@SEALS
def test_every_flipped_bit_is_refused(seal: Seal) -> None:
    message = sealed(bytes(range(50)), seal)
    for position in range(len(message) * 8):
        damaged = bytearray(message)
        damaged[position // 8] ^= 1 << position % 8
        with pytest.raises(WireError):
            wire.unseal_message(bytes(damaged), EXPECTED, 2, seal)


@SEALS
def test_every_cut_is_refused(seal: Seal) -> None:
    message = sealed(bytes(range(1, 50)), seal)
    for length in range(len(message)):
        with pytest.raises(WireError):
            wire.unseal_message(message[:length], EXPECTED, 2, seal)


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (sealed(round=6), "round: 6.*replayed"),
        (sealed(sender=1), "sender: says 1, came from rank 2"),
        (sealed(schema=b"another."), "schema.*another model or method"),
        (sealed(run=b"another."), "run.*of another run"),
        (sealed() + b"x", "length.*more came"),
        (sealed(seal=KEYED), "seal: the sender has a key, this replica has none"),
        (b"HTTP/1.1 200 OK\r\n" + bytes(60), "magic"),
        (b"", "shorter than the header"),
    ],
)
def test_foreign_messages_are_refused_by_field(message: bytes, told: str) -> None:
    with pytest.raises(WireError, match=told):
        wire.unseal_message(message, EXPECTED, 2, PLAIN)


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (sealed(), "seal: this replica has a key, the sender has none; set OVERTONE_KEY"),
        (sealed(seal=Seal(b"another key")), "HMAC: does not match.*of another key"),
    ],
)
def test_a_key_refuses_who_has_it_not(message: bytes, told: str) -> None:
    with pytest.raises(WireError, match=told):
        wire.unseal_message(message, EXPECTED, 2, KEYED)


def test_the_key_comes_from_argument_or_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OVERTONE_KEY", raising=False)
    assert Seal.with_key(None) == PLAIN
    monkeypatch.setenv("OVERTONE_KEY", "from outside")
    assert Seal.with_key(None) == Seal(b"from outside")
    assert Seal.with_key("given") == Seal.with_key(b"given") == Seal(b"given")
    assert "given" not in repr(Seal(b"given"))
    for bad, told in ((5, "key: a int"), ("", "key: an empty one"), (b"", "key: an empty one")):
        with pytest.raises(MethodError, match=told):
            Seal.with_key(bad)  # type: ignore[arg-type]


@settings(max_examples=200, deadline=None)
@given(data=st.data(), keyed=st.booleans())
def test_any_damage_is_refused(data: st.DataObject, keyed: bool) -> None:
    """Cut, extended, overwritten or spliced with another message of the same run: never opened, never anything but a
    `WireError`."""
    seal = KEYED if keyed else PLAIN
    message, other = sealed(bytes(range(30)), seal), sealed(bytes(range(40)), seal, round=8)
    at = data.draw(st.integers(0, len(message)))
    damaged = data.draw(
        st.sampled_from([message[:at], message + other[at:], other[:at] + message[at:], message[:at] + other[at:]])
        | st.binary(min_size=1, max_size=20).map(lambda noise: message[:at] + noise + message[at + len(noise) :])
    )
    if damaged.rstrip(b"\0") == message.rstrip(b"\0"):
        return
    with pytest.raises(WireError):
        wire.unseal_message(damaged, EXPECTED, 2, seal)
