"""One prompt's KV on its way to a decode node: blocks are offered as soon as they are full, those
that this node had cached at once, those that the decode node has cached not at all."""

import time

from kvtransfer.blocks import Lease
from kvtransfer.ending import Ending
from kvtransfer.lane_metrics import LaneMetrics
from kvtransfer.messages import FirstToken
from kvtransfer.outgoing_lane import OutgoingLane
from protos.errors import Reason, ServingError


class Shipment:
    """Ships the blocks of num_tokens tokens of lease, but for the first ones, whose tokens the
    receiver has cached. close() ends what is not handed over."""

    def __init__(
        self,
        lane: OutgoingLane,
        *,
        transfer_id: bytes,
        lease: Lease,
        num_tokens: int,
        num_cached_tokens: int,
        block_size: int,
        metrics: LaneMetrics,
    ) -> None:
        self._lane = lane
        self._metrics = metrics
        self._num_tokens = num_tokens
        self._block_size = block_size
        self._end = -(-num_tokens // block_size)
        # Of differently cut blocks the first one may hold some tokens that are there already.
        self._first_block = num_cached_tokens // block_size
        self._num_offered = self._first_block
        self._offered_at = 0.0
        self._ending = Ending()
        self._transfer = lane.begin(
            transfer_id, lease=lease, num_tokens=num_tokens, on_end=self._ending.set
        )

    @property
    def num_blocks(self) -> int:
        """That are shipped in all."""
        return self._end - self._first_block

    def computed(self, num_tokens: int) -> None:
        """KV of the first num_tokens is in the blocks. Raises ServingError if nobody wants it."""
        if self._ending.is_set:
            raise self._aborted(self._ending.reason)
        is_all = num_tokens >= self._num_tokens
        num_full = self._end if is_all else num_tokens // self._block_size
        if num_full > self._num_offered:
            self._lane.offer(
                self._transfer,
                first_block=self._num_offered,
                num_blocks=num_full - self._num_offered,
            )
            self._num_offered = num_full
            self._offered_at = time.monotonic()

    async def hand_over(self, first_token: FirstToken) -> None:
        """Commits; returns when the decode node has sealed every block. Raises ServingError."""
        self._lane.commit(self._transfer, num_blocks=self.num_blocks, first_tokens=(first_token,))
        reason = await self._ending.wait()
        if reason is not None:
            raise self._aborted(reason)
        self._metrics.exposed(time.monotonic() - self._offered_at)

    def close(self, reason: str) -> None:
        """Aborts the transfer unless it has ended."""
        self._lane.abort(self._transfer, reason)

    def _aborted(self, reason: str | None) -> ServingError:
        return ServingError(
            Reason.TRANSFER_ABORTED,
            f"transfer to {self._lane.peer} ended: {reason}",
            node=self._lane.peer,
        )
