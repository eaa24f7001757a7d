"""Proposition 3: with features that are good enough, linear probing before fine-tuning leaves earlier tasks alone.

The head that linear probing finds already has zero loss, so the gradient is zero, B_t = B_0 and every earlier task's
loss L_t'(B_t, v_t') stays what it was when that task was learned. Plain fine-tuning from a random head moves B.
"""

from __future__ import annotations

import numpy as np
from pydantic import BaseModel, ConfigDict

from confitune.analysis.saved import SavedResult
from confitune.analysis.theory.linear_model import (
    Array,
    best_head,
    fine_tune,
    inputs,
    linear_map,
    orthonormal_rows,
    worst_case_error,
)

TOLERANCE = 1e-10
_SIZES = (3, 10, 30)  # k, n, d


class Curve(BaseModel):
    """After each task, averaged over instances."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    moved: list[float]  # ||B_t - B_0||, spectral norm
    earlier_loss: list[float]  # worst-case loss of the tasks before it; 0 after the first, which has none
    forgotten: list[float]  # the same minus what it was when they were learned


class Proposition3(SavedResult):
    """What `check_proposition3` found."""

    holds: bool
    worst_violation: float  # largest move of B or change of an earlier loss, probing first
    probing_first: Curve
    plain: Curve


def check_proposition3(
    seed: int = 0, instances: int = 20, tasks: int = 5, feature_error: float = 0.0, head_error: float = 0.0
) -> Proposition3:
    """Learn random task sequences in both ways and compare.

    Args:
        feature_error: how far the tasks' own maps lie beside what the features can give; above 0 the proposition's
            assumption (ii) is broken and it must fail.
        head_error: of the head after probing, which breaks assumption (i).
    """
    probing_first, worst = _learn(seed, instances, tasks, feature_error, head_error, probe=True)
    plain, _ = _learn(seed, instances, tasks, feature_error, head_error, probe=False)
    return Proposition3(holds=worst <= TOLERANCE, worst_violation=worst, probing_first=probing_first, plain=plain)


def _learn(
    seed: int, instances: int, tasks: int, feature_error: float, head_error: float, probe: bool
) -> tuple[Curve, float]:
    chance = np.random.default_rng(seed)
    k, n, d = _SIZES
    start = features = orthonormal_rows(chance, instances, k, d)
    moved, earlier_loss, forgotten, worst = [], [], [], 0.0
    learned: list[tuple[Array, Array, Array]] = []  # of every task: its head, its map, its loss when it was learned
    for _ in range(tasks):
        target = linear_map(start, chance.normal(size=(instances, k)))
        target = target + feature_error * chance.normal(size=(instances, d)) / np.sqrt(d)
        x = inputs(chance, instances, n, d)
        y = np.einsum("ind,id->in", x, target)
        random_head = chance.normal(size=(instances, k))
        astray = head_error * chance.normal(size=(instances, k))
        head = best_head(features, x, y) + astray if probe else random_head
        # Every step is taken: stopping at a small residual would keep B still by decree.
        features, head = fine_tune(features, head, x, y, steps=2000, tolerance=0.0)
        losses = [worst_case_error(features, v, w) ** 2 for v, w, _ in learned]
        changes = [loss - before for loss, (_, _, before) in zip(losses, learned, strict=True)]
        learned.append((head, target, worst_case_error(features, head, target) ** 2))
        distance = np.linalg.norm(features - start, ord=2, axis=(1, 2))
        moved.append(float(distance.mean()))
        earlier_loss.append(float(np.mean(losses)) if losses else 0.0)
        forgotten.append(float(np.mean(changes)) if changes else 0.0)
        worst = max(worst, float(distance.max()), *(float(np.abs(change).max()) for change in changes))
    return Curve(moved=moved, earlier_loss=earlier_loss, forgotten=forgotten), worst
