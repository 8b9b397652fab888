"""The command line. Everything here is words; the work is done elsewhere."""

from __future__ import annotations

import sys


def main() -> None:
    """`overtone COMMAND …`: one clear line and exit status 1 for what the user can mend, never a traceback."""
    try:
        import rich  # noqa: F401
        import tyro
    except ImportError as error:
        sys.exit(f"overtone: the command line needs {error.name}; pip install 'overtone[cli]'")

    from overtone import commands
    from overtone.errors import OvertoneError

    try:
        command = tyro.cli(
            commands.Command,
            prog="overtone",
            description="Train one model on many machines joined by thin wires.",
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes, tyro.conf.FlagConversionOff),
        )
        commands.run(command)
    except OvertoneError as error:
        sys.exit(f"overtone: {error}")
    except KeyboardInterrupt:
        sys.exit("overtone: interrupted")
