"""The store survives what happens to files: half-written, damaged, changed, written by two processes at once."""

import errno
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
import torch
from PIL import Image

import confitune
from confitune import files
from confitune.errors import DataError, UnreadableImageError
from confitune.tasks import store
from confitune.tasks.decode import Pipeline
from confitune.tasks.store import SHAPE, ImageFile, open_store
from locks import no_locks

COUNT = 6
CLEAN = Pipeline()


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for i in range(COUNT):
        values = np.random.default_rng(i).integers(0, 256, (30, 40, 3), dtype=np.uint8)
        (tmp_path / "photos").mkdir(exist_ok=True)
        Image.fromarray(values).save(tmp_path / "photos" / f"{i}.png")
    return tmp_path / "photos"


@pytest.fixture
def build(photos: Path, tmp_path: Path) -> Callable[..., tuple[torch.Tensor, int]]:
    """Opens the store; returns its pixels and how many images had to be decoded for it."""

    def build(pipeline: Pipeline = CLEAN) -> tuple[torch.Tensor, int]:
        decoded = [0]
        names = sorted(path.name for path in photos.iterdir())
        files = [ImageFile(name) for name in names]

        def progress(what: str, done: int, total: int) -> None:
            assert (what, total) == ("decoding test", len(files))
            decoded.append(done)

        return open_store("test", photos, files, pipeline, tmp_path / "cache", progress), decoded[-1]

    return build


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def test_holds_each_image_in_order_and_decodes_once(build, photos: Path) -> None:
    pixels, decoded = build()
    assert decoded == COUNT
    assert (pixels.dtype, tuple(pixels.shape)) == (torch.uint8, (COUNT, 3, 224, 224))
    for i in range(COUNT):
        assert np.array_equal(pixels[i].numpy(), Pipeline()(Image.open(photos / f"{i}.png")))
    again, decoded = build()
    assert decoded == 0
    assert torch.equal(again, pixels)


def test_writing_to_the_tensor_never_reaches_the_file(build) -> None:
    pixels, _ = build()
    before = pixels[0, 0, 0, 0].item()
    pixels[0, 0, 0, 0] = 255 - before
    again, decoded = build()
    assert (again[0, 0, 0, 0].item(), decoded) == (before, 0)


def cut_short(cache: Path) -> None:
    path = only(cache, "*.u8")
    os.truncate(path, path.stat().st_size // 2)


def flip_one_bit(cache: Path) -> None:
    with only(cache, "*.u8").open("r+b") as file:
        file.seek(1000)
        byte = file.read(1)[0]
        file.seek(1000)
        file.write(bytes([byte ^ 1]))


def invert_the_last_image(cache: Path) -> None:
    path = only(cache, "*.u8")
    stored = np.fromfile(path, np.uint8)
    stored[: COUNT * math.prod(SHAPE)][-math.prod(SHAPE) :] ^= 255
    stored.tofile(path)


def few_checksums(cache: Path) -> None:
    path = only(cache, "*.u8")
    os.truncate(path, path.stat().st_size - 4)


def other_checksum(cache: Path) -> None:
    path = only(cache, "*.u8")
    path.write_bytes(path.read_bytes()[:-4] + b"crc!")


def lose_pixels(cache: Path) -> None:
    only(cache, "*.u8").unlink()


DAMAGE = (cut_short, flip_one_bit, invert_the_last_image, few_checksums, other_checksum, lose_pixels)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_store_is_built_again(build, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    pixels = build()[0].clone()
    damage(tmp_path / "cache")
    again, decoded = build()
    assert decoded == COUNT
    assert torch.equal(again, pixels)
    assert build()[1] == 0


def test_the_last_byte_of_a_large_store_is_compared_too(tmp_path: Path) -> None:
    """260 MB of zeros, which take no space on disk."""
    path, count = tmp_path / "large.u8", 1800
    checksums = np.full(count, crc32(bytes(math.prod(SHAPE))), store.CHECKSUM)
    with path.open("wb") as file:
        file.truncate(count * math.prod(SHAPE))
        file.seek(0, os.SEEK_END)
        file.write(checksums.tobytes())
        file.flush()
        assert store._read(path, count) is not None
        file.seek(count * math.prod(SHAPE) - 1)
        file.write(b"x")
    assert store._read(path, count) is None


def test_a_changed_file_or_pipeline_is_another_store(build, photos: Path, tmp_path: Path) -> None:
    first = build()[0].clone()
    Image.new("RGB", (30, 40), "red").save(photos / "3.png")
    changed, decoded = build()
    assert decoded == COUNT
    assert changed[3, 0].min() == 255
    assert torch.equal(changed[:3], first[:3])
    wraps = [((0.5,) * 3, (0.5,) * 3), ((0.5,) * 3, (0.25,) * 3)]
    assert [build(Pipeline("published", wrap=wrap))[1] for wrap in (*wraps, *wraps)] == [COUNT, COUNT, 0, 0]
    (photos / "0.png").unlink()
    assert build()[1] == COUNT - 1
    assert len(list((tmp_path / "cache").glob("*.u8"))) == 5


def test_name_size_time_and_box_each_change_the_key(photos: Path, tmp_path: Path) -> None:
    def stores_after(box: tuple[int, int, int, int], pipeline: Pipeline) -> int:
        files = [ImageFile(path.name, box) for path in sorted(photos.iterdir())[:1]]
        open_store("test", photos, files, pipeline, tmp_path / "cache")
        return len(list((tmp_path / "cache").glob("*.u8")))

    box, other, boxed = (0, 0, 20, 20), (0, 0, 20, 21), Pipeline("published", use_box=True)
    assert [stores_after(box, CLEAN), stores_after(other, CLEAN)] == [1, 1]  # boxes are not used
    assert [stores_after(box, boxed), stores_after(other, boxed)] == [2, 3]
    times = (photos / "0.png").stat()
    os.utime(photos / "0.png", ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    assert stores_after(box, CLEAN) == 4
    with (photos / "0.png").open("ab") as file:
        file.write(b"x")
    os.utime(photos / "0.png", ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    assert stores_after(box, CLEAN) == 5
    (photos / "0.png").rename(photos / "00.png")
    assert stores_after(box, CLEAN) == 6


def test_all_unreadable_images_are_named_and_other_stores_stay(build, photos: Path, tmp_path: Path) -> None:
    build()
    (photos / "1.png").write_bytes((photos / "1.png").read_bytes()[:-60])
    (photos / "4.png").write_text("no image")
    kept = only(tmp_path / "cache", "*.u8")
    with pytest.raises(UnreadableImageError, match=r"(?s)photos/1\.png.*photos/4\.png.*2 of 6 images"):
        build()
    assert list((tmp_path / "cache").glob("*.u8")) == [kept]
    assert not list((tmp_path / "cache").glob("*.partial"))


def test_a_full_disk_and_an_impossible_folder_are_explained(build, photos: Path, tmp_path: Path, monkeypatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DataError, match=r"\(1 MB\): .*No space left.*CONFITUNE_CACHE"):
            build()
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]
    assert build()[1] == COUNT
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="set cache_dir"):
        open_store("test", photos, [ImageFile("0.png")], Pipeline(), tmp_path / "file")


def test_works_where_the_file_system_has_no_locks(build, monkeypatch) -> None:
    monkeypatch.setattr(files.fcntl, "flock", no_locks)
    assert build()[1] == COUNT
    monkeypatch.setattr(files, "fcntl", None)
    assert build()[1] == 0


CHILD = """
import os, signal, sys, time
from pathlib import Path
from confitune.tasks.decode import Pipeline
from confitune.tasks.store import ImageFile, open_store

base, me, mode = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
files = [ImageFile(p.name) for p in sorted((base / "photos").iterdir())] * 60  # several chunks
calls = []

def progress(what, done, total):
    calls.append(what)
    if mode == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    while mode == "stay":
        (base / "decoding").touch()
        time.sleep(0.1)
    time.sleep(0.1)

(base / f"ready-{me}").touch()
while mode == "race" and len(list(base.glob("ready-*"))) < 2:
    time.sleep(0.01)
pixels = open_store("test", base / "photos", files, Pipeline(), base / "cache", progress)
print(sum(what.startswith("decoding") for what in calls), pixels[::45].long().sum().item())
"""


def start(base: Path, name: str, mode: str) -> subprocess.Popen:
    source = Path(confitune.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CHILD, str(base), name, mode]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_processes_at_once_decode_once(photos: Path, tmp_path: Path) -> None:
    children = [start(tmp_path, name, "race") for name in ("a", "b")]
    results = [child.communicate(timeout=240) for child in children]
    assert [child.returncode for child in children] == [0, 0], results
    (calls_a, sum_a), (calls_b, sum_b) = (out.split() for out, _ in results)
    assert sorted([int(calls_a), int(calls_b)]) == [0, 3]
    assert sum_a == sum_b
    assert len(list((tmp_path / "cache").glob("*.u8"))) == 1


def test_a_killed_process_leaves_nothing_in_the_way(photos: Path, tmp_path: Path) -> None:
    child = start(tmp_path, "a", "die")
    child.communicate(timeout=240)
    assert child.returncode == -9
    assert len(list((tmp_path / "cache").glob("*.partial"))) == 1
    assert not list((tmp_path / "cache").glob("*.u8"))
    files = [ImageFile(path.name) for path in sorted(photos.iterdir())] * 60
    pixels = open_store("test", photos, files, Pipeline(), tmp_path / "cache")
    assert torch.equal(pixels[:COUNT], pixels[-COUNT:])
    assert not list((tmp_path / "cache").glob("*.partial"))


def test_who_waits_says_so_and_goes_on_when_the_other_is_killed(photos: Path, tmp_path: Path) -> None:
    child = start(tmp_path, "a", "stay")
    while not (tmp_path / "decoding").exists():
        assert child.poll() is None, child.communicate()
        time.sleep(0.01)
    lock = only(tmp_path / "cache", "*.lock")
    said: list[str] = []

    def progress(what: str, done: int, total: int) -> None:
        said.append(what)
        if what.startswith("waiting"):
            child.kill()

    files = [ImageFile(path.name) for path in sorted(photos.iterdir())] * 60
    pixels = open_store("test", photos, files, Pipeline(), tmp_path / "cache", progress)
    assert child.wait() == -9
    assert said[0] == "waiting for another process to decode test"
    assert set(said[1:]) == {"decoding test"}
    assert len(pixels) == len(files)
    assert lock.exists()  # the file stays, but says nothing: the lock went with its process
