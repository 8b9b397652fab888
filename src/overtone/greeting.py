"""How replicas meet: the same method and model everywhere, then rank 0's weights everywhere, verified."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from overtone import agreement, fingerprint
from overtone.exchange import Broadcast, Gather, Talk

if TYPE_CHECKING:
    from overtone.replica import Replica


def greet(replica: Replica) -> Talk[None]:
    """A replica's side of the greeting; afterwards its state is that of round 0."""
    peers = replica.transport.peers
    everything = [*replica.parameters.all.values(), *replica.buffers.tensors()]
    heard = yield Gather(json.dumps(replica.about).encode())
    agreement.compare_introductions(dict(zip(peers, heard, strict=True)))
    yield Broadcast(everything)
    replica.buffers.remember()
    replica.signal.begin()
    weights = replica.layout.read(replica.parameters.tensors, replica.layout.empty(replica.device))
    replica.state = replica.method.rule.begin(weights, lossless=replica.method.codec.lossless)
    anchor = fingerprint.of_tensors(replica.anchor_tensors())
    heard = yield Gather(fingerprint.of_tensors(everything) + anchor)
    agreement.compare_initial_weights(peers, [h[:8] for h in heard])
    if replica.method.consensus and len({h[8:16] for h in heard}) > 1:
        # Equal weights, unequal coefficients: the hosts round the transform differently. Rank 0's count.
        yield Broadcast(replica.anchor_tensors())
    replica.transport.ledger.phase = "rounds"
