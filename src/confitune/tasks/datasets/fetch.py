"""Download an archive and unpack it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torchvision.datasets.utils import download_url

from confitune.tasks.datasets.archive import unpack


@dataclass(frozen=True)
class Remote:
    """A file that is published under an address, with the checksum that was published along with it."""

    url: str
    md5: str

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


def fetch_file(remote: Remote, folder: Path) -> Path:
    """The file in `folder`, downloaded if it is not there; one with another checksum is refused."""
    download_url(remote.url, folder, remote.name, remote.md5)
    return folder / remote.name


def fetch_folder(remote: Remote, place: Path) -> None:
    """Put the folder `place.name` of a remote archive at `place`; the archive is not kept."""
    archive = fetch_file(remote, place.parent)
    unpack(archive, place, remote.md5)
    archive.unlink()
