"""What every program of ours does around its main coroutine: logs, signals, its parent, its exit.

stdout: one JSON line when it listens. stderr: logs, one line per state change (log_format.py).
SIGTERM, SIGINT, or the end of stdin with --exit-with-parent: stop gracefully, exit 0.
"""

import asyncio
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable

import uvloop

from engine.log_format import log_formatter

# Longest graceful stop after the parent is gone.
ORPHAN_GRACE_S = 5.0
SWITCH_INTERVAL_S = 0.0005


class StartError(Exception):
    """The program cannot start; the message is one line for a person."""


def run_program(
    name: str,
    main: Callable[[asyncio.Event], Awaitable[None]],
    *,
    exit_with_parent: bool,
    log_format: str = "text",
) -> int:
    """Runs main(stop) on uvloop until it returns; stop is set when the program must end.

    Returns the exit status: 0, or 1 after a StartError.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(log_formatter(log_format, program=name))
    logging.basicConfig(level=logging.INFO, handlers=[handler])

    # The engine thread and the event loop hand the GIL to each other thousands of times a second;
    # at the default of 5 ms each would wait for the other longer than a step's own Python takes.
    sys.setswitchinterval(SWITCH_INTERVAL_S)

    async def run() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, stop.set)
        if exit_with_parent:
            threading.Thread(target=_watch_stdin, args=(loop, stop), daemon=True).start()
        await main(stop)

    try:
        uvloop.run(run())
    except StartError as error:
        logging.getLogger(name).error("cannot start: %s", error)
        return 1
    return 0


def announce(*, role: str, node_id: str, address: str, metrics_address: str | None) -> None:
    """Tells whoever started this program where it listens: one JSON line on stdout."""
    line = {"role": role, "node_id": node_id, "address": address}
    if metrics_address is not None:
        line["metrics_address"] = metrics_address
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _watch_stdin(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    loop.call_soon_threadsafe(stop.set)
    # A step or a call that does not end must not outlive the parent.
    threading.Event().wait(ORPHAN_GRACE_S)
    os._exit(1)
