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

import overtone
from overtone.codec import TopK
from overtone.coding import fingerprint
from overtone.coding.kernels import in_numba, in_torch
from overtone.exchange import message as wire
from overtone.exchange.buffers import Buffers
from overtone.exchange.consensus import digest
from overtone.exchange.description import describe, schema_of
from overtone.exchange.message import Expected, Header, Kind, Seal
from whole import decode_all, encode_all

FOLDER = Path(__file__).parent / "vectors"

# Name: codec, shapes of the tensors, and values to put somewhere, by position.
PAYLOADS: dict[str, tuple[TopK, list[tuple[int, ...]], dict[int, float]]] = {
    "one chunk, 1 bit": (TopK(keep=512, bits=1, chunk=8, transform="none", plain_below=0), [(8, 8)], {}),
    "2 bits, an exception": (TopK(keep=2048, bits=2, chunk=8, transform="none", plain_below=0), [(8, 8)], {37: -70.0}),
    "edges, 4 bits": (TopK(keep=1024, bits=4, chunk=8, transform="none", plain_below=20), [(10, 13), (3,), (2, 2)], {}),
    "8 bits": (TopK(keep=512, bits=8, chunk=8, transform="none", plain_below=0), [(8, 16)], {}),
    "bf16": (TopK(keep=512, bits=16, chunk=8, transform="none", plain_below=0), [(8, 8)], {3: 1e38}),
    "fp32": (TopK(keep=64, bits=32, chunk=8, transform="none", plain_below=0), [(8, 8)], {5: 1e-42}),
    "everything, 1 bit": (TopK(keep=4096, bits=1, chunk=4, transform="none", plain_below=0), [(6, 4)], {}),
    "nothing but zeros": (TopK(keep=512, bits=2, chunk=8, transform="none", plain_below=0), [(8, 8)], {}),
    "two slabs": (TopK(keep=1, bits=1, chunk=64, transform="none", plain_below=0), [(64, 64 * 257)], {}),
}
MESSAGES: dict[str, tuple[Header, bytes, Seal]] = {
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


def signal(name: str) -> torch.Tensor:
    """Numbers that any implementation can make: a linear congruence, scaled to look like noise."""
    codec, shapes, special = PAYLOADS[name]
    size = codec.layout(shapes).size
    state, values = 12345, []
    for _ in range(size):
        state = (1103515245 * state + 12345) % 2**31
        values.append((state / 2**31 - 0.5) * 4)
    flat = torch.tensor(values) if name != "nothing but zeros" else torch.zeros(size)
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
        "shapes": [list(shape) for shape in shapes],
        "payload": payload.hex(),
        "decoded": {str(i): sent[i].item() for i in where.tolist()},
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
    about = describe(overtone.decoupled(exchange="gathered"), dict(model.named_parameters()), buffers, "raise")
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
