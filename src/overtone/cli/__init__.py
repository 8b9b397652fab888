"""The command line: reads arguments, prints results and errors. The work is done elsewhere."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def main() -> None:
    """`overtone COMMAND …`. An error that the user can repair is one line, without a traceback. The exit status is 2
    if something was typed wrong, and 1 if something happened during the work."""
    try:
        import rich  # noqa: F401
        import tyro  # noqa: F401
    except ImportError as error:
        sys.exit(f"overtone: the command line needs {error.name}; pip install 'overtone[cli]'")

    from overtone.cli import arguments
    from overtone.common import machine_errors
    from overtone.errors import OvertoneError

    try:
        with machine_errors.in_words(), arguments.warnings_in_one_line():
            run, flags = arguments.parse(sys.argv[1:])
            run(flags)
    except OvertoneError as error:
        if isinstance(error.__cause__, BrokenPipeError):  # of a pager or `head` that has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes
            sys.exit(1)
        _end(error)
    except KeyboardInterrupt:
        sys.exit("overtone: interrupted")


def _end(error: Exception) -> NoReturn:
    """Print the error and exit. A replica whose launcher prints the error leaves it to the launcher."""
    from overtone.errors import OvertoneError, one_line

    status = error.status if isinstance(error, OvertoneError) else 1
    if {"OVERTONE_SPAWNED", "TORCHELASTIC_ERROR_FILE"} & os.environ.keys():  # a replica failed before it could train
        from overtone.runs.launch import inside

        inside.report_failure(error)
        if inside.is_ours():
            sys.exit(status)
    print(f"overtone: {one_line(str(error))}", file=sys.stderr)
    sys.exit(status)
