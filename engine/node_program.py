"""How a node program lives: up, serving, down. The roles' __main__ call it.

find model -> pool, memory -> metrics, listen (NOT_SERVING) -> register (STARTING)
  -> load weights, calibrate -> engine, SERVING
  -> stop or drain: DRAINING, what runs may end within a grace, lanes and server close
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Protocol

from engine.knobs import NodeConfig, parse_knobs
from engine.membership import Membership
from engine.node import Node
from engine.process import StartError, announce, run_program
from engine.served_model import find_model
from kvtransfer.messages import NodeKey
from protos.metrics_server import serve_metrics
from protos.pd.v1 import cluster_pb2
from protos.serving import GrpcServer

log = logging.getLogger(__name__)


class Role(Protocol):
    """What prefill and decode differ in."""

    def members_changed(self, members: set[NodeKey]) -> None: ...

    async def close(self) -> None: ...


def main(
    role_name: str, *, role: cluster_pb2.NodeRole, make_role: Callable[[Node, GrpcServer], Role]
) -> int:
    """A node program from its command line to its exit status."""
    config = parse_knobs(role_name)
    return run_program(
        config.node_id,
        lambda stop: serve_node(config, stop, role=role, role_name=role_name, make_role=make_role),
        exit_with_parent=config.exit_with_parent,
        log_format=config.log_format,
    )


async def serve_node(
    config: NodeConfig,
    stop: asyncio.Event,
    *,
    role: cluster_pb2.NodeRole,
    role_name: str,
    make_role: Callable[[Node, GrpcServer], Role],
) -> None:
    """Runs a node until stop is set. Raises StartError."""
    # Before torch is imported: two processes with two OpenMP threads each on two cores collapse.
    os.environ["OMP_NUM_THREADS"] = str(config.threads)
    try:
        model = find_model(
            config.model,
            dtype=config.dtype,
            block_size=config.block_size,
            device=config.device,
        )
        node = Node(config=config, role=role, model=model)
    except ValueError as error:
        raise StartError(str(error)) from error
    _log_device(config.device)
    server = GrpcServer()
    parts = make_role(node, server)
    async with AsyncExitStack() as stack:
        try:
            metrics_address = await stack.enter_async_context(
                serve_metrics(config.metrics_listen, node.registry)
            )
            address = await server.start(config.listen)
        except OSError as error:
            raise StartError(str(error)) from error
        node.membership = Membership(
            registration=node.registration(config.advertise or address),
            status=node.status,
            pool=node.pool,
            on_change=parts.members_changed,
            on_drain=stop.set,
        )
        announce(
            role=role_name,
            node_id=config.node_id,
            address=address,
            metrics_address=metrics_address,
        )
        await _serve_until(stop, node, server, parts)
    if node.crashed.is_set():
        raise StartError("the engine crashed; the log says why")


def _log_device(device: str) -> None:
    """What a report about a GPU must name."""
    if device != "cpu":
        import torch

        from kvtransfer.nccl_group import nccl_version

        version = nccl_version()
        nccl = ".".join(map(str, version)) if version else "none"
        log.info("device=%s torch=%s NCCL=%s", device, torch.__version__, nccl)


async def _serve_until(stop: asyncio.Event, node: Node, server: GrpcServer, parts: Role) -> None:
    """Registered, loading and serving, until stop is set or the engine has crashed; then down."""
    assert node.membership is not None
    registered = asyncio.create_task(node.membership.run(node.config.coordinators))
    try:
        await _load_or_stop(node, server, stop)
        await _first(stop, node.crashed)
        node.drain()
    finally:
        await server.set_serving(False)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(node.config.drain_grace_s):
                await node.admission.wait_idle()
        await parts.close()
        await server.stop(grace_s=0)
        registered.cancel()
        await asyncio.gather(registered, return_exceptions=True)
        await node.stop()


async def _load_or_stop(node: Node, server: GrpcServer, stop: asyncio.Event) -> None:
    """A stop while weights load does not wait for them."""
    loading = asyncio.create_task(node.load())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([loading, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not loading.done():
        loading.cancel()
    else:
        loading.result()
        await server.set_serving(True)


async def _first(*events: asyncio.Event) -> None:
    """Returns when one of them is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
