"""Steady streams and long prompts, put on contenders in turns: what disagg bench interfere runs.

contenders --run_rounds--> InterfereRun per contender and round --> runs.jsonl, requests
"""

import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from bench.contender import Contender
from bench.interfere import Ask, InterfereLoad, put_on, summarise
from bench.measured import keep_requests
from bench.prompts import Prompts
from bench.records import RequestRecord
from bench.rounds import Measured, Tell, run_rounds
from bench.run import warm_up
from bench.run_log import LoggedRun
from bench.self_check import Watch
from bench.targets import Chunks, Target
from bench.workload import Arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfereRun:
    """Measures a contender under the load."""

    load: InterfereLoad
    folder: Path

    async def __call__(self, contender: Contender, label: str, seed: int) -> Measured:
        target = contender.open_target()
        try:
            await warm_up(target, seed=seed)
            prompts = Prompts(seed=seed, vocab=await target.vocab())
            async with Watch() as watch:
                observed = await put_on(asker(target, prompts), self.load)
        finally:
            await target.close()
        return Measured(
            figures=summarise(observed),
            records=keep_requests(observed.records, self.folder, label),
            problems=watch.check(observed.records).reasons,
        )


async def interfere(
    contenders: Sequence[Contender],
    load: InterfereLoad,
    *,
    num_rounds: int,
    seed: int,
    folder: Path,
    tell: Tell = lambda run: None,
) -> list[LoggedRun]:
    """Starts all contenders and measures them in turns. Raises ChildFailed."""
    async with AsyncExitStack() as stack:
        for contender in contenders:
            await stack.enter_async_context(contender)
        return await run_rounds(
            contenders,
            phase="ab",
            num_rounds=num_rounds,
            seed=seed,
            folder=folder,
            measure=InterfereRun(load=load, folder=folder),
            tell=tell,
        )


def asker(target: Target, prompts: Prompts) -> Ask:
    """Sends prompts of made-up tokens, other ones each time; times count from now."""
    indices, start_s = count(), time.monotonic()

    async def ask(label: str, num_input: int, num_output: int) -> RequestRecord:
        index = next(indices)
        prompt = prompts.of(index, Arrival(at_s=0.0, num_input=num_input, num_output=num_output))
        chunks: Chunks = []
        sent_s = time.monotonic() - start_s
        ending = await target.ask(prompt, num_output, chunks)
        return RequestRecord(
            index=index,
            offered_s=sent_s,
            sent_s=sent_s,
            num_input=num_input,
            num_output=num_output,
            label=label,
            chunks=tuple((at_s - start_s, num_tokens) for at_s, num_tokens in chunks),
            ended_s=time.monotonic() - start_s,
            outcome=ending.outcome,
            error=ending.error,
            queue_s=ending.queue_s,
            transfer_s=ending.transfer_s,
            handoff_gap_s=ending.handoff_gap_s,
            served_as=ending.served_as,
            prefill_node=ending.prefill_node,
            decode_node=ending.decode_node,
            num_cached=ending.num_cached,
        )

    return ask
