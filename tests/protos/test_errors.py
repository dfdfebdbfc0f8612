"""Errors cross a real call with their reason, metadata and retry delay."""

from collections.abc import AsyncIterator

import grpc.aio
import pytest

from protos.errors import Reason, ServingError, read_error
from protos.pd.v1 import generation_pb2, generation_pb2_grpc
from protos.serving import GrpcServer, dial


class Failing(generation_pb2_grpc.GenerationServiceServicer):
    def __init__(self, error: Exception) -> None:
        self.error = error

    async def Generate(self, request, context) -> AsyncIterator[generation_pb2.GenerateResponse]:
        raise self.error
        yield


async def call(error: Exception) -> grpc.aio.AioRpcError:
    server = GrpcServer()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(Failing(error), server.server)
    address = await server.start("127.0.0.1:0")
    try:
        async with dial(address, purpose="test") as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(generation_pb2.GenerateRequest(), timeout=10).read()
    finally:
        await server.stop(grace_s=0)
    return caught.value


@pytest.mark.parametrize("reason", list(Reason))
async def test_every_reason_arrives_with_its_code_metadata_and_retry_delay(reason: Reason):
    sent = ServingError(reason, "what is wrong", retry_after_s=1.5, field="stop.max_tokens")
    status = await call(sent)
    assert status.code() is reason.code
    received = read_error(status)
    assert received is not None
    assert received.reason is reason
    assert received.message == "what is wrong"
    assert received.metadata == {"field": "stop.max_tokens"}
    assert received.retry_after_s == 1.5


async def test_an_unexpected_error_is_internal_and_tells_no_details():
    status = await call(RuntimeError("secret"))
    assert status.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(status.details())


async def test_a_port_in_use_is_an_error():
    first, second = GrpcServer(), GrpcServer()
    address = await first.start("127.0.0.1:0")
    try:
        with pytest.raises(OSError, match="in use"):
            await second.start(address)
    finally:
        await first.stop(grace_s=0)
        await second.stop(grace_s=0)
