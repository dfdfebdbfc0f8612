"""Between a lane's values and its protos. The only file that knows both."""

from kvtransfer.layout import KvLayout
from kvtransfer.messages import (
    Abort,
    Ack,
    Commit,
    Committed,
    FirstToken,
    Grant,
    Nack,
    NodeKey,
    Ready,
    ReceiverMessage,
    SenderMessage,
    Sent,
)
from protos.pd.v1 import lane_pb2, types_pb2

_FINISH_TO_PB = {
    "": types_pb2.FINISH_REASON_UNSPECIFIED,
    "length": types_pb2.FINISH_REASON_LENGTH,
    "stop": types_pb2.FINISH_REASON_STOP,
    "eos": types_pb2.FINISH_REASON_EOS,
}
_FINISH_FROM_PB = {value: name for name, value in _FINISH_TO_PB.items()}


def finish_reason_to_pb(reason: str) -> types_pb2.FinishReason:
    return _FINISH_TO_PB[reason]


def finish_reason_from_pb(reason: types_pb2.FinishReason) -> str:
    return _FINISH_FROM_PB[reason]


def node_to_pb(node: NodeKey) -> types_pb2.NodeRef:
    return types_pb2.NodeRef(node_id=node.node_id, incarnation=node.incarnation)


def node_from_pb(node: types_pb2.NodeRef) -> NodeKey:
    return NodeKey(node_id=node.node_id, incarnation=node.incarnation)


def layout_to_pb(layout: KvLayout) -> types_pb2.KvLayout:
    return types_pb2.KvLayout(
        model=layout.model,
        model_digest=bytes.fromhex(layout.model_digest),
        dtype=layout.dtype,
        inner_order=layout.inner_order,
        block_size=layout.block_size,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_start=layout.head_start,
        head_dim=layout.head_dim,
    )


def layout_from_pb(layout: types_pb2.KvLayout) -> KvLayout:
    """Raises ValueError for a layout that cannot be."""
    return KvLayout(
        model=layout.model,
        model_digest=layout.model_digest.hex(),
        dtype=layout.dtype,
        inner_order=layout.inner_order,
        block_size=layout.block_size,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_start=layout.head_start,
        head_dim=layout.head_dim,
    )


def first_token_to_pb(token: FirstToken) -> types_pb2.TokenRun:
    run = types_pb2.TokenRun(
        choice=token.choice,
        position=token.position,
        token_ids=[token.token_id],
        finish_reason=finish_reason_to_pb(token.finish_reason),
    )
    if token.logprobs:
        run.logprobs.add().ParseFromString(token.logprobs)
    return run


def first_token_from_pb(run: types_pb2.TokenRun) -> FirstToken:
    return FirstToken(
        choice=run.choice,
        position=run.position,
        token_id=run.token_ids[0],
        finish_reason=finish_reason_from_pb(run.finish_reason),
        logprobs=run.logprobs[0].SerializeToString() if run.logprobs else b"",
    )


def sender_message_to_pb(message: SenderMessage) -> lane_pb2.LaneRequest:
    match message:
        case Ready():
            ready = lane_pb2.Ready(
                seq=message.seq,
                transfer_id=message.transfer_id,
                first_block=message.first_block,
                num_blocks=message.num_blocks,
                size_bytes=message.size_bytes,
            )
            return lane_pb2.LaneRequest(ready=ready)
        case Sent():
            sent = lane_pb2.Sent(seq=message.seq, digest=message.digest)
            return lane_pb2.LaneRequest(sent=sent)
        case Commit():
            commit = lane_pb2.Commit(
                transfer_id=message.transfer_id,
                num_blocks=message.num_blocks,
                runs=[first_token_to_pb(token) for token in message.first_tokens],
            )
            return lane_pb2.LaneRequest(commit=commit)
        case Abort():
            abort = lane_pb2.Abort(transfer_id=message.transfer_id, reason=message.reason)
            return lane_pb2.LaneRequest(abort=abort)


def sender_message_from_pb(request: lane_pb2.LaneRequest) -> SenderMessage | None:
    """None for what has no place after the handshake, or that this version does not know."""
    match request.WhichOneof("event"):
        case "ready":
            if request.ready.num_heads or request.ready.wire_dtype:
                return None  # parts of a block and other dtypes are not received yet
            return Ready(
                seq=request.ready.seq,
                transfer_id=request.ready.transfer_id,
                first_block=request.ready.first_block,
                num_blocks=request.ready.num_blocks,
                size_bytes=request.ready.size_bytes,
            )
        case "sent":
            return Sent(seq=request.sent.seq, digest=request.sent.digest)
        case "commit":
            runs = request.commit.runs
            if any(len(r.token_ids) != 1 or r.finish_reason not in _FINISH_FROM_PB for r in runs):
                return None
            return Commit(
                transfer_id=request.commit.transfer_id,
                num_blocks=request.commit.num_blocks,
                first_tokens=tuple(first_token_from_pb(run) for run in runs),
            )
        case "abort":
            return Abort(transfer_id=request.abort.transfer_id, reason=request.abort.reason)
    return None


def receiver_message_to_pb(message: ReceiverMessage) -> lane_pb2.LaneResponse:
    match message:
        case Grant():
            return lane_pb2.LaneResponse(grant=lane_pb2.Grant(seq=message.seq))
        case Ack():
            return lane_pb2.LaneResponse(ack=lane_pb2.Ack(seq=message.seq))
        case Nack():
            return lane_pb2.LaneResponse(nack=lane_pb2.Nack(seq=message.seq))
        case Committed():
            committed = lane_pb2.Committed(transfer_id=message.transfer_id)
            return lane_pb2.LaneResponse(committed=committed)
        case Abort():
            abort = lane_pb2.Abort(transfer_id=message.transfer_id, reason=message.reason)
            return lane_pb2.LaneResponse(abort=abort)


def receiver_message_from_pb(response: lane_pb2.LaneResponse) -> ReceiverMessage | None:
    """None for what has no place after the handshake."""
    match response.WhichOneof("event"):
        case "grant":
            return Grant(seq=response.grant.seq)
        case "ack":
            return Ack(seq=response.ack.seq)
        case "nack":
            return Nack(seq=response.nack.seq)
        case "committed":
            return Committed(transfer_id=response.committed.transfer_id)
        case "abort":
            return Abort(transfer_id=response.abort.transfer_id, reason=response.abort.reason)
    return None
