"""What the file of a dataset is made of: what is known of it, the images it hands over, and how its folder is found,
downloaded and unpacked.
"""

from __future__ import annotations

import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torchvision.datasets.utils import check_md5, download_url

from confitune.errors import DataError, DataMissingError
from confitune.files import exclusive
from confitune.tasks.store import ImageFile


@dataclass(frozen=True)
class DatasetInfo:
    """A dataset and the defaults for learning it."""

    name: str  # as given to `load_tasks`
    read: Callable[[Path, bool], ImageSet] | None  # from the data folder, or download it; None: a user's own function
    batch_size: int
    epochs: int  # of each task
    tasks: int | None = None  # by default; None where that depends on the data, or on the parts that are joined
    classes_per_task: int | None = None  # likewise
    pipelines: tuple[str, ...] = ("clean",)  # preprocessing that there is, the default first
    from_paper: bool = False  # whether tasks, batch size and epochs are those of the ConFiT paper (sec. 4.1)


@dataclass(frozen=True, eq=False)
class ImageSet:
    """All images of a dataset before they are cut into tasks."""

    classes: tuple[str, ...]  # in the order of the labels
    labels: NDArray[np.int64]  # of every image
    train: NDArray[np.int64]  # positions, ascending
    test: NDArray[np.int64]
    pixels: Tensor | None = None  # uint8 [M,3,H,W], where they are small enough to hold in memory
    folder: Path = Path()  # where `files` lie
    files: tuple[ImageFile, ...] = ()  # in the order of `labels`, to be decoded into a store
    resize: int | None = None  # on the fly, see `Preprocess`
    crop: int | None = None


@dataclass(frozen=True)
class Remote:
    """A file to download, and the MD5 checksum that its makers published."""

    url: str
    md5: str

    def fetch(self, folder: Path) -> Path:
        """The file in `folder`, downloaded if it is not there."""
        file = folder / self.url.rpartition("/")[2]
        download_url(self.url, folder, file.name, self.md5)
        return file

    def fetch_folder(self, place: Path) -> None:
        """Put the folder `place.name` of this archive at `place`; the archive is not kept."""
        archive = self.fetch(place.parent)
        unpack(archive, place, self.md5)
        archive.unlink()


def unpack(archive: Path, place: Path, md5: str | None = None) -> None:
    """Put the folder `place.name` that a .zip, .tar, .tar.gz or .tgz file holds at `place`, whole or not at all.

    The checksum vouches for what is in it (None for a file out of an archive that was compared), and `tarfile` and
    `zipfile` write nothing outside of the folder.
    """
    if place.exists():
        raise DataError(f"{place} is there but incomplete; remove it, and {archive.name} will be unpacked")
    again = "remove it and download it again"
    if md5 is not None and not check_md5(str(archive), md5):
        raise DataError(f"{archive} is not the published file (its MD5 is not {md5}); {again}")
    unpacked = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    try:
        if archive.suffix == ".zip":
            with zipfile.ZipFile(archive) as zipped:
                zipped.extractall(unpacked)
        else:
            with tarfile.open(archive) as packed:
                packed.extractall(unpacked, filter="data")
        if not (unpacked / place.name).is_dir():
            raise DataError(f"{archive} has no folder {place.name}; {again}")
        (unpacked / place.name).rename(place)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError) as error:
        raise DataError(f"{archive} cannot be unpacked: {error}; {again}") from error
    finally:
        shutil.rmtree(unpacked, ignore_errors=True)


def locate(
    name: str, data_dir: Path, folder: str, contents: Sequence[str], source: str, fetch: Callable[[Path], object] | None
) -> Path:
    """The folder that holds a dataset: `data_dir/folder`, or `data_dir` itself if that is it.

    Args:
        folder: the dataset's usual folder.
        contents: files or folders that must be there; one that is missing means an interrupted download.
        source: where to get it by hand, for messages.
        fetch: called with the folder that should come to hold `folder`; None to leave the network alone.
    """

    def found() -> Path | None:
        places = (data_dir / folder, data_dir)
        return next((place for place in places if all((place / part).exists() for part in contents)), None)

    place, failure = found(), None
    if place is None and fetch is not None:
        root = data_dir.parent if data_dir.name == folder else data_dir
        try:
            # Several processes may want it: one fetches, the others find it there.
            with exclusive(root / f".{name}.lock", lambda: None):
                if found() is None:
                    fetch(root)
            place = found()
        except Exception as error:  # no network, no space, no permission, a wrong checksum, ...
            failure = error
    if place is not None:
        return place
    tried = f"; fetching it failed: {failure}" if failure else ""
    raise DataMissingError(
        f"{name} is not there: looked for {', '.join(contents)} in {data_dir / folder} and in {data_dir}{tried}. "
        f"To get it: {source}. "
        "To look elsewhere: set data_dir or the environment variable CONFITUNE_DATA"
    ) from failure
