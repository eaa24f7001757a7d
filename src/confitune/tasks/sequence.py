"""A sequence of tasks, in the order in which they are learned, and how a user's own PyTorch datasets become one.

A user's datasets are read once into one tensor per task. That is fast for what fits into memory; larger data belongs
into folders (`load_tasks("folder:PATH", ...)`), which are kept in a memory-mapped store.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, overload
from zlib import crc32

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, Subset
from torchvision.transforms.functional import pil_to_tensor

from confitune.errors import DataError
from confitune.tasks.decode import Progress, to_rgb
from confitune.tasks.splits import hold_out, stratified_split
from confitune.tasks.task import IMAGENET_MEAN, IMAGENET_STD, Images, Preprocess, Task


@dataclass(frozen=True, eq=False)
class TaskSequence(Sequence[Task]):
    """Tasks in the order in which they are learned; indexed and sliced like a tuple.

    Get one from `load_tasks("flowers102", mean=..., std=...)` or from `TaskSequence.from_datasets(...)`.
    """

    name: str  # of the dataset, e.g. "flowers102", or of its parts, e.g. "photos:1-2+digits:1"
    pipeline: str  # how its images were treated: "clean", "published" or, for a user's own datasets, "own"
    tasks: tuple[Task, ...]  # with different names
    unused_classes: tuple[str, ...] = ()  # left over when the dataset was cut into tasks of equal size

    def __post_init__(self) -> None:
        if not self.tasks:
            raise DataError(f"the task sequence {self.name!r} is empty")
        names = [task.name for task in self.tasks]
        if len(set(names)) != len(names):
            raise DataError(f"two tasks of the sequence {self.name!r} have the same name: {names}")

    @cached_property
    def checksum(self) -> int:
        """Of all images and labels: it changes when a photo is replaced."""
        found = 0
        for images in (images for task in self for images in (task.train, task.test)):
            for positions in torch.arange(len(images)).split(256):
                for values in images.batch(positions):
                    found = crc32(values.cpu().contiguous().view(torch.uint8).numpy().tobytes(), found)
        return found

    def __len__(self) -> int:
        return len(self.tasks)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> TaskSequence: ...
    def __getitem__(self, index: int | slice) -> Task | TaskSequence:
        if isinstance(index, slice):
            return replace(self, tasks=self.tasks[index])
        return self.tasks[index]

    def require_joinable(self) -> None:
        """Refuse tasks that `joined` cannot make one of: one task has one size of stored images, and one preprocess."""
        splits = [(task.preprocess, images.pixels) for task in self for images in (task.train, task.test)]
        if len({(preprocess, pixels.dtype, pixels.shape[1:]) for preprocess, pixels in splits}) > 1:
            raise DataError(
                f"the tasks of {self.name!r} cannot be joined, as the method joint does: their images differ in size, "
                "type or preprocessing. Give all tasks images of one kind, or leave joint out"
            )

    def joined(self, by_name: bool = False) -> TaskSequence:
        """All tasks as one, with all classes and all data (joint training).

        `groups` of the joint task tells which classes came from which task, so that a class competes only with those
        of its own task. If two tasks have a class of the same name, all classes are named "task:class".

        Args:
            by_name: merge classes of the same name, and let all classes compete: there are no groups.
        """
        if len(self) == 1 and self[0].groups:
            return self
        self.require_joinable()
        names = [name for task in self for name in task.classes]
        if len(set(names)) != len(names) and not by_name:
            names = [f"{task.name}:{name}" for task in self for name in task.classes]
        place = {name: number for number, name in enumerate(dict.fromkeys(names))}
        places = torch.tensor([place[name] for name in names]).split([len(task.classes) for task in self])
        starts = accumulate((len(task.classes) for task in self), initial=0)
        whole = Task(
            name="joint",
            classes=tuple(place),
            train=_joined_images([task.train for task in self], places),
            test=_joined_images([task.test for task in self], places),
            preprocess=self[0].preprocess,
            groups=() if by_name else tuple(pairwise(starts)),
        )
        return replace(self, tasks=(whole,))

    def validating(self, share: float, seed: int = 0) -> TaskSequence:
        """The same tasks, tested on held-out training images, so that hyperparameters can be tuned.

        The share is the same in every class (see `hold_out`), and the split depends on nothing but the seed.
        """
        generator = torch.Generator().manual_seed(seed)
        tasks = []
        for task in self:
            stay, held = hold_out(task.train.labels.cpu(), share, generator)
            if not len(held):
                raise DataError(
                    f"task {task.name!r} has one training image per class, so none can be held out; give every class "
                    "two or more"
                )
            tasks.append(replace(task, train=task.train.only(stay), test=task.train.only(held)))
        return replace(self, tasks=tuple(tasks))

    @classmethod
    def from_datasets(
        cls,
        datasets: Sequence[Dataset[Any] | tuple[Dataset[Any], Dataset[Any]]],
        *,
        name: str = "own",
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        resize: int | None = None,
        crop: int | None = None,
        test_share: float = 0.2,
        seed: int = 0,
        class_names: Sequence[Sequence[str]] | None = None,
        task_names: Sequence[str] | None = None,
        progress: Progress | None = None,
    ) -> TaskSequence:
        """Tasks from your own PyTorch datasets, one task each, read into memory.

        Args:
            datasets: for each task a tuple (train, test) of map-style datasets, or one dataset that is split.
                Items are (image, label): a PIL image, a uint8 tensor [C,H,W] with C 1 or 3, or a float tensor [C,H,W]
                that your own transform has already resized and normalised. All images of a task must have one size.
            name: of the sequence, as it appears in results.
            mean: of the backbone, for PIL and uint8 images, as std; float images are not normalised again.
            resize: resize the short side of PIL and uint8 images on the fly, then `crop` their centre (`Preprocess`).
            test_share: part of a single dataset that is held out for testing, the same in every class.
            seed: of that split.
            class_names: for each task the names of its labels in ascending order. Default: `dataset.classes[label]`
                where the dataset has it (through `Subset` too), otherwise the label itself.
            task_names: default task1, task2, ...
            progress: called as progress(what, done, total) while reading.

        Labels may be any integers; they are mapped to 0..C-1 within each task, in ascending order.
        """
        preprocess = Preprocess(tuple(mean), tuple(std), resize, crop)
        for option, given in (("class_names", class_names), ("task_names", task_names)):
            if given is not None and len(given) != len(datasets):
                raise DataError(f"{option} has {len(given)} entries for {len(datasets)} tasks; give one for each task")
        tasks = []
        for index, data in enumerate(datasets):
            task = task_names[index] if task_names else f"task{index + 1}"
            parts = data if isinstance(data, tuple) else (data,)  # a list may be a dataset itself
            if len(parts) not in (1, 2):
                raise DataError(
                    f"task {task!r}: expected a dataset or a tuple (train, test), got {len(parts)} datasets"
                )
            read = [list(_items(part, task, progress)) for part in parts]
            pixels = _stacked([image for items in read for image, _ in items], task)
            labels = np.array([label for items in read for _, label in items], dtype=np.int64)
            train_labels, test_labels = np.split(labels, [len(read[0])])
            values = np.unique(train_labels)
            if strangers := sorted(set(test_labels.tolist()) - set(values.tolist())):
                raise DataError(f"task {task!r}: the test set has labels that the training set lacks: {strangers}")
            classes = tuple(class_names[index]) if class_names is not None else _class_names(parts[0], values)
            if len(classes) != len(values):
                raise DataError(
                    f"task {task!r} has {len(values)} labels {values.tolist()} but {len(classes)} class names"
                )
            found = np.searchsorted(values, labels)
            splits = np.split(np.arange(len(found), dtype=np.int64), [len(train_labels)])
            if len(parts) == 1:
                splits = list(stratified_split(found, classes, test_share=test_share, seed=seed))
            train, test = (Images(pixels, torch.from_numpy(rows), torch.from_numpy(found[rows])) for rows in splits)
            tasks.append(Task(task, classes, train, test, preprocess))
        return cls(name=name, pipeline="own", tasks=tuple(tasks))


def _joined_images(parts: Sequence[Images], places: Sequence[Tensor]) -> Images:
    """One `Images` of all parts; `places` are those of each part's classes among all classes."""
    blocks = list({id(part.pixels): part.pixels for part in parts}.values())
    first_rows = dict(zip(map(id, blocks), accumulate(map(len, blocks), initial=0), strict=False))
    return Images(
        # Tasks of one dataset share their pixels: then nothing is copied.
        pixels=blocks[0] if len(blocks) == 1 else torch.cat(blocks),
        rows=torch.cat([part.rows + first_rows[id(part.pixels)] for part in parts]),
        labels=torch.cat([mine.to(part.labels)[part.labels] for part, mine in zip(parts, places, strict=True)]),
    )


def _items(dataset: Any, task: str, progress: Progress | None) -> Iterator[tuple[Tensor, int]]:
    """The images of a dataset as tensors, and their labels."""
    try:
        count = len(dataset)
    except TypeError as error:
        raise DataError(f"task {task!r}: {type(dataset).__name__} has no length; give a map-style dataset") from error
    if count == 0:
        raise DataError(f"task {task!r}: the dataset is empty")
    for index in range(count):
        item = dataset[index]
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise DataError(
                f"task {task!r}: item {index} is {type(item).__name__}, not (image, label); "
                "a training and a test set go together as a tuple (train, test)"
            )
        try:
            label = operator.index(item[1])
        except TypeError:
            raise DataError(f"task {task!r}: label {index} is {item[1]!r}; expected an integer") from None
        yield _as_tensor(item[0], task, index), label
        if progress is not None and ((index + 1) % 256 == 0 or index + 1 == count):
            progress(f"reading {task}", index + 1, count)


def _as_tensor(image: Any, task: str, index: int) -> Tensor:
    got = type(image).__name__
    if isinstance(image, Image.Image):
        image = pil_to_tensor(to_rgb(image))
    if isinstance(image, Tensor):
        got = f"a {image.dtype} tensor of shape {list(image.shape)}"
        if image.is_floating_point():
            image = image.float()  # what networks compute in
        if image.dtype in (torch.uint8, torch.float32) and image.ndim == 3 and image.shape[0] in (1, 3):
            colour: Tensor = image.detach().cpu().expand(3, -1, -1)
            return colour
    raise DataError(
        f"task {task!r}: image {index} is {got}; expected a PIL image, a uint8 tensor [C,H,W] with one or three "
        "channels (torchvision.transforms.PILToTensor makes one), or a float tensor [C,H,W] that is already normalised"
    )


def _stacked(images: list[Tensor], task: str) -> Tensor:
    kinds = sorted({f"{image.dtype} {list(image.shape)}" for image in images})
    if len(kinds) > 1:
        raise DataError(
            f"task {task!r}: its images are of {len(kinds)} kinds, such as {kinds[0]} and {kinds[1]}; make them one "
            "type and size with the same transform for all, e.g. Compose([Resize(256), CenterCrop(224)])"
        )
    return torch.stack(images)


def _class_names(dataset: Any, labels: np.ndarray) -> tuple[str, ...]:
    """Of a dataset's labels: as the dataset calls them where it does."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    known = getattr(dataset, "classes", None)
    if isinstance(known, Sequence) and labels.min() >= 0 and labels.max() < len(known):
        return tuple(str(known[label]) for label in labels)
    return tuple(str(label) for label in labels)
