"""The record of one round."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Round:
    """What one exchange did. Bytes and seconds are this replica's own, measured where they happen (in the simulator the
    waiting is virtual)."""

    index: int
    local_steps: int
    bytes_sent: int
    bytes_received: int
    seconds_encoding: float
    seconds_waiting: float
    seconds_decoding: float
    drift_norm: float  # of the gradient, for methods that exchange gradients
    residual_norm: float
    anchor_fingerprint: str  # after the round; where gradients are exchanged, of the weights that all began it with
    left_out: tuple[int, ...] = ()  # ranks whose message was refused, where the policy is to go on without them
