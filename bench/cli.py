"""The installed disagg command: serving (coordinator/cli.py), and measuring (bench/cli_app.py).

Measuring imports the simulator, numpy and an HTTP client, which would more than double the time
that a command like disagg nodes takes; so it is imported only where it is asked for.
"""

import sys

from coordinator import cli


def main() -> None:
    """Entry point."""
    if sys.argv[1:2] and sys.argv[1] in serving_commands():
        cli.main()
        return
    # Also for --help, and for a word that is no command.
    from bench.cli_app import app

    app()


def serving_commands() -> set[str]:
    """Their names, and those of groups."""
    commands = (command.name or command.callback.__name__ for command in cli.app.registered_commands
                if command.callback is not None)  # fmt: skip
    return {*commands, *(str(group.name) for group in cli.app.registered_groups)}
