"""A program that streams ends as it should: the threads of the libraries below let go of its files first.

Arrow's threads may hold the last reference to a file that Python opened. One that drops it while the interpreter ends
asks for a lock that it will never get, and the process aborts after its work is done (apache/arrow issue 45214; the
datasets library sleeps for half a second in some places and hopes). Here the end waits until these files are gone.
"""

from __future__ import annotations

import atexit
import gc
import io
import time
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

PATIENCE = 10.0  # seconds, after which the program ends as it would have
PAUSE = 0.005


class Closes(Protocol):
    def close(self) -> None: ...


_READERS: weakref.WeakSet[Closes] = weakref.WeakSet()


def close_at_exit(reader: Closes) -> None:
    """Close it when the interpreter ends, if it is still there then, and see to it that its files are released."""
    _READERS.add(reader)
    _register()


@cache
def _register() -> None:
    atexit.register(_end)  # after the libraries were imported: theirs run later


def _end() -> None:
    for reader in list(_READERS):
        reader.close()
    gc.collect()
    settle(orphans)


def settle(left: Callable[[], list[Any]], patience: float = PATIENCE) -> bool:
    """Wait until nothing is left; whether that came to be."""
    until = time.monotonic() + patience
    while left():
        if time.monotonic() > until:
            return False
        time.sleep(PAUSE)  # lets the other threads have the interpreter's lock
    return True


def orphans() -> list[io.IOBase]:
    """Files that no Python object refers to: whoever keeps them alive is native code."""
    candidates = [each for each in gc.get_objects() if issubclass(type(each), io.IOBase) and _is_done_with(each)]
    return [each for each in candidates if all(other is candidates for other in gc.get_referrers(each))]


def _is_done_with(file: io.IOBase) -> bool:
    try:
        return file.closed or isinstance(file, io.BytesIO)  # which nobody closes
    except ValueError:  # detached
        return False
