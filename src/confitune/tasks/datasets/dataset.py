"""What the file of a dataset is made of: what is known of it, how its folder is found, and the images it hands over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torchvision.datasets.utils import download_url

from confitune.files import exclusive
from confitune.tasks.datasets.archive import unpack
from confitune.tasks.errors import DataMissingError
from confitune.tasks.store import ImageFile


@dataclass(frozen=True)
class DatasetInfo:
    """A dataset and the defaults for learning it."""

    name: str  # as given to `load_tasks`
    tasks: int | None  # by default; None where that depends on the data
    classes_per_task: int | None  # likewise
    batch_size: int
    epochs: int  # of each task
    image_size: int = 224  # side of the images that the network sees
    pipelines: tuple[str, ...] = ("clean",)  # which treatments of the images there are, the default first
    from_paper: bool = False  # whether tasks, batch size and epochs are those of the ConFiT paper (sec. 4.1)

    @classmethod
    def of_paper(cls, name: str, tasks: int, classes_per_task: int, batch_size: int, epochs: int) -> DatasetInfo:
        """One of the four sets of the paper, which can also be treated as by the published code."""
        return cls(name, tasks, classes_per_task, batch_size, epochs, pipelines=("clean", "published"), from_paper=True)


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
    resize: int | None = None  # to be done on the fly, see `Preprocess`
    crop: int | None = None


@dataclass(frozen=True)
class Remote:
    """A file that is published under an address, with the checksum that was published along with it."""

    url: str
    md5: str

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    def fetch(self, folder: Path) -> Path:
        """The file in `folder`, downloaded if it is not there; one with another checksum is refused."""
        download_url(self.url, folder, self.name, self.md5)
        return folder / self.name

    def fetch_folder(self, place: Path) -> None:
        """Put the folder `place.name` of this archive at `place`; the archive is not kept."""
        archive = self.fetch(place.parent)
        unpack(archive, place, self.md5)
        archive.unlink()


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
