"""Unpack an archive that came from elsewhere: all of it is checked before any of it is written.

Only plain files and folders below the folder at hand come out of it. Whoever can change an archive could otherwise have
a file written anywhere (absolute names, '..', links), or fill the disk from a few kilobytes.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import shutil
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO

from confitune.tasks.errors import DataError

MOST_EXPANSION = 20  # bytes unpacked for each byte packed: photographs are packed already
SMALL = 2**20  # whatever its expansion
MOST_MEMBERS = 100_000
MOST_AT_ONCE = 2**20  # bytes that are read into memory: a tar's header for one long name needs a few hundred
# What the readers raise on archives that are damaged, or that name a file both as a file and as a folder.
_BROKEN = (
    *(tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError),
    *(ValueError, RuntimeError, NotADirectoryError, FileExistsError),
)


class ArchiveError(DataError):
    """An archive is not what was published, or holds what no dataset holds; nothing of it was written."""


@dataclass(frozen=True)
class _Member:
    name: str
    kind: str  # "file", "folder" or "other"
    size: int
    open: Callable[[], IO[bytes] | None]


def unpack(archive: Path, place: Path, md5: str | None = None) -> None:
    """Put the folder `place.name` that the archive holds at `place`, whole or not at all.

    Args:
        archive: a .zip, .tar, .tar.gz or .tgz file.
        place: where nothing may be yet.
        md5: of the archive, compared before it is opened; None for one that came out of an archive that was compared.
    """
    if place.exists():
        raise DataError(f"{place} is there but incomplete; remove it, and {archive.name} will be unpacked")
    if md5 is not None and _md5(archive) != md5:
        raise ArchiveError(f"{archive} is not what was published (its MD5 is not {md5}); remove it and get it again")
    unpacked = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    try:
        with ExitStack() as stack:
            for member in _checked(archive, stack):
                _write(member, unpacked / member.name)
        if not (unpacked / place.name).is_dir():
            raise ArchiveError(f"{archive} holds no folder {place.name}; remove it and get it again")
        (unpacked / place.name).rename(place)
    except _BROKEN as error:
        raise ArchiveError(f"{archive} is damaged: {error}; remove it and get it again") from error
    finally:
        shutil.rmtree(unpacked, ignore_errors=True)


def _checked(archive: Path, stack: ExitStack) -> Sequence[_Member]:
    """Every file of the archive; the first thing that is not to be unpacked raises."""
    most = max(SMALL, MOST_EXPANSION * archive.stat().st_size)
    members: dict[str, _Member] = {}
    total = 0
    for member in _zip_members(archive, stack) if archive.suffix == ".zip" else _tar_members(archive, stack, most):
        parts = PurePosixPath(member.name).parts
        readable = member.name.isprintable() and not set(member.name) & set('\\:*?"<>|')
        if not parts or member.name.startswith("/") or ".." in parts or not readable:
            raise ArchiveError(
                f"{archive} holds a file called {member.name[:200]!r}, which is no place below it; do not use it"
            )
        if member.kind == "folder":
            continue
        if member.kind != "file":
            raise ArchiveError(
                f"{archive} holds {member.name[:200]!r}, which is neither a file nor a folder; do not use it"
            )
        total += member.size
        if member.size < 0 or total > most:
            raise ArchiveError(f"{archive} would unpack to more than {MOST_EXPANSION} times its size; do not use it")
        if len(members) >= MOST_MEMBERS:
            raise ArchiveError(f"{archive} holds more than {MOST_MEMBERS:,} files; do not use it")
        if members.setdefault(member.name, member) is not member:
            raise ArchiveError(f"{archive} holds {member.name!r} twice; do not use it")
    return list(members.values())


def _zip_members(archive: Path, stack: ExitStack) -> Iterator[_Member]:
    packed = stack.enter_context(zipfile.ZipFile(archive))
    for info in packed.infolist():
        plain = stat.S_IFMT(info.external_attr >> 16) in (0, stat.S_IFREG, stat.S_IFDIR)
        kind = ("folder" if info.is_dir() else "file") if plain else "other"
        yield _Member(info.filename, kind, info.file_size, partial(packed.open, info))


def _tar_members(archive: Path, stack: ExitStack, most: int) -> Iterator[_Member]:
    file = stack.enter_context(archive.open("rb"))
    zipped = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    data = stack.enter_context(gzip.GzipFile(fileobj=file)) if zipped else file
    bounded = _Bounded(data, archive, most + MOST_MEMBERS * tarfile.BLOCKSIZE)
    packed = stack.enter_context(tarfile.TarFile(fileobj=bounded))
    for info in packed:
        kind = "folder" if info.isdir() else "file" if info.isfile() and not info.issparse() else "other"
        yield _Member(info.name, kind, info.size, partial(packed.extractfile, info))


class _Bounded(io.RawIOBase):
    """A tar's bytes, of which neither too many in all nor too many at once can be read.

    A tar's headers may have any length, and `tarfile` reads each into memory, before anything could look at them.
    """

    def __init__(self, file: IO[bytes] | gzip.GzipFile, archive: Path, most: int) -> None:
        self._file, self._archive, self._most = file, archive, most

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= MOST_AT_ONCE:
            raise ArchiveError(f"{self._archive} has a header of {size:,} bytes; do not use it")
        return self._file.read(size)

    def seek(self, place: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_SET or place > self._most:
            raise ArchiveError(f"{self._archive} would unpack to {place:,} bytes; do not use it")
        return self._file.seek(place)

    def tell(self) -> int:
        return self._file.tell()


def _write(member: _Member, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    packed = member.open()
    assert packed is not None  # it is a file
    with packed, path.open("xb") as out:
        left = member.size
        while left and (block := packed.read(min(left, 2**16))):
            out.write(block)
            left -= len(block)
    if left:
        raise EOFError(f"{member.name} is cut short")


def _md5(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)  # what the datasets' makers published
    with path.open("rb") as file:
        while block := file.read(2**22):
            digest.update(block)
    return digest.hexdigest()
