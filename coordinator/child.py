"""One child process, from its first line to its last.

    spawn --> {"role", "node_id", "address"} on stdout --> ... --> exit
                                  stdin: a pipe that we hold; its EOF means that we are gone

A child is its own process group, so that a Ctrl-C in the terminal reaches only us and the stop is
ours to order. One daemon thread per child sits in waitpid: asyncio's own wait() also waits for
pipes, which a grandchild can hold open. Everything else is on the loop.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

_LOG_TAIL_LINES = 20


class ChildFailed(Exception):
    """A child that ended, or did not answer, when it should not. log_tail ends its stderr."""

    def __init__(self, name: str, what: str, *, log_tail: str = "") -> None:
        super().__init__(f"{name} {what}")
        self.name = name
        self.log_tail = log_tail


class Child:
    """A running program. exited is done, with its status, once it is gone and reaped.

    A status below 0 is the signal that ended it. stderr is ours, or appended to log_path. address,
    node_id and metrics_address are what the program said; they are "" before read_address().
    """

    def __init__(self, name: str, command: Sequence[str], *, log_path: Path | None) -> None:
        self.name = name
        self.address = ""
        self.node_id = ""
        self.metrics_address = ""
        self._log_path = log_path
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[int] = self._loop.create_future()
        self._stdout: asyncio.ReadTransport | None = None
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(log_path.open("ab")) if log_path else None
            # close_fds (the default) keeps this child out of the pipes of the others: a copy of a
            # write end would hide our death from its reader.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                process_group=0,
            )
        threading.Thread(target=self._wait, name=f"wait-{name}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return not self.exited.done()

    async def read_address(self) -> str:
        """Waits for the program's line. Raises ChildFailed when it ends or says something else.

        Without a deadline of its own: the caller has one for the whole start.
        """
        assert self._process.stdout is not None
        self._stdout, first_line = await self._loop.connect_read_pipe(
            _FirstLine, self._process.stdout
        )
        line = await first_line.line
        if not line.endswith(b"\n"):  # the pipe's end; its cause has a status in a moment
            status = await asyncio.shield(self.exited)
            raise self.failure(f"{describe_exit(status)} before it listened")
        try:
            announced = json.loads(line)
            self.address, self.node_id = announced["address"], announced["node_id"]
            self.metrics_address = announced.get("metrics_address", "")
        except (ValueError, KeyError, TypeError) as error:
            raise self.failure(f"announced no address but {line[:80]!r}") from error
        return self.address

    def failure(self, what: str) -> ChildFailed:
        """The exception that says what happened to this child, with the end of its log."""
        return ChildFailed(self.name, what, log_tail=self._log_tail())

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal to the program; SIGSTOP freezes it and SIGCONT thaws it."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Asks it to stop gracefully; a frozen one is thawed to hear it.

        stdin stays open: its end says that nobody waits any more, and makes programs hurry.
        """
        self.send_signal(signal.SIGTERM)
        self.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Ends it and whatever it started, if it still runs."""
        # Only while it is ours: once reaped, its number may be another group's.
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def _wait(self) -> None:
        status = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._set_exited, status)

    def _set_exited(self, status: int) -> None:
        self.exited.set_result(status)
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._stdout is not None:
            self._stdout.close()

    def _log_tail(self) -> str:
        if self._log_path is None:
            return ""
        lines = self._log_path.read_text("utf-8", errors="replace").splitlines()
        return "\n".join(lines[-_LOG_TAIL_LINES:])


class _FirstLine(asyncio.Protocol):
    """Keeps the first line and drops the rest: a full or closed pipe would hurt the writer."""

    def __init__(self) -> None:
        self.line: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._data = b""

    def data_received(self, data: bytes) -> None:
        if self.line.done():
            return
        self._data += data
        if b"\n" in data:
            self.line.set_result(self._data[: self._data.index(b"\n") + 1])

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.line.done():
            self.line.set_result(self._data)


def describe_exit(status: int) -> str:
    """An exit status in words, as the end of a sentence about a program."""
    if status >= 0:
        return f"exited with status {status}"
    return f"was ended by {signal.Signals(-status).name}"
