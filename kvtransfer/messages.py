"""What a lane's two ends say to each other. Values; kvtransfer/wire.py knows their protos.

A transfer moves one prompt's blocks, in chunks of whole blocks; seq counts chunks on the lane.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeKey:
    """One life of a node: a restart has another incarnation."""

    node_id: str
    incarnation: int

    def __str__(self) -> str:
        return f"{self.node_id}#{self.incarnation:x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """The first token of one choice. finish_reason is "" while the choice goes on.

    logprobs is a serialized PositionLogprobs that is passed on unread, or empty.
    """

    choice: int
    position: int
    token_id: int
    finish_reason: str = ""
    logprobs: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Sender: blocks [first_block, first_block + num_blocks) of the transfer are computed."""

    seq: int
    transfer_id: bytes
    first_block: int
    num_blocks: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Receiver: a staging slot is posted for this chunk, which is now always completed."""

    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Sender: all bytes of the chunk are on the data plane; digest is their XXH3-64, 0 on a
    plane whose bytes are not checked."""

    seq: int
    digest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Nack:
    """Receiver: the chunk's bytes are not those of SENT's digest. Its slot is free again; the same
    blocks are due once more, under a new seq."""

    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """Receiver: the chunk was checked and is in its blocks, or was dropped with its transfer."""

    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Sender: all chunks were sent; this is what decoding starts from."""

    transfer_id: bytes
    num_blocks: int
    first_tokens: tuple[FirstToken, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """Receiver: every block is sealed."""

    transfer_id: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Either side: the transfer is over. Answered with an Abort by a side that did not know."""

    transfer_id: bytes
    reason: str


SenderMessage = Ready | Sent | Commit | Abort
ReceiverMessage = Grant | Ack | Nack | Committed | Abort
