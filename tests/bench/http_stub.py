"""An HTTP server with a /v1/completions whose answer is chosen by the number of prompt tokens.

1: a token per event, counted in each    2: three tokens in two events, counted at the end only
3: 429    4: 500    5: an error within the stream    6: the connection breaks after one token
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any


class HttpStub:
    """Keeps the bodies of its requests."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1])
            for line in head.splitlines()
            if line.lower().startswith(b"content-length:")
        )
        body = json.loads(await reader.readexactly(length))
        self.bodies.append(body)
        kind = len(body["prompt"])
        status = {3: "429 Too Many Requests", 4: "500 Internal Server Error"}.get(kind, "200 OK")
        # Without a length the answer ends with the connection, and 6 breaks its promise of one.
        promise = "content-length: 100000\r\n" if kind == 6 else ""
        writer.write(f"HTTP/1.1 {status}\r\n{promise}connection: close\r\n\r\n".encode())
        for event in events(kind, body["max_tokens"]):
            writer.write(f"data: {event}\n\n".encode())
        await writer.drain()
        writer.close()


def events(kind: int, max_tokens: int) -> Iterator[str]:
    if kind == 1:
        for number in range(1, max_tokens + 1):
            usage = {"prompt_tokens": 1, "completion_tokens": number}
            # A token may have no text yet.
            yield json.dumps({"choices": [{"text": "" if number == 1 else "a"}], "usage": usage})
        details = {"prompt_tokens_details": {"cached_tokens": 1}}
        usage = {"prompt_tokens": 1, "completion_tokens": max_tokens, **details}
        yield json.dumps({"choices": [], "usage": usage})
        yield "[DONE]"
    elif kind == 2:
        yield json.dumps({"choices": [{"text": "a"}]})
        yield json.dumps({"choices": [{"text": "bc"}]})
        yield json.dumps({"choices": [{"text": "", "finish_reason": "length"}]})
        yield json.dumps({"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3}})
        yield "[DONE]"
    elif kind == 5:
        yield json.dumps({"choices": [{"text": "a"}]})
        yield json.dumps({"error": {"message": "out of memory"}})
    elif kind == 6:
        yield json.dumps({"choices": [{"text": "a"}]})


@asynccontextmanager
async def serve_http_stub() -> AsyncIterator[HttpStub]:
    stub = HttpStub()
    server = await asyncio.start_server(stub.serve, "127.0.0.1", 0)
    stub.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield stub
