"""The command line. Everything here is words; the work is done elsewhere."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """`overtone COMMAND …`: one clear line and exit status 1 for what the user can mend, never a traceback."""
    try:
        import rich  # noqa: F401
        import tyro  # noqa: F401
    except ImportError as error:
        sys.exit(f"overtone: the command line needs {error.name}; pip install 'overtone[cli]'")

    from overtone import arguments, commands
    from overtone.errors import OvertoneError

    try:
        commands.run(arguments.parse(sys.argv[1:]))
    except OvertoneError as error:
        if {
            "OVERTONE_WORDS",
            "TORCHELASTIC_ERROR_FILE",
        } & os.environ.keys():  # a replica that did not get as far as being one
            from overtone import launch

            launch.confess(error)
            if launch.is_ours():  # the launcher tells it, once
                sys.exit(1)
        sys.exit(f"overtone: {error}")
    except KeyboardInterrupt:
        sys.exit("overtone: interrupted")
