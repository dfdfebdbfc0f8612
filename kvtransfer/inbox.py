"""The transfers that a decode node expects: reserved blocks, waiting for a prompt's KV.

    servicer: expect(lease) -> transfer id to the prefill node
    lane:     find(id), receives chunks into the lease, seals
    servicer: on_end(None) -> decode starts;  on_end(reason) -> it does not

A transfer id is 128 random bits: knowing it is the right to write. Runs on the event loop.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtransfer.blocks import Lease
from kvtransfer.messages import FirstToken, NodeKey


@dataclass(slots=True, kw_only=True)
class IncomingTransfer:
    """KV of num_tokens tokens is to arrive in lease from sender (unset: not known yet), but for
    the first num_cached_tokens, which are there: whole blocks of ours, that others may share.

    on_end is called once: with None when all blocks are sealed and first_tokens is set, else with
    the reason why that will not happen. The sets are the lane's, and count the sender's blocks,
    whose size may differ from ours.
    """

    transfer_id: bytes
    lease: Lease
    num_tokens: int
    on_end: Callable[[str | None], None]
    num_cached_tokens: int = 0
    sender: NodeKey | None = None
    received: set[int] = field(default_factory=set)
    in_flight: set[int] = field(default_factory=set)
    # Arrived damaged once, whatever became of them; a second time ends the transfer.
    damaged: set[int] = field(default_factory=set)
    first_tokens: tuple[FirstToken, ...] | None = None
    ended: bool = False


class Inbox:
    """Expected transfers by id. A transfer is here from expect() until end()."""

    def __init__(self) -> None:
        self._transfers: dict[bytes, IncomingTransfer] = {}

    def __len__(self) -> int:
        return len(self._transfers)

    def expect(
        self,
        lease: Lease,
        *,
        num_tokens: int,
        on_end: Callable[[str | None], None],
        num_cached_tokens: int = 0,
    ) -> IncomingTransfer:
        """Opens the lease's blocks for num_tokens tokens, but for those that are cached, to whoever
        knows the new transfer's id."""
        assert 0 <= num_cached_tokens < num_tokens
        transfer = IncomingTransfer(
            transfer_id=secrets.token_bytes(16),
            lease=lease,
            num_tokens=num_tokens,
            num_cached_tokens=num_cached_tokens,
            on_end=on_end,
        )
        self._transfers[transfer.transfer_id] = transfer
        return transfer

    def find(self, transfer_id: bytes, *, sender: NodeKey) -> IncomingTransfer | None:
        """The open transfer of this id, if it is sender's; the first to ask binds it."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            return None
        if transfer.sender is None:
            transfer.sender = sender
        return transfer if transfer.sender == sender else None

    def from_sender(self, sender: NodeKey) -> list[IncomingTransfer]:
        return [t for t in self._transfers.values() if t.sender == sender]

    def end(self, transfer: IncomingTransfer, reason: str | None) -> None:
        """Closes the transfer, once: no chunk is taken for it after this."""
        if not transfer.ended:
            transfer.ended = True
            del self._transfers[transfer.transfer_id]
            transfer.on_end(reason)
