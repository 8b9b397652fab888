"""The controller: it sets `keep` for each round, so that a run needs no tuning and stays within a budget of bytes.

Every message carries its `keep` and a *tell*: what its sender has measured. All replicas read the same tells, compute
with them in rank order and in Python's own numbers, and so come to the same `keep` without a further message.

A budget says how large `keep` may be. It does not follow the drift: fewer bytes where the learning rate is low brought
no gain (docs/log.md).

    lag        Σ‖E‖² / Σ‖G‖²: how many rounds of drift the residuals hold, after the message has left
    agreement  K·‖u‖² / Σ‖c‖²: 1 if all replicas say the same, 1/K if what they send has nothing in common
    cosine     of the mean u with the outer momentum M before it

Legend: E residual, G drift, c what a replica sent, u the mean of all c, K replicas.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from overtone.coding.bits import Reader
from overtone.errors import MethodError, WireError

LEAST_KEEP, MOST_KEEP = 1, 4096
UNKNOWN = 32  # `keep` of the first round on a link, before the time of a round is known
FEW_ROUNDS = 2.0  # of drift in the residuals: the next message needs fewer coefficients
BANK = 4  # rounds whose bytes may be saved, or owed
TINY = 1e-300
UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}
RATES = {"kbit/s": 10**3 / 8, "mbit/s": 10**6 / 8, "gbit/s": 10**9 / 8}
MOST_BUDGET = 10**15
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_SHARE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*of\s*(\d+(?:\.\d+)?)\s*([a-z]+/s)\s*", re.IGNORECASE)
HOW = "give the bytes that a replica may send in a round, such as 200kB, or a share of a link, such as 10% of 50Mbit/s"


@dataclass(frozen=True)
class Budget:
    """The bytes that a replica may send in a round, at most, on average over a few rounds: a number, or a share of what
    its link could carry while the replica trains."""

    bytes: int = 0
    rate: float = 0.0  # bytes per second of the link; 0 if `bytes` is given
    share: float = 0.0  # of the link

    @classmethod
    def parse(cls, given: object) -> Budget:
        """The budget that a number or a text means."""
        number = re.fullmatch(_AMOUNT, str(given)) if not isinstance(given, bool) else None
        if number and number[2].lower() in UNITS:
            amount = round(float(number[1]) * UNITS[number[2].lower()])
            if 1 <= amount <= MOST_BUDGET:
                return cls(bytes=amount)
        part = re.fullmatch(_SHARE, str(given))
        if part and part[3].lower() in RATES:
            share, rate = float(part[1]) / 100, float(part[2]) * RATES[part[3].lower()]
            if 0 < share <= 1 and 0 < rate <= MOST_BUDGET:
                return cls(rate=rate, share=share)
        raise MethodError(f"budget={given}: {HOW}")

    def __str__(self) -> str:
        if self.bytes:
            return f"{self.bytes} bytes a round"
        return f"{100 * self.share:g} % of {self.rate * 8 / 1e6:g} Mbit/s"

    def of_round(self, seconds: float) -> int:
        """The bytes of a round whose local steps took so long."""
        return self.bytes or min(MOST_BUDGET, round(self.share * self.rate * seconds))


_TELL = struct.Struct("<HQffffff")
MOST_FP32 = 3.4e38


@dataclass(frozen=True)
class Tell:
    """What a replica tells all others in each round. ``spent``, ``agreement`` and ``cosine`` are of the round before:
    they are known only after it."""

    keep: int
    residual: float = 0.0  # ‖E‖² after the message has left it
    drift: float = 0.0  # ‖G‖²
    sent: float = 0.0  # ‖c‖²
    spent: int = 0  # bytes that the replica sent
    agreement: float = 0.0
    cosine: float = 0.0
    seconds: float = 0.0  # since the start of the round before; 0 if that is not known

    def pack(self) -> bytes:
        """As it travels."""
        numbers = (self.residual, self.drift, self.sent, self.agreement, self.cosine, self.seconds)
        return _TELL.pack(self.keep, self.spent, *(min(number, MOST_FP32) for number in numbers))

    @classmethod
    def unpack(cls, reader: Reader, keep: int | None = None) -> Tell:
        """Read the next tell. It must be of a message with this ``keep``, if one is given."""
        fields = _TELL.unpack(reader.take(_TELL.size, "tell"))
        names = ("keep", "spent", "residual", "drift", "sent", "agreement", "cosine", "seconds")
        numbers = dict(zip(names, fields, strict=True))
        if keep is not None and numbers["keep"] != keep:
            raise WireError(f"keep: {numbers['keep']}, this replica keeps {keep}; their controllers disagree")
        if not all(math.isfinite(value) for value in fields):
            raise WireError("tell: not all of its numbers are finite; the message is corrupt")
        return cls(**numbers)


@dataclass(frozen=True)
class Control:
    """The controller's state. ``keep`` and ``account`` are the same on all replicas. The rest is what this replica has
    measured in the last round, and tells in the next."""

    keep: int
    account: int = 0  # bytes that were not spent, or below 0 that were spent too early
    spent: int = 0
    agreement: float = 0.0
    cosine: float = 0.0

    def tell(self, *, residual: float, drift: float, sent: float, seconds: float) -> Tell:
        """What this replica tells in the next round."""
        return Tell(self.keep, residual, drift, sent, self.spent, self.agreement, self.cosine, seconds)

    @property
    def of_all(self) -> Control:
        """The part that is the same on all replicas, for a newcomer."""
        return Control(self.keep, self.account)

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> Control:
        """The state that was saved as a table. Raises a `ValueError` if it is damaged."""
        whole = [int(saved[name]) for name in ("keep", "account", "spent")]
        measured = [float(saved[name]) for name in ("agreement", "cosine")]
        if not LEAST_KEEP <= whole[0] <= MOST_KEEP or not all(map(math.isfinite, measured)):
            raise ValueError(f"control {saved}")
        return cls(*whole, *measured)


class Controller:
    """Decides on `keep`, round by round: it alternates between the powers of two around what the budget pays for."""

    def __init__(self, budget: Budget, cost: Callable[[int], int], least: int = 0) -> None:
        self.budget = budget
        self.cost = cost  # about the bytes that a replica sends in a round with this `keep`
        # ``least`` are the bytes of a round with one coefficient of each chunk, if no buffer has changed.
        if budget.bytes and least > budget.bytes:
            raise MethodError(
                f"budget={budget.bytes}: a round takes {least} bytes even if it sends one coefficient of each chunk; "
                "give at least that, or lower `plain_keep`"
            )

    def begin(self) -> Control:
        """Before the first round: what the budget pays for. If the time of a round is not known yet, `UNKNOWN`."""
        return Control(self.affordable(self.budget.bytes) if self.budget.bytes else UNKNOWN)

    def decide(self, control: Control, tells: Sequence[Tell]) -> tuple[Control, str]:
        """The controller's state after a round with these tells, and in words why `keep` moved; empty if it did not."""
        wanted, account, why = self._wanted(control, tells)
        keep = control.keep
        chosen = min(wanted, 2 * keep) if wanted > keep else max(wanted, (keep + 1) // 2)
        about = f"agreement {_mean([t.agreement for t in tells]):.2f}, cosine {_mean([t.cosine for t in tells]):+.2f}"
        why = f"keep {keep} to {chosen}: {why} ({about})" if chosen != keep else ""
        return replace(control, keep=chosen, account=account), why

    def _wanted(self, control: Control, tells: Sequence[Tell]) -> tuple[int, int, str]:
        """The `keep` that the account pays for, the account after the round, and why."""
        # The slowest replica sets the pace, and the largest message the cost.
        limit = self.budget.of_round(max(tell.seconds for tell in tells))
        if not limit:  # no round is over yet whose time is known
            return control.keep, control.account, ""
        # Before the second round nobody knows what the first one cost.
        spent = max(tell.spent for tell in tells) or self.cost(control.keep)
        account = max(-BANK * limit, min(BANK * limit, control.account + limit - spent))
        base, lag = self.affordable(limit), lag_of(tells)
        held = f"the residuals hold {lag:.1f} rounds of drift"
        if lag < FEW_ROUNDS:
            return max(LEAST_KEEP, base // 2), account, held
        if account + limit < self.cost(base):
            return max(LEAST_KEEP, base // 2), account, f"{-account:,} bytes too many were sent"
        if base < MOST_KEEP and account + limit >= self.cost(2 * base):
            return 2 * base, account, f"{held}, and {account:,} bytes were saved"
        return base, account, f"the budget is {limit:,} bytes, and {held}"

    def affordable(self, amount: int) -> int:
        """The largest power of two, as `keep`, that so many bytes pay for."""
        keep = LEAST_KEEP
        while keep < MOST_KEEP and self.cost(2 * keep) <= amount:
            keep *= 2
        return keep


def lag_of(tells: Sequence[Tell]) -> float:
    """How many rounds of drift the residuals hold, in energy."""
    return sum(tell.residual for tell in tells) / max(sum(tell.drift for tell in tells), TINY)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
