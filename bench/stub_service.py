"""A GenerationService that computes nothing and sends tokens at a pace: bench/generator_check.py.

    prompt's first token: the stream's number --> a token every gap_s, and when each was written

It runs in a process of its own, on one core: run_stub is the process's main function, and talks to
its parent over a pipe: its address, then, after the parent's word, the times.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from typing import Any

import uvloop

from protos.pd.v1 import generation_pb2, generation_pb2_grpc
from protos.serving import GrpcServer

# Between the first request and the first token, so that all streams have begun.
_LEAD_S = 0.5
_STOP_GRACE_S = 2.0

# When each token of a stream was written, in monotonic seconds, by the stream's number.
Written = dict[int, list[float]]


class StubService(generation_pb2_grpc.GenerationServiceServicer):
    """num_streams streams, each a token every gap_s: all together, or evenly spread."""

    def __init__(self, *, num_streams: int, gap_s: float, together: bool) -> None:
        self.written: Written = {}
        self._gap_s = gap_s
        self._step_s = 0.0 if together else gap_s / num_streams
        self._begin_s = 0.0

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        number = request.token_ids.ids[0]
        times = self.written[number] = []
        self._begin_s = self._begin_s or time.monotonic() + _LEAD_S
        at_s = self._begin_s + number * self._step_s
        for position in range(request.stop.max_tokens):
            response = generation_pb2.GenerateResponse(request_id=request.request_id)
            response.delta.position = position
            response.delta.token_ids.append(7)
            response.delta.text = " the"
            await asyncio.sleep(max(0.0, at_s - time.monotonic()))
            times.append(time.monotonic())
            yield response
            at_s += self._gap_s
        finished = generation_pb2.GenerationFinished()
        finished.usage.generated_tokens = request.stop.max_tokens
        yield generation_pb2.GenerateResponse(finished=finished)


def run_stub(pipe: Connection, core: int, options: dict[str, Any]) -> None:
    """Serves until the parent says so."""
    os.sched_setaffinity(0, {core})
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        pipe.send(runner.run(_serve(pipe, StubService(**options))))


async def _serve(pipe: Connection, service: StubService) -> Written:
    server = GrpcServer()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(service, server.server)
    pipe.send(await server.start("127.0.0.1:0"))
    await asyncio.to_thread(pipe.recv)
    await server.stop(grace_s=_STOP_GRACE_S)
    return service.written
