"""PrefillService: compute a prompt chunk by chunk, ship each finished chunk, hand over.

    Prefill(sequence, target) -> blocks, in turn -> engine -> full blocks: shipment
                              -> first token to the coordinator -> commit -> Shipped

The call owns everything that it takes: whatever ends it takes the sequence out of the engine,
aborts the transfer and releases the lease. Runs on the event loop.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack

from engine.loop import Run
from engine.node import Node, request_log, run_errors
from engine.scheduler import Progress
from kvtransfer.dialer import LaneDialer
from kvtransfer.messages import FirstToken, NodeKey
from kvtransfer.outgoing_lane import OutgoingLane
from kvtransfer.wire import first_token_to_pb, node_from_pb
from prefill_server.shipment import Shipment
from protos.errors import invalid
from protos.pd.v1 import cluster_pb2, prefill_pb2, prefill_pb2_grpc
from protos.serving import Context, GrpcServer


class PrefillRole:
    """The prefill part of a node: its service and its outgoing lanes."""

    def __init__(self, node: Node, server: GrpcServer) -> None:
        async def resolve(target: NodeKey) -> str | None:
            return await node.address_of(target, role=cluster_pb2.NODE_ROLE_DECODE)

        self._dialer = LaneDialer(me=node.key, pool=node.pool, memory=node.memory, resolve=resolve)
        self._forgetting: set[asyncio.Task[None]] = set()
        servicer = PrefillServicer(node, self._dialer)
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, server.server)
        server.announce("pd.v1.PrefillService")

    def members_changed(self, members: set[NodeKey]) -> None:
        task = asyncio.create_task(self._dialer.forget(members))
        self._forgetting.add(task)
        task.add_done_callback(self._forgetting.discard)

    async def close(self) -> None:
        await self._dialer.close()


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    def __init__(self, node: Node, dialer: LaneDialer) -> None:
        self._node = node
        self._dialer = dialer

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Context
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        node, engine = self._node, self._node.engine
        layout = node.model.layout
        spec = node.read(request.sequence)
        num_tokens = len(spec.token_ids)
        lane = await self._lane(request)
        arrived = _now()
        num_blocks = layout.blocks_for(num_tokens + 1)
        async with request_log(spec), node.admission.reserve_in_turn(num_blocks) as lease:
            queued_s = _now() - arrived
            with ExitStack() as cleanup:
                shipment = None
                if lane is not None:
                    shipment = Shipment(
                        lane,
                        transfer_id=request.target.transfer_id,
                        lease=lease,
                        num_tokens=num_tokens,
                        block_size=layout.block_size,
                    )
                    cleanup.callback(shipment.close, "prefill call ended")
                async with engine.run(spec, lease, max_new_tokens=1) as run:
                    with run_errors():
                        last = await _compute(run, shipment)
                assert last.token_id is not None
                first = FirstToken(
                    choice=spec.choice,
                    position=last.position,
                    token_id=last.token_id,
                    finish_reason=last.reason,
                )
                yield _first_token(first, queued_s)
                if shipment is not None:
                    await shipment.hand_over(first)
                    yield _shipped(shipment.num_blocks, layout.block_bytes)

    async def _lane(self, request: prefill_pb2.PrefillRequest) -> OutgoingLane | None:
        if not request.HasField("target"):
            return None
        if len(request.target.transfer_id) != 16:
            raise invalid("target.transfer_id", "is not 16 bytes")
        return await self._dialer.lane_to(node_from_pb(request.target.decode))


async def _compute(run: Run, shipment: Shipment | None) -> Progress:
    """Until the first token is drawn; full blocks ship meanwhile."""
    while True:
        for progress in await run.next():
            if shipment is not None:
                shipment.computed(progress.num_computed)
            if progress.token_id is not None:
                return progress


def _first_token(first: FirstToken, queued_s: float) -> prefill_pb2.PrefillResponse:
    message = prefill_pb2.FirstToken(runs=[first_token_to_pb(first)])
    message.queue.FromNanoseconds(int(queued_s * 1e9))
    return prefill_pb2.PrefillResponse(first_token=message)


def _shipped(num_blocks: int, block_bytes: int) -> prefill_pb2.PrefillResponse:
    return prefill_pb2.PrefillResponse(
        shipped=prefill_pb2.Shipped(num_blocks=num_blocks, size_bytes=num_blocks * block_bytes)
    )


def _now() -> float:
    # Not the loop's time: uvloop's is in whole milliseconds.
    return time.monotonic()
