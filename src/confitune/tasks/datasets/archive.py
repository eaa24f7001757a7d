"""Unpack an archive that came from elsewhere: it is what its makers published, and only files below a folder come out.

The checksum vouches for what is in it, and `tarfile` and `zipfile` themselves write nothing outside of the folder.
"""

from __future__ import annotations

import shutil
import tarfile
import tempfile
import zipfile
import zlib
from pathlib import Path

from torchvision.datasets.utils import check_md5

from confitune.tasks.errors import DataError


class ArchiveError(DataError):
    """An archive is not what was published, or holds what no dataset holds; nothing of it was written."""


def unpack(archive: Path, place: Path, md5: str | None = None) -> None:
    """Put the folder `place.name` that the archive holds at `place`, whole or not at all.

    A .zip, .tar, .tar.gz or .tgz file. Its MD5, which its makers published, is compared before it is opened; None for
    one that came out of an archive that was compared.
    """
    if place.exists():
        raise DataError(f"{place} is there but incomplete; remove it, and {archive.name} will be unpacked")
    if md5 is not None and not check_md5(str(archive), md5):
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
            packed.extractall(folder)
    else:
        with tarfile.open(archive) as packed_tar:
            packed_tar.extractall(folder, filter="data")
