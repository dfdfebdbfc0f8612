import asyncio

import pytest

from bench.interfere import LONG, STEADY, InterfereLoad, Observed, chunk_gaps_ms, put_on, summarise
from bench.records import RequestRecord


def record(
    label: str, *chunks: tuple[float, int], sent_s: float = 0.0, outcome: str = "ok"
) -> RequestRecord:
    return RequestRecord(
        index=0,
        offered_s=sent_s,
        sent_s=sent_s,
        num_input=64,
        num_output=8,
        label=label,
        chunks=chunks,
        outcome=outcome,
    )


def test_gaps_are_between_chunks_that_came_while_all_streams_ran() -> None:
    steady = record(STEADY, (1.0, 1), (1.02, 2), (1.1, 1), (2.5, 1))
    assert chunk_gaps_ms(steady, until=2.0) == pytest.approx([20.0, 80.0])


def test_figures_of_two_streams_and_a_long_prompt() -> None:
    observed = Observed(
        records=[
            # Gaps of 10, 60 and 120 ms.
            record(STEADY, (0.1, 1), (0.11, 1), (0.17, 2), (0.29, 1), sent_s=0.0),
            # TTFT 300 ms, no gap.
            record(STEADY, (0.8, 1), sent_s=0.5),
            record(LONG, (1.1, 1), (1.9, 1), sent_s=0.6),
            record(LONG, sent_s=0.7, outcome="refused"),
        ],
        duration_s=2.0,
        wall_s=4.0,
    )
    figures = summarise(observed)
    assert figures == pytest.approx(
        {
            "itl_p50_ms": 60.0,
            "itl_p99_ms": 118.8,  # between 60 and 120, 98 % of the way
            "itl_p999_ms": 119.88,
            "itl_max_ms": 120.0,
            "gaps_over_50ms": 2,
            "gaps_over_100ms": 1,
            "short_ttft_p50_ms": 200.0,
            "long_ttft_p50_ms": 500.0,
            "steady_tok_s": 1.5,  # 6 tokens in 4 s
            "tokens_per_chunk": 1.2,  # in 5 chunks
            "num_failed": 1,
        }
    )


def test_a_run_without_answers_has_no_latencies() -> None:
    figures = summarise(Observed(records=[], duration_s=1.0, wall_s=1.0))
    assert figures["itl_p50_ms"] is None
    assert figures["short_ttft_p50_ms"] is None
    assert figures["steady_tok_s"] == 0.0


async def test_streams_go_on_while_long_prompts_arrive() -> None:
    asked: list[str] = []

    async def ask(label: str, num_input: int, num_output: int) -> RequestRecord:
        asked.append(label)
        await asyncio.sleep(0.01)
        return record(label)

    load = InterfereLoad(num_streams=2, every_s=0.04, duration_s=0.2)
    observed = await put_on(ask, load)
    assert len(observed.records) == len(asked)
    # At 0.04, 0.08, 0.12 and 0.16 s, whatever the machine is busy with.
    assert asked.count(LONG) == 4
    assert asked.count(STEADY) > 2


async def test_the_control_has_no_long_prompts() -> None:
    async def ask(label: str, num_input: int, num_output: int) -> RequestRecord:
        await asyncio.sleep(0.01)
        return record(label)

    load = InterfereLoad(num_streams=1, num_long_input=0, every_s=0.01, duration_s=0.05)
    assert {one.label for one in (await put_on(ask, load)).records} == {STEADY}
