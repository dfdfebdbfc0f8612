"""The line on a terminal while a run goes on: requests done, in flight, tokens per second, TTFT.

async with ... drive_open(..., watch=live_line())      nothing where stderr is no terminal
"""

import asyncio
import statistics
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.driver import Live, Watcher

_LOOK_INTERVAL_S = 0.5


def live_line(what: str) -> Watcher | None:
    """None where nobody looks."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return None

    async def show(live: Live) -> None:
        # Without a thread of its own, which would take the interpreter from the load.
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rates]}"),
            TimeElapsedColumn(),
            console=console,
            auto_refresh=False,
            transient=True,
        ) as progress:
            task = progress.add_task(what, total=live.num_planned, rates="")
            num_tokens, looked_s = 0, time.monotonic()
            while True:
                await asyncio.sleep(_LOOK_INTERVAL_S)
                now_s, now_tokens = time.monotonic(), tokens_so_far(live)
                rates = describe(live, tok_s=(now_tokens - num_tokens) / (now_s - looked_s))
                progress.update(task, completed=len(live.records), rates=rates, refresh=True)
                num_tokens, looked_s = now_tokens, now_s

    return show


def tokens_so_far(live: Live) -> int:
    ended = sum(record.num_generated for record in live.records)
    return ended + sum(count for chunks in live.in_flight.values() for _, count in chunks)


def describe(live: Live, *, tok_s: float) -> str:
    """TTFT is of requests that have ended."""
    ttfts_s = [record.ttft_s for record in live.records if record.ttft_s is not None]
    ttft = f", TTFT p50 {1e3 * statistics.median(ttfts_s):.0f} ms" if ttfts_s else ""
    num_missed = sum(record.outcome != "ok" for record in live.records)
    missed = f", {num_missed} not served" if num_missed else ""
    return f"{len(live.in_flight)} in flight, {tok_s:.0f} tok/s{ttft}{missed}"
