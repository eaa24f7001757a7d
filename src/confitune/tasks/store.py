"""The decode-once image store: a dataset's images as one file of bytes, mapped into memory.

Decoding JPEGs takes longer than a training step on a small network, and each run would do it again in each epoch.
So a dataset is decoded once, on all cores, to `NAME-KEY.u8` (bytes [M,3,H,W]) with a small `NAME-KEY.json` beside it
(shape, checksums, pipeline). KEY is made from the folder, the names, sizes and modification times of all files and
from everything in the pipeline that changes bytes: a changed file or another pipeline is another store. Stores can
be deleted at any time; they are built again.
"""

import json
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import IO
from zlib import crc32

import torch
from torch import Tensor

from confitune.errors import DataError, UnreadableImageError
from confitune.files import exclusive, remove_partial, write_whole
from confitune.tasks.decode import CROP, Box, Pipeline, Progress, open_rgb

FORMAT = 2  # raise when the file's layout or the decoding changes, so that older stores are not read
CHUNK = 128  # images decoded between two writes: enough to keep all cores busy, little memory


@dataclass(frozen=True)
class ImageFile:
    """One image of a dataset: its file below the dataset's folder, and a bounding box where the dataset has them."""

    name: str
    box: Box | None = None


def open_store(
    name: str,
    folder: Path,
    files: Sequence[ImageFile],
    pipeline: Pipeline,
    cache_dir: Path,
    progress: Progress | None = None,
) -> Tensor:
    """All images of `files` (below `folder`) as uint8 [M,3,H,W], mapped from the store, which is built if need be.

    A store that was cut short or damaged is recognised when it is opened, and built again: every image has a checksum,
    and comparing them takes less than half a second for a gigabyte. Several processes may call this at once: one
    builds, the others wait and then read. A store appears under its name only when it is complete.

    The tensor is a private mapping: pages are read when they are used and shared between processes; writing to it
    never reaches the file.
    """

    def say(what: str, done: int) -> None:
        if progress is not None:
            progress(f"{what} {name}", done, len(files))

    place = cache_dir / f"{name}-{pipeline.name}-{_key(folder, files, pipeline)}"
    shape = (len(files), 3, CROP, CROP)
    stored = _read(place, shape)
    if stored is not None:
        return stored
    try:
        with exclusive(Path(f"{place}.lock"), lambda: say("waiting for another process to decode", 0)) as held:
            stored = _read(place, shape)  # another process may have built it meanwhile
            if stored is None:
                if held:  # nobody else is writing: what lies here was left by a process that was killed
                    remove_partial(cache_dir, place.name)
                _build(place, folder, files, pipeline, shape, lambda done: say("decoding", done))
                stored = _read(place, shape)
    except OSError as error:
        raise DataError(
            f"cannot write the image store {place}.u8 ({math.prod(shape) / 2**20:.0f} MB): {error}; "
            "free some space or set cache_dir (or CONFITUNE_CACHE) to another folder"
        ) from error
    if stored is None:
        raise DataError(f"the image store {place}.u8 was written but reads back differently; check the disk")
    return stored


def _key(folder: Path, files: Sequence[ImageFile], pipeline: Pipeline) -> str:
    """Changes whenever a file, the list of files or the pipeline does.

    The folder itself is part of it: unpacked archives often give all files one time, and uncompressed images all
    have one size, so two datasets can look alike in everything else.
    """
    digest = blake2b(digest_size=10)
    digest.update(json.dumps([FORMAT, str(folder.resolve()), pipeline.describe()]).encode())
    for file in files:
        try:
            status = (folder / file.name).stat()
        except OSError as error:
            raise UnreadableImageError(
                f"cannot read the image {folder / file.name}: {error.strerror}", [file.name]
            ) from error
        box = file.box if pipeline.use_box else None
        digest.update(json.dumps([file.name, status.st_size, status.st_mtime_ns, box]).encode())
    return digest.hexdigest()


def _read(place: Path, shape: tuple[int, ...]) -> Tensor | None:
    """The store's images, or None where there is no complete and undamaged store."""
    pixels = Path(f"{place}.u8")
    size = math.prod(shape)
    try:
        header = json.loads(Path(f"{place}.json").read_text())
        if header["shape"] != list(shape) or pixels.stat().st_size != size:
            return None
        images = torch.from_file(str(pixels), shared=False, size=size, dtype=torch.uint8).view(shape)
        return images if _are_whole(images, header["crc32"]) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _are_whole(images: Tensor, checksums: list[int]) -> bool:
    """On all cores: zlib works outside Python's lock."""

    def same(first: int) -> bool:
        part = images[first : first + CHUNK]
        return [crc32(image.numpy()) for image in part] == checksums[first : first + CHUNK]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return len(checksums) == len(images) and all(pool.map(same, range(0, len(images), CHUNK)))


def _build(
    place: Path,
    folder: Path,
    files: Sequence[ImageFile],
    pipeline: Pipeline,
    shape: tuple[int, ...],
    decoded: Callable[[int], None],
) -> None:
    checksums: list[int] = []
    broken: dict[str, str] = {}  # files that cannot be read, and why

    def decode(file: ImageFile) -> bytes:
        try:
            return pipeline(open_rgb(folder / file.name), file.box).tobytes()
        except UnreadableImageError as error:
            broken[file.name] = str(error)
        except Exception as error:  # e.g. an empty bounding box
            broken[file.name] = f"cannot resize and crop the image {folder / file.name}: {error}"
        return b""

    def write_pixels(out: IO[bytes]) -> None:
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow decodes and resizes outside Python's lock
            for first in range(0, len(files), CHUNK):
                chunk = files[first : first + CHUNK]
                for image in pool.map(decode, chunk):
                    out.write(image)
                    checksums.append(crc32(image))
                decoded(first + len(chunk))
        if broken:  # all of them at once: one run for each broken file would be tedious
            listed = "\n".join(broken[name] for name in sorted(broken)[:20])
            message = f"{listed}\n{len(broken)} of {len(files)} images; replace or remove them"
            raise UnreadableImageError(message, broken)

    # The header is written last: it says that the pixels beside it are complete.
    Path(f"{place}.json").unlink(missing_ok=True)
    write_whole(Path(f"{place}.u8"), write_pixels)
    header = {
        "format": FORMAT,
        "shape": list(shape),
        "crc32": checksums,
        "folder": str(folder.resolve()),
        "pipeline": {"name": pipeline.name, **pipeline.describe()},
    }
    write_whole(Path(f"{place}.json"), lambda out: out.write(json.dumps(header, indent=1).encode()))
