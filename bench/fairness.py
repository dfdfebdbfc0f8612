"""python -m bench.fairness: what a tenant that floods the queue does to another one's TTFT.

    solo:    tenant "calm" alone, one request after the other
    flooded: the same, while tenant "flood" keeps many of its requests waiting

One emulated prefill and one decode node; --priority gives the calm tenant's requests a priority.
"""

import argparse
import asyncio
import contextlib
import statistics
import time

from coordinator.client import AsyncClient
from coordinator.events import Delta
from coordinator.supervisor import Cluster


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.fairness")
    add = parser.add_argument
    add("--flood", type=int, default=40, help="requests of the flood at a time")
    add("--prompt", type=int, default=2000, help="tokens of every prompt")
    add("--requests", type=int, default=20, help="of the calm tenant, per phase")
    add("--priority", type=int, default=0)
    asyncio.run(measure(parser.parse_args()))


async def measure(args: argparse.Namespace) -> None:
    async with (
        Cluster(model="emulated", num_prefill=1, num_decode=1) as cluster,
        AsyncClient(cluster.address) as client,
    ):

        async def first_token_s(tenant: str, priority: int = 0) -> float:
            started = time.monotonic()
            first_s = 0.0
            prompt = [7] * args.prompt
            async for event in client.generate(
                prompt, max_tokens=2, tenant=tenant, priority=priority
            ):
                if isinstance(event, Delta) and not first_s:
                    first_s = time.monotonic() - started
            return first_s

        async def flood() -> None:
            while True:
                await first_token_s("flood")

        async def phase() -> float:
            times = []
            for _ in range(args.requests):
                times.append(await first_token_s("calm", args.priority))
                await asyncio.sleep(0.05)
            return 1e3 * statistics.median(times)

        await first_token_s("calm")
        solo_ms = await phase()
        floods = [asyncio.create_task(flood()) for _ in range(args.flood)]
        await asyncio.sleep(1.0)
        flooded_ms = await phase()
        for task in floods:
            task.cancel()
        for task in floods:
            with contextlib.suppress(asyncio.CancelledError):
                await task
    print(f"TTFT p50 of the calm tenant: solo {solo_ms:.0f} ms, flooded {flooded_ms:.0f} ms: "
          f"{flooded_ms / solo_ms:.2f}x")  # fmt: skip


if __name__ == "__main__":
    main()
