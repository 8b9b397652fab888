"""The handshake: replicas compare method and model, agree on an id for this run, and take over rank 0's weights."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from torch import Tensor

from overtone.coding import fingerprint
from overtone.errors import WireError
from overtone.exchange.consensus import MOST_TEXT, compare_initial_weights, gather_sealed
from overtone.exchange.description import Description, compare_descriptions
from overtone.exchange.message import NOBODY, Header, Kind, Message, Seal
from overtone.transport import Broadcast, Exchange


class Handshake:
    """One replica's side of the handshake.

    Call `introduce` first. Call `confirm` after the replica has built its state from rank 0's weights.
    """

    def __init__(self, rank: int, peers: Sequence[int], seal: Seal) -> None:
        self.rank = rank
        self.peers = peers
        self.seal = seal
        self.run = NOBODY

    def introduce(self, description: Description, tensors: Sequence[Tensor]) -> Exchange[bytes]:
        """Compare the descriptions of all replicas and take over rank 0's tensors. Returns the id of this run."""
        nonce = os.urandom(8)
        bodies = yield from self._gather(nonce + json.dumps(description).encode())
        compare_descriptions({rank: body[8:] for rank, body in zip(self.peers, bodies, strict=True)})
        # Every rank adds a nonce, so messages of earlier runs never match and cannot be replayed.
        self.run = fingerprint.of_bytes(b"".join(body[:8] for body in bodies))
        yield Broadcast(tensors)
        return self.run

    def confirm(self, tensors: Sequence[Tensor], anchor: Sequence[Tensor], *, consensus: bool) -> Exchange[None]:
        """Verify that all replicas hold the same tensors. If the method has consensus, give all the same anchor."""
        mine = fingerprint.of_tensors(tensors) + fingerprint.of_tensors(anchor)
        bodies = yield from self._gather(mine)
        compare_initial_weights(self.peers, [body[:8] for body in bodies])
        if consensus and len({body[8:16] for body in bodies}) > 1:
            # Equal weights but unequal coefficients: the hosts round the transform differently. All take rank 0's.
            yield Broadcast(anchor)

    def _gather(self, body: bytes) -> Exchange[list[bytes]]:
        """The bodies of all ranks, in rank order."""
        header = Header(Kind.GREETING, self.rank, 0, 0, self.run, NOBODY, NOBODY, NOBODY)
        # The description of a large model is long. A peer with a somewhat larger model shall still be told why it
        # does not match.
        most = MOST_TEXT + 4 * len(body)
        return (yield from gather_sealed("handshake", header, body, self.peers, self.seal, _body_of, most))


def _body_of(message: Message) -> bytes:
    if len(message.body) < 16:
        raise WireError("handshake: too short")
    return message.body
