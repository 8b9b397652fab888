"""The last messages of a run: they make sure that all replicas hold the same model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from overtone.coding import fingerprint
from overtone.exchange.consensus import compare_anchors, compare_last_weights
from overtone.exchange.message import Kind
from overtone.exchange.pattern import Contribution, Received
from overtone.exchange.round import Exchanger
from overtone.transport import Broadcast, Exchange


def closing(exchanger: Exchanger) -> Exchange[None]:
    """Compare the models of all replicas. If they differ, all replicas take over the first replica's.

    They can differ for two reasons. Hosts that round D⁻¹ differently (another type of CPU, another library) get other
    weights from the same anchor. Frozen parameters and statistics may have changed on one replica since they were last
    equal.
    """
    parameters, buffers = exchanger.parameters, exchanger.buffers
    on_weights = "anchor" in exchanger.state.tensors
    anchor, weights = exchanger.anchor_tensors(), parameters.tensors
    if on_weights and not exchanger.changes():
        exchanger.show(exchanger.state.tensors["anchor"])
    # Integer buffers are not here: every header has their fingerprint.
    rest = [*parameters.frozen, *buffers.float_tensors()]
    received = yield from _last_message(exchanger, [*anchor, *weights, *rest] if on_weights else [*weights, *rest])
    # The usual case: one message with the fingerprint of everything is enough.
    if _are_equal(received):
        return
    # Anchors must be equal on all hosts. If they are not, this is an error that a broadcast would only hide.
    received = yield from _last_message(exchanger, anchor)
    compare_anchors(exchanger.state.rounds, _anchors(received), of_weights=not on_weights)
    received = yield from _last_message(exchanger, rest)
    yield Broadcast(weights if _are_equal(received) else [*weights, *rest])
    exchanger.signal.begin()
    buffers.remember()
    # Verify that the broadcast arrived as it was sent.
    received = yield from _last_message(exchanger, [*weights, *rest])
    compare_last_weights(_anchors(received))


def _last_message(exchanger: Exchanger, tensors: Sequence[Tensor]) -> Exchange[Received]:
    """Exchange a last message. It has the fingerprint of these tensors in the place of the anchor's."""
    why = exchanger.changes()
    header = exchanger.header(Kind.FAILURE if why else Kind.FINISH)
    header = replace(header, anchor=fingerprint.of_tensors(tensors))
    return (yield from exchanger.carry(Contribution(header, exchanger.method.codec, why=why)))


def _are_equal(received: Received) -> bool:
    return len(set(_anchors(received).values())) == 1 and not received.left_out


def _anchors(received: Received) -> dict[int, bytes]:
    return {header.sender: header.anchor for header in received.headers}
