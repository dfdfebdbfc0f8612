"""A coordinator without nodes: answers from the prompt, so that clients can be tested.

"words of text" -> one delta per word, then finished          "refuse" -> NO_NODES
"hang" -> one delta, then silence until the client cancels    "cut" -> one delta, no finish
"leave" -> on a server with may_leave, the connection breaks there once that event is set

All choices say the same, the later ones in capitals. A prompt with prompt_logprobs has those of its
words, all at once, before the first delta.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
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
            state="NODE_STATE_SERVING",
            available_blocks=90,
            num_running=2,
            num_queued=1,
            num_decoding=2,
            step_predicted=Duration(nanos=12_500_000),
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
        self.drained: list[str] = []
        self.cleared: list[str] = []
        self.may_leave: asyncio.Event | None = None

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.requests.append(request)
        self.deadlines_s.append(context.time_remaining())
        kind = request.WhichOneof("prompt")
        text = request.chat.messages[-1].content if kind == "chat" else request.text
        if text == "refuse":
            raise ServingError(Reason.NO_NODES, "no decode node", retry_after_s=1.5, role="decode")
        words = text.split() if kind != "token_ids" else [str(i) for i in request.token_ids.ids]
        if request.HasField("prompt_logprobs"):
            yield prompt_logprobs(num_tokens=len(words))
        for index, word in enumerate(words):
            if word == "leave" and self.may_leave is not None:
                await self.may_leave.wait()
                # As a broken connection looks to the client: no reason of ours with it.
                await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
            for choice in range(max(1, request.n)):
                response = delta(position=index, text=word.upper() if choice else word)
                response.delta.choice = choice
                if request.HasField("logprobs"):
                    response.delta.logprobs.append(position_logprobs(1000 + index))
                yield response
            if word == "hang":
                try:
                    await asyncio.Event().wait()
                finally:
                    self.cancelled.set()
        if text != "cut":
            yield finished(num_tokens=len(words))

    async def ListNodes(self, request: Any, context: Any) -> Any:
        return cluster_pb2.ListNodesResponse(nodes=NODES)

    async def DrainNode(self, request: Any, context: Any) -> Any:
        self.drained.append(request.node_id)
        return cluster_pb2.DrainNodeResponse()

    async def ClearCache(self, request: Any, context: Any) -> Any:
        self.cleared.append(request.node_id)
        return cluster_pb2.ClearCacheResponse()

    async def Tokenize(self, request: Any, context: Any) -> Any:
        """A token per character; a chat has the characters of all of its messages."""
        text = request.text + "".join(message.content for message in request.chat.messages)
        return generation_pb2.TokenizeResponse(token_ids=map(ord, text))

    async def Detokenize(self, request: Any, context: Any) -> Any:
        return generation_pb2.DetokenizeResponse(text="".join(map(chr, request.token_ids)))

    async def GetModel(self, request: Any, context: Any) -> Any:
        limits = generation_pb2.RequestLimits(
            max_choices=1,
            max_logprobs=2,
            max_stop_strings=3,
            max_stop_string_bytes=4,
            max_stop_token_ids=5,
            max_logit_bias=6,
            max_message_bytes=7,
        )
        return generation_pb2.GetModelResponse(
            model="toy", vocab_size=8, max_model_len=9, has_chat_template=True, limits=limits
        )

    async def Explain(self, request: Any, context: Any) -> Any:
        if request.request_id != "r1":
            raise ServingError(Reason.UNKNOWN_REQUEST, "no such request")
        events = [
            generation_pb2.TimelineEvent(what="queued", details={"waiting": "0"}),
            generation_pb2.TimelineEvent(
                at=Duration(nanos=2_500_000), what="ended", details={"outcome": "ok"}
            ),
        ]
        return generation_pb2.ExplainResponse(request_id="r1", events=events)


def delta(*, position: int, text: str) -> Any:
    return generation_pb2.GenerateResponse(
        request_id="r1",
        delta=generation_pb2.GenerationDelta(
            position=position, token_ids=[1000 + position], text=text
        ),
    )


def prompt_logprobs(*, num_tokens: int) -> Any:
    return generation_pb2.GenerateResponse(
        request_id="r1",
        prompt_logprobs=types_pb2.PromptLogprobs(
            position=1, positions=[position_logprobs(index) for index in range(1, num_tokens)]
        ),
    )


def position_logprobs(token_id: int) -> types_pb2.PositionLogprobs:
    """-0.5 for the token, -0.25 for token 7."""
    return types_pb2.PositionLogprobs(
        chosen=types_pb2.TokenLogprob(token_id=token_id, logprob=-0.5),
        top=[types_pb2.TokenLogprob(token_id=7, logprob=-0.25)],
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
