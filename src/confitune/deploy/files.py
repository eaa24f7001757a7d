"""Files that are named by their hash, with tensors inside; nothing in them is ever executed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from confitune.deploy.format import BundleError, DamagedError, StoredFile
from confitune.deploy.mapped import mapped_tensors
from confitune.files import write_whole

_CHUNK = 2**20  # bytes that are hashed at once


class TensorFiles:
    """A folder of such files. Each is compared with its hash when it is first needed, and with its size every time.

    Args:
        folder: made when the first file is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._whole: set[str] = set()  # hashes of files that were compared

    def path(self, stored: StoredFile) -> Path:
        """Where it is."""
        return self.folder / f"{stored.sha256}.safetensors"

    def store(self, tensors: Mapping[str, Tensor], about: Mapping[str, object]) -> StoredFile:
        """Write tensors to `<sha256>.safetensors`; the same ones again are not written again.

        Args:
            about: goes into the file's own metadata, so that it can be read without the bundle.
        """
        # One entry: safetensors writes several in an order of its own each time, and the same would not be one file.
        metadata = {"confitune": json.dumps(about, sort_keys=True)}
        data = save({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, metadata)
        stored = StoredFile(sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))
        path = self.path(stored)
        if not (path.exists() and path.stat().st_size == stored.bytes):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, lambda out: out.write(data))
        return stored

    def check(self, stored: StoredFile) -> None:
        """Raise unless the file is what was stored."""
        path = self.path(stored)
        try:
            size = path.stat().st_size
            if size != stored.bytes:
                raise DamagedError(f"{path} is damaged: {size} bytes, not {stored.bytes}; restore it from a copy")
            if stored.sha256 not in self._whole and _hash(path) != stored.sha256:
                raise DamagedError(f"{path} is damaged: its hash is not its name; restore it from a copy")
        except OSError as error:
            raise DamagedError(f"{path} cannot be read: {error}; restore it from a copy") from error
        self._whole.add(stored.sha256)

    def read(self, stored: StoredFile) -> dict[str, Tensor]:
        """What `store` wrote. The tensors are the file itself, mapped: they take memory where they are copied."""
        self.check(stored)
        path = self.path(stored)
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
