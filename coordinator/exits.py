"""How the disagg command ends: its exit codes, and one line for what went wrong."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import typer

from coordinator.child import ChildFailed
from coordinator.events import GenerationError
from engine.model_cache import FetchFailed


class ExitCode(IntEnum):
    """What scripts can rely on; EPILOG is the same for people."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    NOT_STARTED = 4
    INTERRUPTED = 130


EPILOG = (
    "Exit codes: 0 ok; 1 request or download failed, or a program of the cluster ended; 2 usage; "
    "3 no coordinator at that address; 4 the cluster did not start; 130 interrupted."
)


@contextmanager
def exit_code_of_errors(*, coordinator: str = "") -> Iterator[None]:
    """Turns what a command is expected to raise into one line on stderr and an exit code."""
    try:
        yield
    except GenerationError as error:
        if error.is_unreachable:
            report(f"no coordinator at {coordinator}: {error.message}")
            raise typer.Exit(ExitCode.UNREACHABLE) from error
        report(str(error))
        raise typer.Exit(ExitCode.FAILED) from error
    except ChildFailed as error:
        if error.log_tail:
            sys.stderr.write(f"{error.log_tail}\n")
        report(f"the cluster did not start: {error}")
        raise typer.Exit(ExitCode.NOT_STARTED) from error
    except (FetchFailed, OSError) as error:
        report(str(error))
        raise typer.Exit(ExitCode.FAILED) from error
    except (ValueError, TypeError) as error:
        report(str(error))
        raise typer.Exit(ExitCode.USAGE) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(ExitCode.INTERRUPTED) from error


def report(message: str) -> None:
    """One line on stderr, whatever the message holds."""
    sys.stderr.write(f"disagg: {' '.join(message.split())}\n")
