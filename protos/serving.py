"""How every server of ours is served, and how every channel of ours is dialled.

One grpc.aio server per process, with health, reflection, and one interceptor that turns a
ServingError into its status and anything unexpected into INTERNAL without a stack trace on the
wire. A port that is in use is an error, never shared silently.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from protos.errors import Reason, ServingError

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 16 * 1024 * 1024

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]

log = logging.getLogger(__name__)

# A peer that vanishes without a FIN is noticed by pings; one that is frozen, by its heartbeat.
_KEEPALIVE = [
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_SERVER_OPTIONS = [
    *_KEEPALIVE,
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]


def dial(address: str, *, purpose: str) -> grpc.aio.Channel:
    """A channel to address. Channels of different purpose never share a connection."""
    return grpc.aio.insecure_channel(
        address,
        options=[
            *_KEEPALIVE,
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            # Part of what gRPC compares before it reuses a connection.
            ("grpc.primary_user_agent", f"disagg-{purpose}"),
            # Nodes are dialled at the address that they registered, through no proxy.
            ("grpc.enable_http_proxy", 0),
            ("grpc.min_reconnect_backoff_ms", 100),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1_000),
        ],
    )


class GrpcServer:
    """A server of one process: add servicers, start, set_serving(True), stop."""

    def __init__(self, *, max_receive_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self.server = grpc.aio.server(
            interceptors=[_ErrorInterceptor()],
            options=[*_SERVER_OPTIONS, ("grpc.max_receive_message_length", max_receive_bytes)],
        )
        self._health = health.aio.HealthServicer()
        self._services = [reflection.SERVICE_NAME, health.SERVICE_NAME]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)

    def announce(self, service_name: str) -> None:
        """Makes a service visible to reflection and health (once its servicer was added)."""
        self._services.append(service_name)

    async def start(self, listen: str) -> str:
        """Binds and serves. Returns the bound host:port. Raises OSError if it cannot bind."""
        reflection.enable_server_reflection(self._services, self.server)
        try:
            port = self.server.add_insecure_port(listen)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {listen}: is the port in use?") from error
        await self.set_serving(False)
        await self.server.start()
        return f"{listen.rpartition(':')[0]}:{port}"

    async def set_serving(self, serving: bool) -> None:
        state = health_pb2.HealthCheckResponse
        status = state.SERVING if serving else state.NOT_SERVING
        for service in ("", *self._services):
            await self._health.set(service, status)

    async def stop(self, *, grace_s: float) -> None:
        await self._health.enter_graceful_shutdown()
        await self.server.stop(grace_s)


class _ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler so that what it raises becomes a status of the table."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith("/grpc."):
            return handler
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(
                _guard_stream(handler.unary_stream),
                handler.request_deserializer,
                handler.response_serializer,
            )
        if handler.stream_stream:
            return grpc.stream_stream_rpc_method_handler(
                _guard_stream(handler.stream_stream),
                handler.request_deserializer,
                handler.response_serializer,
            )
        make = (
            grpc.stream_unary_rpc_method_handler
            if handler.request_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        return make(
            _guard_unary(handler.stream_unary or handler.unary_unary),
            handler.request_deserializer,
            handler.response_serializer,
        )


async def next_message(messages: AsyncIterator[T], *, timeout_s: float | None = None) -> T:
    """The next message of a stream that must have one. Raises ServingError (INVALID_ARGUMENT)."""
    try:
        async with asyncio.timeout(timeout_s):
            return await anext(messages)
    except (StopAsyncIteration, TimeoutError):
        raise ServingError(
            Reason.INVALID_ARGUMENT, "the stream ended, or was silent, where a message was due"
        ) from None


def _guard_stream(behaviour: Any) -> Any:
    async def guarded(request: Any, context: Context) -> AsyncIterator[Any]:
        try:
            # Closed here and now, whatever ends the call: its clean-up must not wait for the
            # garbage collector.
            async with aclosing(behaviour(request, context)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:
            await _abort(context, error)

    return guarded


def _guard_unary(behaviour: Any) -> Any:
    async def guarded(request: Any, context: Context) -> Any:
        try:
            return await behaviour(request, context)
        except Exception as error:
            await _abort(context, error)

    return guarded


async def _abort(context: Context, error: Exception) -> None:
    if isinstance(error, grpc.aio.BaseError):
        # gRPC's own: the call was aborted, or the server stops.
        raise error
    if not isinstance(error, ServingError):
        log.error("unexpected error in a handler", exc_info=error)
        error = ServingError(Reason.INTERNAL, f"unexpected {type(error).__name__}")
    await context.abort_with_status(rpc_status.to_status(error.to_status()))
