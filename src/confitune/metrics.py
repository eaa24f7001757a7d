"""Metrics of continual learning: pure functions of the accuracy matrix.

`accuracy[i, j]` is the accuracy in percent on task `i` after training task `j`: a T x T matrix, NaN where nothing was
measured. What lies below the diagonal (a task before it was learned) is never read. Every metric needs the last column;
a run that has nothing else (joint training, which learns all tasks at once) has an average accuracy, and NaN for
whatever depends on the moment a task was learned.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray


class MeanInterval(NamedTuple):
    """A mean over `n` values and the half width of its 95% confidence interval (NaN where `n` is 1)."""

    mean: float
    half_width: float
    n: int


def average_accuracy(accuracy: ArrayLike) -> float:
    """Mean accuracy over all tasks after the last one (ACC).

    `ACC = 1/T * sum_i a[i, T-1]`

    >>> average_accuracy([[90.0, 80.0], [np.nan, 95.0]])
    87.5
    """
    return float(_checked(accuracy)[:, -1].mean())


def average_forgetting(accuracy: ArrayLike) -> float:
    """How much of their best accuracy the earlier tasks lost, on average (FGT, never negative).

    `FGT = 1/(T-1) * sum_{i<T-1} (max_{j>=i} a[i, j] - a[i, T-1])`

    The best accuracy counts from the moment the task was learned. A single task has nothing to forget: 0. NaN where an
    entry on or above the diagonal is missing, since the best accuracy is then unknown.

    >>> average_forgetting([[90.0, 80.0], [np.nan, 95.0]])
    10.0
    """
    matrix = _checked(accuracy)
    lost = [row[task:].max() - row[-1] for task, row in enumerate(matrix[:-1])]
    return float(np.mean(lost)) if lost else 0.0


def learning_accuracy(accuracy: ArrayLike) -> float:
    """Mean accuracy of each task right after it was learned: how well the method learns, forgetting aside.

    `LA = 1/T * sum_i a[i, i]`

    >>> learning_accuracy([[90.0, 80.0], [np.nan, 95.0]])
    92.5
    """
    return float(_checked(accuracy).diagonal().mean())


def backward_transfer(accuracy: ArrayLike) -> float:
    """How later tasks changed the earlier ones, on average (BWT): negative is loss, positive is gain.

    `BWT = 1/(T-1) * sum_{i<T-1} (a[i, T-1] - a[i, i])`

    A single task has no later one: 0.

    >>> backward_transfer([[90.0, 80.0], [np.nan, 95.0]])
    -10.0
    """
    matrix = _checked(accuracy)
    if len(matrix) == 1:
        return 0.0
    return float((matrix[:-1, -1] - matrix.diagonal()[:-1]).mean())


def average_accuracy_curve(accuracy: ArrayLike) -> NDArray[np.float64]:
    """Mean accuracy on the tasks learned so far, after each task.

    `curve[j] = 1/(j+1) * sum_{i<=j} a[i, j]`

    The last of the T values is the average accuracy. NaN where a column is incomplete.

    >>> average_accuracy_curve([[90.0, 80.0], [np.nan, 95.0]])
    array([90. , 87.5])
    """
    matrix = _checked(accuracy)
    return np.array([matrix[: task + 1, task].mean() for task in range(len(matrix))])


def mean_and_interval(values: ArrayLike) -> MeanInterval:
    """Mean over seeds with its 95% confidence interval (Student t).

    `half_width = t_{0.975, n-1} * s / sqrt(n)`, with `s` the sample standard deviation (`n - 1` degrees of freedom).
    One value says nothing about its spread: `half_width` is NaN.

    >>> mean, half_width, n = mean_and_interval([86.0, 87.0, 88.0])
    >>> mean, round(half_width, 3), n
    (87.0, 2.484, 3)
    """
    from scipy.special import stdtrit

    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1 or sample.size == 0:
        raise ValueError(f"expected a list of at least one number, got shape {sample.shape}")
    n = sample.size
    if n == 1:
        return MeanInterval(float(sample[0]), float("nan"), 1)
    half_width = stdtrit(n - 1, 0.975) * sample.std(ddof=1) / np.sqrt(n)
    return MeanInterval(float(sample.mean()), float(half_width), n)


def _checked(accuracy: ArrayLike) -> NDArray[np.float64]:
    matrix = np.asarray(accuracy, dtype=np.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or matrix.size == 0:
        raise ValueError(f"an accuracy matrix is square, tasks x tasks, but this one has shape {matrix.shape}")
    missing = np.flatnonzero(np.isnan(matrix[:, -1]))
    if missing.size:
        raise ValueError(
            f"the accuracy after the last task is missing for task(s) {missing.tolist()} of {len(matrix)}, "
            "counted from 0: the run is not finished"
        )
    tolerance = 1e-3  # single precision around 100
    if np.any((matrix < -tolerance) | (matrix > 100 + tolerance)):
        low, high = np.nanmin(matrix), np.nanmax(matrix)
        raise ValueError(f"accuracies are in percent, 0 to 100, but this matrix spans {low:g} to {high:g}")
    return matrix
