"""Which files in a bundle's folder are its own, and what its tasks may be called."""

from __future__ import annotations

import os
import re
import unicodedata
from pathlib import Path

from confitune.deploy.format import (
    BACKBONES,
    BEFORE,
    HEAD,
    HELD_OUT,
    INDEX,
    LOCK,
    NAME_LENGTH,
    TASKS,
    UNFINISHED,
    BundleError,
    StoredFile,
    TaskRecord,
)

_STORED = re.compile(r"[0-9a-f]{64}\.safetensors")
_PARTIAL = re.compile(r"([0-9a-f]{64}|bundle|bundle\.before)\.[0-9a-f]{32}\.partial")
_FOLDERS = (BACKBONES, TASKS, HELD_OUT)


def check_name(task: str) -> str:
    """A task's name that is one line of readable text.

    >>> check_name("birds of Samoa")
    'birds of Samoa'
    >>> check_name("birds\\n")
    Traceback (most recent call last):
    confitune.deploy.format.BundleError: a task's name must be 1 to 100 readable characters: got 'birds\\n'
    """
    readable = all(unicodedata.category(c) not in ("Zl", "Zp") and unicodedata.category(c)[0] != "C" for c in task)
    if not (0 < len(task) <= NAME_LENGTH and readable and task == task.strip()):
        raise BundleError(f"a task's name must be 1 to {NAME_LENGTH} readable characters: got {task[:200]!r}")
    return task


def is_bundle(path: Path) -> bool:
    """Whether a folder holds a bundle, be it a damaged one."""
    return (path / HEAD).is_file() or (path / BEFORE).is_file()


def file_name(folder: str, stored: StoredFile) -> str:
    """Of a stored file within the bundle."""
    return f"{folder}/{stored.sha256}.safetensors"


def names_of(record: TaskRecord) -> list[str]:
    """A task's files within the bundle."""
    kept = [] if record.held_out is None else [file_name(HELD_OUT, record.held_out)]
    return [file_name(TASKS, record.file), *kept]


def own_files(path: Path) -> list[str]:
    """Files with names that only a bundle gives: stored tensors, and files that were not finished."""
    found = [entry.name for entry in path.glob("*.partial") if _PARTIAL.fullmatch(entry.name)]
    for folder in _FOLDERS:
        found += [f"{folder}/{entry.name}" for entry in (path / folder).glob("*") if _is_own(entry.name)]
    return sorted(found)


def foreign_files(path: Path) -> list[str]:
    """What is in a folder that no bundle writes."""
    usual = {LOCK, UNFINISHED, INDEX, *_FOLDERS}
    found = [entry.name for entry in path.iterdir() if entry.name not in usual and not _PARTIAL.fullmatch(entry.name)]
    for folder in _FOLDERS:
        found += [f"{folder}/{entry.name}" for entry in (path / folder).glob("*") if not _is_own(entry.name)]
    return sorted(found)


def _is_own(name: str) -> bool:
    return bool(_STORED.fullmatch(name) or _PARTIAL.fullmatch(name))


def append_at(path: Path, start: int, data: bytes) -> None:
    """Write at `start`, over whatever a broken-off commit left there."""
    with path.open("r+b" if path.exists() else "xb") as out:
        out.truncate(start)
        out.seek(start)
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
