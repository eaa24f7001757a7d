"""Files that are whole or not there, locks that end with the process that holds them, and code of the user's own.

The lock is twenty lines around `flock` and not the package filelock. Where a file system has no locks, that one falls
back to a marker file, which a killed process leaves behind; some of its versions truncate the file that they lock,
which may hold results here; and it would not be enough for Windows, where open files cannot be replaced or deleted.
"""

import hashlib
import json
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import IO, Any
from uuid import uuid4

from confitune.errors import ConfituneError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file so that it is whole or as it was before: to a temporary file beside it, synced, then renamed."""
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


def remove_partial(folder: Path, stem: str = "*") -> None:
    """Delete what a process that was killed in `write_whole` left; for use where no other process writes."""
    for leftover in folder.glob(f"{stem}.*.partial"):
        leftover.unlink()


def open_plain(path: Path) -> IO[bytes]:
    """Open a file to read it. A link, a pipe (which may never end) or a file with several names raises an OSError."""
    require_plain(path, path.lstat())
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        require_plain(path, os.fstat(handle))  # it may have been exchanged
        return os.fdopen(handle, "rb")
    except OSError:
        os.close(handle)
        raise


def require_plain(path: Path, status: os.stat_result) -> None:
    """Raise where that is not the status of a plain file with one name."""
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{path} is not a regular file; replace it with a copy of its target")
    if status.st_nlink > 1:
        raise OSError(f"{path} has several hard links; replace it with a copy")


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
    """Make renamed and new files in a folder survive a power cut; Windows neither needs nor allows it."""
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
        with open_plain(path) as file:
            whole = file.read()
    except OSError as error:
        raise DamagedFileError(f"{path} cannot be read: {error}") from error
    seal, _, data = whole.partition(b"\n")
    if seal != _SEALED + hashlib.sha256(data).hexdigest().encode():
        raise DamagedFileError(f"{path} is damaged: its checksum does not match")
    return data


def checksum_of(values: dict[str, Any]) -> str:
    """SHA-256 of a JSON object, however its file is formatted.

    >>> checksum_of({"a": 1, "b": [2.5]}) == checksum_of({"b": [2.5], "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(values, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


@contextmanager
def exclusive(path: Path, waiting: Callable[[], None]) -> Iterator[bool]:
    """Hold the lock file `path`; `waiting` is called once if another process has it.

    The operating system drops the lock when its process ends, so a killed process blocks nobody; the file stays.
    Yields False where there are no such locks (Windows, some network file systems): another process may then do the
    same work at the same time.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        held = fcntl is not None
        if held:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(handle, fcntl.LOCK_EX)
            except OSError:  # e.g. a network file system without locks
                held = False
        yield held


def run_file(path: str) -> ModuleType:
    """A Python file of the user's own as a module; it is run once, and again when it has changed."""
    code = Path(path).read_bytes()
    name = f"confitune_own_{hashlib.blake2b(os.fsencode(path) + code, digest_size=8).hexdigest()}"
    if name not in sys.modules:
        module = sys.modules[name] = ModuleType(name)  # known before it is run: dataclasses look it up
        module.__file__ = path
        try:
            exec(compile(code, path, "exec"), vars(module))
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
