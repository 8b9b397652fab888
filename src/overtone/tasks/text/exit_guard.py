"""Lets a program that streams data end without a crash.

Threads of Arrow may hold the last reference to a file that Python opened. A thread that drops such a reference while
the interpreter shuts down asks for a lock that it will never get, and the process aborts after its work is done
(apache/arrow issue 45214; the datasets library sleeps half a second in some places to avoid this). So this module
makes the end of the program wait until these files are gone.
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

PATIENCE = 10.0  # seconds; after that the program ends whether or not files are left
PAUSE = 0.005


class Closable(Protocol):
    """A reader that can be closed."""

    def close(self) -> None:
        """Release all files."""
        ...


_READERS: weakref.WeakSet[Closable] = weakref.WeakSet()


def close_at_exit(reader: Closable) -> None:
    """When the interpreter ends, close the reader if it still exists, and wait until its files are released."""
    _READERS.add(reader)
    _register()


@cache
def _register() -> None:
    # Functions run in reverse order of registration. This one is registered after the libraries were imported, so it
    # runs before theirs.
    atexit.register(_close_and_wait)


def _close_and_wait() -> None:
    for reader in list(_READERS):
        reader.close()
    gc.collect()
    wait(orphaned_files)


def wait(remaining: Callable[[], list[Any]], patience: float = PATIENCE) -> bool:
    """Wait until ``remaining()`` is empty, at most ``patience`` seconds. Return whether it is."""
    until = time.monotonic() + patience
    while remaining():
        if time.monotonic() > until:
            return False
        time.sleep(PAUSE)  # other threads can take the interpreter's lock meanwhile
    return True


def orphaned_files() -> list[io.IOBase]:
    """Return the files that are no longer in use and to which no Python object refers: native code holds them."""
    candidates = [each for each in gc.get_objects() if issubclass(type(each), io.IOBase) and _out_of_use(each)]
    return [each for each in candidates if all(other is candidates for other in gc.get_referrers(each))]


def _out_of_use(file: io.IOBase) -> bool:
    try:
        return file.closed or isinstance(file, io.BytesIO)  # nobody closes a BytesIO
    except ValueError:  # detached
        return False
