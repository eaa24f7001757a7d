"""Files that are named by their hash, with tensors inside; nothing in them is ever executed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load, save
from torch import Tensor

from confitune.deploy.format import BundleError, StoredFile
from confitune.files import write_whole


def store_tensors(folder: Path, tensors: Mapping[str, Tensor], about: Mapping[str, object]) -> StoredFile:
    """Write tensors to `folder/<sha256>.safetensors`; the same ones again are not written again.

    Args:
        about: goes into the file's own metadata, so that it can be read without the bundle.
    """
    # One entry: safetensors writes several in an order of its own each time, and the same would not be the same file.
    metadata = {"confitune": json.dumps(about, sort_keys=True)}
    data = save({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, metadata)
    stored = StoredFile(sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))
    path = path_of(folder, stored)
    if not (path.exists() and path.stat().st_size == stored.bytes):
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda out: out.write(data))
    return stored


def read_tensors(folder: Path, stored: StoredFile) -> dict[str, Tensor]:
    """What `store_tensors` wrote, checked against its size and hash before anything is made of it."""
    path = path_of(folder, stored)
    try:
        size = path.stat().st_size
        if size != stored.bytes:
            raise BundleError(f"{path} is damaged: {size} bytes, not {stored.bytes}; restore it from a copy")
        data = path.read_bytes()
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error}; restore it from a copy") from error
    if hashlib.sha256(data).hexdigest() != stored.sha256:
        raise BundleError(f"{path} is damaged: its hash is not its name; restore it from a copy")
    try:
        return load(data)
    except Exception as error:  # safetensors raises its own kinds
        raise BundleError(f"{path} holds no tensors: {error}") from error


def path_of(folder: Path, stored: StoredFile) -> Path:
    """Where it is."""
    return folder / f"{stored.sha256}.safetensors"
