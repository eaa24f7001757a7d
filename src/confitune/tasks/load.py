"""`load_tasks`: a name in, a sequence of tasks out."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from confitune.errors import DataError, UnreadableImageError
from confitune.tasks.datasets.dataset import DatasetInfo, ImageSet
from confitune.tasks.datasets.folder import in_two_classes, read_folder
from confitune.tasks.decode import CROP, Pipeline, Progress
from confitune.tasks.names import DATASETS, Part, dataset_parts
from confitune.tasks.sequence import TaskSequence
from confitune.tasks.splits import class_order, cut_into_tasks
from confitune.tasks.store import open_store
from confitune.tasks.task import Images, Preprocess, Task


def load_tasks(
    name: str,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    data_dir: Path | str | None = None,
    cache_dir: Path | str | None = None,
    pipeline: str = "clean",
    order_seed: int = 0,
    tasks: int | None = None,
    classes_per_task: int | None = None,
    download: bool = True,
    progress: Progress | None = None,
) -> TaskSequence:
    """Load a dataset, or tasks of several, as a sequence of tasks. The split and the order never change.

    Args:
        name: one of `DATASETS` (cifar100, cub200, caltech101, flowers102, photos, digits), "folder:PATH", your own
            function that returns a `TaskSequence` ("FILE.py:FUNCTION", see `names.py`),
            or several of these joined by '+', each with the tasks to use, counted from 1 (default: all):
            "photos:1-2+digits:1+photos:3-5". Tasks are then called "photos-task1", "digits-task1", ..., and each keeps
            the image size of its dataset. A path with a '+' can only stand alone.
        mean: channel means that the backbone expects, for values in [0, 1].
        std: channel standard deviations, likewise.
        data_dir: the folder that holds `flowers-102/` and the like (torchvision's `root`), or that folder itself;
            default `$CONFITUNE_DATA` or `~/.cache/confitune/data`.
        cache_dir: where decoded images are kept (1.2 GB for flowers102); default `$CONFITUNE_CACHE` or
            `~/.cache/confitune/store`.
        pipeline: "clean", or "published" for the preprocessing behind the paper's numbers (see `decode.py`); every
            dataset in `name` must have it.
        order_seed: seed of the class order, which decides the classes of each task (paper: 0). Your own function
            orders its tasks itself.
        tasks: use only the first N tasks of all datasets together; datasets after them are not read.
        classes_per_task: for every dataset; default as in `DATASETS`. A folder joined with others is one task, unless
            tasks of it are chosen; a folder alone gives tasks of a fifth of its classes each, or of 2 if it has fewer
            than 10. Leftover classes are not used; `TaskSequence.unused_classes` names them.
        download: download a dataset that is missing, where that is possible (all of the paper's but cub200).
        progress: called as progress(what, done, total) while images are decoded.

    Raises:
        DataError: the data or the arguments cannot be used; the message names the file, folder or option.
    """
    parts = dataset_parts(name)
    normalise = Preprocess(tuple(map(float, mean)), tuple(map(float, std)))
    pipelines = {part.key: _pipeline(part.info, pipeline, normalise) for part in parts}
    data = Path(os.path.expanduser(data_dir or _home("DATA", "data")))

    def read(part: Part) -> TaskSequence:
        info = part.info
        if info.read is None:
            if order_seed or classes_per_task is not None:
                raise DataError(f"{part.dataset} makes its tasks itself: leave order_seed and classes_per_task out")
            return part.call_own(normalise.mean, normalise.std, data)
        images = info.read(Path(part.folder or data), download)
        if pipelines[part.key].use_box and not all(file.box for file in images.files):
            raise DataError(
                f"{part.dataset}: there are no bounding boxes to cut images to, as the pipeline 'published' "
                "does; use 'clean', which takes whole images"
            )
        number = len(images.classes)
        alone = number // 5 if number >= 10 else 2
        usual = info.classes_per_task or (number if len(parts) > 1 and part.tasks is None else alone)
        per_task = usual if classes_per_task is None else classes_per_task
        try:
            groups, left = cut_into_tasks(class_order(number, order_seed), per_task)
        except DataError as error:
            raise DataError(f"{part.dataset}: {error}") from error
        pixels = _pixels(part.label, images, pipelines[part.key], cache_dir, progress)
        ready = replace(normalise, resize=images.resize, crop=images.crop)
        digits = len(str(len(groups)))
        made = [_task(f"task{i:0{digits}}", images, group, pixels, ready) for i, group in enumerate(groups, 1)]
        return TaskSequence(part.dataset, pipeline, tuple(made), tuple(images.classes[i] for i in left))

    joined = len(parts) > 1 or parts[0].tasks is not None
    sources: dict[str, TaskSequence] = {}
    labels: Counter[str] = Counter()
    chosen: list[Task] = []
    for part in parts:
        if tasks is not None and 0 < tasks <= len(chosen):
            break
        if part.key not in sources:
            source = read(part)
            labels[part.label] += 1  # datasets of the same label are numbered
            prefix = part.label + (f"-{labels[part.label]}" if labels[part.label] > 1 else "")
            named = (replace(task, name=f"{prefix}-{task.name}") for task in source)
            sources[part.key] = replace(source, tasks=tuple(named)) if joined else source
        source = sources[part.key]
        first, last = part.tasks or (1, len(source))
        if last > len(source):
            raise DataError(f"{part.dataset} has {len(source)} tasks, so {part.text} is impossible")
        chosen += source.tasks[first - 1 : last]
    if tasks is not None and not 1 <= tasks <= len(chosen):
        raise DataError(f"{name} has {len(chosen)} tasks, so tasks={tasks} is impossible; give 1 to {len(chosen)}")
    unused = tuple(left for source in sources.values() for left in source.unused_classes)
    return TaskSequence(name, pipeline, tuple(chosen[:tasks]), unused)


def load_folder_task(
    folder: Path | str,
    name: str,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    size: int = CROP,
    known: Sequence[str] = (),
    skip_broken: bool = False,
    cache_dir: Path | str | None = None,
    progress: Progress | None = None,
    note: Callable[[str], None] | None = None,
) -> Task:
    """Load a folder of labelled images as one task with all its classes, in sorted order.

    `mean`, `std`, `cache_dir` and `progress` are those of `load_tasks`.

    Args:
        folder: one folder of images per class, or train/ and test/ with such folders; see `datasets/folder.py`.
        size: of the network's input, in pixels; images are first cropped to 224 x 224.
        known: classes that the task already has; new ones come after them. One class is then enough, and a folder with
            images but no class folders is a class with the folder's name.
        skip_broken: leave out images that cannot be read, instead of raising an error that lists them.
        note: called with what was left out, and with photos that are in two classes.
    """
    broken: frozenset[str] = frozenset()
    while True:
        images = read_folder(Path(folder).expanduser(), least=1 if known else 2, without=broken)
        classes = (*known, *(name for name in images.classes if name not in known))
        places = np.array([classes.index(name) for name in images.classes])
        images = replace(images, classes=classes, labels=places[images.labels])
        try:
            pixels = _pixels(Part(str(folder), f"folder:{folder}").label, images, Pipeline(), cache_dir, progress)
            break
        except UnreadableImageError as error:
            if not (skip_broken and error.files):
                raise
            broken |= error.files
    if broken and note is not None:
        note(f"{len(broken)} images that cannot be read are left out: {', '.join(sorted(broken))}")
    twice = in_two_classes(images)
    if twice and note is not None:
        shown = "; ".join(" and ".join(names) for names in twice[:10]) + ("; ..." if len(twice) > 10 else "")
        note(f"{len(twice)} photos are in two classes or more, which cannot both be right: {shown}")
    return _task(name, images, range(len(images.classes)), pixels, Preprocess.of_cut(mean, std, size))


def _pipeline(info: DatasetInfo, name: str, preprocess: Preprocess) -> Pipeline:
    """How a dataset's image files are decoded; an error where it has no pipeline of that name."""
    if name not in info.pipelines:
        having = ", ".join(other.name for other in DATASETS.values() if name in other.pipelines)
        raise DataError(f"{info.name} has no {name!r} pipeline (those that have it: {having or 'none'}); use 'clean'")
    if name == "clean":
        return Pipeline()
    # The published code's double transform is in the code of these two sets only.
    wrap = (preprocess.mean, preprocess.std) if info.name in ("caltech101", "flowers102") else None
    return Pipeline(name, wrap=wrap, use_box=info.name == "cub200")


def _task(name: str, images: ImageSet, group: Sequence[int], pixels: Tensor, preprocess: Preprocess) -> Task:
    """A task of some of the classes."""
    place = np.full(len(images.classes), -1, dtype=np.int64)
    place[list(group)] = np.arange(len(group))

    def chosen(rows: np.ndarray) -> Images:
        labels = place[images.labels[rows]]
        return Images(pixels, torch.from_numpy(rows[labels >= 0]), torch.from_numpy(labels[labels >= 0]))

    classes = tuple(images.classes[i] for i in group)
    return Task(name, classes, chosen(images.train), chosen(images.test), preprocess)


def _pixels(
    label: str, images: ImageSet, pipeline: Pipeline, cache_dir: Path | str | None, progress: Progress | None
) -> Tensor:
    """Of all images; files are decoded once, into a store."""
    if images.pixels is not None:
        return images.pixels
    cache = Path(cache_dir or _home("CACHE", "store")).expanduser()
    return open_store(label, images.folder, images.files, pipeline, cache, progress)


def _home(variable: str, folder: str) -> Path:
    return Path(os.environ.get(f"CONFITUNE_{variable}") or Path.home() / ".cache" / "confitune" / folder)
