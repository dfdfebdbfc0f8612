"""DecodeService: reserve, receive (or compute) a prompt's KV, generate.

    Decode: start -> blocks or RESOURCE_EXHAUSTED -> Reserved(transfer id, cached prefix)
            remote -> the lane seals the blocks and hands over -> Sealed -> engine -> Tokens
            local  -> engine computes the prompt too ------------------------> Tokens

Both leave out the prefix whose blocks were here.

The call owns everything that it takes: whatever ends it takes the sequence out of the engine,
ends the transfer and releases the lease. Runs on the event loop.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import ExitStack, aclosing

from decode_server.generation import ChoiceTables, Generation
from engine.incoming import read_choices
from engine.loop import Engine
from engine.node import Node, request_log, run_errors
from engine.room import NodeFull
from engine.sequence import GenerationSpec
from kvtransfer.blocks import BlocksExhausted, Lease
from kvtransfer.ending import Ending
from kvtransfer.inbox import Inbox, IncomingTransfer
from kvtransfer.lane_service import LaneServicer
from kvtransfer.messages import FirstToken, NodeKey
from kvtransfer.prefix import PrefixChain
from kvtransfer.wire import first_token_to_pb, node_from_pb, node_to_pb
from protos.errors import Reason, ServingError, invalid
from protos.pd.v1 import cluster_pb2, decode_pb2, decode_pb2_grpc, lane_pb2_grpc, types_pb2
from protos.serving import Context, GrpcServer, next_message


class DecodeRole:
    """The decode part of a node: its service, its inbox and its incoming lanes."""

    def __init__(self, node: Node, server: GrpcServer) -> None:
        async def is_prefill_node(key: NodeKey) -> bool:
            return await node.address_of(key, role=cluster_pb2.NODE_ROLE_PREFILL) is not None

        inbox = Inbox()
        self._lanes = LaneServicer(
            me=node.key,
            inbox=inbox,
            pool=node.pool,
            memory=node.memory,
            is_prefill_node=is_prefill_node,
            planes=node.planes,
            metrics=node.lane_metrics,
        )
        lane_pb2_grpc.add_LaneServiceServicer_to_server(self._lanes, server.server)
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(
            DecodeServicer(node, inbox, self._lanes), server.server
        )
        server.announce("pd.v1.DecodeService")
        server.announce("pd.v1.LaneService")

    def members_changed(self, members: set[NodeKey]) -> None:
        self._lanes.forget(members)

    async def close(self) -> None:
        self._lanes.close()


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    def __init__(self, node: Node, inbox: Inbox, lanes: LaneServicer) -> None:
        self._node = node
        self._inbox = inbox
        self._lanes = lanes

    async def Decode(
        self, requests: AsyncIterator[decode_pb2.DecodeRequest], context: Context
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        engine = self._node.engine
        start = await _next_event(requests, "start")
        spec = self._node.read(start.start)
        choices = read_choices(start.start, spec, vocab_size=self._node.vocab_size)
        serving = self._serve(spec, choices, engine, requests)
        async with request_log(spec), aclosing(serving) as responses:
            async for response in responses:
                yield response

    async def _serve(
        self,
        spec: GenerationSpec,
        choices: Sequence[GenerationSpec],
        engine: Engine,
        requests: AsyncIterator[decode_pb2.DecodeRequest],
    ) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
        """spec is what a prefill node computes; choices go on from it."""
        with ExitStack() as cleanup:
            tables = self._tables(spec, choices)
            reuse = self._node.reuse(spec)
            lease = self._reserve(tables.num_blocks, reuse.prefix, cleanup)
            transfer, ending = self._expect(spec, lease, cleanup)
            yield self._reserved(transfer)
            prefill = await _next_event(requests, "remote", "local")
            generation = Generation(
                choices,
                tables,
                lease,
                num_prompt_tokens=len(spec.token_ids),
                chain=reuse.chain,
            )
            if prefill.WhichOneof("event") == "local":
                self._inbox.end(transfer, "local prefill")
                computed = cleanup.enter_context(self._node.backlog.computing(len(spec.token_ids)))
                running = generation.run_locally(engine, computed)
            else:
                first = await self._receive(
                    transfer, ending, spec, node_from_pb(prefill.remote.prefill)
                )
                self._publish(spec, lease, reuse.chain)
                yield decode_pb2.DecodeResponse(
                    sealed=decode_pb2.Sealed(runs=[first_token_to_pb(first)])
                )
                running = generation.run_from(first, engine)
            with run_errors():
                async with aclosing(running) as responses:
                    async for response in responses:
                        yield response

    def _tables(self, spec: GenerationSpec, choices: Sequence[GenerationSpec]) -> ChoiceTables:
        return ChoiceTables(
            block_size=self._node.model.layout.block_size,
            num_prompt_tokens=len(spec.token_ids),
            num_tokens=[len(choice.token_ids) for choice in choices],
        )

    def _reserve(self, num_blocks: int, prefix: Sequence[bytes], cleanup: ExitStack) -> Lease:
        """Blocks for what is there and the next token, beside those that others grow into; or
        RESOURCE_EXHAUSTED."""
        try:
            return cleanup.enter_context(
                self._node.admission.reserve(num_blocks, headroom=True, prefix=prefix)
            )
        except (BlocksExhausted, NodeFull) as error:
            raise ServingError(
                Reason.BLOCKS_EXHAUSTED,
                f"{self._node.key}: {error}",
                retry_after_s=0.1,
                node=self._node.key,
            ) from error

    def _expect(
        self, spec: GenerationSpec, lease: Lease, cleanup: ExitStack
    ) -> tuple[IncomingTransfer, Ending]:
        ending = Ending()
        transfer = self._inbox.expect(
            lease,
            num_tokens=len(spec.token_ids),
            num_cached_tokens=lease.num_cached * self._node.model.layout.block_size,
            on_end=ending.set,
        )
        cleanup.callback(self._lanes.abort, transfer, "decode call ended")
        return transfer, ending

    def _reserved(self, transfer: IncomingTransfer) -> decode_pb2.DecodeResponse:
        status = self._node.status()
        target = types_pb2.Target(
            decode=node_to_pb(self._node.key),
            transfer_id=transfer.transfer_id,
            num_cached_tokens=transfer.num_cached_tokens,
        )
        return decode_pb2.DecodeResponse(
            reserved=decode_pb2.Reserved(
                target=target,
                available_blocks=status.available_blocks,
                status_seq=status.seq,
            )
        )

    def _publish(self, spec: GenerationSpec, lease: Lease, chain: PrefixChain | None) -> None:
        """Makes the sealed blocks of a prompt findable; the engine does so with what it fills."""
        if chain is not None:
            num_full = len(spec.token_ids) // self._node.model.layout.block_size
            chain.extend(spec.token_ids, num_blocks=num_full)
            self._node.pool.publish(lease.block_ids[:num_full], chain.hashes)

    async def _receive(
        self,
        transfer: IncomingTransfer,
        ending: Ending,
        spec: GenerationSpec,
        prefill: NodeKey,
    ) -> FirstToken:
        """The handoff, once every block is sealed. Raises ServingError."""
        if not transfer.ended and self._inbox.find(transfer.transfer_id, sender=prefill) is None:
            raise invalid("remote.prefill", f"the transfer is bound to {transfer.sender}")
        reason = await ending.wait()
        if reason is not None:
            raise ServingError(
                Reason.TRANSFER_ABORTED, f"transfer from {prefill} ended: {reason}", node=prefill
            )
        assert transfer.first_tokens is not None
        return self._checked_handoff(transfer.first_tokens, spec, prefill)

    def _checked_handoff(
        self, first_tokens: tuple[FirstToken, ...], spec: GenerationSpec, prefill: NodeKey
    ) -> FirstToken:
        """The first token, if it is one that this node can go on from."""
        if len(first_tokens) == 1:
            first = first_tokens[0]
            is_next = first.choice == spec.choice and first.position == len(spec.token_ids)
            if is_next and first.token_id < self._node.vocab_size:
                return first
        raise ServingError(
            Reason.TRANSFER_ABORTED, f"the handoff of {prefill} does not fit", node=prefill
        )


async def _next_event(
    requests: AsyncIterator[decode_pb2.DecodeRequest], *expected: str
) -> decode_pb2.DecodeRequest:
    """The call's deadline is the wait's."""
    request = await next_message(requests)
    got = request.WhichOneof("event")
    if got not in expected:
        raise invalid("event", f"{got} where {' or '.join(expected)} was due")
    return request
