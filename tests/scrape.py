"""A scrape as a test reads it: {("name_total", label, label, ...): value}."""

import asyncio
import urllib.request

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

Samples = dict[tuple[str, ...], float]


async def scrape(address: str) -> Samples:
    """What GET /metrics answers at host:port."""

    def get() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
            return response.read().decode()

    return _samples(await asyncio.to_thread(get))


def samples(registry: CollectorRegistry) -> Samples:
    """What a scrape of registry would give."""
    return _samples(generate_latest(registry).decode())


def _samples(text: str) -> Samples:
    """Labels in the order of their names."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
