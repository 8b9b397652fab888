"""How replicas meet: the same method and model everywhere, a name for this run, then rank 0's weights, verified."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from overtone.coding import fingerprint
from overtone.errors import WireError
from overtone.exchange import agreement
from overtone.exchange.message import NOBODY, Header, Kind, Letter
from overtone.exchange.patterns import WORDS, tell
from overtone.exchange.steps import Broadcast, Talk

if TYPE_CHECKING:
    from overtone.replica import Replica


def greet(replica: Replica) -> Talk[None]:
    """A replica's side of the greeting; afterwards its state is that of round 0."""
    peers = replica.transport.peers
    everything = [*replica.parameters.all.values(), *replica.buffers.tensors()]
    nonce = os.urandom(8)
    heard = yield from _tell(replica, nonce + json.dumps(replica.about).encode())
    agreement.compare_introductions({rank: body[8:] for rank, body in zip(peers, heard, strict=True)})
    # Everybody's dice are in it, so a message of any other run is a stranger's, whoever replays it.
    replica.run = fingerprint.of_bytes(b"".join(body[:8] for body in heard))
    yield Broadcast(everything)
    replica.buffers.remember()
    replica.signal.begin()
    weights = replica.layout.read(replica.parameters.tensors, replica.layout.empty(replica.device))
    # Who may be left out of a round must be able to owe what it said.
    lossless = replica.method.codec.lossless and replica.refused == "raise"
    replica.state = replica.method.rule.begin(weights, lossless=lossless)
    anchor = fingerprint.of_tensors(replica.anchor_tensors())
    heard = yield from _tell(replica, fingerprint.of_tensors(everything) + anchor)
    agreement.compare_initial_weights(peers, [body[:8] for body in heard])
    if replica.method.consensus and len({body[8:16] for body in heard}) > 1:
        # Equal weights, unequal coefficients: the hosts round the transform differently. Rank 0's count.
        yield Broadcast(replica.anchor_tensors())
    replica.transport.ledger.phase = "rounds"


def _tell(replica: Replica, body: bytes) -> Talk[Sequence[bytes]]:
    """Everybody's body, by rank."""
    header = Header(Kind.GREETING, replica.transport.rank, 0, 0, replica.run, NOBODY, NOBODY, NOBODY)
    most = WORDS + 4 * len(body)
    return (yield from tell("greeting", header, body, replica.transport.peers, replica.seal, _body_of, most))


def _body_of(letter: Letter) -> bytes:
    if len(letter.body) < 16:
        raise WireError("greeting: too short")
    return letter.body
