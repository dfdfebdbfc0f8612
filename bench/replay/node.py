"""A node of the replay: a real block pool, and one prompt after the other in predicted time.

    take --> lease: what of the prompt is cached      compute --> chunks --> published, done
    give_back --> the lease's blocks stay as cache

A decode node also has streams, which share its time with prompts. What it tells the registry is
what a real node's status and cache events do, without their delay.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from bench.plan.clock import Clock
from bench.replay.trace import BLOCK_SIZE, TracedRequest
from coordinator.registry import NodeEntry
from engine.cache_feed import CacheFeed
from engine.cost_model import StepShape, chunk_shape
from kvtransfer.blocks import BlockPool, Lease
from kvtransfer.prefix import reusable_blocks

CHUNK_TOKENS = 4 * BLOCK_SIZE
# Least share of a decode node's time that prompts get.
_MIN_SHARE = 0.1


@dataclass(slots=True, kw_only=True)
class _Prompt:
    request: TracedRequest
    lease: Lease
    num_left: int
    on_done: Callable[[], None]


class SimulatedNode:
    """Feeds entry; on_change is called when what it tells has changed. uncached_tokens are those
    that it was given to compute."""

    def __init__(self, entry: NodeEntry, clock: Clock, *, on_change: Callable[[], None]) -> None:
        self.entry = entry
        self.uncached_tokens = 0
        self._clock = clock
        self._on_change = on_change
        self._pool = BlockPool(entry.num_blocks)
        self._feed = CacheFeed(self._pool)
        self._queue: deque[_Prompt] = deque()
        self.tell()

    def take(self, request: TracedRequest) -> Lease:
        """Blocks for the prompt and the next token. Raises BlocksExhausted."""
        num_tokens = request.num_prompt_tokens
        num_reusable = reusable_blocks(num_tokens, block_size=BLOCK_SIZE)
        lease = self._pool.reserve(
            self.entry.layout.blocks_for(num_tokens + 1), prefix=request.chain[:num_reusable]
        )
        self.entry.num_running += 1
        self.tell()
        return lease

    def give_back(self, lease: Lease) -> None:
        self._pool.release(lease)
        self.entry.num_running -= 1
        self.tell()

    def compute(self, request: TracedRequest, lease: Lease, *, on_done: Callable[[], None]) -> None:
        """The prompt past what the lease has, after those that are here."""
        num_left = request.num_prompt_tokens - lease.num_cached * BLOCK_SIZE
        self.uncached_tokens += num_left
        self.entry.unseen_tokens = 0
        self.entry.queued_tokens += num_left
        self._queue.append(
            _Prompt(request=request, lease=lease, num_left=num_left, on_done=on_done)
        )
        if len(self._queue) == 1:
            self._go_on()

    def keep(self, request: TracedRequest, lease: Lease, *, start: int, end: int) -> None:
        """The KV of these tokens is in the lease's blocks now; full ones are cached."""
        first, last = start // BLOCK_SIZE, end // BLOCK_SIZE
        fresh, parent = lease.block_ids[first:last], request.chain[first - 1] if first else None
        self._pool.begin_write(lease, fresh, writer="replay")
        self._pool.end_write(fresh, writer="replay")
        self._pool.publish(fresh, request.chain[first:last], parent=parent)
        self.tell()

    def stream(self, num_tokens: int, *, sign: int) -> None:
        """A stream of a prompt of so many tokens begins (1) or has ended (-1)."""
        self.entry.num_decoding += sign
        self.entry.decode_context += sign * num_tokens

    def step_ms(self) -> float:
        """Of its streams; 0 without any."""
        entry = self.entry
        if not entry.num_decoding:
            return 0.0
        return entry.profile.predict_ms(
            StepShape(num_decode_rows=entry.num_decoding, decode_context=entry.decode_context)
        )

    def tell(self) -> None:
        self.entry.available_blocks = self._pool.counts().available
        for events in self._feed.messages():
            is_whole = self.entry.index.take_in(
                seq=events.seq,
                added=events.added,
                evicted=events.evicted,
                is_snapshot=events.is_snapshot,
            )
            assert is_whole

    def _go_on(self) -> None:
        prompt = self._queue[0]
        start = prompt.request.num_prompt_tokens - prompt.num_left
        num_tokens = min(CHUNK_TOKENS, prompt.num_left)
        profile = self.entry.profile
        chunk_ms = profile.predict_ms(chunk_shape(start, num_tokens)) - profile.base_ms
        share = max(_MIN_SHARE, 1.0 - self.step_ms() / self.entry.step_budget_ms)
        self._clock.after(chunk_ms / share / 1e3, lambda: self._chunk_done(prompt, num_tokens))

    def _chunk_done(self, prompt: _Prompt, num_tokens: int) -> None:
        end = prompt.request.num_prompt_tokens - prompt.num_left + num_tokens
        prompt.num_left -= num_tokens
        self.keep(prompt.request, prompt.lease, start=end - num_tokens, end=end)
        self.entry.queued_tokens -= num_tokens
        is_done = not prompt.num_left
        if is_done:
            self._queue.popleft()
        if self._queue:
            self._go_on()
        # Last: it may bring the next one.
        if is_done:
            prompt.on_done()
        self._on_change()
