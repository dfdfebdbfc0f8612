"""What must never be near a socket, looked for in the syntax of everything that runs."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = (
    *("bench", "coordinator", "decode_server", "engine", "kernels"),
    *("kvtransfer", "prefill_server", "protos"),
)
FORBIDDEN_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
# Loads pickles; listens on all interfaces whatever address it is given.
FORBIDDEN_NAMES = {"TCPStore"}
FORBIDDEN_ATTRIBUTES = {("torch", "load"), ("torch", "save"), ("np", "load")}


def offences(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                for name in names:
                    if name.name.partition(".")[0] in FORBIDDEN_MODULES:
                        yield f"import {name.name}"
            case ast.ImportFrom(module=str(module)):
                if module.partition(".")[0] in FORBIDDEN_MODULES:
                    yield f"from {module}"
            case ast.Call(func=ast.Name(id=name)) if name in FORBIDDEN_CALLS:
                yield f"{name}()"
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in FORBIDDEN_NAMES:
                yield name
            case ast.Attribute(value=ast.Name(id=owner), attr=name):
                if (owner, name) in FORBIDDEN_ATTRIBUTES:
                    yield f"{owner}.{name}"
            case ast.keyword(arg="trust_remote_code", value=ast.Constant(value=True)):
                yield "trust_remote_code=True"


def sources() -> list[Path]:
    return sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_runs_or_unpickles_what_came_from_outside(path):
    assert list(offences(path.read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "eval(text)",
        "torch.load(file)",
        "dist.TCPStore(host)",
        "from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_the_search_finds_what_it_looks_for(source):
    assert len(list(offences(source))) == 1
