"""The decode-once image store: a dataset's images as one file of bytes, mapped into memory.

Decoding JPEGs takes longer than a training step on a small network, and each run would do it again in each epoch.
So a dataset is decoded once, on all cores, to `NAME-KEY.u8`: bytes [M,3,H,W], then a CRC-32 of each image. KEY is made
from the folder, the names, sizes and modification times of all files and the pipeline: a changed file or another
pipeline is another store. Stores can be deleted at any time; they are built again.
"""

import json
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import IO
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from confitune.errors import DataError, UnreadableImageError
from confitune.files import exclusive, remove_partial, write_whole
from confitune.tasks.decode import CROP, Box, Pipeline, Progress, open_rgb

FORMAT = 3  # raise when the file's layout or the decoding changes, so that older stores are not read
CHECKSUM = "<u4"
SHAPE = (3, CROP, CROP)
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

    path = cache_dir / f"{name}-{pipeline.name}-{_key(folder, files, pipeline)}.u8"
    stored = _read(path, len(files))
    if stored is not None:
        return stored
    try:
        with exclusive(path.with_suffix(".lock"), lambda: say("waiting for another process to decode", 0)) as held:
            stored = _read(path, len(files))  # another process may have built it meanwhile
            if stored is None:
                if held:  # nobody else is writing: what lies here was left by a process that was killed
                    remove_partial(cache_dir, path.stem)
                write_whole(path, lambda out: _decode(out, folder, files, pipeline, lambda done: say("decoding", done)))
                stored = _read(path, len(files))
    except OSError as error:
        raise DataError(
            f"cannot write the image store {path} ({len(files) * math.prod(SHAPE) / 2**20:.0f} MB): {error}; "
            "free some space or set cache_dir (or CONFITUNE_CACHE) to another folder"
        ) from error
    if stored is None:
        raise DataError(f"the image store {path} was written but reads back differently; check the disk")
    return stored


def _key(folder: Path, files: Sequence[ImageFile], pipeline: Pipeline) -> str:
    """Changes whenever a file, the list of files or the pipeline does.

    The folder itself is part of it: unpacked archives often give all files one time, and uncompressed images all
    have one size, so two datasets can look alike in everything else.
    """
    digest = blake2b(digest_size=10)
    digest.update(json.dumps([FORMAT, str(folder.resolve()), asdict(pipeline)]).encode())
    for file in files:
        try:
            status = (folder / file.name).stat()
        except OSError as error:  # said now, not after the others were decoded
            why = f"cannot read the image {folder / file.name}: {error.strerror}"
            raise UnreadableImageError(why, [file.name]) from error
        box = file.box if pipeline.use_box else None
        digest.update(json.dumps([file.name, status.st_size, status.st_mtime_ns, box]).encode())
    return digest.hexdigest()


def _read(path: Path, count: int) -> Tensor | None:
    """So many images from a store, or None where there is no complete and undamaged one."""
    size = count * math.prod(SHAPE)
    try:
        if path.stat().st_size != size + 4 * count:
            return None
        whole = torch.from_file(str(path), shared=False, size=size + 4 * count, dtype=torch.uint8)
    except OSError:
        return None
    images, checksums = whole[:size].view(count, *SHAPE), whole[size:].numpy().view(CHECKSUM)

    def same(first: int) -> bool:
        part = slice(first, first + CHUNK)
        return np.array_equal([crc32(image.numpy()) for image in images[part]], checksums[part])

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # zlib works outside Python's lock
        return images if all(pool.map(same, range(0, count, CHUNK))) else None


def _decode(
    out: IO[bytes], folder: Path, files: Sequence[ImageFile], pipeline: Pipeline, decoded: Callable[[int], None]
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
    out.write(np.array(checksums, CHECKSUM).tobytes())
