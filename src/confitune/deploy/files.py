"""The files in a bundle's folder: which are its own, and tensors in safetensors files that are named by their hash."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load, save
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
_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_KINDS = {*_FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool}


def own_files(path: Path) -> list[str]:
    """Files with names that only a bundle gives: stored tensors, and files that were not finished."""
    return [name for name in _names_in(path) if _OWN.fullmatch(name)]


def foreign_files(path: Path) -> list[str]:
    """What is in a folder that no bundle writes."""
    usual = {LOCK, UNFINISHED, INDEX, *_FOLDERS}
    return [name for name in _names_in(path) if name not in usual and not _OWN.fullmatch(name)]


def _names_in(path: Path) -> list[str]:
    found = [*path.glob("*"), *(entry for folder in _FOLDERS for entry in (path / folder).glob("*"))]
    return sorted(entry.relative_to(path).as_posix() for entry in found)


class TensorFiles:
    """Files of tensors in a bundle. Each is compared with its hash when it is first needed, and with its size always.

    Args:
        root: the bundle's folder.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._whole: set[str] = set()  # names of files that were compared

    def store(self, folder: str, tensors: Mapping[str, Tensor], about: Mapping[str, object]) -> StoredFile:
        """Write tensors to `<sha256>.safetensors`; the same ones again are not written again.

        Args:
            about: goes into the file's own metadata, so that it can be read without the bundle.
        """
        # One entry: safetensors writes several in an order of its own each time, and the same would not be one file.
        metadata = {"confitune": json.dumps(about, sort_keys=True)}
        data = save({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, metadata)
        stored = StoredFile(sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))
        path = self._root / file_name(folder, stored)
        if not (path.exists() and path.stat().st_size == stored.bytes):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, lambda out: out.write(data))
        return stored

    def check(self, folder: str, stored: StoredFile) -> bytes:
        """The file as it was stored; raises if it is not that."""
        name = file_name(folder, stored)
        path = self._root / name
        try:
            size = path.stat().st_size
            if size != stored.bytes:
                raise DamagedError(f"{path} is damaged: {size} bytes, not {stored.bytes}; restore it from a copy")
            data = path.read_bytes()
        except OSError as error:
            raise DamagedError(f"{path} cannot be read: {error}; restore it from a copy") from error
        if name not in self._whole and hashlib.sha256(data).hexdigest() != stored.sha256:
            raise DamagedError(f"{path} is damaged: its hash is not its name; restore it from a copy")
        self._whole.add(name)
        return data

    def read(self, folder: str, stored: StoredFile) -> dict[str, Tensor]:
        """The tensors that `store` wrote."""
        data, path = self.check(folder, stored), self._root / file_name(folder, stored)
        try:
            tensors = load(data)
        except Exception as error:  # whatever a file can be that only its hash vouches for
            raise BundleError(f"{path} holds no tensors: {error}") from error
        if not {tensor.dtype for tensor in tensors.values()} <= _KINDS:
            raise BundleError(f"{path} holds tensors of a kind that no bundle has")
        return tensors
