"""A user's own PyTorch datasets as tasks (the work behind `TaskSequence.from_datasets`).

Everything is read once into one tensor per task. That is fast for what fits into memory; larger data belongs into
folders (`load_tasks("folder:PATH", ...)`), which are kept in a memory-mapped store.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, Subset

from confitune.tasks.decode import to_rgb
from confitune.tasks.errors import DataError, Progress
from confitune.tasks.splits import stratified_split
from confitune.tasks.task import Images, Preprocess, Task


def task_from_dataset(
    data: Dataset[Any] | tuple[Dataset[Any], Dataset[Any]],
    name: str,
    preprocess: Preprocess,
    test_share: float,
    seed: int,
    class_names: Sequence[str] | None,
    progress: Progress | None,
) -> Task:
    """A task of one dataset, which is split, or of a pair (train, test)."""
    parts = data if isinstance(data, tuple) else (data,)  # only a tuple is a pair: a list may well be a dataset itself
    if len(parts) not in (1, 2):
        raise DataError(f"task {name!r}: expected a dataset or a tuple (train, test), got {len(parts)} datasets")
    pixels, labels = zip(*(_read(part, name, progress) for part in parts), strict=True)
    block = _alike(torch.cat, pixels, name)
    values = np.unique(labels[0])
    if strangers := sorted(set(labels[-1].tolist()) - set(values.tolist())):
        raise DataError(f"task {name!r}: the test set has labels that the training set lacks: {strangers}")
    names = _names(parts[0], values, name, class_names)
    found = np.searchsorted(values, np.concatenate(labels))
    if len(parts) == 1:
        splits = stratified_split(found, names, test_share=test_share, seed=seed)
    else:
        rows, count = np.arange(len(found), dtype=np.int64), len(labels[0])
        splits = rows[:count], rows[count:]
    train, test = (Images(block, torch.from_numpy(rows), torch.from_numpy(found[rows])) for rows in splits)
    return Task(name, names, train, test, preprocess)


def _read(dataset: Any, task: str, progress: Progress | None) -> tuple[Tensor, np.ndarray]:
    """All images of a dataset as one tensor, and all labels."""
    try:
        count = len(dataset)
    except TypeError as error:
        raise DataError(f"task {task!r}: {type(dataset).__name__} has no length; give a map-style dataset") from error
    if count == 0:
        raise DataError(f"task {task!r}: the dataset is empty")
    images, labels = [], []
    for index in range(count):
        item = dataset[index]
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise DataError(
                f"task {task!r}: item {index} is {type(item).__name__}, not (image, label); "
                "a training and a test set go together as a tuple (train, test)"
            )
        images.append(_as_tensor(item[0], task, index))
        try:
            labels.append(operator.index(item[1]))
        except TypeError:
            raise DataError(f"task {task!r}: label {index} is {item[1]!r}; expected an integer") from None
        if progress is not None and ((index + 1) % 256 == 0 or index + 1 == count):
            progress(f"reading {task}", index + 1, count)
    return _alike(torch.stack, images, task), np.array(labels, dtype=np.int64)


def _as_tensor(image: Any, task: str, index: int) -> Tensor:
    if isinstance(image, Image.Image):
        return torch.from_numpy(np.array(to_rgb(image))).permute(2, 0, 1).contiguous()
    got = type(image).__name__
    if isinstance(image, Tensor):
        got, fits = f"{image.dtype} {list(image.shape)}", image.dtype == torch.uint8 or image.is_floating_point()
        if fits and image.ndim == 3 and image.shape[0] in (1, 3):
            return image.detach().cpu().expand(3, -1, -1)
    raise DataError(
        f"task {task!r}: image {index} is {got}; expected a PIL image, a uint8 tensor [C,H,W] with one or three "
        "channels (torchvision.transforms.PILToTensor makes one), or a float tensor that is already normalised"
    )


def _names(dataset: Any, values: np.ndarray, task: str, given: Sequence[str] | None) -> tuple[str, ...]:
    if given is not None:
        if len(given) != len(values):
            raise DataError(f"task {task!r} has {len(values)} labels {values.tolist()} but {len(given)} class names")
        return tuple(given)
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    known = getattr(dataset, "classes", None)
    if isinstance(known, Sequence) and values.min() >= 0 and values.max() < len(known):
        return tuple(str(known[value]) for value in values)
    return tuple(str(value) for value in values)


def _alike(together: Callable[[list[Tensor]], Tensor], images: Sequence[Tensor], task: str) -> Tensor:
    try:
        if len({image.dtype for image in images}) > 1:
            raise RuntimeError("some are bytes and some floats")
        return together(list(images))
    except RuntimeError as error:
        raise DataError(
            f"task {task!r}: {error}; give the datasets a transform that makes all images alike, e.g. "
            "Compose([Resize(256), CenterCrop(224)])"
        ) from error
