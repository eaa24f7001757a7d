"""A task: some classes, their training and test images, and how the images become network input.

Tasks of one dataset share one block of pixels (usually a file mapped into memory) and differ in the rows they use,
so twenty tasks cost no more memory than one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from confitune.tasks.errors import DataError
from confitune.tasks.preprocess import Preprocess


@dataclass(frozen=True, eq=False, repr=False)
class Images:
    """One split (train or test) of one task.

    Args:
        pixels: uint8 [M,3,H,W] (or float, already normalised), possibly a memory map shared by all tasks.
        rows: int64 [N], which rows of `pixels` belong to this split.
        labels: int64 [N], their classes, counted from 0 within the task.

    >>> images = Images(torch.zeros(5, 3, 2, 2, dtype=torch.uint8), torch.tensor([1, 4]), torch.tensor([0, 1]))
    >>> len(images)
    2
    >>> pixels, labels = images.batch(torch.tensor([1]))
    >>> list(pixels.shape), labels.tolist()
    ([1, 3, 2, 2], [1])
    """

    pixels: Tensor
    rows: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if self.pixels.ndim != 4 or self.pixels.shape[1] != 3:
            raise DataError(f"pixels must be [M, 3, H, W]: got {list(self.pixels.shape)}")
        if self.pixels.dtype != torch.uint8 and not self.pixels.is_floating_point():
            raise DataError(f"pixels must be uint8, or float and already normalised: got {self.pixels.dtype}")
        if self.rows.dtype != torch.int64 or self.labels.dtype != torch.int64:
            raise DataError(f"rows and labels must be int64: got {self.rows.dtype} and {self.labels.dtype}")
        if self.rows.ndim != 1 or self.rows.shape != self.labels.shape:
            raise DataError(
                f"rows and labels must be two lists of one length: got {list(self.rows.shape)} "
                f"and {list(self.labels.shape)}"
            )
        if len(self.rows) and not 0 <= int(self.rows.min()) <= int(self.rows.max()) < len(self.pixels):
            raise DataError(
                f"rows reach from {int(self.rows.min())} to {int(self.rows.max())}, but there are only "
                f"{len(self.pixels)} images"
            )

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"Images({len(self)} of {str(self.pixels.dtype).removeprefix('torch.')} {list(self.pixels.shape)})"

    def only(self, positions: Tensor) -> Images:
        """The images at `positions` (int64, 0..len-1), of the same pixels."""
        return Images(self.pixels, self.rows[positions], self.labels[positions])

    def batch(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Pixels and labels at `positions` (int64, 0..len-1), on the devices where `pixels` and `labels` are."""
        positions = positions.to(self.rows.device)
        return self.pixels[self.rows[positions].to(self.pixels.device)], self.labels[positions]


@dataclass(frozen=True, eq=False)
class Task:
    """Classes to tell apart, and the images to learn and to test that with.

    Args:
        name: unique in its sequence.
        classes: names; a label is an index into them.
        train: images to learn from.
        test: images to test with.
        preprocess: turns a batch of pixels into network input.
        groups: (first, stop) class ranges of the tasks that were merged into this one, for joint training;
            empty for an ordinary task.
    """

    name: str
    classes: tuple[str, ...]
    train: Images
    test: Images
    preprocess: Preprocess
    groups: tuple[tuple[int, int], ...] = ()

    def inputs(self, pixels: Tensor) -> Tensor:
        """What the network takes of stored pixels, channels last."""
        return self.preprocess(pixels).contiguous(memory_format=torch.channels_last)

    def __post_init__(self) -> None:
        if not self.name:
            raise DataError("a task needs a name")
        if len(self.classes) < 2:
            raise DataError(f"task {self.name!r} has the classes {list(self.classes)}; it needs two or more")
        if len(set(self.classes)) != len(self.classes):
            twice = sorted({c for c in self.classes if self.classes.count(c) > 1})
            raise DataError(f"task {self.name!r} has two classes of the same name: {twice}")
        for split, images in (("training", self.train), ("test", self.test)):
            if len(images) == 0:
                raise DataError(f"task {self.name!r} has no {split} images")
            low, high = int(images.labels.min()), int(images.labels.max())
            if low < 0 or high >= len(self.classes):
                raise DataError(
                    f"task {self.name!r} has {len(self.classes)} classes, "
                    f"but its {split} labels reach from {low} to {high}"
                )
        edges = [0, *(stop for _, stop in self.groups)]
        if self.groups and (
            edges[-1] != len(self.classes) or any(first != edges[i] for i, (first, _) in enumerate(self.groups))
        ):
            raise DataError(f"groups of task {self.name!r} must cover its {len(self.classes)} classes: {self.groups}")
