"""`load_tasks`: a name in, a sequence of tasks out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from confitune.tasks.catalog import DATASETS
from confitune.tasks.datasets import read_dataset
from confitune.tasks.errors import DataError
from confitune.tasks.joined import Part, dataset_parts, is_whole_dataset
from confitune.tasks.pipelines import CROP, Pipeline
from confitune.tasks.preprocess import Preprocess
from confitune.tasks.progress import Progress
from confitune.tasks.sequence import TaskSequence
from confitune.tasks.source import Source, label_of, make_task, pipeline_of, stored_pixels
from confitune.tasks.task import Task


def load_tasks(
    name: str,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    data_dir: Path | None = None,
    cache_dir: Path | None = None,
    pipeline: str = "clean",
    order_seed: int = 0,
    tasks: int | None = None,
    classes_per_task: int | None = None,
    download: bool = True,
    progress: Progress | None = None,
) -> TaskSequence:
    """A dataset, or tasks of several, as a sequence of tasks, always split and ordered in the same way.

    Args:
        name: one of `DATASETS` (cifar100, cub200, caltech101, flowers102, photos, digits) or "folder:PATH", or parts of
            them joined by '+', each with the tasks to take of it, counted from 1: "photos:1-2+digits:1+photos:3-5". A
            part without tasks is all of them. Tasks are then called "photos-task1", "digits-task1", ...; each keeps
            its dataset's size of images. A folder whose path has a '+' can only stand alone.
        mean: of the backbone's own preprocessing, per channel, for values in [0, 1].
        std: likewise.
        data_dir: the folder that holds `flowers-102/` and the like (torchvision's `root`), or that folder itself;
            default `$CONFITUNE_DATA` or `~/.cache/confitune/data`.
        cache_dir: where decoded images are kept (1.2 GB for flowers102); default `$CONFITUNE_CACHE` or
            `~/.cache/confitune/store`.
        pipeline: "clean", or "published" for the treatment behind the paper's numbers (see `pipelines.py`), which every
            part must have.
        order_seed: of the order of classes, and so of which classes make a task; the paper's is 0. The same in every
            part.
        tasks: only the first so many tasks, of all parts together. Parts after them are not read.
        classes_per_task: in every part; default as in `DATASETS`; for a folder a fifth of its classes, or 2 if it has
            fewer than 10. Classes left over when cutting are not used; `TaskSequence.unused_classes` names them.
        download: fetch a dataset that is not there, where that is possible (all of the paper's but cub200).
        progress: called as progress(what, done, total) while images are decoded.

    Raises:
        DataError: whatever is wrong with the data or the arguments, with the file, folder or option to look at.
    """
    parts = dataset_parts(name)
    preprocess = Preprocess(tuple(map(float, mean)), tuple(map(float, std)))
    treatments = {part.key: pipeline_of(part.info, pipeline, preprocess) for part in parts}
    joined = not is_whole_dataset(parts)
    sources: dict[str, Source] = {}
    places: list[tuple[str, int]] = []  # of each task: its source, and its place in it
    for part in parts:
        if tasks is not None and 0 < tasks <= len(places):
            break
        if part.key not in sources:
            sources[part.key] = Source.read(
                part.dataset,
                treatments[part.key],
                data_dir=data_dir,
                order_seed=order_seed,
                classes_per_task=classes_per_task,
                download=download,
            )
        places += [(part.key, index) for index in _taken(part, sources[part.key])]
    if tasks is not None and not 1 <= tasks <= len(places):
        counted = f"{name} has {len(places)} tasks" if joined else sources[parts[0].key].counted
        raise DataError(f"{counted}, so tasks={tasks} is impossible; give a number from 1 to {len(places)}")
    prefixes = _prefixes(sources) if joined else dict.fromkeys(sources, "")
    pixels = {key: source.pixels(cache_dir, progress) for key, source in sources.items()}
    made = [
        sources[key].task(index, prefixes[key] + sources[key].task_name(index), pixels[key], preprocess)
        for key, index in places[:tasks]
    ]
    unused = tuple(name for source in sources.values() for name in source.unused)
    return TaskSequence(name, pipeline, tuple(made), unused)


def load_folder_task(
    folder: Path,
    name: str,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    size: int = CROP,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> Task:
    """A folder of labelled images as one task, with all its classes in sorted order.

    Args:
        folder: one folder of images for each class, or train/ and test/ with such folders; see `datasets/folder.py`.
        name: of the task.
        mean: of the backbone's own preprocessing.
        std: likewise.
        size: of the network's input, in pixels; images are cut to 224 square ones first.
        cache_dir: as in `load_tasks`.
        progress: called as progress(what, done, total) while images are decoded.
    """
    info = DATASETS["folder"]
    images = read_dataset(info.name, folder.expanduser(), download=False)
    pixels = stored_pixels(label_of(info, folder), images, Pipeline(), cache_dir, progress)
    ready = Preprocess.of_cut(mean, std, size)
    return make_task(name, images, range(len(images.classes)), pixels, ready)


def _taken(part: Part, source: Source) -> range:
    """Places of the tasks that a part takes."""
    if part.tasks is None:
        return range(len(source.groups))
    first, last = part.tasks
    if last > len(source.groups):
        raise DataError(f"{source.counted}, so {part} is impossible; take tasks from 1 to {len(source.groups)}")
    return range(first - 1, last)


def _prefixes(sources: Mapping[str, Source]) -> dict[str, str]:
    """What names of tasks begin with; folders of the same name are numbered."""
    found: dict[str, str] = {}
    for key, source in sources.items():
        prefix, number = f"{source.label}-", 2
        while prefix in found.values():
            prefix, number = f"{source.label}-{number}-", number + 1
        found[key] = prefix
    return found
