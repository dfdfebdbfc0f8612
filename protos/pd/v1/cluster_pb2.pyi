from google.protobuf import duration_pb2 as _duration_pb2
from protos.pd.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NodeRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NODE_ROLE_UNSPECIFIED: _ClassVar[NodeRole]
    NODE_ROLE_PREFILL: _ClassVar[NodeRole]
    NODE_ROLE_DECODE: _ClassVar[NodeRole]

class NodeState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NODE_STATE_UNSPECIFIED: _ClassVar[NodeState]
    NODE_STATE_STARTING: _ClassVar[NodeState]
    NODE_STATE_SERVING: _ClassVar[NodeState]
    NODE_STATE_DRAINING: _ClassVar[NodeState]
NODE_ROLE_UNSPECIFIED: NodeRole
NODE_ROLE_PREFILL: NodeRole
NODE_ROLE_DECODE: NodeRole
NODE_STATE_UNSPECIFIED: NodeState
NODE_STATE_STARTING: NodeState
NODE_STATE_SERVING: NodeState
NODE_STATE_DRAINING: NodeState

class RegisterRequest(_message.Message):
    __slots__ = ("registration", "status", "cache")
    REGISTRATION_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    registration: Registration
    status: NodeStatus
    cache: CacheEvents
    def __init__(self, registration: _Optional[_Union[Registration, _Mapping]] = ..., status: _Optional[_Union[NodeStatus, _Mapping]] = ..., cache: _Optional[_Union[CacheEvents, _Mapping]] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("membership", "drain", "resync_cache", "clear_cache")
    MEMBERSHIP_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    RESYNC_CACHE_FIELD_NUMBER: _ClassVar[int]
    CLEAR_CACHE_FIELD_NUMBER: _ClassVar[int]
    membership: Membership
    drain: Drain
    resync_cache: ResyncCache
    clear_cache: ClearCache
    def __init__(self, membership: _Optional[_Union[Membership, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., resync_cache: _Optional[_Union[ResyncCache, _Mapping]] = ..., clear_cache: _Optional[_Union[ClearCache, _Mapping]] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResyncCache(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClearCache(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CacheEvents(_message.Message):
    __slots__ = ("seq", "is_snapshot", "added", "evicted")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    IS_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    seq: int
    is_snapshot: bool
    added: _containers.RepeatedScalarFieldContainer[int]
    evicted: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, seq: _Optional[int] = ..., is_snapshot: bool = ..., added: _Optional[_Iterable[int]] = ..., evicted: _Optional[_Iterable[int]] = ...) -> None: ...

class DrainNodeRequest(_message.Message):
    __slots__ = ("node_id",)
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    def __init__(self, node_id: _Optional[str] = ...) -> None: ...

class DrainNodeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClearCacheRequest(_message.Message):
    __slots__ = ("node_id",)
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    def __init__(self, node_id: _Optional[str] = ...) -> None: ...

class ClearCacheResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Registration(_message.Message):
    __slots__ = ("protocol_version", "node", "role", "address", "layout", "num_blocks", "max_model_len", "max_running", "step_budget_ms")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    STEP_BUDGET_MS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    node: _types_pb2.NodeRef
    role: NodeRole
    address: str
    layout: _types_pb2.KvLayout
    num_blocks: int
    max_model_len: int
    max_running: int
    step_budget_ms: float
    def __init__(self, protocol_version: _Optional[int] = ..., node: _Optional[_Union[_types_pb2.NodeRef, _Mapping]] = ..., role: _Optional[_Union[NodeRole, str]] = ..., address: _Optional[str] = ..., layout: _Optional[_Union[_types_pb2.KvLayout, _Mapping]] = ..., num_blocks: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_running: _Optional[int] = ..., step_budget_ms: _Optional[float] = ...) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("seq", "state", "available_blocks", "num_running", "num_queued", "queued_tokens", "step", "step_age", "loaded_percent", "step_predicted", "cost_profile", "decode_context", "num_decoding")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEP_AGE_FIELD_NUMBER: _ClassVar[int]
    LOADED_PERCENT_FIELD_NUMBER: _ClassVar[int]
    STEP_PREDICTED_FIELD_NUMBER: _ClassVar[int]
    COST_PROFILE_FIELD_NUMBER: _ClassVar[int]
    DECODE_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODING_FIELD_NUMBER: _ClassVar[int]
    seq: int
    state: NodeState
    available_blocks: int
    num_running: int
    num_queued: int
    queued_tokens: int
    step: int
    step_age: _duration_pb2.Duration
    loaded_percent: int
    step_predicted: _duration_pb2.Duration
    cost_profile: CostProfile
    decode_context: int
    num_decoding: int
    def __init__(self, seq: _Optional[int] = ..., state: _Optional[_Union[NodeState, str]] = ..., available_blocks: _Optional[int] = ..., num_running: _Optional[int] = ..., num_queued: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., step: _Optional[int] = ..., step_age: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., loaded_percent: _Optional[int] = ..., step_predicted: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., cost_profile: _Optional[_Union[CostProfile, _Mapping]] = ..., decode_context: _Optional[int] = ..., num_decoding: _Optional[int] = ...) -> None: ...

class CostProfile(_message.Message):
    __slots__ = ("base_ms", "decode_row_ms", "prefill_token_ms", "decode_context_ms", "prefill_context_ms")
    BASE_MS_FIELD_NUMBER: _ClassVar[int]
    DECODE_ROW_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    DECODE_CONTEXT_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CONTEXT_MS_FIELD_NUMBER: _ClassVar[int]
    base_ms: float
    decode_row_ms: float
    prefill_token_ms: float
    decode_context_ms: float
    prefill_context_ms: float
    def __init__(self, base_ms: _Optional[float] = ..., decode_row_ms: _Optional[float] = ..., prefill_token_ms: _Optional[float] = ..., decode_context_ms: _Optional[float] = ..., prefill_context_ms: _Optional[float] = ...) -> None: ...

class Membership(_message.Message):
    __slots__ = ("version", "members")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    version: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    def __init__(self, version: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("node", "role", "address", "layout")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    node: _types_pb2.NodeRef
    role: NodeRole
    address: str
    layout: _types_pb2.KvLayout
    def __init__(self, node: _Optional[_Union[_types_pb2.NodeRef, _Mapping]] = ..., role: _Optional[_Union[NodeRole, str]] = ..., address: _Optional[str] = ..., layout: _Optional[_Union[_types_pb2.KvLayout, _Mapping]] = ...) -> None: ...

class ListNodesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListNodesResponse(_message.Message):
    __slots__ = ("nodes",)
    NODES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[NodeInfo]
    def __init__(self, nodes: _Optional[_Iterable[_Union[NodeInfo, _Mapping]]] = ...) -> None: ...

class NodeInfo(_message.Message):
    __slots__ = ("registration", "status")
    REGISTRATION_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    registration: Registration
    status: NodeStatus
    def __init__(self, registration: _Optional[_Union[Registration, _Mapping]] = ..., status: _Optional[_Union[NodeStatus, _Mapping]] = ...) -> None: ...
