"""The table of errors that cross the wire, and the two ways to use it: raise one, read one.

Every failed call ends with a gRPC status whose details carry google.rpc.ErrorInfo: a reason from
this table, the domain, and metadata that names what was wrong (field, limit, node, ...).

    servicer: raise ServingError(Reason.X, "...", field="...")  --serving.py-->  status + ErrorInfo
    caller:   read_error(rpc_error)  -->  ServingError
"""

from enum import Enum

import grpc.aio
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

DOMAIN = "disagg"
# A status travels in HTTP/2 trailers, which are cut off at 8 KiB; a client's own text may be in it.
MAX_MESSAGE_LENGTH = 1000
MAX_METADATA_LENGTH = 200


class Reason(Enum):
    """ErrorInfo.reason, with the status code that it always comes with."""

    INVALID_ARGUMENT = ("INVALID_ARGUMENT", grpc.StatusCode.INVALID_ARGUMENT)
    CONTEXT_TOO_LONG = ("CONTEXT_TOO_LONG", grpc.StatusCode.INVALID_ARGUMENT)
    PROMPT_TOO_LARGE = ("PROMPT_TOO_LARGE", grpc.StatusCode.INVALID_ARGUMENT)
    UNKNOWN_MODEL = ("UNKNOWN_MODEL", grpc.StatusCode.NOT_FOUND)
    QUEUE_FULL = ("QUEUE_FULL", grpc.StatusCode.RESOURCE_EXHAUSTED)
    BLOCKS_EXHAUSTED = ("BLOCKS_EXHAUSTED", grpc.StatusCode.RESOURCE_EXHAUSTED)
    DEADLINE_UNREACHABLE = ("DEADLINE_UNREACHABLE", grpc.StatusCode.RESOURCE_EXHAUSTED)
    REQUEST_EXISTS = ("REQUEST_EXISTS", grpc.StatusCode.ALREADY_EXISTS)
    UNKNOWN_REQUEST = ("UNKNOWN_REQUEST", grpc.StatusCode.NOT_FOUND)
    PREEMPTED = ("PREEMPTED", grpc.StatusCode.ABORTED)
    NO_NODES = ("NO_NODES", grpc.StatusCode.UNAVAILABLE)
    NODE_LOST = ("NODE_LOST", grpc.StatusCode.UNAVAILABLE)
    NOT_READY = ("NOT_READY", grpc.StatusCode.UNAVAILABLE)
    DEADLINE_EXCEEDED = ("DEADLINE_EXCEEDED", grpc.StatusCode.DEADLINE_EXCEEDED)
    UNKNOWN_NODE = ("UNKNOWN_NODE", grpc.StatusCode.FAILED_PRECONDITION)
    LAYOUT_MISMATCH = ("LAYOUT_MISMATCH", grpc.StatusCode.FAILED_PRECONDITION)
    PROTOCOL_MISMATCH = ("PROTOCOL_MISMATCH", grpc.StatusCode.FAILED_PRECONDITION)
    TRANSFER_ABORTED = ("TRANSFER_ABORTED", grpc.StatusCode.ABORTED)
    LANE_LOST = ("LANE_LOST", grpc.StatusCode.UNAVAILABLE)
    STEP_FAILED = ("STEP_FAILED", grpc.StatusCode.INTERNAL)
    INTERNAL = ("INTERNAL", grpc.StatusCode.INTERNAL)

    @property
    def code(self) -> grpc.StatusCode:
        return self.value[1]


class ServingError(Exception):
    """An error of the table. metadata names what was wrong; retry_after_s becomes RetryInfo."""

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        retry_after_s: float | None = None,
        **metadata: object,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message[:MAX_MESSAGE_LENGTH]
        self.retry_after_s = retry_after_s
        self.metadata = {name: str(value)[:MAX_METADATA_LENGTH] for name, value in metadata.items()}

    def to_status(self) -> status_pb2.Status:
        """The google.rpc.Status that crosses the wire."""
        details = [
            error_details_pb2.ErrorInfo(
                reason=self.reason.name, domain=DOMAIN, metadata=self.metadata
            )
        ]
        if self.retry_after_s is not None:
            delay = Duration(nanos=0)
            delay.FromNanoseconds(int(self.retry_after_s * 1e9))
            details.append(error_details_pb2.RetryInfo(retry_delay=delay))
        status = status_pb2.Status(code=self.reason.code.value[0], message=self.message)
        for detail in details:
            packed = Any()
            packed.Pack(detail)
            status.details.append(packed)
        return status


def invalid(field: str, message: str) -> ServingError:
    """INVALID_ARGUMENT that names the offending field."""
    return ServingError(Reason.INVALID_ARGUMENT, f"{field}: {message}", field=field)


def read_error(error: grpc.aio.AioRpcError | grpc.Call) -> ServingError | None:
    """What the other side raised; None if the status does not carry our ErrorInfo."""
    try:
        status = rpc_status.from_call(error)
    except ValueError:
        # The call ended here, at its deadline, while the server's own status was on its way.
        status = None
    if status is None:
        return None
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    reason: Reason | None = None
    retry_after_s: float | None = None
    for detail in status.details:
        if detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
            reason = Reason.__members__.get(info.reason) if info.domain == DOMAIN else None
        elif detail.Is(retry.DESCRIPTOR):
            detail.Unpack(retry)
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    if reason is None:
        return None
    result = ServingError(reason, status.message, retry_after_s=retry_after_s)
    result.metadata = dict(info.metadata)
    return result
