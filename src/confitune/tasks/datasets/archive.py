"""Unpack an archive that came from elsewhere: it is what its makers published, and only files below a folder come out.

The checksum vouches for what is in it. Besides, nothing is written outside of the folder (by `tarfile`'s and
`zipfile`'s own rules), and no few kilobytes fill the disk.
"""

from __future__ import annotations

import hashlib
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path

from confitune.tasks.errors import DataError

MOST_EXPANSION = 20  # bytes unpacked for each byte packed: photographs are packed already
SMALL = 2**20  # whatever its expansion


class ArchiveError(DataError):
    """An archive is not what was published, or holds what no dataset holds; nothing of it was written."""


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
        _extract(archive, unpacked)
        if not (unpacked / place.name).is_dir():
            raise ArchiveError(f"{archive} holds no folder {place.name}; remove it and get it again")
        (unpacked / place.name).rename(place)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError) as error:
        raise ArchiveError(f"{archive} cannot be unpacked: {error}; remove it and get it again") from error
    finally:
        shutil.rmtree(unpacked, ignore_errors=True)


def _extract(archive: Path, folder: Path) -> None:
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as packed:
            _refuse_bomb(archive, (info.file_size for info in packed.infolist()))
            packed.extractall(folder)
    else:
        with tarfile.open(archive) as packed_tar:
            _refuse_bomb(archive, (info.size for info in packed_tar))
            packed_tar.extractall(folder, filter="data")


def _refuse_bomb(archive: Path, sizes: Iterable[int]) -> None:
    left = max(SMALL, MOST_EXPANSION * archive.stat().st_size)
    for size in sizes:
        left -= size
        if size < 0 or left < 0:
            raise ArchiveError(f"{archive} would unpack to more than {MOST_EXPANSION} times its size; do not use it")


def _md5(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)  # what the datasets' makers published
    with path.open("rb") as file:
        while block := file.read(2**22):
            digest.update(block)
    return digest.hexdigest()
