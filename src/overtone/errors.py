"""All errors that users can meet. Every message names the thing, the value, the rule and the way out."""

from __future__ import annotations

from typing import ClassVar

MOST_PRINTED = 2000  # characters of a text from another process that one of our messages shows


class OvertoneError(Exception):
    """Base of all errors that overtone raises on purpose."""

    # The exit status of a command that ends with this error: 1 for a failure, 2 for a mistake on the command line.
    status: ClassVar[int] = 1


class OvertoneWarning(UserWarning):
    """Something is wrong, but the work can go on."""


class MethodError(OvertoneError, ValueError):
    """A method, rule or codec was given a value that it cannot work with."""

    status = 2


class EnvironmentVariableError(OvertoneError, ValueError):
    """An environment variable has a value that makes no sense."""

    status = 2


class ModelError(OvertoneError, ValueError):
    """The model or its inner optimizer cannot be wrapped, or it changed after the replica was built."""


class MismatchError(OvertoneError, RuntimeError):
    """Replicas differ: in method, model or version before the first step, or in the anchor afterwards."""


class PeerError(OvertoneError, RuntimeError):
    """A replica could not take part in a round. It is raised on every rank, and names the rank at fault."""


class RelayedError(PeerError):
    """Another rank failed, and this rank only saw the effect. The error of the failed rank says more."""


class GaveUpError(PeerError):
    """A replica reported that it cannot go on, most often because its values are not finite.

    A retry does not help: the replica would report the same again.
    """


class WireError(OvertoneError, ValueError):
    """The received bytes are not a valid message of this round of this run."""


class StoreError(OvertoneError, RuntimeError):
    """The object storage of a run cannot be reached, or refuses a request."""


class NotFiniteError(OvertoneError, ValueError):
    """Some coefficients are infinite or NaN. ``tensor`` is the index of the tensor, counted from 0."""

    def __init__(self, tensor: int) -> None:
        super().__init__(f"tensor {tensor}: values that are not finite")
        self.tensor = tensor


class StateError(OvertoneError, ValueError):
    """A saved state does not fit this replica."""


# -- of whole runs: configuration, data, files, processes -----------------------------------------------------------


class ConfigError(OvertoneError, ValueError):
    """A setting of the run cannot be used."""

    status = 2


class TaskError(OvertoneError, ValueError):
    """The task's data or model cannot be used."""

    status = 2


class StreamError(TaskError):
    """A stream of data broke off. The command line is not at fault, so the status is 1."""

    status = 1


class RunError(OvertoneError, RuntimeError):
    """A run directory cannot be used."""


class UnfitRunError(RunError):
    """The named run directory must be a mistake: it is in use already, is not a run, or cannot be written to."""

    status = 2


class CheckpointError(OvertoneError, RuntimeError):
    """A checkpoint cannot be written or read."""


class RunLogError(OvertoneError, RuntimeError):
    """A run log cannot be written or read."""


class NotALogError(RunLogError):
    """The named file or directory is not the log of a run."""

    status = 2


class DamagedLogWarning(OvertoneWarning):
    """Some lines of a run log cannot be read. The other lines can."""


class ReplicaError(OvertoneError, RuntimeError):
    """A replica of the run failed. The message and the status are those of the replica.

    The status is passed on because a replica, too, can be the first to find a mistake on the command line.
    """

    def __init__(self, words: str, status: int = 1) -> None:
        super().__init__(words)
        self.status = status  # type: ignore[misc]


class MachineError(OvertoneError, RuntimeError):
    """The operating system or the hardware could not do what the run needs."""


class FileNameError(MachineError):
    """The operating system does not accept the name of a file."""

    status = 2


# -- foreign text in messages --------------------------------------------------------------------------------------


def visible(text: str) -> str:
    """Make text of unknown origin safe for a terminal and for files.

    Control characters and escape sequences are written as escapes, except newlines and tabs: a terminal would obey
    them. Lone surrogates are written as escapes too: no file can hold them.
    """
    return "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable(text: str) -> str:
    """Make foreign text fit for one line of a message: control characters and line ends become escapes, and text that
    is too long is cut."""
    # Cut before the escaping too: the text may be of any length.
    shown = visible(text[: MOST_PRINTED + 1]).replace("\n", "\\n").replace("\t", "\\t")
    return shown if len(shown) <= MOST_PRINTED else shown[: MOST_PRINTED - 1] + "…"


def shortened(value: object) -> str:
    """The beginning of a foreign value, for a message. The beginning is enough to recognize the value."""
    text = printable(repr(value))
    return text if len(text) <= 200 else f"{text[:200]}…"


def one_line(text: str) -> str:
    """One of our own messages on a single line, whatever foreign text it contains."""
    return " ".join(visible(text).split("\n"))
