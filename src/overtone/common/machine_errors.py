"""Errors of the machine in one line: no memory, no space on the disk, a name that the file system refuses.

Any other error that is not an `OvertoneError` is a bug, in overtone or in a user's own task. It shows its traceback.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from overtone.errors import FileNameError, MachineError, OvertoneError

TYPED = (errno.ENAMETOOLONG, errno.ELOOP)  # only a name that somebody typed can cause these
NO_MEMORY = ("not enough memory", "can't allocate memory", "out of memory", "alloc_cpu")  # parts of torch's messages
OWN_TASK = "overtone_task_"  # how the names of modules with users' own tasks begin


@contextmanager
def in_words() -> Iterator[None]:
    """Turn an error of the machine inside this context into a `MachineError`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OvertoneError) or (told := _in_words(error)) is None:
            raise
        raise told from error


def _in_words(error: Exception) -> MachineError | None:
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    if _is_of_memory(error):
        return MachineError(f"out of memory ({first}); use a smaller model, batch or context, or fewer replicas")
    if _is_of_own_task(error.__traceback__):
        return None
    if isinstance(error, OSError):
        return _of_system(error)
    if isinstance(error, UnicodeError):
        return MachineError(f"text that is not UTF-8 ({first}); rename or convert it")
    if isinstance(error, RecursionError):
        return MachineError(f"nested too deeply to be read ({first}); give something flatter")
    return None


def _is_of_memory(error: Exception) -> bool:
    """True for Python's `MemoryError` and for torch's errors of the CPU and of a GPU, which are `RuntimeError`s.

    torch's are recognized by name and message: this module must not import torch, since `overtone --help` imports it.
    """
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and (
        type(error).__name__ == "OutOfMemoryError" or any(words in str(error) for words in NO_MEMORY)
    )


def _is_of_own_task(trace: TracebackType | None) -> bool:
    """True if the error passed through a user's own task: the user needs the traceback to repair it."""
    while trace is not None:
        if str(trace.tb_frame.f_globals.get("__name__")).startswith(OWN_TASK):
            return True
        trace = trace.tb_next
    return False


def _of_system(error: OSError) -> MachineError:
    why = error.strerror or str(error) or type(error).__name__
    words = why if error.filename is None else f"{error.filename}: {why}"
    if error.errno in TYPED:
        return FileNameError(f"{words}; choose another name")
    return MachineError(f"{words}; check the name, the permissions and the space on the disk")
