"""The files in a bundle's folder: which are its own, and tensors in files that are named by their hash.

Nothing in them is ever executed. Tensors are views of the file, which is mapped and not read: safetensors' own
`safe_open` maps a file as well, but takes six times as long for the hundreds of small tensors of a task, and that is
what a predictor waits for when a task is not ready. The format: eight bytes with the length of a JSON header, the
header, then the tensors' bytes; the header gives dtype, shape and place of each.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from confitune.deploy.format import (
    BACKBONES,
    HELD_OUT,
    INDEX,
    LOCK,
    TASKS,
    UNFINISHED,
    BundleError,
    DamagedError,
    StoredFile,
    file_name,
)
from confitune.files import write_whole

_FOLDERS = (BACKBONES, TASKS, HELD_OUT)
_FOLDER = f"({'|'.join(_FOLDERS)})/"
_OWN = re.compile(
    rf"{_FOLDER}[0-9a-f]{{64}}\.safetensors|({_FOLDER})?([0-9a-f]{{64}}|bundle|bundle\.before)\.[0-9a-f]{{32}}\.partial"
)
_CHUNK = 2**20  # bytes that are hashed at once
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def own_files(path: Path) -> list[str]:
    """Files with names that only a bundle gives: stored tensors, and files that were not finished."""
    return [name for name in _names_in(path) if _OWN.fullmatch(name)]


def foreign_files(path: Path) -> list[str]:
    """What is in a folder that no bundle writes."""
    usual = {LOCK, UNFINISHED, INDEX, *_FOLDERS}
    return [name for name in _names_in(path) if name not in usual and not _OWN.fullmatch(name)]


def _names_in(path: Path) -> list[str]:
    found = (entry for pattern in ("*", *(f"{folder}/*" for folder in _FOLDERS)) for entry in path.glob(pattern))
    return sorted(entry.relative_to(path).as_posix() for entry in found)


class TensorFiles:
    """Files of tensors in a bundle. Each is compared with its hash when it is first needed, and with its size always.

    Args:
        root: the bundle's folder.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._whole: set[str] = set()  # names of files that were compared

    def path(self, folder: str, stored: StoredFile) -> Path:
        """Where it is."""
        return self._root / file_name(folder, stored)

    def store(self, folder: str, tensors: Mapping[str, Tensor], about: Mapping[str, object]) -> StoredFile:
        """Write tensors to `<sha256>.safetensors`; the same ones again are not written again.

        Args:
            about: goes into the file's own metadata, so that it can be read without the bundle.
        """
        # One entry: safetensors writes several in an order of its own each time, and the same would not be one file.
        metadata = {"confitune": json.dumps(about, sort_keys=True)}
        data = save({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, metadata)
        stored = StoredFile(sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))
        path = self.path(folder, stored)
        if not (path.exists() and path.stat().st_size == stored.bytes):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, lambda out: out.write(data))
        return stored

    def check(self, folder: str, stored: StoredFile) -> None:
        """Raise unless the file is what was stored."""
        name, path = file_name(folder, stored), self.path(folder, stored)
        try:
            size = path.stat().st_size
            if size != stored.bytes:
                raise DamagedError(f"{path} is damaged: {size} bytes, not {stored.bytes}; restore it from a copy")
            if name not in self._whole and _hash(path) != stored.sha256:
                raise DamagedError(f"{path} is damaged: its hash is not its name; restore it from a copy")
        except OSError as error:
            raise DamagedError(f"{path} cannot be read: {error}; restore it from a copy") from error
        self._whole.add(name)

    def read(self, folder: str, stored: StoredFile) -> dict[str, Tensor]:
        """What `store` wrote. The tensors are the file itself, mapped: they take memory where they are copied."""
        self.check(folder, stored)
        path = self.path(folder, stored)
        try:
            return mapped_tensors(path)
        except Exception as error:  # whatever a file can be that only its hash vouches for
            raise BundleError(f"{path} holds no tensors: {error}") from error


def _hash(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    return found.hexdigest()


def mapped_tensors(path: Path) -> dict[str, Tensor]:
    """Name -> tensor; what is written to one stays in this process. A file of another format raises some error."""
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    return {name: _view(data, start, **entry) for name, entry in header.items()}


def _view(data: mmap.mmap, start: int, dtype: str, shape: list[int], data_offsets: list[int]) -> Tensor:
    kind, (first, last) = _DTYPES[dtype], data_offsets
    if first == last:
        return torch.empty(0, dtype=kind).view(shape)
    if first < 0 or (last - first) % kind.itemsize:
        raise ValueError(f"a tensor of {dtype} cannot be bytes {first} to {last}")
    return torch.frombuffer(data, dtype=kind, count=(last - first) // kind.itemsize, offset=start + first).view(shape)
