"""A round in flight as part of a saved state.

The message itself is saved, not the answers of the peers. A restored replica sends the same bytes again, and so do its
peers, which were saved at the same step. They all absorb the round at the step at which they would have, and go on as
if they had never stopped.

If the number of replicas has changed, the round is taken back instead, as if it had been refused: what was in the
message is owed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from overtone.codec import Block, TopK
from overtone.coding.bits import Reader, bytes_tensor, tensor_bytes
from overtone.errors import StateError, shortened
from overtone.exchange.control import Tell
from overtone.exchange.description import Description, compare_saved
from overtone.exchange.inner_step import InnerStep
from overtone.exchange.message import MOST_REPLICAS, Header, Kind
from overtone.exchange.pattern import Contribution
from overtone.exchange.round import Exchanger, Pending
from overtone.methods import Method


def save(pending: Pending, pattern: str, members: int) -> dict[str, Any]:
    """The saved form of a round in flight, of this pattern and among so many replicas."""
    mine = pending.contribution
    return {
        "pattern": pattern,
        "members": members,
        "kind": int(mine.header.kind),
        "steps": mine.header.steps,
        "anchor": mine.header.anchor.hex(),
        "counters": mine.header.counters.hex(),
        "why": mine.why,
        "blocks": _save_blocks(mine.blocks),
        "buffers": _save_blocks(mine.buffers),
        "measured_at": list(pending.sources.measured_at or ()),
        "buffers_at": list(pending.buffers_at or ()),
        "norms": pending.norms,
        **({"keep": mine.codec.keep} if isinstance(mine.codec, TopK) else {}),
        **({} if mine.tell is None else {"tell": mine.tell.pack().hex()}),
    }


def restore(saved: Mapping[str, Any], exchanger: Exchanger, inner_step: InnerStep) -> Pending:
    """The round in flight, ready to be sent again. The exchange state must have been restored already."""
    sources = replace(exchanger.signal.measure(overlapped=True), measured_at=list(saved["measured_at"]))
    work, tell = exchanger.work(_row(saved, exchanger)), _tell(saved)
    state, kind = exchanger.state, Kind(saved["kind"])
    header = Header(
        kind,
        exchanger.transport.rank,
        state.rounds,
        int(saved["steps"]),
        state.run,  # of this run: peers would refuse the message of an earlier one
        exchanger.schema,
        bytes.fromhex(saved["anchor"]),
        bytes.fromhex(saved["counters"]),
    )
    blocks, buffers = _restore_blocks(saved["blocks"]), _restore_blocks(saved["buffers"])
    keep_down = exchanger.method.keep_down
    mine = Contribution(header, work.codec, work.deal, blocks, buffers, keep_down, why=saved["why"], tell=tell)
    seconds = 0.0  # of encoding: an earlier session spent them
    pending = Pending(work, mine, inner_step, sources, header.steps, saved["norms"], seconds, list(saved["buffers_at"]))
    return exchanger.resume(pending)


def checked(saved: Mapping[str, Any], exchanger: Exchanger, description: Description) -> Mapping[str, Any]:
    """A saved state whose round in flight, if it has one, can be restored here. Nothing has changed yet.

    The round is taken back if it was in flight in another world: another pattern, or another number of replicas.
    """
    if saved.get("flight") is None:
        return saved
    compare_saved(saved.get("about", {}), description)  # first: other mismatches follow from another model or method
    there = saved["flight"].get("pattern"), saved["flight"].get("members")
    if there != (exchanger.pattern.name, len(exchanger.transport.peers)):
        return take_back(saved, exchanger)
    _refuse_damaged(saved["flight"], exchanger)
    return saved


def _refuse_damaged(saved: Mapping[str, Any], exchanger: Exchanger) -> None:
    try:
        _check(saved, exchanger)
    except (AssertionError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        why = shortened(error)  # a `WireError` of a block too
        raise StateError(f"saved state: its round in flight is incomplete or damaged ({why})") from error


def _check(saved: Mapping[str, Any], exchanger: Exchanger) -> None:
    (pattern, members), failed, buffers = _among(saved), bool(saved["why"]), exchanger.buffers
    if not 1 <= members <= MOST_REPLICAS:
        raise ValueError(f"{members} replicas")
    work = exchanger.work(_row(saved, exchanger), pattern, members)
    if [tensor.shape for tensor in saved["measured_at"]] != [t.shape for t in exchanger.parameters.tensors]:
        raise ValueError("measured weights of other shapes")
    if [tensor.shape for tensor in saved["buffers_at"]] != ([] if failed else [t.shape for t in buffers.shared]):
        raise ValueError("measured buffers of other shapes")
    if [len(bytes.fromhex(saved[part])) for part in ("anchor", "counters")] != [8, 8] or int(saved["steps"]) < 0:
        raise ValueError("a damaged header")
    if Kind(saved["kind"]) is not (Kind.FAILURE if failed else Kind.ROUND) or not isinstance(saved["norms"], Tensor):
        raise ValueError("a message of another kind")
    blocks, own = _restore_blocks(saved["blocks"]), _restore_blocks(saved["buffers"])
    if (len(blocks), len(own)) != ((0, 0) if failed else (len(work.deal.pieces), len(work.deal.buffers))):
        raise ValueError("a message of other parts")
    for piece, block in zip(work.deal.pieces, blocks, strict=False):  # a failure has none
        if block.numbers is None:
            reader = Reader(block.packed)
            work.codec.check(reader, piece.slab, exchanger.kernels)
            reader.end()
        elif block.numbers.numel() != piece.slab.size:
            raise ValueError("a block of another size")
    numbers = sum(shared.numel() for shared in buffers.shared)
    if any(block.numbers is not None and block.numbers.numel() != numbers for block in own):
        raise ValueError("buffers of another size")


def take_back(saved: Mapping[str, Any], exchanger: Exchanger) -> dict[str, Any]:
    """A saved state whose round in flight was taken back: its message is owed again."""
    flight = saved["flight"]
    _refuse_damaged(flight, exchanger)
    rest = {name: value for name, value in saved.items() if name != "flight"}
    try:
        tensors = {name: tensor.clone() for name, tensor in saved["state"].items()}
    except (AttributeError, KeyError, TypeError):
        return rest  # whoever restores the state finds what it lacks
    work = exchanger.work(_row(flight, exchanger), *_among(flight), index=int(saved["counts"]["rounds"]))
    # The residual then contains the drift up to the measurement, and the next drift begins there.
    if work.withdraw(tensors, _restore_blocks(flight["blocks"])):
        return {**rest, "state": tensors, "signal": list(flight["measured_at"])}
    return rest


def _tell(flight: Mapping[str, Any]) -> Tell | None:
    return Tell.unpack(Reader(bytes.fromhex(flight["tell"]))) if "tell" in flight else None


def _row(flight: Mapping[str, Any], exchanger: Exchanger) -> Method:
    """The method of the round in flight, with the `keep` of that round. Earlier versions had one for all rounds."""
    return exchanger.method.with_keep(flight["keep"]) if "keep" in flight else exchanger.method


def _among(flight: Mapping[str, Any]) -> tuple[str, int]:
    return str(flight["pattern"]), int(flight["members"])


def _save_blocks(blocks: Sequence[Block]) -> dict[str, Any]:
    """All blocks as tensors. Blocks of bytes are joined, because there may be thousands."""
    packed = b"".join(block.packed for block in blocks)
    return {
        "lengths": [len(block.packed) for block in blocks],
        "bytes": bytes_tensor(packed, torch.uint8),
        "numbers": [block.numbers for block in blocks if block.numbers is not None],
    }


def _restore_blocks(saved: Mapping[str, Any]) -> list[Block]:
    if saved["numbers"]:
        return [Block(numbers=numbers) for numbers in saved["numbers"]]
    packed, blocks, at = tensor_bytes(saved["bytes"]), [], 0
    for length in saved["lengths"]:
        blocks.append(Block(packed[at : at + length]))
        at += length
    return blocks
