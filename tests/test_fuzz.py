"""No message but a true one is believed: mutated messages, with and without a valid seal, and what becomes of them."""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from overtone.codec import TopK
from overtone.coding.bits import Reader
from overtone.coding.kernels import Kernels, in_numba, in_torch
from overtone.errors import WireError
from overtone.exchange import message as wire
from overtone.exchange.buffers import Buffers
from overtone.exchange.gathered import Gathered
from overtone.exchange.message import Expected, Header, Kind, Seal
from overtone.exchange.pattern import Context, Contribution
from whole import encode_all

SCHEMA, RUN = b"schema..", b"this run"
EXPECTED = Expected(5, RUN, SCHEMA)
TRUE = Header(Kind.ROUND, 1, 5, 50, RUN, SCHEMA, b"anchor..", bytes(8))
CODEC = TopK(keep=40, bits=2, plain_below=30)
MINE = Contribution(replace(TRUE, sender=0), CODEC)
SHAPES = [(70, 130), (64, 64), (9,)]


class Receiver:
    """Everything between the network and the weights, and some messages worth spoiling."""

    def __init__(self, seal: Seal, loops: Kernels) -> None:
        self.seal = seal
        model = nn.BatchNorm1d(3)
        self.layout = CODEC.layout(SHAPES)
        buffers = Buffers(model, "shared")
        self.context = Context(self.layout, loops, buffers, seal, torch.device("cpu"))
        self.gathered = Gathered(self.context)
        dice = torch.Generator().manual_seed(0)
        flat = torch.randn(self.layout.size, generator=dice)
        flat[7] = 500.0  # so that there is an exception
        payload, _ = encode_all(CODEC, flat, self.layout)
        model.running_mean.add_(1.0)  # type: ignore[union-attr]
        self.body = buffers.pack(range(2)) + payload
        self.message = wire.seal_message(TRUE, self.body, seal)
        smaller, _ = encode_all(CODEC, flat * 0.1, self.layout)
        self.others = [
            wire.seal_message(replace(TRUE, round=4), self.body, seal),
            wire.seal_message(replace(TRUE, run=b"that run"), self.body, seal),
            wire.seal_message(replace(TRUE, schema=b"schemb.."), self.body, seal),
            wire.seal_message(replace(TRUE, sender=2), buffers.pack(range(2)) + smaller, seal),
            wire.seal_message(TRUE, self.body, Seal(b"" if seal.key else b"a key")),
        ]

    def open(self, message: bytes) -> None:
        self.gathered.open(message, EXPECTED, 1, MINE)


def flipped(message: bytes, dice: random.Random) -> bytes:
    damaged = bytearray(message)
    for _ in range(dice.choice((1, 1, 2, 8))):
        damaged[dice.randrange(len(damaged))] ^= 1 << dice.randrange(8)
    return bytes(damaged)


def cut(message: bytes, dice: random.Random) -> bytes:
    return message[: dice.randrange(len(message))]


def extended(message: bytes, dice: random.Random) -> bytes:
    return message + bytes(dice.randrange(9)) + dice.randbytes(dice.randint(1, 40)) + b"\1"


def overwritten(message: bytes, dice: random.Random) -> bytes:
    at = dice.randrange(len(message))
    noise = dice.choice((b"\xff" * 4, b"\xff" * 8, bytes(8), b"\x80\x7f", dice.randbytes(6)))
    return message[:at] + noise + message[at + len(noise) :]


def removed(message: bytes, dice: random.Random) -> bytes:
    at = dice.randrange(len(message))
    return message[:at] + message[at + dice.randint(1, 30) :]


DAMAGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (flipped, cut, extended, overwritten, removed)


def spliced(message: bytes, other: bytes, dice: random.Random) -> bytes:
    at = dice.randrange(1, min(len(message), len(other)))
    return dice.choice((message[:at] + other[at:], other[:at] + message[at:]))


RECEIVERS = {
    f"{seal_name}, {loops_name}": (seal, loops)
    for seal_name, seal in (("checksum", Seal()), ("keyed", Seal(b"a key")))
    for loops_name, loops in (("torch", in_torch), ("numba", in_numba))
}


def test_the_true_message_is_believed() -> None:
    for seal, loops in RECEIVERS.values():
        Receiver(seal, loops).open(Receiver(seal, loops).message)


@pytest.mark.slow
@pytest.mark.parametrize(("seal", "loops"), RECEIVERS.values(), ids=RECEIVERS)
def test_a_hundred_thousand_lies(seal: Seal, loops: Kernels) -> None:
    """25,000 for each of four receivers: damaged at random, spliced with messages of other rounds, runs, schemas,
    senders and keys, or those themselves. Every single one is refused, naming a field, in bounded time and memory."""
    receiver, dice = Receiver(seal, loops), random.Random(0)
    fields: dict[str, int] = {}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    slowest, count = 0.0, 0  # seconds of computing; waiting for a processor does not count
    while count < 25_000:
        message, other = receiver.message, dice.choice(receiver.others)
        lie = dice.choice(
            (
                other,
                spliced(message, other, dice),
                *(damage(message, dice) for damage in DAMAGES),
                *(damage(other, dice) for damage in DAMAGES),
            )
        )
        if lie.rstrip(b"\0") == message.rstrip(b"\0"):
            continue
        start = time.thread_time()
        with pytest.raises(WireError) as caught:
            receiver.open(lie)
        slowest = max(slowest, time.thread_time() - start)
        field = str(caught.value).split(":")[0]
        fields[field] = fields.get(field, 0) + 1
        count += 1
    assert slowest < 1.0
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 200e6
    assert {"magic", "version", "seal", "length", "sender", "run", "schema", "round", "message"} <= set(fields)
    assert fields["HMAC" if seal.key else "checksum"] > 1000
    print(f"{count} lies refused, the slowest in {slowest:.3f} s: {fields}")


@pytest.mark.slow
@pytest.mark.parametrize("loops", [in_torch, in_numba], ids=["torch", "numba"])
def test_lies_under_a_valid_seal(loops: Kernels) -> None:
    """A sender that seals whatever bytes: no lie of the format survives, and what decodes is finite and in place. Both
    kinds of loops refuse the same ones, and check refuses exactly what decode does."""
    receiver, dice = Receiver(Seal(), loops), random.Random(1)
    other = Context(**{**vars(receiver.context), "kernels": in_torch if loops is in_numba else in_numba})
    told, believed = set(), 0
    for _ in range(10_000):
        body = dice.choice(DAMAGES)(receiver.body, dice)
        message = wire.seal_message(TRUE, body, Seal())
        try:
            receiver.open(message)
        except WireError as error:
            told.add(str(error).split(":")[0].split(",")[0])
            with pytest.raises(WireError):
                Gathered(other).open(message, EXPECTED, 1, MINE)
            continue
        believed += 1
        Gathered(other).open(message, EXPECTED, 1, MINE)
        reader = Reader(body)
        receiver.context.buffers.unpack(reader, range(2))
        for slab in receiver.layout.slabs:
            here = torch.zeros(slab.chunks, slab.area)
            CODEC.decode(reader, slab, loops).add_to(here)
            assert bool(torch.isfinite(here).all())
    assert {"positions", "scales", "exceptions", "payload", "values"} <= told
    assert believed < 8_000  # another position or code is another message, and no lie of the format


@settings(max_examples=300, deadline=None)
@given(body=st.binary(max_size=400), keep=st.sampled_from([1, 40, 4096]), bits=st.sampled_from([1, 2, 8, 16, 32]))
def test_any_bytes_at_all(body: bytes, keep: int, bits: int) -> None:
    """Whatever stands where a payload should: `WireError`, or values."""
    codec = TopK(keep=keep, bits=bits, plain_below=30, chunk=16)
    for loops in (in_torch, in_numba):
        for slab in codec.layout([(20, 20), (3,)]).slabs:
            reader = Reader(body)
            try:
                part = codec.decode(reader, slab, loops)
            except WireError:
                with pytest.raises(WireError):
                    codec.check(Reader(body), slab, loops)
                continue
            part.add_to(torch.zeros(slab.chunks, slab.area))
