"""Our `kernels` shadows a PyPI package that transformers looks for; it must see none."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

_PROBE = """
import kernels
assert kernels.__version__ == "0.0.0"
from transformers.utils import is_kernels_available
assert not is_kernels_available()
from transformers import LlamaForCausalLM
print(kernels.__file__)
"""


def test_transformers_reports_kernels_as_unavailable_and_imports_llama() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROBE], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == ROOT / "kernels" / "__init__.py"
