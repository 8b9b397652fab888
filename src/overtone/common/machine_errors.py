"""What the machine refuses (memory, disk, names of files) and what input makes Python stumble over, in one line.

Everything else that is not an `OvertoneError` is a bug, ours or that of a user's own task, and shows its traceback.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch

from overtone.errors import FileNameError, MachineError, OvertoneError

TYPED = (errno.ENAMETOOLONG, errno.ELOOP)  # can only be the fault of a name that somebody gave
NO_MEMORY = ("not enough memory", "can't allocate memory", "out of memory", "alloc_cpu")  # torch's words for it
OWN_TASK = "overtone_task_"  # how modules of users' own tasks are called


@contextmanager
def in_words() -> Iterator[None]:
    """Whatever the machine refuses inside becomes a `MachineError`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OvertoneError) or (told := _told(error)) is None:
            raise
        raise told from error


def _told(error: Exception) -> MachineError | None:
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
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)


def _is_of_own_task(trace: TracebackType | None) -> bool:
    """It went through a task of the user's own, who needs the traceback to mend it."""
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
