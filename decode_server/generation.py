"""The choices of one request on a decode node, over one lease and one run of the engine.

    lease:     [ prompt blocks, then the first choice's | second choice's | third choice's ]
    choice 0:  all of the first part
    choice 1:  the full blocks of the prompt, shared; a copy of the one not full; its own

The first choice goes on from the first token that the prefill node drew, or computes the prompt
here. The others begin when the prompt is there: they compute its last token again, each in its own
copy, and draw their first token from it.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from engine.loop import Engine
from engine.outgoing import prompt_logprobs, token_run
from engine.run import Run
from engine.scheduler import Progress
from engine.sequence import GenerationSpec
from kvtransfer.blocks import Lease
from kvtransfer.messages import FirstToken
from kvtransfer.prefix import PrefixChain
from protos.pd.v1 import decode_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceTables:
    """Which blocks of a lease each choice has. num_tokens[i] are there of choice i at its start."""

    block_size: int
    num_prompt_tokens: int
    num_tokens: Sequence[int]

    @property
    def num_shared(self) -> int:
        """Full blocks of the prompt without its last token."""
        return (self.num_prompt_tokens - 1) // self.block_size

    @property
    def num_blocks(self) -> int:
        return sum(self._num_own(index) for index in range(len(self.num_tokens)))

    def block_ids(self, lease: Lease, index: int) -> list[int]:
        start = sum(self._num_own(before) for before in range(index))
        own = lease.block_ids[start : start + self._num_own(index)]
        return [*(lease.block_ids[: self.num_shared] if index else ()), *own]

    def copied_block(self, lease: Lease) -> int | None:
        """What a later choice has a copy of; None if only full blocks are before its start."""
        if (self.num_prompt_tokens - 1) % self.block_size == 0:
            return None
        return lease.block_ids[self.num_shared]

    def _num_own(self, index: int) -> int:
        needed = -(-(self.num_tokens[index] + 1) // self.block_size)
        return needed - (self.num_shared if index else 0)


class Generation:
    """num_prompt_tokens are computed by the prefill node, or here. chain is of them; None keeps
    no blocks for later requests."""

    def __init__(
        self,
        choices: Sequence[GenerationSpec],
        tables: ChoiceTables,
        lease: Lease,
        *,
        num_prompt_tokens: int,
        chain: PrefixChain | None,
    ) -> None:
        self._choices = choices
        self._tables = tables
        self._lease = lease
        self._num_prompt_tokens = num_prompt_tokens
        self._chains = [chain and chain.fork() for _ in choices]
        self._choice_of: dict[int, int] = {}
        self._unfinished = len(choices)

    async def run_from(
        self, first: FirstToken, engine: Engine
    ) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
        """Every token behind the first one; the prompt's KV is sealed."""
        main = self._choices[0]
        async with engine.run() as run:
            if len(main.token_ids) > self._num_prompt_tokens:
                self._start_first(run, main.token_ids, self._num_prompt_tokens)
            elif first.finish_reason:
                self._unfinished -= 1
            else:
                token_ids = (*main.token_ids, first.token_id)
                self._start_first(run, token_ids, self._num_prompt_tokens)
            self._start_others(run)
            async for response in self._responses(run):
                yield response

    async def run_locally(
        self, engine: Engine, computed: Callable[[int], None]
    ) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
        """The prompt's logprobs, if asked for, and every token, behind the prompt's blocks that
        the lease had cached. computed is told of progress."""
        num_cached = self._lease.num_cached * self._tables.block_size
        computed(num_cached)
        async with engine.run() as run:
            self._start_first(run, self._choices[0].token_ids, num_cached)
            has_begun = False
            async for response in self._responses(run, computed):
                if not has_begun and response.HasField("tokens"):
                    has_begun = True
                    self._start_others(run)
                yield response

    def _start_first(self, run: Run, token_ids: Sequence[int], num_computed: int) -> None:
        main = self._choices[0]
        key = run.start(
            main,
            self._lease,
            block_ids=self._tables.block_ids(self._lease, 0),
            token_ids=token_ids,
            num_computed=num_computed,
            chain=self._chains[0],
        )
        self._choice_of[key] = main.choice

    def _start_others(self, run: Run) -> None:
        for index, spec in enumerate(self._choices[1:], start=1):
            key = run.start(
                spec,
                self._lease,
                block_ids=self._tables.block_ids(self._lease, index),
                num_computed=self._num_prompt_tokens - 1,
                copy_from=self._tables.copied_block(self._lease),
                chain=self._chains[index],
            )
            self._choice_of[key] = spec.choice

    async def _responses(
        self, run: Run, computed: Callable[[int], None] = lambda num_tokens: None
    ) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
        """Everything drawn since the last message in one run of tokens per choice."""
        while self._unfinished:
            drawn: dict[int, list[Progress]] = {}
            for progress in await run.next():
                computed(progress.num_computed)
                if progress.prompt_logprobs is not None:
                    prompt = self._choices[0].token_ids
                    yield decode_pb2.DecodeResponse(
                        prompt_logprobs=prompt_logprobs(progress.prompt_logprobs, prompt)
                    )
                if progress.token_id is not None:
                    drawn.setdefault(progress.key, []).append(progress)
            for key, of_choice in drawn.items():
                self._unfinished -= of_choice[-1].left
                yield decode_pb2.DecodeResponse(
                    tokens=token_run(of_choice, choice=self._choice_of[key])
                )
