"""The files of a bundle on disk: tensors under the hash of what they hold, manifests that are whole or as they were.

A bundle may come from anyone: links are not followed, and what a file declares is checked before it is believed.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from confitune.deploy.bundle.format import (
    BEFORE,
    FOLDERS,
    LOCK,
    MANIFEST,
    BundleError,
    DamagedError,
    Manifest,
    StoredFile,
)
from confitune.files import exclusive, open_plain, require_plain, write_whole
from confitune.nn import headless, without_memory

_FOLDER = f"({'|'.join(FOLDERS)})/"
_OWN = re.compile(
    rf"{_FOLDER}[0-9a-f]{{64}}\.safetensors|({_FOLDER})?([0-9a-f]{{64}}|bundle|bundle\.before)\.[0-9a-f]{{32}}\.partial"
)
_DEVICE_FAILED = getattr(torch, "AcceleratorError", torch.OutOfMemoryError)  # torch 2.7 has no error of its own
_INSIDE = 2  # times the image's size: what a layer may read, some networks pad their images
_KINDS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_KINDS |= {torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool}


def is_bundle(path: Path) -> bool:
    """Whether a folder holds a bundle, be it a damaged one."""
    return (path / MANIFEST).is_file() or (path / BEFORE).is_file()


class Store:
    """The files in the folder of a bundle.

    A file of tensors is compared with its hash when it is first needed, and with its size always.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._whole: set[str] = set()  # names of files that were compared

    def store(self, folder: Any, tensors: Mapping[str, Tensor], **about: object) -> StoredFile:
        """Write tensors to `<sha256>.safetensors`; the same ones again are not written again.

        Args:
            folder: which of `FOLDERS`.
            about: goes into the file's own metadata, so that it can be read without the bundle.
        """
        # One entry: safetensors writes several in an order of its own each time, and the same would not be one file.
        metadata = {"confitune": json.dumps({"holds": folder, **about}, sort_keys=True)}
        data = save({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, metadata)
        stored = StoredFile(folder=folder, sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))
        self.write(stored, data)
        return stored

    def write(self, stored: StoredFile, data: bytes) -> None:
        """Write a file, unless it is there and whole."""
        self._whole.discard(stored.name)
        try:
            self.check(stored)
        except DamagedError:  # or it is not there yet
            (self.root / stored.folder).mkdir(parents=True, exist_ok=True)
            write_whole(self.root / stored.name, lambda out: out.write(data))

    def check(self, stored: StoredFile) -> bytes:
        """The file as it was stored; raises if it is not that."""
        path = self.root / stored.name
        data = self._bytes(path, stored.bytes)
        if stored.name not in self._whole and hashlib.sha256(data).hexdigest() != stored.sha256:
            raise DamagedError(f"{path} is damaged: its checksum does not match its name; restore it from a copy")
        self._whole.add(stored.name)
        return data

    @contextmanager
    def read(self, stored: StoredFile) -> Iterator[dict[str, Tensor]]:
        """The tensors that `store` wrote; whatever is found wrong with them within is said of the file."""
        data = self.check(stored)
        try:
            tensors = load(data)
            if not {tensor.dtype for tensor in tensors.values()} <= _KINDS:
                raise BundleError("it has tensors of an unexpected dtype")
            if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
                raise BundleError("it has NaN or infinite values")
            yield tensors
        except (torch.OutOfMemoryError, _DEVICE_FAILED):  # no fault of the file
            raise
        except Exception as error:  # whatever a file can be that only its hash vouches for
            raise BundleError(f"{self.root / stored.name} is not what a bundle keeps: {error}") from error

    def _bytes(self, path: Path, expected: int | None = None) -> bytes:
        """What a file holds; one of another size than expected is not read."""
        try:
            with open_plain(path) as file:
                size = os.fstat(file.fileno()).st_size
                if expected not in (None, size):
                    raise DamagedError(f"{path} is damaged: {size} bytes, not {expected}; restore it from a copy")
                return file.read()
        except OSError as error:
            raise DamagedError(f"{path} cannot be read: {error}; restore it from a copy") from error

    def write_manifest(self, name: str, manifest: Manifest) -> None:
        """The file is whole, or as it was."""
        write_whole(self.root / name, lambda out: out.write(manifest.to_bytes()))

    def read_manifest(self, name: str) -> Manifest:
        """What a manifest says."""
        path = self.root / name
        return Manifest.from_bytes(self._bytes(path), str(path))

    def read_before(self) -> Manifest | None:
        """The manifest before the last change; None if it cannot be read."""
        with suppress(BundleError):
            return self.read_manifest(BEFORE)
        return None

    def newest(self) -> tuple[Manifest, str | None]:
        """The manifest and None; or, if it or a file that all tasks share is damaged, the one before and the damage."""
        if not is_bundle(self.root):
            raise BundleError(f"{self.root} is not a bundle: create one with `confitune learn`")
        self._require_own()
        while True:
            manifest = None
            try:
                manifest = self.read_manifest(MANIFEST)
                return self.check_shared(manifest), None
            except DamagedError as error:
                with suppress(DamagedError):
                    if self.read_manifest(MANIFEST) != manifest:
                        continue  # it was changed twice meanwhile, and what the manifest named is gone
                try:
                    return self.check_shared(self.read_manifest(BEFORE)), str(error)
                except BundleError:
                    raise error from None

    def check_shared(self, manifest: Manifest) -> Manifest:
        """Check the files that all tasks share."""
        for stored in manifest.shared_files():
            self.check(stored)
        return manifest

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within, no other process changes the bundle."""

        def busy() -> None:
            raise BundleError(f"another process is changing {self.root}; try again when it is done")

        self._require_own()
        with exclusive(self.root / LOCK, busy) as held:
            if not held:
                raise BundleError(
                    f"{self.root} cannot be locked, so two changes could undo each other: use a local disk"
                )
            yield

    def leftovers(self, *manifests: Manifest | None) -> set[str]:
        """Names that only a bundle gives, of files that none of these manifests needs."""
        needed = set().union(*(manifest.files() for manifest in manifests if manifest is not None))
        return {name for name in self._names() if _OWN.fullmatch(name)} - needed

    def delete(self, names: Iterable[str]) -> None:
        """Delete files of the bundle; for use within `alone`."""
        for name in names:
            (self.root / name).unlink(missing_ok=True)

    def foreign(self) -> list[str]:
        """What is in the folder that no bundle writes."""
        return [name for name in self._names() if name not in (LOCK, *FOLDERS) and not _OWN.fullmatch(name)]

    def _names(self) -> list[str]:
        found = [*self.root.glob("*"), *(entry for folder in FOLDERS for entry in (self.root / folder).glob("*"))]
        return sorted(entry.relative_to(self.root).as_posix() for entry in found)

    def _require_own(self) -> None:
        """Refuse a bundle of links and other things that are no files: a change would reach what is not its own."""
        try:
            for name in (MANIFEST, BEFORE, LOCK, *FOLDERS):
                with suppress(FileNotFoundError):
                    status = (self.root / name).lstat()
                    if not (name in FOLDERS and stat.S_ISDIR(status.st_mode)):
                        require_plain(self.root / name, status)
        except OSError as error:
            raise BundleError(f"{self.root} cannot be used: {error}") from error


def require_room(model: str, size: int) -> None:
    """Refuse a file of `size` bytes that cannot hold the weights of a network: it is not built then.

    Counted are the weights that no task can own: all but scales and shifts of norms.
    """
    empty = without_memory(model, size)
    with next(empty.parameters()).device:  # a torchvision network is traced
        needed = sum(weight.nbytes for weight in headless(empty).parameters() if weight.dim() > 1)
    if needed > size:
        raise BundleError(f"{size} bytes cannot be the weights of {model}: they take {needed}")


def check_declared(state: Mapping[str, Tensor], size: int) -> None:
    """Refuse a task that was not finished, and sizes that no image of `size` pixels leads to: planes are made of them.

    >>> check_declared({"finished": torch.tensor(True), "image_size": torch.tensor([64, 64])}, 32)
    Traceback (most recent call last):
    confitune.deploy.bundle.format.BundleError: it was learned from images of [64, 64] pixels, not 32
    """
    finished, image = state.get("finished", torch.zeros(0)), state.get("image_size", torch.zeros(0))
    if finished.shape != () or not finished:
        raise BundleError("its task is not marked as finished")
    if image.shape != (2,) or image.tolist() != [size, size]:
        said = image.tolist() if image.numel() < 5 else "very many"
        raise BundleError(f"it was learned from images of {said} pixels, not {size}")
    planes = [tensor for key, tensor in state.items() if key.endswith(".input_size") and tensor.shape == (3,)]
    for plane in planes:
        least, most = plane[:2].double().aminmax()  # whatever kind of numbers they are
        if least < 0 or most > _INSIDE * size:
            raise BundleError(f"its feature map sizes are impossible for images of {size} pixels")
