"""A coordinator without nodes: answers from the prompt, so that clients can be tested.

"words of text" -> one delta per word, then finished          "refuse" -> NO_NODES
"hang" -> one delta, then silence until the client cancels    "cut" -> one delta, no finish
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from google.protobuf.duration_pb2 import Duration

from protos.errors import Reason, ServingError
from protos.pd.v1 import (
    cluster_pb2,
    cluster_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    types_pb2,
)
from protos.serving import GrpcServer

NODES = [
    cluster_pb2.NodeInfo(
        registration=cluster_pb2.Registration(
            node=types_pb2.NodeRef(node_id=f"{role}-0", incarnation=7),
            role=f"NODE_ROLE_{role.upper()}",
            address=f"127.0.0.1:{port}",
            layout=types_pb2.KvLayout(model="toy"),
            num_blocks=100,
        ),
        status=cluster_pb2.NodeStatus(
            state="NODE_STATE_SERVING", available_blocks=90, num_running=2, num_queued=1
        ),
    )
    for role, port in (("prefill", 1001), ("decode", 1002))
]


class FakeCoordinator(
    generation_pb2_grpc.GenerationServiceServicer, cluster_pb2_grpc.ClusterServiceServicer
):
    """Keeps the requests, their deadlines in s, and whether a hanging one was cancelled."""

    def __init__(self) -> None:
        self.address = ""
        self.requests: list[Any] = []
        self.deadlines_s: list[float | None] = []
        self.cancelled = asyncio.Event()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.requests.append(request)
        self.deadlines_s.append(context.time_remaining())
        kind = request.WhichOneof("prompt")
        text = request.chat.messages[-1].content if kind == "chat" else request.text
        if text == "refuse":
            raise ServingError(Reason.NO_NODES, "no decode node", retry_after_s=1.5, role="decode")
        words = text.split() if kind != "token_ids" else [str(i) for i in request.token_ids.ids]
        for index, word in enumerate(words):
            yield delta(position=index, text=word)
            if word == "hang":
                try:
                    await asyncio.Event().wait()
                finally:
                    self.cancelled.set()
        if text != "cut":
            yield finished(num_tokens=len(words))

    async def ListNodes(self, request: Any, context: Any) -> Any:
        return cluster_pb2.ListNodesResponse(nodes=NODES)


def delta(*, position: int, text: str) -> Any:
    return generation_pb2.GenerateResponse(
        request_id="r1",
        delta=generation_pb2.GenerationDelta(
            position=position, token_ids=[1000 + position], text=text
        ),
    )


def finished(*, num_tokens: int) -> Any:
    """0.5 s to the first token, then 0.1 s for each."""
    total_ms = 500 + 100 * (num_tokens - 1)
    return generation_pb2.GenerateResponse(
        request_id="r1",
        finished=generation_pb2.GenerationFinished(
            choices=[
                generation_pb2.ChoiceFinish(reason="FINISH_REASON_STOP", stop_string="\n"),
            ],
            usage=generation_pb2.Usage(prompt_tokens=9, generated_tokens=num_tokens),
            seed=2**64 - 1,
            served_as="SERVED_AS_DISAGGREGATED",
            served_as_reason="paired",
            prefill_node="prefill-0",
            decode_node="decode-0",
            timing=generation_pb2.Timing(
                ttft=Duration(nanos=500_000_000),
                total=Duration(seconds=total_ms // 1000, nanos=total_ms % 1000 * 1_000_000),
            ),
        ),
    )


@asynccontextmanager
async def serve_fake() -> AsyncIterator[FakeCoordinator]:
    fake, server = FakeCoordinator(), GrpcServer()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(fake, server.server)
    cluster_pb2_grpc.add_ClusterServiceServicer_to_server(fake, server.server)
    fake.address = await server.start("127.0.0.1:0")
    try:
        yield fake
    finally:
        await server.stop(grace_s=0)
