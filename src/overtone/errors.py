"""All errors, as the user meets them. Every message names the thing, the value, the rule and the way out."""

from __future__ import annotations

from typing import ClassVar

MOST_PRINTED = 2000  # characters of what somebody else said


class OvertoneError(Exception):
    """Base of all errors that overtone raises on purpose."""

    status: ClassVar[int] = 1  # of a command that ends with it: 1 for what happened, 2 for what was typed wrong


class OvertoneWarning(UserWarning):
    """Something is wrong, and the work goes on without it."""


class MethodError(OvertoneError, ValueError):
    """A method, rule or codec was given a number it cannot work with."""

    status = 2


class EnvironmentVariableError(OvertoneError, ValueError):
    """A variable of the environment that says what it cannot mean."""

    status = 2


class ModelError(OvertoneError, ValueError):
    """The model or its inner optimiser cannot be wrapped, or changed under the replica's feet."""


class MismatchError(OvertoneError, RuntimeError):
    """Replicas do not agree: on method, model or version before the first step, or on the anchor afterwards."""


class PeerError(OvertoneError, RuntimeError):
    """A replica could not take part in a round; raised on every rank, naming the one at fault."""


class RelayedError(PeerError):
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


# -- of whole runs: configuration, data, files, processes -----------------------------------------------------------


class ConfigError(OvertoneError, ValueError):
    """A number of the run that cannot be used."""

    status = 2


class TaskError(OvertoneError, ValueError):
    """The task's data or model cannot be used."""

    status = 2


class StreamError(TaskError):
    """A stream that broke off: no fault of what was typed."""

    status = 1


class RunError(OvertoneError, RuntimeError):
    """A run directory that cannot be used."""


class UnfitRunError(RunError):
    """A run directory that cannot be meant: used already, not a run, not a place to write to."""

    status = 2


class CheckpointError(OvertoneError, RuntimeError):
    """A checkpoint that cannot be written or read."""


class RunLogError(OvertoneError, RuntimeError):
    """A run log that cannot be written or read."""


class NotALogError(RunLogError):
    """What was named is not the log of a run."""

    status = 2


class DamagedLogWarning(OvertoneWarning):
    """Lines of a run log that cannot be read; the others can."""


class ReplicaError(OvertoneError, RuntimeError):
    """A replica of the run failed; its own words, and its own status: what was typed wrong is so in a replica too."""

    def __init__(self, words: str, status: int = 1) -> None:
        super().__init__(words)
        self.status = status  # type: ignore[misc]


class MachineError(OvertoneError, RuntimeError):
    """The machine could not do what was asked."""


class FileNameError(MachineError):
    """The name of a file that the system does not take."""

    status = 2


# -- words in messages ---------------------------------------------------------------------------------------------


def visible(text: str) -> str:
    """Text of unknown origin, fit for a terminal: what it would obey (escape sequences, control characters) is spelt
    out, but for newlines and tabs; so is what no file can hold (half characters)."""
    return "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable(text: str) -> str:
    """Somebody else's words in one line of a message: control characters and line ends are spelt out, and what is too
    long is cut."""
    shown = visible(text[: MOST_PRINTED + 1]).replace("\n", "\\n").replace("\t", "\\t")
    return shown if len(shown) <= MOST_PRINTED else shown[: MOST_PRINTED - 1] + "…"


def shortened(value: object) -> str:
    """Somebody else's value in a message: its beginning is enough to find it by."""
    text = printable(repr(value))
    return text if len(text) <= 200 else f"{text[:200]}…"


def one_line(text: str) -> str:
    """A message of our own, whatever went into it, on a single line."""
    return " ".join(visible(text).split("\n"))
