"""Which images train and which test, and which classes make which task: both fixed, the same in every run.

The paper fixes the split and the task partition for all runs; a run's own seed changes only the heads' initial
weights and the order of batches.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from confitune.errors import DataError

Ints = NDArray[np.int64]


def class_order(n_classes: int, seed: int = 0) -> list[int]:
    """The order in which classes are learned: what `torch.manual_seed(seed); torch.randperm(n_classes)` gives.

    Drawn from a generator of its own, so that the caller's random numbers are left alone.

    >>> class_order(10)
    [4, 1, 7, 5, 3, 9, 0, 8, 6, 2]
    """
    return list(torch.randperm(n_classes, generator=torch.Generator().manual_seed(seed)).tolist())


def cut_into_tasks(order: Sequence[int], classes_per_task: int) -> tuple[list[list[int]], list[int]]:
    """Consecutive groups of `classes_per_task` classes, and the classes left over.

    >>> cut_into_tasks([4, 1, 3, 0, 2], 2)
    ([[4, 1], [3, 0]], [2])
    """
    if classes_per_task < 2:
        raise DataError(f"classes_per_task is {classes_per_task}; a task needs two or more classes to tell apart")
    if classes_per_task > len(order):
        raise DataError(f"classes_per_task is {classes_per_task}, but there are only {len(order)} classes")
    used = len(order) - len(order) % classes_per_task
    groups = [list(order[first : first + classes_per_task]) for first in range(0, used, classes_per_task)]
    return groups, list(order[used:])


def stratified_split(
    labels: Sequence[int] | Ints, classes: Sequence[str], *, test_share: float = 0.2, seed: int = 0
) -> tuple[Ints, Ints]:
    """Positions of the training and of the test images, both ascending, with equal shares of every class.

    The split is scikit-learn's `train_test_split(range(n), stratify=labels, test_size=test_share, random_state=seed)`.
    A class too small to be in both parts is an error that names it: silently it would never be tested.

    >>> train, test = stratified_split([0, 0, 0, 0, 0, 1, 1, 1, 1, 1], ["cat", "dog"])
    >>> len(train), test.tolist()
    (8, [4, 8])
    """
    from sklearn.model_selection import train_test_split

    if not 0 < test_share < 1:
        raise DataError(f"test_share is {test_share}; it must lie between 0 and 1")
    labels = np.asarray(labels, dtype=np.int64)
    try:
        train, test = train_test_split(np.arange(len(labels)), stratify=labels, test_size=test_share, random_state=seed)
        complete = all(len(np.unique(labels[rows])) == len(classes) for rows in (train, test))
    except ValueError:  # a class of one image, or fewer test images than classes
        complete = False
    if not complete:
        # n * test_share of a class's n images are rounded down at worst, so this many are always enough.
        enough = max(math.ceil(1 / test_share), math.ceil(1 / (1 - test_share)))
        counts = np.bincount(labels, minlength=len(classes))
        small = [f"{classes[i]!r} ({counts[i]})" for i in np.flatnonzero(counts < enough).tolist()]
        raise DataError(
            f"too few images to train and to test on: {', '.join(small)}; give every class {enough} images or more, or "
            "make your own training and test sets"
        )
    return np.sort(train).astype(np.int64), np.sort(test).astype(np.int64)


def hold_out(labels: Tensor, share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Positions of the images that stay and of those held out to choose hyperparameters by, both ascending.

    The share is taken of every class and rounded; a class of two images or more gives at least one, and keeps at least
    one. A class with a single image keeps it.

    >>> labels = torch.tensor([0] * 20 + [1] * 3 + [2])
    >>> stay, held = hold_out(labels, 0.1, torch.Generator().manual_seed(0))
    >>> labels[stay].bincount().tolist(), labels[held].bincount().tolist()
    ([18, 2, 1], [2, 1])
    """
    if not 0 < share < 1:
        raise DataError(f"the share to hold out is {share}; it must lie between 0 and 1")
    out = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique().tolist():
        of_class = (labels == label).nonzero().flatten()
        count = min(max(1, math.floor(len(of_class) * share + 0.5)), len(of_class) - 1)
        out[of_class[torch.randperm(len(of_class), generator=generator)[:count]]] = True
    return (~out).nonzero().flatten(), out.nonzero().flatten()
