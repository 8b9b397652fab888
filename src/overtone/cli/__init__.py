"""The command line. Everything here is words; the work is done elsewhere."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from overtone.version import __version__


def main() -> None:
    """`overtone COMMAND …`: one clear line for what the user can mend, never a traceback; exit status 2 for what was
    typed wrong, 1 for what happened during the work."""
    try:
        import rich  # noqa: F401
        import tyro  # noqa: F401
    except ImportError as error:
        sys.exit(f"overtone: the command line needs {error.name}; pip install 'overtone[cli]'")

    if sys.argv[1:] == ["--version"]:
        print(f"overtone {__version__}")
        return

    from overtone.cli import arguments, commands
    from overtone.common import machine_errors
    from overtone.errors import OvertoneError

    try:
        with machine_errors.in_words(), arguments.warnings_in_one_line():
            commands.run(arguments.parse(sys.argv[1:]))
    except OvertoneError as error:
        _end(error)
    except KeyboardInterrupt:
        sys.exit("overtone: interrupted")


def _end(error: Exception) -> NoReturn:
    from overtone.errors import OvertoneError, one_line

    status = error.status if isinstance(error, OvertoneError) else 1
    if {"OVERTONE_WORDS", "TORCHELASTIC_ERROR_FILE"} & os.environ.keys():  # of a replica that was never one
        from overtone.runs import launch

        launch.confess(error)
        if launch.is_ours():  # the launcher tells it, once
            sys.exit(status)
    print(f"overtone: {one_line(str(error))}", file=sys.stderr)
    sys.exit(status)
