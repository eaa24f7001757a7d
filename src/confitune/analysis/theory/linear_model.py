"""The overparametrised linear model of propositions 2 and 3: y = v^T B x with B [k, d], v [k], n samples, k < n < d.

All functions take many instances at once: B [I, k, d], v [I, k], X [I, n, d]; w = B^T v [I, d] is the map they stand
for. The loss of a task with map w* in the worst case over ||x|| <= 1 is (v^T B x - w*^T x)^2 at its largest, that is
||B^T v - w*||^2.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def linear_map(features: Array, head: Array) -> Array:
    """w = B^T v: [I, k, d] and [I, k] -> [I, d]."""
    return np.asarray(np.einsum("ikd,ik->id", features, head))


def worst_case_error(features: Array, head: Array, target: Array) -> Array:
    """Square root of the worst-case loss, ||B^T v - w*||: [I]."""
    return np.asarray(np.linalg.norm(linear_map(features, head) - target, axis=1))


def orthonormal_rows(chance: np.random.Generator, instances: int, rows: int, columns: int) -> Array:
    """Random [I, rows, columns] with B B^T = identity."""
    return np.asarray(np.linalg.qr(chance.normal(size=(instances, columns, rows)))[0].swapaxes(1, 2))


def inputs(chance: np.random.Generator, instances: int, samples: int, columns: int) -> Array:
    """Gaussian X [I, n, d] of rows of length about 1."""
    return np.asarray(chance.normal(size=(instances, samples, columns)) / np.sqrt(columns))


def best_head(features: Array, x: Array, y: Array) -> Array:
    """Linear probing: the head with the smallest training loss on frozen features (least squares)."""
    return np.asarray(np.einsum("ikn,in->ik", np.linalg.pinv(x @ features.swapaxes(1, 2)), y))


def fine_tune(
    features: Array, head: Array, x: Array, y: Array, steps: int = 4000, tolerance: float = 1e-8
) -> tuple[Array, Array]:
    """Gradient descent on ||X B^T v - y||^2 / 2 over B and v together, until every residual is within `tolerance`.

    Steps are a twentieth of what would still be stable, so that the path follows gradient flow, for which the theorem
    behind proposition 2 is proved (at every point of the path, converged or not).
    """
    size = np.linalg.norm(x, ord=2, axis=(1, 2)) ** 2
    reach = np.linalg.norm(features, ord=2, axis=(1, 2)) ** 2 + (head**2).sum(1) + np.linalg.norm(y, axis=1)
    rate = (0.1 / (size * reach))[:, None, None]
    transposed, target, v = x.swapaxes(1, 2), y[..., None], head[..., None]
    for _ in range(steps):
        seen = x @ features.swapaxes(1, 2)  # [I, n, k]
        residual = seen @ v - target
        if np.abs(residual).max() <= tolerance:
            break
        moved = v @ (transposed @ residual).swapaxes(1, 2)
        v = v - rate * (seen.swapaxes(1, 2) @ residual)
        features = features - rate * moved
    return features, v[..., 0]


def best_rotation(features: Array, others: Array) -> Array:
    """The orthogonal U [I, k, k] that brings U B' closest to B (orthogonal Procrustes).

    For orthonormal rows it is the nearest in every norm that rotations leave alone, the spectral norm included.
    """
    left, _, right = np.linalg.svd(features @ others.swapaxes(1, 2))
    return np.asarray(left @ right)


def smallest_cosine(features: Array, x: Array) -> Array:
    """sigma_k(R^T S_perp): the cosine of the largest angle between the rows of B and what no sample has a part in."""
    rows = np.linalg.qr(features.swapaxes(1, 2))[0].swapaxes(1, 2)
    spanned = np.linalg.qr(x.swapaxes(1, 2))[0]
    outside = rows - (rows @ spanned) @ spanned.swapaxes(1, 2)
    return np.asarray(np.linalg.svd(outside, compute_uv=False)[:, -1])
