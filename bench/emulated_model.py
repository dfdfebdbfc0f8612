"""Emulated models whose steps last as long as one wants, to try clusters that are not here."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from engine.catalog import resolve_model


def emulated_model(folder: Path, cost_profile: Mapping[str, float]) -> Path:
    """The emulated model with another cost profile (milliseconds), in folder, which is new."""
    shutil.copytree(resolve_model("emulated", allow_download=False).folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"cost_profile": dict(cost_profile)}))
    return folder
