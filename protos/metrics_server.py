"""How a program's metrics are served: Prometheus text over HTTP, on a port of its own.

    what a program counts --> its CollectorRegistry <-- GET /metrics <-- a scraper

Each program makes one registry and passes it on; prometheus_client's global one stays unused. The
library's own server answers in threads of its own, so whatever is read at a scrape must be readable
from any thread. There is neither TLS nor authentication here.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry, start_http_server


@asynccontextmanager
async def serve_metrics(
    listen: str | None, registry: CollectorRegistry
) -> AsyncIterator[str | None]:
    """Serves registry at HOST:PORT (port 0: any free one) inside the block; None serves nothing.

    Yields the bound HOST:PORT, or None. Raises OSError if it cannot bind.
    """
    if listen is None:
        yield None
        return
    host, _, port = listen.rpartition(":")
    try:
        # In a thread: binding may ask a name server.
        server, thread = await asyncio.to_thread(
            start_http_server, int(port), host.strip("[]"), registry
        )
    except OSError as error:
        raise OSError(f"cannot serve metrics on {listen}: {error.strerror or error}") from error
    try:
        yield f"{host}:{server.server_port}"
    finally:
        # Returns at the server's next look around, up to half a second later.
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        thread.join()
