"""Proposition 2: fine-tuning with a badly aligned head must lose on earlier tasks, the more so the better the features.

With orthonormal rows, w_* = B_*^T v_* (the paper prints ||B_* v_*|| for its norm) and fine-tuning from (B, v):

    ||B_t^T v_t - w_*|| >= sigma_k(R^T S_perp) / sqrt(k) * min(phi, phi^2 / ||w_*||) / (1 + ||w_*||)^2 - epsilon
    phi^2 = |(v^T v_*)^2 - (v_*^T v_*)^2|,   epsilon = min over U of ||B - U B_*||^2

Two readings are needed. (U B_*, U v_*) is the same map as (B_*, v_*), so phi means something only in one frame: the one
in which the features are compared, v_* -> U v_* with the U of epsilon. Taken as printed, the bound fails: features that
are right but rotated, with the head that fits them, lose nothing, yet phi is not 0 (`frame='printed'`). And the theorem
it is deduced from (Kumar et al., ICLR 2022) subtracts the distance itself, not its square; both are checked, and the
square, which for good features is the stronger claim, decides.

Multi-head (appendix A.2): with the earlier task's own head v', ||B_t^T v' - w_*|| >= the same - epsilon_mh, where
epsilon_mh = ||B_t^T (v_t - v')||.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from confitune.analysis.saved import SavedResult
from confitune.analysis.theory.linear_model import (
    Array,
    best_rotation,
    fine_tune,
    inputs,
    linear_map,
    orthonormal_rows,
    smallest_cosine,
    worst_case_error,
)

Frame = Literal["aligned", "printed"]

_ANGLES = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0)  # between the rows of B and of B_*: from perfect features to poor ones
_SIZES = (2, 8, 30)  # k, n, d
_ROUNDING = 1e-9


class FeatureLevel(BaseModel):
    """Instances whose features are equally good; square roots of worst-case losses, averaged."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    distance: float  # min over U of ||B - U B_*||, not squared
    error: float  # left side
    residual: float  # largest, of the training samples after fine-tuning
    bound: float  # right side, 0 where it is negative and says nothing
    tightness: float  # mean of bound / error; 1 would be tight
    tightness_unsquared: float  # with the distance itself subtracted
    says_something: float  # share of instances with a positive bound
    holds: float  # share of instances
    holds_unsquared: float
    holds_multi_head: float


class Proposition2(SavedResult):
    """What `check_proposition2` found."""

    holds: bool  # in every instance, single-head and multi-head
    worst_violation: float  # largest bound - error; 0 or less: none
    tighter_with_better_features: bool  # tightness never falls as the distance shrinks
    instances: int
    levels: list[FeatureLevel]


def check_proposition2(
    seed: int = 0, instances: int = 60, row_norm: float = 1.0, frame: Frame = "aligned"
) -> Proposition2:
    """Fine-tune random instances and compare both sides of the bound, for features from perfect to poor.

    Heads start from nearly right to unrelated.

    Args:
        instances: for each quality of features.
        row_norm: length of the rows of B and B_*, heads scaled inversely so that the maps stay; the proposition's
            orthonormal rows have 1, and with short rows it must fail.
        frame: in which phi is taken, see above.
    """
    levels, worst = [], -np.inf
    for angle in _ANGLES:
        # The same draws at every angle: levels then differ by the features alone.
        level, violation = _level(np.random.default_rng(seed), instances, angle, row_norm, frame)
        levels.append(level)
        worst = max(worst, violation)
    tightness = [level.tightness for level in levels]
    return Proposition2(
        holds=all(level.holds == level.holds_multi_head == 1.0 for level in levels),
        worst_violation=worst,
        tighter_with_better_features=all(a >= b for a, b in pairwise(tightness)),
        instances=instances * len(levels),
        levels=levels,
    )


def _level(
    chance: np.random.Generator, instances: int, angle: float, row_norm: float, frame: Frame
) -> tuple[FeatureLevel, float]:
    k, n, d = _SIZES
    both = orthonormal_rows(chance, instances, 2 * k, d)
    best, aside = both[:, :k], both[:, k:]
    turned = orthonormal_rows(chance, instances, k, k)
    features = turned @ (np.cos(angle) * best + np.sin(angle) * aside)  # orthonormal, too
    best_head = chance.normal(size=(instances, k))
    best_head *= chance.uniform(0.3, 2.0, (instances, 1)) / np.linalg.norm(best_head, axis=1, keepdims=True)
    astray = np.exp(chance.uniform(np.log(0.01), np.log(2.0), (instances, 1)))
    head = np.einsum("iab,ib->ia", turned, best_head) + astray * chance.normal(size=(instances, k))
    best, features, best_head, head = best * row_norm, features * row_norm, best_head / row_norm, head / row_norm

    x = inputs(chance, instances, n, d)
    target = linear_map(best, best_head)
    y = np.einsum("ind,id->in", x, target)
    after, head_after = fine_tune(features, head, x, y)
    error = worst_case_error(after, head_after, target)

    rotation = best_rotation(features, best)
    distance = np.linalg.norm(features - rotation @ best, ord=2, axis=(1, 2))
    own_head = np.einsum("iab,ib->ia", rotation, best_head)  # the earlier task's head beside B_t
    gain = _bound(head, own_head if frame == "aligned" else best_head, target, smallest_cosine(features, x))
    bound, unsquared = gain - distance**2, gain - distance
    multi_head_error = worst_case_error(after, own_head, target)
    relaxation = worst_case_error(after, head_after, linear_map(after, own_head))  # epsilon_mh
    multi_head_gap = bound - relaxation - multi_head_error
    level = FeatureLevel(
        distance=float(distance.mean()),
        error=float(error.mean()),
        residual=float(np.abs(np.einsum("ind,id->in", x, linear_map(after, head_after)) - y).max()),
        bound=float(bound.clip(0).mean()),
        tightness=float((bound.clip(0) / error).mean()),
        tightness_unsquared=float((unsquared.clip(0) / error).mean()),
        says_something=float((bound > 0).mean()),
        holds=float((bound <= error + _ROUNDING).mean()),
        holds_unsquared=float((unsquared <= error + _ROUNDING).mean()),
        holds_multi_head=float((multi_head_gap <= _ROUNDING).mean()),
    )
    return level, float(max((bound - error).max(), multi_head_gap.max()))


def _bound(head: Array, best_head: Array, target: Array, cosine: Array) -> Array:
    """The right side without its epsilon, [I]."""
    k = head.shape[1]
    length = np.linalg.norm(target, axis=1)
    squared = np.abs((head * best_head).sum(1) ** 2 - (best_head**2).sum(1) ** 2)  # phi^2
    gain = cosine / np.sqrt(k) * np.minimum(np.sqrt(squared), squared / length) / (1 + length) ** 2
    return np.asarray(gain)
