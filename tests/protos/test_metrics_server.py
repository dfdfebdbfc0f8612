"""The port that metrics are read at: there while the block runs, and nowhere else."""

import urllib.error

import pytest
from prometheus_client import CollectorRegistry, Counter

from protos.metrics_server import serve_metrics
from tests.scrape import scrape


async def test_a_registry_is_served_until_the_block_ends():
    registry = CollectorRegistry()
    counter = Counter("seen", "Test.", registry=registry)
    async with serve_metrics("127.0.0.1:0", registry) as address:
        assert await scrape(address) == {("seen_total",): 0}
        counter.inc(2)
        assert await scrape(address) == {("seen_total",): 2}
    with pytest.raises(urllib.error.URLError):
        await scrape(address)


async def test_nothing_is_served_unasked():
    async with serve_metrics(None, CollectorRegistry()) as address:
        assert address is None


async def test_a_port_in_use_is_an_error_that_names_it():
    registry = CollectorRegistry()
    async with serve_metrics("127.0.0.1:0", registry) as address:
        with pytest.raises(OSError, match=f"cannot serve metrics on {address}: Address already"):
            async with serve_metrics(address, registry):
                pass
