"""Triton kernels run in Triton's interpreter here; it must be told before they are imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"
