"""What can go wrong, as the user meets it. Every message names the thing, the value, the rule and the way out."""

from __future__ import annotations

MOST_PRINTED = 2000  # characters of what somebody else said


def printable(text: str) -> str:
    """Words that came from elsewhere, fit for a terminal and for one line: control characters, escape sequences and
    line ends are written out (``\\x1b``, ``\\n``), and what is too long is cut."""
    shown = "".join(
        sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text[: MOST_PRINTED + 1]
    )
    return shown if len(shown) <= MOST_PRINTED else shown[: MOST_PRINTED - 1] + "…"


class OvertoneError(Exception):
    """Base of all errors that overtone raises on purpose."""


class MethodError(OvertoneError, ValueError):
    """A method, rule or codec was given a number it cannot work with."""


class ModelError(OvertoneError, ValueError):
    """The model or its inner optimiser cannot be wrapped, or changed under the replica's feet."""


class MismatchError(OvertoneError, RuntimeError):
    """Replicas do not agree: on method, model or version before the first step, or on the anchor afterwards."""


class PeerError(OvertoneError, RuntimeError):
    """A replica could not take part in a round; raised on every rank, naming the one at fault."""


class ToldError(PeerError):
    """Somebody else's failure, as this rank heard of it: the one at fault says more."""


class GaveUpError(PeerError):
    """A replica said that it cannot go on, most often since its numbers are not finite: it would say so again."""


class WireError(OvertoneError, ValueError):
    """Bytes that are not a message of this round of this run."""


class NotFiniteError(OvertoneError, ValueError):
    """Coefficients with an infinity or NaN among them; ``tensor`` says in which tensor, counted from 0."""

    def __init__(self, tensor: int) -> None:
        super().__init__(f"tensor {tensor}: values that are not finite")
        self.tensor = tensor


class StateError(OvertoneError, ValueError):
    """A saved state does not fit this replica."""
