"""The safetensors files of a model folder: what is in them, and who they are.

    model.safetensors, or model.safetensors.index.json naming shards --Checkpoint--> tensors, mapped

Headers are checked when the folder is opened, so that a truncated download fails in one line and
before any memory is spent. Tensors are views of the mapped files until somebody copies them.
Nothing is ever unpickled.
"""

import hashlib
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from engine.model_config import read_json

if TYPE_CHECKING:
    import torch

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = ("F32", "BF16", "F16")

# safetensors itself refuses longer headers.
_MAX_HEADER_BYTES = 100_000_000
_PAGE_BYTES = 4096


class Checkpoint:
    """Open safetensors files by tensor name. A file stays mapped while a tensor of it lives."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError, one line, for files that are absent, damaged or inconsistent."""
        self.folder = folder
        self._files: dict[Path, Any] = {path: _open(path) for path in checkpoint_files(folder)}
        self._path_of: dict[str, Path] = {}
        for path, file in self._files.items():
            for name in file.keys():  # noqa: SIM118 - not a dict
                if name in self._path_of:
                    raise ValueError(f"{path}: tensor {name} is in {self._path_of[name].name} too")
                self._path_of[name] = path

    def __contains__(self, name: str) -> bool:
        return name in self._path_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._path_of)

    def num_elements(self) -> int:
        """Elements of all tensors together."""
        return sum(
            math.prod(self._files[path].get_slice(name).get_shape())
            for name, path in self._path_of.items()
        )

    def tensor(self, name: str, shape: tuple[int, ...]) -> "torch.Tensor":
        """The tensor as stored, mapped. Raises ValueError if absent or not of this shape."""
        if name not in self._path_of:
            raise ValueError(f"{self.folder}: tensor {name} is missing")
        path = self._path_of[name]
        info = self._files[path].get_slice(name)
        if tuple(info.get_shape()) != shape:
            raise ValueError(
                f"{path}: tensor {name} has shape {list(info.get_shape())}, not {list(shape)}"
            )
        if info.get_dtype() not in _DTYPES:
            raise ValueError(
                f"{path}: tensor {name} has dtype {info.get_dtype()}, not one of "
                f"{', '.join(_DTYPES)}"
            )
        tensor: torch.Tensor = self._files[path].get_tensor(name)
        return tensor


def checkpoint_files(folder: Path) -> list[Path]:
    """The folder's safetensors files, sorted by name; all of them exist. Raises ValueError."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    index_path = folder / _INDEX
    if not index_path.exists():
        if not (folder / _SINGLE).exists():
            raise ValueError(f"{folder}: holds neither {_SINGLE} nor {_INDEX}")
        return [folder / _SINGLE]
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index_path}: weight_map is absent or empty")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"{index_path}: names {name!r}, which is not a file of this folder")
        if not (folder / name).is_file():
            raise ValueError(f"{index_path}: names {name}, which is absent")
    return [folder / name for name in names]


def model_digest(folder: Path) -> str:
    """SHA-256, hex, of config.json, the safetensors headers and three pages of each tensor.

    Says whose KV a block holds. It reads a few kilobytes per tensor, so it costs the same at any
    model size; two models that differ elsewhere only are not told apart. Raises ValueError.
    """
    config_path = folder / "config.json"
    read_json(config_path)
    digest = hashlib.sha256(config_path.read_bytes())
    for path in checkpoint_files(folder):
        header = _read_header(path)
        digest.update(header)
        data_start = 8 + len(header)
        with path.open("rb") as file:
            for start, end in _tensor_spans(path, header):
                for offset in _page_offsets(start, end):
                    file.seek(data_start + offset)
                    digest.update(file.read(min(_PAGE_BYTES, end - offset)))
    return digest.hexdigest()


def _open(path: Path) -> Any:
    _read_header(path)
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: truncated or damaged ({error})") from None


def _read_header(path: Path) -> bytes:
    """Eight bytes of length, then that many of JSON, of which this returns the JSON."""
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        header = file.read(length) if length <= _MAX_HEADER_BYTES else b""
    if not header or len(header) != length:
        raise ValueError(f"{path}: truncated or damaged (its header is incomplete)")
    return header


def _tensor_spans(path: Path, header: bytes) -> list[tuple[int, int]]:
    """Byte ranges of the tensors, in file order; the file is long enough for all of them."""
    size_bytes = path.stat().st_size - 8 - len(header)
    try:
        entries = json.loads(header)
        spans = sorted(
            (int(entry["data_offsets"][0]), int(entry["data_offsets"][1]))
            for name, entry in entries.items()
            if name != "__metadata__"
        )
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise ValueError(f"{path}: truncated or damaged (its header is not understood)") from None
    if any(not 0 <= start <= end <= size_bytes for start, end in spans):
        raise ValueError(f"{path}: truncated or damaged (a tensor lies outside the file)")
    return spans


def _page_offsets(start: int, end: int) -> list[int]:
    """First, middle and last page of a tensor; fewer where they coincide."""
    last = max(start, end - _PAGE_BYTES)
    return sorted({start, (start + last) // 2, last})
