"""Whether a run has enough rounds for its messages: a rule of thumb that `overtone plan` and every run tell.

A message takes a share *delta* of a residual's energy. So a residual holds about 1/delta rounds of drift, and a run
whose rounds times delta is below 10 ends before most of its drift was exchanged. benchmarks/frontier checked it.
"""

from __future__ import annotations

import math
import warnings

from overtone.codec import TopK
from overtone.errors import OvertoneWarning
from overtone.exchange.letters import letters_for
from overtone.methods import Method
from overtone.replica import Replica

ENOUGH = 10  # rounds times delta
TRIAL = 10  # a run of fewer rounds is a trial of something else than the loss


class TooFewRoundsWarning(OvertoneWarning):
    """The run has too few rounds for messages that are so thin."""


def delta(method: Method, members: int, pattern: str) -> float | None:
    """The share of a residual's energy that one round takes; None if the method leaves no residual to the next."""
    codec = method.codec
    if not isinstance(codec, TopK) or method.every is None or not method.signal.keeps_start or codec.lossless:
        return None
    # Owners send back what does not fit into their letters.
    passed_on = letters_for(codec, method.keep_down, members).top_k.keep if pattern == "sharded" else math.inf
    return codec.energy_share() * min(1.0, passed_on / (codec.keep * members))


def rounds_needed(share: float) -> int:
    """Rounds after which the rule of thumb is met."""
    return math.ceil(ENOUGH / share)


def warn_of_few_rounds(replica: Replica, steps: int) -> None:
    """Warn if so many local steps have too few rounds. With a budget nothing is known yet: it sets `keep` later."""
    method, members = replica.method, replica.transport.size
    share = delta(method, members, replica.exchanger.pattern.name)
    if share is None or method.budget is not None or method.every is None or members == 1:
        return
    rounds = steps // method.every
    if TRIAL <= rounds < ENOUGH / share:
        assert isinstance(method.codec, TopK)
        warnings.warn(
            TooFewRoundsWarning(
                f"steps={steps}: {rounds} rounds are few for keep={method.codec.keep}: a message takes {share:.1%} of "
                f"what a replica owes, so that about {rounds_needed(share)} rounds are needed to come near DiLoCo; "
                "raise keep or steps, or lower every"
            ),
            stacklevel=3,
        )
