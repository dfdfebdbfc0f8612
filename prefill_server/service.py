"""PrefillService: compute a prompt chunk by chunk, ship each finished chunk, hand over.

    Prefill(sequence, target) -> blocks, in turn; cached ones: shipment
                              -> engine, behind them -> full blocks: shipment
                              -> first token to the coordinator -> commit -> Shipped

The call owns everything that it takes: whatever ends it takes the sequence out of the engine,
aborts the transfer and releases the lease. Runs on the event loop.
"""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import ExitStack, aclosing

from engine.loop import Engine
from engine.node import Node, request_log, run_errors
from engine.outgoing import first_token, prompt_logprobs
from engine.scheduler import Progress
from engine.sequence import GenerationSpec
from kvtransfer.blocks import Lease
from kvtransfer.dialer import LaneDialer
from kvtransfer.messages import NodeKey
from kvtransfer.outgoing_lane import OutgoingLane
from kvtransfer.prefix import PrefixChain
from kvtransfer.wire import first_token_to_pb, node_from_pb
from prefill_server.shipment import Shipment
from protos.errors import invalid
from protos.pd.v1 import cluster_pb2, prefill_pb2, prefill_pb2_grpc, types_pb2
from protos.serving import Context, GrpcServer


class PrefillRole:
    """The prefill part of a node: its service and its outgoing lanes."""

    def __init__(self, node: Node, server: GrpcServer) -> None:
        async def resolve(target: NodeKey) -> str | None:
            return await node.address_of(target, role=cluster_pb2.NODE_ROLE_DECODE)

        self._node = node
        self._dialer = LaneDialer(
            me=node.key,
            pool=node.pool,
            memory=node.memory,
            resolve=resolve,
            planes=node.planes,
            metrics=node.lane_metrics,
        )
        servicer = PrefillServicer(node, self._dialer)
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, server.server)
        server.announce("pd.v1.PrefillService")

    def members_changed(self, members: set[NodeKey]) -> None:
        assert self._node.membership is not None
        self._dialer.keep(self._node.membership.of_role(cluster_pb2.NODE_ROLE_DECODE))

    async def close(self) -> None:
        await self._dialer.close()


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    def __init__(self, node: Node, dialer: LaneDialer) -> None:
        self._node = node
        self._dialer = dialer

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Context
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        node = self._node
        spec = node.read(request.sequence)
        # Refused now, or later without a place.
        engine = node.engine
        lane = await self._lane(request)
        arrived = _now()
        num_blocks = node.model.layout.blocks_for(len(spec.token_ids) + 1)
        reuse = node.reuse(spec)
        turn = node.admission.reserve_in_turn(num_blocks, prefix=reuse.prefix)
        with node.backlog.computing(len(spec.token_ids)) as computed:
            async with request_log(spec), turn as lease:
                queued_s = _now() - arrived
                num_cached = lease.num_cached * node.model.layout.block_size
                computed(num_cached)
                with ExitStack() as cleanup:
                    shipment = None
                    if lane is not None:
                        shipment = self._shipment(lane, request.target, spec, lease)
                        cleanup.callback(shipment.close, "prefill call ended")
                        shipment.computed(num_cached)
                    computing = _compute(spec, lease, engine, num_cached, reuse.chain)
                    async with aclosing(computing) as steps:
                        async for progress in steps:
                            computed(progress.num_computed)
                            if shipment is not None:
                                shipment.computed(progress.num_computed)
                            for response in _responses(progress, spec, queued_s, num_cached):
                                yield response
                    if shipment is not None:
                        await shipment.hand_over(first_token(progress, choice=spec.choice))
                        yield _shipped(shipment.num_blocks, node.model.layout.block_bytes)

    def _shipment(
        self, lane: OutgoingLane, target: types_pb2.Target, spec: GenerationSpec, lease: Lease
    ) -> Shipment:
        return Shipment(
            lane,
            transfer_id=target.transfer_id,
            lease=lease,
            num_tokens=len(spec.token_ids),
            num_cached_tokens=target.num_cached_tokens,
            block_size=self._node.model.layout.block_size,
            metrics=self._node.lane_metrics,
        )

    async def _lane(self, request: prefill_pb2.PrefillRequest) -> OutgoingLane | None:
        if not request.HasField("target"):
            return None
        if len(request.target.transfer_id) != 16:
            raise invalid("target.transfer_id", "is not 16 bytes")
        num_tokens = len(request.sequence.token_ids) // 4
        if request.target.num_cached_tokens >= num_tokens:
            raise invalid("target.num_cached_tokens", f"is not below {num_tokens} tokens")
        return await self._dialer.lane_to(node_from_pb(request.target.decode))


async def _compute(
    spec: GenerationSpec,
    lease: Lease,
    engine: Engine,
    num_cached_tokens: int,
    chain: PrefixChain | None,
) -> AsyncGenerator[Progress, None]:
    """Step by step until the first token is drawn, which comes last."""
    async with engine.run() as run:
        run.start(spec, lease, num_computed=num_cached_tokens, max_new_tokens=1, chain=chain)
        with run_errors():
            while True:
                for progress in await run.next():
                    yield progress
                    if progress.token_id is not None:
                        return


def _responses(
    progress: Progress, spec: GenerationSpec, queued_s: float, num_cached_tokens: int
) -> Iterator[prefill_pb2.PrefillResponse]:
    """What a step has brought that the coordinator wants to know."""
    if progress.prompt_logprobs is not None:
        yield prefill_pb2.PrefillResponse(
            prompt_logprobs=prompt_logprobs(progress.prompt_logprobs, spec.token_ids)
        )
    if progress.token_id is not None:
        first = first_token_to_pb(first_token(progress, choice=spec.choice))
        message = prefill_pb2.FirstToken(runs=[first], num_cached_tokens=num_cached_tokens)
        message.queue.FromNanoseconds(int(queued_s * 1e9))
        yield prefill_pb2.PrefillResponse(first_token=message)


def _shipped(num_blocks: int, block_bytes: int) -> prefill_pb2.PrefillResponse:
    return prefill_pb2.PrefillResponse(
        shipped=prefill_pb2.Shipped(num_blocks=num_blocks, size_bytes=num_blocks * block_bytes)
    )


def _now() -> float:
    # Not the loop's time: uvloop's is in whole milliseconds.
    return time.monotonic()
