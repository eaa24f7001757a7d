"""Files that are whole or not there."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from confitune.errors import ConfituneError


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file that is either whole or as it was before: to a temporary file beside it, synced, then renamed."""
    partial = path.with_name(f"{path.stem}.{uuid4().hex}.partial")
    try:
        with partial.open("xb") as out:
            write(out)
            out.flush()
            os.fsync(out.fileno())
        os.replace(partial, path)
        sync_folder(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def require_writable(folder: Path) -> None:
    """Make the folder, or say that nothing can be written there: now, not after the work is done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = error.strerror or error
        raise ConfituneError(f"cannot write in {folder}: {why}; choose another folder with --out") from error


def sync_folder(folder: Path) -> None:
    """Have what was renamed or made in a folder survive a power cut; Windows neither needs nor allows it."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


_SEALED = b"confitune sealed file 1, sha256 "


class DamagedFileError(ConfituneError):
    """A file is not what was written."""


def write_sealed(path: Path, data: bytes) -> None:
    """As `write_whole`, with a checksum in the first line."""
    seal = _SEALED + hashlib.sha256(data).hexdigest().encode() + b"\n"
    write_whole(path, lambda out: (out.write(seal), out.write(data)))


def read_sealed(path: Path) -> bytes:
    """What `write_sealed` was given; a single changed bit is noticed."""
    try:
        whole = path.read_bytes()
    except OSError as error:
        raise DamagedFileError(f"{path} cannot be read: {error}") from error
    seal, _, data = whole.partition(b"\n")
    if seal != _SEALED + hashlib.sha256(data).hexdigest().encode():
        raise DamagedFileError(f"{path} is damaged: its checksum does not fit")
    return data


def checksum_of(values: dict[str, Any]) -> str:
    """SHA-256 of what a JSON object says, however it is laid out: a file may be reformatted, but not changed.

    >>> checksum_of({"a": 1, "b": [2.5]}) == checksum_of({"b": [2.5], "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(values, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
