from protos.pd.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LaneRequest(_message.Message):
    __slots__ = ("hello", "ready", "sent", "commit", "abort", "rendezvous")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    ready: Ready
    sent: Sent
    commit: Commit
    abort: Abort
    rendezvous: Rendezvous
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., sent: _Optional[_Union[Sent, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., rendezvous: _Optional[_Union[Rendezvous, _Mapping]] = ...) -> None: ...

class LaneResponse(_message.Message):
    __slots__ = ("welcome", "grant", "ack", "committed", "abort", "rendezvous", "nack")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_FIELD_NUMBER: _ClassVar[int]
    NACK_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    grant: Grant
    ack: Ack
    committed: Committed
    abort: Abort
    rendezvous: Rendezvous
    nack: Nack
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., committed: _Optional[_Union[Committed, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., rendezvous: _Optional[_Union[Rendezvous, _Mapping]] = ..., nack: _Optional[_Union[Nack, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "sender", "receiver", "layout", "planes")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PLANES_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    sender: _types_pb2.NodeRef
    receiver: _types_pb2.NodeRef
    layout: _types_pb2.KvLayout
    planes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, protocol_version: _Optional[int] = ..., sender: _Optional[_Union[_types_pb2.NodeRef, _Mapping]] = ..., receiver: _Optional[_Union[_types_pb2.NodeRef, _Mapping]] = ..., layout: _Optional[_Union[_types_pb2.KvLayout, _Mapping]] = ..., planes: _Optional[_Iterable[str]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("lane_id", "epoch", "plane", "num_slots", "slot_bytes")
    LANE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PLANE_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    lane_id: bytes
    epoch: int
    plane: str
    num_slots: int
    slot_bytes: int
    def __init__(self, lane_id: _Optional[bytes] = ..., epoch: _Optional[int] = ..., plane: _Optional[str] = ..., num_slots: _Optional[int] = ..., slot_bytes: _Optional[int] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("seq", "transfer_id", "first_block", "num_blocks", "size_bytes", "head_start", "num_heads", "wire_dtype")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEAD_START_FIELD_NUMBER: _ClassVar[int]
    NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
    WIRE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    seq: int
    transfer_id: bytes
    first_block: int
    num_blocks: int
    size_bytes: int
    head_start: int
    num_heads: int
    wire_dtype: str
    def __init__(self, seq: _Optional[int] = ..., transfer_id: _Optional[bytes] = ..., first_block: _Optional[int] = ..., num_blocks: _Optional[int] = ..., size_bytes: _Optional[int] = ..., head_start: _Optional[int] = ..., num_heads: _Optional[int] = ..., wire_dtype: _Optional[str] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("seq",)
    SEQ_FIELD_NUMBER: _ClassVar[int]
    seq: int
    def __init__(self, seq: _Optional[int] = ...) -> None: ...

class Sent(_message.Message):
    __slots__ = ("seq", "digest")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    seq: int
    digest: int
    def __init__(self, seq: _Optional[int] = ..., digest: _Optional[int] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("seq",)
    SEQ_FIELD_NUMBER: _ClassVar[int]
    seq: int
    def __init__(self, seq: _Optional[int] = ...) -> None: ...

class Nack(_message.Message):
    __slots__ = ("seq",)
    SEQ_FIELD_NUMBER: _ClassVar[int]
    seq: int
    def __init__(self, seq: _Optional[int] = ...) -> None: ...

class Rendezvous(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: bytes
    def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("transfer_id", "num_blocks", "runs")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    transfer_id: bytes
    num_blocks: int
    runs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenRun]
    def __init__(self, transfer_id: _Optional[bytes] = ..., num_blocks: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[_types_pb2.TokenRun, _Mapping]]] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ("transfer_id",)
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    transfer_id: bytes
    def __init__(self, transfer_id: _Optional[bytes] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("transfer_id", "reason")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    transfer_id: bytes
    reason: str
    def __init__(self, transfer_id: _Optional[bytes] = ..., reason: _Optional[str] = ...) -> None: ...

class PlaneRequest(_message.Message):
    __slots__ = ("lane_id", "seq", "offset", "data")
    LANE_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    lane_id: bytes
    seq: int
    offset: int
    data: bytes
    def __init__(self, lane_id: _Optional[bytes] = ..., seq: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class PlaneResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
