"""A cluster whose programs are started one by one, each behind a proxy that a test can cut.

    client --> coordinator <--proxy-- nodes          coordinator, prefill nodes --proxy--> node

A cut closes every connection through the proxy and refuses new ones until it is mended.
"""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Sequence
from typing import Self

from coordinator.child import Child
from coordinator.client import AsyncClient
from coordinator.events import GenerationError
from tests.e2e.serving import wait_until

COORDINATOR = "coordinator"


class Proxy:
    """Bytes from its own port to target, both ways, while it is not cut."""

    def __init__(self) -> None:
        self.target = ""
        self.address = ""
        self._is_cut = False
        self._server: asyncio.Server | None = None
        self._pipes: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"

    def cut(self) -> None:
        self._is_cut = True
        for pipe in self._pipes:
            pipe.cancel()

    def mend(self) -> None:
        self._is_cut = False

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        if self._pipes:
            await asyncio.wait(self._pipes)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._pipes.add(task)
        task.add_done_callback(self._pipes.discard)
        with contextlib.closing(writer):
            if self._is_cut or not self.target:
                return
            host, _, port = self.target.rpartition(":")
            with contextlib.suppress(OSError, asyncio.CancelledError):
                to_reader, to_writer = await asyncio.open_connection(host, int(port))
                with contextlib.closing(to_writer):
                    await asyncio.gather(_pump(reader, to_writer), _pump(to_reader, writer))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()


class FaultCluster:
    """One coordinator, num_prefill and num_decode nodes, named as Cluster names them."""

    def __init__(
        self, *, model: str, flags: Sequence[str] = (), num_prefill: int = 2, num_decode: int = 2
    ) -> None:
        self._model = model
        self._flags = flags
        self.nodes = [f"prefill-{i}" for i in range(num_prefill)]
        self.nodes += [f"decode-{i}" for i in range(num_decode)]
        self.children: dict[str, Child] = {}
        self.proxies: dict[str, Proxy] = {}
        self.address = ""

    async def __aenter__(self) -> Self:
        for name in (COORDINATOR, *self.nodes):
            self.proxies[name] = Proxy()
            await self.proxies[name].start()
        await self.start(COORDINATOR)
        self.address = self.children[COORDINATOR].address
        await asyncio.gather(*(self.start(name) for name in self.nodes))
        await self.whole()
        return self

    async def __aexit__(self, *_: object) -> None:
        for child in self.children.values():
            if not child.exited.done():
                child.send_signal(signal.SIGCONT)
                child.kill()
        await asyncio.gather(*(child.exited for child in self.children.values()))
        for proxy in self.proxies.values():
            await proxy.close()

    async def start(self, name: str) -> None:
        """Starts a program, or starts it again; the coordinator at the address it had."""
        if name == COORDINATOR:
            command = ["-m", "coordinator", "--listen", self.address or "127.0.0.1:0"]
            command += ["--local-prefill", "never"]
        else:
            role = name.partition("-")[0]
            command = ["-m", f"{role}_server", "--node-id", name, *self._flags]
            command += ["--coordinator", self.proxies[COORDINATOR].address]
            command += ["--advertise", self.proxies[name].address]
        command += ["--model", self._model, "--exit-with-parent"]
        child = Child(name, [sys.executable, *command], log_path=None)
        self.children[name] = child
        self.proxies[name].target = await child.read_address()

    async def registered(self) -> None:
        """Returns when every node is registered and serving, however long the coordinator takes."""
        while True:
            with contextlib.suppress(GenerationError):
                async with AsyncClient(self.address) as client:
                    nodes = await client.list_nodes()
                    if {n.node_id for n in nodes if n.state == "serving"} == set(self.nodes):
                        return
            await asyncio.sleep(0.02)

    async def whole(self) -> None:
        """Returns when every node is registered, serving and has all its blocks."""
        async with AsyncClient(self.address) as client:
            await wait_until(
                client,
                lambda nodes: (
                    {n.node_id for n in nodes if n.state == "serving"} == set(self.nodes)
                    and all(n.available_blocks == n.num_blocks for n in nodes)
                ),
            )
