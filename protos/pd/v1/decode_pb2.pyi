from protos.pd.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DecodeRequest(_message.Message):
    __slots__ = ("start", "remote", "local")
    START_FIELD_NUMBER: _ClassVar[int]
    REMOTE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    start: _types_pb2.Sequence
    remote: Remote
    local: Local
    def __init__(self, start: _Optional[_Union[_types_pb2.Sequence, _Mapping]] = ..., remote: _Optional[_Union[Remote, _Mapping]] = ..., local: _Optional[_Union[Local, _Mapping]] = ...) -> None: ...

class Remote(_message.Message):
    __slots__ = ("prefill",)
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    prefill: _types_pb2.NodeRef
    def __init__(self, prefill: _Optional[_Union[_types_pb2.NodeRef, _Mapping]] = ...) -> None: ...

class Local(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class DecodeResponse(_message.Message):
    __slots__ = ("reserved", "sealed", "tokens", "prompt_logprobs")
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    reserved: Reserved
    sealed: Sealed
    tokens: _types_pb2.TokenRun
    prompt_logprobs: _types_pb2.PromptLogprobs
    def __init__(self, reserved: _Optional[_Union[Reserved, _Mapping]] = ..., sealed: _Optional[_Union[Sealed, _Mapping]] = ..., tokens: _Optional[_Union[_types_pb2.TokenRun, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_types_pb2.PromptLogprobs, _Mapping]] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("target", "available_blocks", "status_seq")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STATUS_SEQ_FIELD_NUMBER: _ClassVar[int]
    target: _types_pb2.Target
    available_blocks: int
    status_seq: int
    def __init__(self, target: _Optional[_Union[_types_pb2.Target, _Mapping]] = ..., available_blocks: _Optional[int] = ..., status_seq: _Optional[int] = ...) -> None: ...

class Sealed(_message.Message):
    __slots__ = ("runs",)
    RUNS_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenRun]
    def __init__(self, runs: _Optional[_Iterable[_Union[_types_pb2.TokenRun, _Mapping]]] = ...) -> None: ...
