"""Stands in for the three programs, so that the supervisor is tested without them.

    python fake_program.py ROLE --listen ... [--coordinator ... --node-id ...] --exit-with-parent

--behave NODE=WHAT makes one of them misbehave: crash, silent, garbage, idle (never SERVING), deaf
(to SIGTERM and EOF), chatty (prints after its line).
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

from fake_coordinator import FakeCoordinator

from protos.pd.v1 import cluster_pb2, cluster_pb2_grpc, generation_pb2_grpc, types_pb2
from protos.serving import GrpcServer, dial


class StandInCoordinator(FakeCoordinator):
    """A node is listed as long as its Register stream lives."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: dict[str, Any] = {}

    async def Register(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        name = ""
        try:
            async for request in requests:
                if request.HasField("registration"):
                    name = request.registration.node.node_id
                    self.nodes[name] = cluster_pb2.NodeInfo(registration=request.registration)
                    yield cluster_pb2.RegisterResponse()
                else:
                    self.nodes[name].status.CopyFrom(request.status)
        finally:
            self.nodes.pop(name, None)

    async def ListNodes(self, request: Any, context: Any) -> Any:
        return cluster_pb2.ListNodesResponse(nodes=self.nodes.values())


async def register(args: argparse.Namespace, address: str, behave: str) -> None:
    async with dial(args.coordinator, purpose="control") as channel:
        call = cluster_pb2_grpc.ClusterServiceStub(channel).Register()
        registration = cluster_pb2.Registration(
            node=types_pb2.NodeRef(node_id=args.node_id, incarnation=1),
            role=f"NODE_ROLE_{args.role.upper()}",
            address=address,
            num_blocks=8,
        )
        await call.write(cluster_pb2.RegisterRequest(registration=registration))
        await call.read()
        if behave != "idle":
            status = cluster_pb2.NodeStatus(state="NODE_STATE_SERVING", available_blocks=8)
            await call.write(cluster_pb2.RegisterRequest(status=status))
        await asyncio.Event().wait()


def watch_stdin(loop: asyncio.AbstractEventLoop, work: asyncio.Task[Any]) -> None:
    # Not sys.stdin: its lock, held by a daemon thread at exit, aborts the interpreter.
    while os.read(0, 4096):
        pass
    with contextlib.suppress(RuntimeError):  # the loop was closed by SIGTERM meanwhile
        loop.call_soon_threadsafe(work.cancel)


async def serve(args: argparse.Namespace, behave: str) -> None:
    server = GrpcServer()
    if args.role == "coordinator":
        servicer = StandInCoordinator()
        cluster_pb2_grpc.add_ClusterServiceServicer_to_server(servicer, server.server)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server.server)
    address = await server.start(args.listen)
    print(json.dumps({"role": args.role, "node_id": args.node_id, "address": address}), flush=True)
    if behave == "chatty":
        print("x" * 1_000_000, flush=True)
    work = asyncio.create_task(
        asyncio.Event().wait() if args.role == "coordinator" else register(args, address, behave)
    )
    if behave != "deaf":
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, work.cancel)
        watch = threading.Thread(target=watch_stdin, args=(loop, work), daemon=True)
        watch.start()
    with contextlib.suppress(asyncio.CancelledError):
        await work
    await server.stop(grace_s=0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role")
    parser.add_argument("--listen", required=True)
    parser.add_argument("--exit-with-parent", action="store_true", required=True)
    parser.add_argument("--coordinator")
    parser.add_argument("--node-id", default="coordinator")
    parser.add_argument("--behave", default="=")
    args, _ = parser.parse_known_args()
    who, _, what = args.behave.partition("=")
    behave = what if who == args.node_id else ""
    if behave == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behave == "crash":
        sys.exit("warming up\nboom: no memory")
    if behave == "garbage":
        print("hello", flush=True)
    if behave in ("garbage", "silent"):
        sys.stdin.read()
        return
    asyncio.run(serve(args, behave))


if __name__ == "__main__":
    main()
