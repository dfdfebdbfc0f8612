from google.protobuf import duration_pb2 as _duration_pb2
from protos.pd.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillRequest(_message.Message):
    __slots__ = ("sequence", "target")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    sequence: _types_pb2.Sequence
    target: _types_pb2.Target
    def __init__(self, sequence: _Optional[_Union[_types_pb2.Sequence, _Mapping]] = ..., target: _Optional[_Union[_types_pb2.Target, _Mapping]] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("first_token", "shipped", "prompt_logprobs")
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SHIPPED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    first_token: FirstToken
    shipped: Shipped
    prompt_logprobs: _types_pb2.PromptLogprobs
    def __init__(self, first_token: _Optional[_Union[FirstToken, _Mapping]] = ..., shipped: _Optional[_Union[Shipped, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_types_pb2.PromptLogprobs, _Mapping]] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("runs", "num_cached_tokens", "queue")
    RUNS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenRun]
    num_cached_tokens: int
    queue: _duration_pb2.Duration
    def __init__(self, runs: _Optional[_Iterable[_Union[_types_pb2.TokenRun, _Mapping]]] = ..., num_cached_tokens: _Optional[int] = ..., queue: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Shipped(_message.Message):
    __slots__ = ("num_blocks", "size_bytes")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    size_bytes: int
    def __init__(self, num_blocks: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...
