"""Where this user's disagg keeps what can be made again: models, compiled kernels. No torch."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """$DISAGG_CACHE, else $XDG_CACHE_HOME/disagg, else ~/.cache/disagg."""
    if own := os.environ.get("DISAGG_CACHE"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "disagg"
