"""Archives that were made to do harm leave nothing behind, neither in the folder nor outside of it."""

from __future__ import annotations

import hashlib
import io
import stat
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from confitune.errors import DataError
from confitune.tasks.datasets.dataset import unpack

Entry = tarfile.TarInfo | tuple[str, bytes]


def file(name: str, data: bytes = b"pixels") -> tuple[str, bytes]:
    return name, data


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def tar(path: Path, *entries: Entry, mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as packed:
        for entry in entries:
            if isinstance(entry, tarfile.TarInfo):
                packed.addfile(entry)
            else:
                info = tarfile.TarInfo(entry[0])
                info.size = len(entry[1])
                packed.addfile(info, io.BytesIO(entry[1]))
    return path


def zipped(path: Path, *entries: tuple[str | zipfile.ZipInfo, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, data in entries:
            packed.writestr(name, data)
    return path


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder to unpack in, below one with a file that must not change."""
    (tmp_path / "canary").write_text("sings")
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.fixture
def refused(home: Path) -> Callable[..., str]:
    """Unpacks an archive that must be refused, and gives what was said; nothing may have changed."""

    def listing() -> dict[str, bytes | None]:
        found = sorted(home.parent.rglob("*"))
        return {str(path): path.read_bytes() if path.is_file() else None for path in found}

    def refused(path: Path, **options: str) -> str:
        before = listing()
        with pytest.raises(DataError) as caught:
            unpack(path, home / "set", **options)
        assert listing() == before
        assert str(path) in str(caught.value)
        return str(caught.value)

    return refused


@pytest.mark.parametrize("ending", ["tgz", "tar.gz", "tar", "zip"])
def test_a_folder_comes_out_as_it_went_in(home: Path, ending: str) -> None:
    path = home / f"set.{ending}"
    entries = [file("set/a.jpg", b"one"), file("set/deeper/ü b.jpg", b"two" * 50_000), file("notes.txt")]
    if ending == "zip":
        zipped(path, *entries)
    else:
        tar(path, *entries, mode="w" if ending == "tar" else "w:gz")
    unpack(path, home / "set", hashlib.md5(path.read_bytes()).hexdigest())
    assert (home / "set/a.jpg").read_bytes() == b"one"
    assert (home / "set/deeper/ü b.jpg").read_bytes() == b"two" * 50_000
    assert sorted(entry.name for entry in home.iterdir()) == ["set", path.name]


def test_another_checksum_is_said_before_the_archive_is_opened(home: Path, refused, monkeypatch) -> None:
    path = tar(home / "set.tgz", file("set/a.jpg"))
    monkeypatch.setattr(tarfile, "open", lambda *_: pytest.fail("it was opened"))
    assert "is not the published file (its MD5 is not 0000)" in refused(path, md5="0000")


def test_what_is_there_is_not_touched(home: Path) -> None:
    path = tar(home / "set.tgz", file("set/a.jpg"))
    (home / "set").mkdir()
    with pytest.raises(DataError, match=r"set is there but incomplete; remove it, and set\.tgz will be unpacked"):
        unpack(path, home / "set")
    assert not list((home / "set").iterdir())


@pytest.mark.parametrize(
    "entry",
    [
        file("../canary"),
        file("set/../../canary"),
        special("../out", tarfile.DIRTYPE),
        special("set/link", tarfile.SYMTYPE, "../../canary"),
        special("set/link", tarfile.LNKTYPE, "../canary"),
        special("set/device", tarfile.CHRTYPE),
        special("set/pipe", tarfile.FIFOTYPE),
    ],
)
def test_what_leads_out_of_a_tar_or_is_no_file(home: Path, refused, entry: Entry) -> None:
    refused(tar(home / "set.tgz", file("set/a.jpg"), entry))


def test_names_that_lead_out_of_a_zip_lead_nowhere(home: Path) -> None:
    link = zipfile.ZipInfo("set/link")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    path = zipped(home / "set.zip", file("set/a.jpg"), file("../canary"), file("/set/b"), (link, b"../../canary"))
    unpack(path, home / "set")
    assert (home.parent / "canary").read_text() == "sings"
    assert not (home / "set/link").is_symlink()
    assert sorted(entry.name for entry in home.iterdir()) == ["set", "set.zip"]


def test_one_name_for_a_file_and_a_folder(home: Path, refused) -> None:
    assert "cannot be unpacked" in refused(tar(home / "set.tgz", file("set/a"), file("set/a/b")))


def test_damaged_archives(home: Path, refused) -> None:
    whole = tar(home / "set.tgz", *(file(f"set/{n}", bytes(range(256)) * n) for n in range(20))).read_bytes()
    for cut in (0, 1, 10, len(whole) // 2, 3 * len(whole) // 4):
        (home / "set.tgz").write_bytes(whole[:cut])
        refused(home / "set.tgz")
    packed = zipped(home / "set.zip", file("set/a", bytes(range(256)) * 100)).read_bytes()
    for changed in (packed[:100], packed[:-1], packed[:40] + b"\xff" + packed[41:]):
        (home / "set.zip").write_bytes(changed)
        assert "cannot be unpacked" in refused(home / "set.zip")


def test_an_archive_of_something_else(home: Path, refused) -> None:
    assert "has no folder set" in refused(tar(home / "set.tgz", file("other/a.jpg")))
    assert "has no folder set" in refused(tar(home / "set.tgz", file("set")))
