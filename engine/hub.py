"""Brings a Hugging Face hub repository's data files into a folder: no code, no pickled weights.

Where there is no hub (no network, HF_HUB_OFFLINE, no answer) that is known within seconds. Files
come at the one revision that the hub named first, so a push in between cannot mix two models.
"""

import os
import queue
import re
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from engine.model_cache import FetchFailed, ModelSource, Progress

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

_ANSWER_S = 5.0

# Top-level files only; model*.safetensors leaves out the second copies that some repositories hold.
_WANTED = re.compile(
    r"config\.json|generation_config\.json|chat_template[^/]*|special_tokens_map\.json"
    r"|tokenizer[^/]*|model[^/]*\.safetensors|model\.safetensors\.index\.json"
)


def fetch_from_hub(repo_id: str, *, folder: Path, progress: Progress) -> ModelSource:
    """Downloads a repository into an empty folder. Raises FetchFailed, soon if there is no hub."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise FetchFailed(repo_id, "the hub is switched off (HF_HUB_OFFLINE)")
    progress(f"asking the hub for {repo_id}", 0, 0)
    info = _ask(repo_id)
    files = info.siblings or []
    sizes = {file.rfilename: file.size or 0 for file in files if _WANTED.fullmatch(file.rfilename)}
    for needed in ("config.json", "tokenizer.json", ".safetensors"):
        if not any(name.endswith(needed) for name in sizes):
            raise FetchFailed(repo_id, f"has no {needed} file")
    _download(repo_id, revision=info.sha, sizes=sizes, folder=folder, progress=progress)
    return ModelSource(
        kind="hub", origin=repo_id, digest=info.sha or "", weights="as published on the hub"
    )


def _ask(repo_id: str) -> "ModelInfo":
    from huggingface_hub import HfApi

    answers: queue.SimpleQueue[ModelInfo | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(HfApi().model_info(repo_id, timeout=_ANSWER_S, files_metadata=True))
        # Any: errors of its HTTP library come through, and which one that is has changed.
        except Exception as error:
            answers.put(error)

    # In a thread, because a name look-up knows no timeout; a daemon, so that it delays no exit.
    threading.Thread(target=ask, name="ask-hub", daemon=True).start()
    try:
        answer = answers.get(timeout=_ANSWER_S)
    except queue.Empty:
        raise FetchFailed(repo_id, f"the hub did not answer within {_ANSWER_S:g} s") from None
    if isinstance(answer, Exception):
        raise FetchFailed(repo_id, f"the hub: {_first_line(answer)}") from None
    return answer


def _download(
    repo_id: str, *, revision: str | None, sizes: dict[str, int], folder: Path, progress: Progress
) -> None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    # Its bars would be drawn across ours.
    disable_progress_bars()
    total_bytes, done_bytes = sum(sizes.values()), 0
    for name, size_bytes in sizes.items():
        progress(f"downloading {name} from the hub", done_bytes, total_bytes)
        try:
            hf_hub_download(repo_id, name, revision=revision, local_dir=folder)
        except Exception as error:  # as in _ask
            raise FetchFailed(repo_id, f"{name}: {_first_line(error)}") from error
        done_bytes += size_bytes
    progress("downloaded from the hub", done_bytes, total_bytes)
    # Notes on the download, of no use to those who read the folder.
    shutil.rmtree(folder / ".cache", ignore_errors=True)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
