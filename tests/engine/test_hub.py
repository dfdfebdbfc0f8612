"""The hub's own client against a hub of one repository on this machine."""

import json
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

_REVISION = "5" * 40
_FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"x",
    "model.safetensors": b"weights",
    "modeling_evil.py": b"raise SystemExit",
    "pytorch_model.bin": b"pickle",
    "onnx/config.json": b"{}",
}
_ROOT = Path(__file__).parents[2]


class _Hub(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self.path.startswith("/api/models/org/model"):
            siblings = [{"rfilename": name, "size": len(data)} for name, data in _FILES.items()]
            info = {"id": "org/model", "sha": _REVISION, "siblings": siblings}
            self._answer(json.dumps(info).encode())
        elif self.path.startswith(f"/org/model/resolve/{_REVISION}/"):
            self._answer(_FILES[self.path.split("?")[0].split("/", 5)[5]])
        else:
            self.send_error(404)

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hash(body)}"')
        self.send_header("X-Repo-Commit", _REVISION)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Hub) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(timeout=10)


def _pull(name: str, *, endpoint: str, cache: Path) -> subprocess.CompletedProcess[str]:
    # A process of its own, because the client reads its settings when it is imported.
    program = f"from engine.catalog import pull; print(pull({name!r}))"
    environment = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(cache / "hf"),
        "DISAGG_CACHE": str(cache),
        "NO_PROXY": "127.0.0.1",
        "PATH": "",
    }
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=_ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_hub_model_arrives_without_code_and_pickles(tmp_path: Path, endpoint: str) -> None:
    result = _pull("org/model", endpoint=endpoint, cache=tmp_path)
    assert result.returncode == 0, result.stderr
    folder = tmp_path / "models" / "org--model"
    assert result.stdout.strip() == str(folder)
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) == [
        "chat_template.jinja",
        "config.json",
        "disagg_source.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    source = json.loads((folder / "disagg_source.json").read_text())
    assert (source["kind"], source["digest"]) == ("hub", _REVISION)


def test_repository_that_the_hub_does_not_know_is_named(tmp_path: Path, endpoint: str) -> None:
    result = _pull("org/other", endpoint=endpoint, cache=tmp_path)
    assert result.returncode != 0
    assert result.stderr.splitlines()[-1].startswith("engine.model_cache.FetchFailed: org/other: ")
