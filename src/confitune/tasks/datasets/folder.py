"""`folder:PATH`: a user's own images, one folder for each class.

Either PATH/train/CLASS/... and PATH/test/CLASS/..., or PATH/CLASS/... alone, which is split 80/20 within each class,
the same way every time. Names starting with a dot and files that are no images are passed over; folders inside a
class folder belong to the class.
"""

import os
from collections import Counter
from hashlib import blake2b
from pathlib import Path

import numpy as np

from confitune.errors import DataError, DataMissingError
from confitune.tasks.datasets.dataset import ImageSet
from confitune.tasks.decode import is_image_name
from confitune.tasks.splits import stratified_split
from confitune.tasks.store import ImageFile

LAYOUT = "A folder needs train/ and test/ with one folder of images per class in each, or such class folders directly"


def read_folder(path: Path, least: int = 2, without: frozenset[str] = frozenset()) -> ImageSet:
    """All images, class by class in sorted order, each class's files sorted by name.

    Args:
        least: how many classes there must be; with 1, a folder of images alone is a class with the folder's name.
        without: class folders and files to leave out, named from `path`.
    """
    if not os.path.isdir(path):  # also for a path that is too long, where pathlib raises
        raise DataMissingError(f"the folder {path} is not there; write folder:PATH with the path of your images")
    split = [name for name in ("train", "test") if folders_in(path / name)]
    if len(split) == 1 and set(folders_in(path)) <= {"train", "test", "val", "valid", "validation"}:
        other = "test" if split == ["train"] else "train"
        raise DataError(
            f"{path} has class folders in {split[0]}/ but not in {other}/; add them there, or put the class folders "
            f"directly into {path}, and a fifth of each class is held out for testing"
        )
    places = [path / name for name in split] if len(split) == 2 else [path]
    parts = [_class_folders(path, place, least, without) for place in places]
    classes = tuple(parts[0])
    for place, part in zip(places, parts, strict=True):
        if lacking := sorted({name for other in parts for name in other} - part.keys()):
            raise DataError(
                f"{place} has no folder for the classes {lacking}; train/ and test/ must have the same classes: add or "
                "remove folders"
            )
    labels = [np.repeat(np.arange(len(classes)), [len(files) for files in part.values()]) for part in parts]
    whole = np.concatenate(labels)
    if len(parts) == 2:
        train, test = np.split(np.arange(len(whole)), [len(labels[0])])
    else:
        train, test = stratified_split(whole, classes)
    files = tuple(file for part in parts for files in part.values() for file in files)
    return ImageSet(classes, whole, train, test, folder=path, files=files)


def _class_folders(root: Path, path: Path, least: int, without: frozenset[str]) -> dict[str, list[ImageFile]]:
    """The files (named from `root`) of each class folder in `path`."""

    def images_in(folder: Path) -> list[ImageFile]:
        names = (file.relative_to(root).as_posix() for file in images_below(folder))
        return [ImageFile(name) for name in names if name not in without]

    classes = [name for name in folders_in(path) if name not in without]
    if least == 1 and not classes and (alone := images_in(path)):
        return {path.resolve().name: alone}
    if len(classes) < least:
        there = "one class folder" if classes else "no class folders"
        raise DataError(f"{path} has {there}; {least} or more are needed. {LAYOUT}")
    seen: dict[str, str] = {}
    for name in classes:
        if (other := seen.setdefault(name.casefold().strip(), name)) != name:
            raise DataError(
                f"the class folders {other!r} and {name!r} in {path} differ only in case or spaces; rename one"
            )
    found = {name: images_in(path / name) for name in classes}
    if empty := [name for name in classes if not found[name]]:
        inside = ", only folders without images" if folders_in(path / empty[0]) else ""
        raise DataError(f"the class folder {path / empty[0]} has no images{inside}. Fill or remove it. {LAYOUT}")
    return found


def in_two_classes(images: ImageSet) -> list[tuple[str, ...]]:
    """Names of files with the very same content whose classes differ."""
    same: dict[tuple[int, bytes], list[int]] = {}
    sizes = [(images.folder / file.name).stat().st_size for file in images.files]
    shared = {size for size, count in Counter(sizes).items() if count > 1}
    for place, (file, size) in enumerate(zip(images.files, sizes, strict=True)):
        if size in shared:
            content = blake2b((images.folder / file.name).read_bytes(), digest_size=16).digest()
            same.setdefault((size, content), []).append(place)
    return [
        tuple(images.files[place].name for place in places)
        for places in same.values()
        if len({int(images.labels[place]) for place in places}) > 1
    ]


def images_below(folder: Path) -> list[Path]:
    """Image files in a folder and in the folders inside it, sorted; hidden ones do not count."""
    # A broken link is listed too: it is then reported as unreadable instead of silently left out.
    found = (path for path in folder.rglob("*") if is_image_name(path.name) and not path.is_dir())
    shown = (path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts))
    return sorted(shown, key=lambda path: path.relative_to(folder).as_posix())


def folders_in(path: Path) -> list[str]:
    """Names of the folders in a folder, sorted, without hidden ones."""
    if not path.is_dir():
        return []
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
