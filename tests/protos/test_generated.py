"""The committed generated code is what the committed .proto files give."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_generated_code_is_up_to_date(tmp_path: Path) -> None:
    sources = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("protos/pd/v1/*.proto"))
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", ".", *outputs, *sources]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    fresh = {p.name: p.read_text() for p in (tmp_path / "protos/pd/v1").iterdir()}
    committed = {p.name: p.read_text() for p in (ROOT / "protos/pd/v1").glob("*_pb2*")}
    assert fresh == committed
