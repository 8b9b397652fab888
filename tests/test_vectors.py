"""The format, pinned: payloads and messages as bytes, for this implementation and for any other.

`PYTHONPATH=tests python tests/test_vectors.py` writes the vectors anew; a change of any of them is a new wire version.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from overtone.codec import TopK
from overtone.coding import fingerprint
from overtone.coding.bits import Reader
from overtone.coding.kernels import Kernels, in_numba, in_torch
from overtone.coding.layout import part_of
from overtone.exchange import message as wire
from overtone.exchange.buffers import Buffers
from overtone.exchange.consensus import digest
from overtone.exchange.dealing import Deal, deal
from overtone.exchange.description import describe, schema_of
from overtone.exchange.letters import LetterCodec, letters_for
from overtone.exchange.message import Expected, Header, Kind, Seal
from scenario import first
from whole import decode_all, encode_all

FOLDER = Path(__file__).parent / "vectors"

# Name: codec, shapes of the tensors, and values to put somewhere, by position.
PAYLOADS: dict[str, tuple[TopK, list[tuple[int, ...]], dict[int, float]]] = {
    "one chunk, 1 bit": (TopK(keep=512, bits=1, chunk=8, transform="none", plain_below=0), [(8, 8)], {}),
    "2 bits, an exception": (TopK(keep=2048, bits=2, chunk=8, transform="none", plain_below=0), [(8, 8)], {37: -70.0}),
    "edges, 4 bits": (TopK(keep=1024, bits=4, chunk=8, transform="none", plain_below=20), [(10, 13), (3,), (2, 2)], {}),
    "some plain values": (
        TopK(keep=1024, bits=1, chunk=8, transform="none", plain_below=20, plain_keep=1024),
        [(10, 13), (9,), (2, 2)],
        {},
    ),
    "8 bits": (TopK(keep=512, bits=8, chunk=8, transform="none", plain_below=0), [(8, 16)], {}),
    "bf16": (TopK(keep=512, bits=16, chunk=8, transform="none", plain_below=0), [(8, 8)], {3: 1e38}),
    "fp32": (TopK(keep=64, bits=32, chunk=8, transform="none", plain_below=0), [(8, 8)], {5: 1e-42}),
    "everything, 1 bit": (TopK(keep=4096, bits=1, chunk=4, transform="none", plain_below=0), [(6, 4)], {}),
    "nothing but zeros": (TopK(keep=512, bits=2, chunk=8, transform="none", plain_below=0), [(8, 8)], {}),
    "two slabs": (TopK(keep=1, bits=1, chunk=64, transform="none", plain_below=0), [(64, 64 * 257)], {}),
}
MESSAGES: dict[str, tuple[Header, bytes, Seal]] = {
    "letter": (
        Header(Kind.LETTER, 5, 3, 256, b"\x01run-id\xff", b"schema.1", b"anchor.2", bytes(8)),
        bytes.fromhex("0000000000000000"),
        Seal(),
    ),
    "checksum": (
        Header(Kind.ROUND, 3, 258, 16512, b"\x01run-id\xff", b"schema.1", b"anchor.2", bytes(8)),
        bytes.fromhex("00112233445566778899"),
        Seal(),
    ),
    "keyed": (
        Header(Kind.DRAIN, 0, 70000, 4480000, b"\x01run-id\xff", b"schema.1", b"anchor.2", b"counters"),
        b"",
        Seal(b"a key that everybody has"),
    ),
    "a reason in words": (
        Header(Kind.FAILURE, 1, 0, 64, b"\x01run-id\xff", b"schema.1", bytes(8), bytes(8)),
        b"the drift of parameter a.weight has 3 of 9 values that are not finite",
        Seal(),
    ),
    "flags of a sum": (  # of ten parameters the first, third, fourth and tenth have a gradient
        Header(Kind.ROUND, 2, 7, 8, b"\x01run-id\xff", b"schema.1", b"weights3", bytes(8)),
        bytes.fromhex("0d02"),
        Seal(),
    ),
}

# Name: codec of messages, keep_down, shapes of the tensors, values of each buffer, replicas.
EDGES: list[tuple[int, ...]] = [(10, 13), (3,), (2, 2), (8, 24)]
DEALS: dict[str, tuple[TopK, int | None, list[tuple[int, ...]], list[int], int]] = {
    "edges": (TopK(keep=1024, bits=1, chunk=8, transform="none", plain_below=20), 1500, EDGES, [5, 5, 1, 0], 3),
    "more replicas than chunks": (
        TopK(keep=512, bits=2, chunk=8, transform="none", plain_below=0),
        900,
        [(9, 8)],
        [2],
        5,
    ),
    "large chunks": (TopK(keep=64, bits=4, chunk=128, transform="none"), None, [(300, 300), (2000,)], [], 4),
    "some plain values": (TopK(keep=64, plain_keep=300), None, [(70, 70), (2000,), (500,)], [], 4),
    "many replicas": (TopK(keep=32, bits=1), None, [(640, 512), (640,), (512, 100)], [640, 640], 12),
}
# Name: the same without buffers, the part, and values of the mean to put somewhere, by position.
LETTERS: dict[str, tuple[TopK, int | None, list[tuple[int, ...]], int, int, dict[int, float]]] = {
    "two layers": (TopK(keep=512, bits=1, chunk=8, transform="none", plain_below=0), 1024, [(8, 16)], 1, 0, {}),
    "an exception": (
        TopK(keep=512, bits=2, chunk=8, transform="none", plain_below=0),
        2048,
        [(8, 32)],
        2,
        1,
        {i: math.copysign(1e-3, i % 3 - 1) for i in range(128, 250)} | {200: -70.0},
    ),
    "edges and plain values": (
        TopK(keep=256, bits=1, chunk=8, transform="none", plain_below=20),
        None,
        EDGES,
        3,
        2,
        {},
    ),
    "some plain values": (
        TopK(keep=256, bits=1, chunk=8, transform="none", plain_below=20, plain_keep=700),
        None,
        [*EDGES, (40,)],
        3,
        2,
        {},
    ),
    "bf16": (TopK(keep=512, bits=8, chunk=8, transform="none", plain_below=0), 700, [(8, 24)], 2, 1, {150: 1e38}),
    "fp32": (TopK(keep=64, bits=32, chunk=8, transform="none", plain_below=0), 128, [(8, 8), (3,)], 1, 0, {5: 1e-42}),
    "everything, 1 bit": (TopK(keep=4096, bits=1, chunk=4, transform="none", plain_below=0), 4096, [(6, 4)], 1, 0, {}),
    "nothing but zeros": (TopK(keep=512, bits=1, chunk=8, transform="none", plain_below=0), 1024, [(8, 8)], 1, 0, {}),
}


def signal(name: str) -> torch.Tensor:
    """Numbers that any implementation can make: a linear congruence, scaled to look like noise."""
    codec, shapes, special = PAYLOADS[name]
    return noise(codec.layout(shapes).size, special, zeros=name == "nothing but zeros")


def noise(size: int, special: dict[int, float], *, zeros: bool) -> torch.Tensor:
    state, values = 12345, []
    for _ in range(size):
        state = (1103515245 * state + 12345) % 2**31
        values.append((state / 2**31 - 0.5) * 4)
    flat = torch.zeros(size) if zeros else torch.tensor(values)
    for position, value in special.items():
        flat[position] = value
    return flat


def payload_vector(name: str) -> dict[str, Any]:
    codec, shapes, _ = PAYLOADS[name]
    payload, sent = encode_all(codec, signal(name), codec.layout(shapes))
    where = sent.nonzero().view(-1)
    return {
        "keep": codec.keep,
        "bits": codec.bits,
        "chunk": codec.chunk,
        "plain_below": codec.plain_below,
        "plain_keep": codec.plain_keep,
        "shapes": [list(shape) for shape in shapes],
        "payload": payload.hex(),
        "decoded": {str(i): sent[i].item() for i in where.tolist()},
    }


def dealt(codec: TopK, keep_down: int | None, shapes: list[tuple[int, ...]], buffers: list[int], k: int) -> Deal:
    letters = letters_for(codec, keep_down, k)
    return deal(codec.layout(shapes).slabs, buffers, k, lambda slab: codec.bits_of(slab) + letters.bits_of(slab))


def codec_numbers(codec: TopK, keep_down: int | None, shapes: list[tuple[int, ...]], replicas: int) -> dict[str, Any]:
    numbers = {name: getattr(codec, name) for name in ("keep", "bits", "chunk", "plain_below", "plain_keep")}
    return {**numbers, "keep_down": keep_down, "shapes": [list(shape) for shape in shapes], "replicas": replicas}


def deal_vector(name: str) -> dict[str, Any]:
    codec, keep_down, shapes, buffers, replicas = DEALS[name]
    letters, found = letters_for(codec, keep_down, replicas).top_k, dealt(*DEALS[name])
    return {
        **codec_numbers(codec, keep_down, shapes, replicas),
        "buffers": buffers,
        "letters": {"keep": letters.keep, "plain_keep": letters.plain_keep, "bits": letters.bits},
        "parts": [
            {"pieces": [[piece.offset, piece.size] for piece in found.of(part)], "buffers": list(found.buffers[part])}
            for part in range(replicas)
        ],
    }


def letter(name: str, kernels: Kernels = in_torch) -> tuple[torch.Tensor, bytes, torch.Tensor, LetterCodec, Deal]:
    """The mean of a part, its letter, and what the owner says that all will decode."""
    codec, keep_down, shapes, replicas, part, special = LETTERS[name]
    codec_of_letters, found = letters_for(codec, keep_down, replicas), dealt(codec, keep_down, shapes, [], replicas)
    flat = noise(codec.layout(shapes).size, special, zeros=name == "nothing but zeros")
    mean, sent, blocks = torch.zeros_like(flat), torch.zeros_like(flat), []
    for piece in found.of(part):
        part_of(mean, piece).copy_(part_of(flat, piece))
        block, passed = codec_of_letters.encode(part_of(mean, piece), piece, kernels)
        passed.add_to(part_of(sent, piece))
        blocks.append(block.packed)
    return mean, b"".join(blocks), sent, codec_of_letters, found


def letter_vector(name: str) -> dict[str, Any]:
    codec, keep_down, shapes, replicas, part, _ = LETTERS[name]
    mean, body, sent, _, _ = letter(name)
    return {
        **codec_numbers(codec, keep_down, shapes, replicas),
        "part": part,
        "mean": {str(i): mean[i].item() for i in mean.nonzero().view(-1).tolist()},
        "letter": body.hex(),
        "decoded": {str(i): sent[i].item() for i in sent.nonzero().view(-1).tolist()},
    }


def message_vector(name: str) -> dict[str, Any]:
    header, body, seal = MESSAGES[name]
    fields = {key: value.hex() if isinstance(value, bytes) else int(value) for key, value in vars(header).items()}
    return {**fields, "body": body.hex(), "key": seal.key.hex(), "message": wire.seal_message(header, body, seal).hex()}


def fingerprint_vectors() -> dict[str, Any]:
    lists: list[list[tuple[list[int], str]]] = [
        [([3], "float32")],
        [([2047], "float32")],
        [([4095], "bfloat16")],
        [([3, 2048], "float32"), ([], "int64")],
    ]
    tensors = [[_counting(shape, dtype) for shape, dtype in one] for one in lists]
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    model[0].weight.requires_grad_(False)
    buffers = Buffers(model, "shared")
    about = describe(first(keep=128, every=64, exchange="gathered"), dict(model.named_parameters()), buffers, "raise")
    about["overtone"] = "0.0.0"
    marks = {"0": "0a0b0c0d", "1": "", "10": "01020304"}
    parts = [b"\x01run-id\xff", (258).to_bytes(4, "little"), json.dumps(marks).encode()]
    return {
        "tensors": [
            {"tensors": one, "fingerprint": fingerprint.of_tensors(made).hex()}
            for one, made in zip(lists, tensors, strict=True)
        ],
        "introduction": {"json": json.dumps(about), "schema": schema_of(about).hex()},
        "verdict": {
            "run": parts[0].hex(),
            "round": 258,
            "marks": marks,
            "plain": digest(Seal(), *parts).hex(),
            "key": b"a key".hex(),
            "keyed": digest(Seal(b"a key"), *parts).hex(),
        },
    }


def _counting(shape: list[int], dtype: str) -> torch.Tensor:
    return torch.arange(math.prod(shape)).to(getattr(torch, dtype)).view(shape)


def vectors() -> dict[str, dict[str, Any]]:
    return {
        "payloads": {name: payload_vector(name) for name in PAYLOADS},
        "messages": {name: message_vector(name) for name in MESSAGES},
        "fingerprints": fingerprint_vectors(),
        "deals": {name: deal_vector(name) for name in DEALS},
        "letters": {name: letter_vector(name) for name in LETTERS},
    }


def committed(kind: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{kind}.json").read_text())[name]
    return found


@pytest.mark.parametrize("name", PAYLOADS)
def test_payloads_are_the_committed_bytes(name: str) -> None:
    codec, shapes, _ = PAYLOADS[name]
    layout, vector = codec.layout(shapes), committed("payloads", name)
    assert payload_vector(name) == vector
    for loops in (in_torch, in_numba):
        assert encode_all(codec, signal(name), layout, loops)[0].hex() == vector["payload"]
        decoded = decode_all(codec, bytes.fromhex(vector["payload"]), layout, loops)
        assert {str(i): decoded[i].item() for i in decoded.nonzero().view(-1).tolist()} == vector["decoded"]


@pytest.mark.parametrize("name", DEALS)
def test_deals_are_the_committed_ones(name: str) -> None:
    assert deal_vector(name) == committed("deals", name)


@pytest.mark.parametrize("name", LETTERS)
def test_letters_are_the_committed_bytes(name: str) -> None:
    vector = committed("letters", name)
    assert letter_vector(name) == vector
    for loops in (in_torch, in_numba):
        mean, body, _, codec, found = letter(name, loops)
        assert body.hex() == vector["letter"]
        reader, ahead, decoded = Reader(body), Reader(body), torch.zeros_like(mean)
        for piece in found.of(vector["part"]):
            codec.check(ahead, piece, loops)
            codec.decode(reader, piece, loops).add_to(part_of(decoded, piece))
            assert ahead.at == reader.at
        reader.end()
        assert {str(i): decoded[i].item() for i in decoded.nonzero().view(-1).tolist()} == vector["decoded"]


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_are_the_committed_bytes(name: str) -> None:
    header, body, seal = MESSAGES[name]
    assert message_vector(name) == committed("messages", name)
    message = bytes.fromhex(committed("messages", name)["message"])
    letter = wire.unseal_message(message, Expected(header.round, header.run, header.schema), header.sender, seal)
    assert (letter.header, letter.body) == (header, body)


def test_fingerprints_are_the_committed_ones() -> None:
    found = json.loads(json.dumps(fingerprint_vectors()))
    assert found == json.loads((FOLDER / "fingerprints.json").read_text())


if __name__ == "__main__":
    for kind, found in vectors().items():
        (FOLDER / f"{kind}.json").write_text(json.dumps(found, indent=1) + "\n")
