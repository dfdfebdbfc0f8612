"""disagg up and disagg demo: a cluster in the foreground, gone when the command ends."""

import asyncio
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from coordinator.child import ChildFailed
from coordinator.client import AsyncClient
from coordinator.events import Delta, Finished
from coordinator.exits import ExitCode, report
from coordinator.render import loading_bars, write_nodes, write_summary, write_text
from coordinator.supervisor import Cluster

_QUESTION = "What is the capital of France?"


@asynccontextmanager
async def started(**options: Any) -> AsyncIterator[Cluster]:
    """A Cluster of these options, running; bars show how its weights load."""
    async with AsyncExitStack() as stack:
        with loading_bars() as on_loaded:
            cluster = await stack.enter_async_context(Cluster(on_loaded=on_loaded, **options))
        yield cluster


async def up(**options: Any) -> ExitCode:
    """Serves until a program ends. Raises ChildFailed when the cluster does not start."""
    async with started(**options) as cluster:
        async with AsyncClient(cluster.address) as client:
            write_nodes(await client.list_nodes())
        sys.stdout.write(f"ready {cluster.address}\n")
        sys.stdout.flush()
        try:
            await cluster.wait_exit()
        except ChildFailed as failure:
            report(str(failure))
        return ExitCode.FAILED


async def demo(*, model: str, options: Mapping[str, object]) -> ExitCode:
    """Starts one prefill and one decode node, streams an answer, and stops them."""
    with tempfile.TemporaryDirectory(prefix="disagg-demo-") as log_dir:
        report("starting a prefill node and a decode node")
        cluster_options = {
            "model": model,
            "num_prefill": 1,
            "num_decode": 1,
            "node_options": options,
            "log_dir": Path(log_dir),
        }
        async with started(**cluster_options) as cluster, AsyncClient(cluster.address) as client:
            write_nodes(await client.list_nodes())
            write_text(f"> {_QUESTION}\n")
            prompt = [{"role": "user", "content": _QUESTION}]
            async for event in client.generate(prompt, max_tokens=64):
                if isinstance(event, Delta):
                    write_text(event.text)
                elif isinstance(event, Finished):
                    write_text("\n")
                    write_summary(event)
    return ExitCode.OK


def run_until_signal(main: Coroutine[None, None, ExitCode]) -> ExitCode:
    """Runs main; SIGTERM and Ctrl-C cancel it, so that it cleans up; Ctrl-C is raised then."""
    return asyncio.run(_until_sigterm(main))


async def _until_sigterm(main: Coroutine[None, None, ExitCode]) -> ExitCode:
    is_terminated = False
    task = asyncio.create_task(main)

    def terminate() -> None:
        nonlocal is_terminated
        is_terminated = True
        task.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
    try:
        return await task
    except asyncio.CancelledError:
        if not is_terminated:
            raise
        return ExitCode.OK
