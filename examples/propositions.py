"""The paper's propositions, checked by numbers.

    python examples/propositions.py --out results/theory

Proposition 1: the mean of a convolution's output depends on its input through the input's mean alone.

For stride 1 and padding K - 1:  AvgPool(f(a)) = AvgPool(f(AvgPool_DP(a))),  AvgPool_DP(a) the map that is constant at
each channel's mean. For stride m the convolution is a sum of m * m convolutions of stride 1, one for each phase of the
padded input and of the kernel, and the equation holds for each with its own phase's mean (appendix A.1). With less
padding, pixels at the border are read by fewer taps than others, and the equation is off by what they differ.

Propositions 2 and 3 are about an overparametrised linear model: y = v^T B x with B [k, d], v [k], n samples, k < n < d.
All functions take many instances at once: B [I, k, d], v [I, k], X [I, n, d]; w = B^T v [I, d] is the map they stand
for. The loss of a task with map w* in the worst case over ||x|| <= 1 is (v^T B x - w*^T x)^2 at its largest, that is
||B^T v - w*||^2.

Proposition 2: fine-tuning with a badly aligned head must lose on earlier tasks, the more so the better the features.

With orthonormal rows, w_* = B_*^T v_* (the paper prints ||B_* v_*|| for its norm) and fine-tuning from (B, v):

    ||B_t^T v_t - w_*|| >= sigma_k(R^T S_perp) / sqrt(k) * min(phi, phi^2 / ||w_*||) / (1 + ||w_*||)^2 - epsilon
    phi^2 = |(v^T v_*)^2 - (v_*^T v_*)^2|,   epsilon = min over U of ||B - U B_*||^2

(U B_*, U v_*) is the same map as (B_*, v_*), so phi means something only in one frame: the one in which the features
are compared, v_* -> U v_* with the U of epsilon. Taken as printed, the bound fails: features that are right but
rotated, with the head that fits them, lose nothing, yet phi is not 0. The theorem that it is deduced from (Kumar et
al., ICLR 2022) subtracts the distance itself; the square, for good features the stronger claim, is checked here.

Multi-head (appendix A.2): with the earlier task's own head v', ||B_t^T v' - w_*|| >= the same - epsilon_mh, where
epsilon_mh = ||B_t^T (v_t - v')||.

Proposition 3: with features that are good enough, linear probing before fine-tuning leaves earlier tasks alone.

The head that linear probing finds already has zero loss, so the gradient is zero, B_t = B_0 and every earlier task's
loss L_t'(B_t, v_t') stays what it was when that task was learned. Plain fine-tuning from a random head moves B.
"""

import argparse
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import conv2d, pad

from confitune.engine.result import command_line
from confitune.experiments.paper.outcome import Outcome
from confitune.experiments.paper.reproduce import write_outcomes
from confitune.files import require_writable

Array = NDArray[np.float64]

_ANGLES = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0)  # between the rows of B and of B_*: from perfect features to poor ones


def check_proposition1(seed: int = 0, cases: int = 60) -> dict[str, Any]:
    """Compare both sides for random sizes, kernels (1 to 5), strides (1 to 3), channels and dilation 1, in float64.

    `worst_violation`: the largest difference of the two means, or of a strided convolution and its sum over phases.
    """
    chance = torch.Generator().manual_seed(seed)
    worst = 0.0
    for _ in range(cases):
        kernel, stride = _draw(1, 5, chance), _draw(1, 3, chance)
        height, width = _draw(kernel, 12, chance), _draw(kernel, 12, chance)
        inputs, outputs = _draw(1, 4, chance), _draw(1, 4, chance)
        a = 1 + torch.randn(3, inputs, height, width, generator=chance, dtype=torch.float64)
        weight = torch.randn(outputs, inputs, kernel, kernel, generator=chance, dtype=torch.float64)
        output = conv2d(a, weight, stride=stride, padding=kernel - 1)
        rows, columns = output.shape[-2:]
        summed = mean = torch.zeros(())
        for part, taps, inside in _phases(a, weight, stride, kernel - 1):
            summed = summed + conv2d(part, taps)[..., :rows, :columns]
            flat = constant_map(part, inside)
            mean = mean + conv2d(flat, taps)[..., :rows, :columns].mean((0, 2, 3))
        worst = max(worst, (summed - output).abs().max().item(), (mean - output.mean((0, 2, 3))).abs().max().item())
    return {"holds": worst <= 1e-12, "worst_violation": worst, "cases": cases}


def _phases(a: Tensor, weight: Tensor, stride: int, padding: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Phase (p, q) of the padded input with the taps that read it: output[h] = sum over p, u of W[m u + p] a'[m (h + u)
    + p]; and which of its pixels are the input's own.
    """
    # Beyond the padding zeros are free: they are cut off again, but no phase must end early.
    reach = [padding, padding + stride * weight.shape[-1]] * 2
    padded, own = pad(a, reach), pad(torch.ones_like(a[:1, :1]), reach)
    for p in range(min(stride, weight.shape[-2])):
        for q in range(min(stride, weight.shape[-1])):
            places = (..., slice(p, None, stride), slice(q, None, stride))
            yield padded[places], weight[places], own[places]


def constant_map(part: Tensor, inside: Tensor) -> Tensor:
    """AvgPool_DP (Eq. 6): every channel constant at the mean of its own pixels, padding at zero."""
    mean = part.sum((0, 2, 3), keepdim=True) / (len(part) * inside.sum()).clamp(min=1)
    return (mean * inside).expand_as(part)


def _draw(low: int, high: int, chance: torch.Generator) -> int:
    return int(torch.randint(low, high + 1, (), generator=chance))


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


def probed_head(features: Array, x: Array, y: Array) -> Array:
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


def check_proposition2(seed: int = 0, instances: int = 60) -> dict[str, Any]:
    """Fine-tune so many random instances for each quality of features, perfect to poor, and compare both sides.

    Heads start from nearly right to unrelated. `holds`: in every instance, single-head and multi-head;
    `worst_violation`: the largest bound - error; `levels`: by quality of features, their distance min over U of
    ||B - U B_*||, the left side (error) and the right side (bound, 0 where it is negative and says nothing), square
    roots of worst-case losses, and the mean of bound / error (tightness; 1 would be tight).
    """
    # The same draws at every angle: levels then differ by the features alone.
    found = [_level(np.random.default_rng(seed), instances, angle) for angle in _ANGLES]
    levels = [level for level, _ in found]
    worst = max(violation for _, violation in found)
    return {
        "holds": worst <= 1e-9,
        "worst_violation": worst,
        "tighter_with_better_features": all(a["tightness"] >= b["tightness"] for a, b in pairwise(levels)),
        "instances": instances * len(levels),
        "levels": levels,
    }


def _level(chance: np.random.Generator, instances: int, angle: float) -> tuple[dict[str, float], float]:
    k, n, d = 2, 8, 30
    both = orthonormal_rows(chance, instances, 2 * k, d)
    best, aside = both[:, :k], both[:, k:]
    turned = orthonormal_rows(chance, instances, k, k)
    features = turned @ (np.cos(angle) * best + np.sin(angle) * aside)  # orthonormal, too
    best_head = chance.normal(size=(instances, k))
    best_head *= chance.uniform(0.3, 2.0, (instances, 1)) / np.linalg.norm(best_head, axis=1, keepdims=True)
    astray = np.exp(chance.uniform(np.log(0.01), np.log(2.0), (instances, 1)))
    head = np.einsum("iab,ib->ia", turned, best_head) + astray * chance.normal(size=(instances, k))

    x = inputs(chance, instances, n, d)
    target = linear_map(best, best_head)
    y = np.einsum("ind,id->in", x, target)
    after, head_after = fine_tune(features, head, x, y)
    error = worst_case_error(after, head_after, target)

    rotation = best_rotation(features, best)
    distance = np.linalg.norm(features - rotation @ best, ord=2, axis=(1, 2))
    own_head = np.einsum("iab,ib->ia", rotation, best_head)  # the earlier task's head beside B_t
    bound = _bound(head, own_head, target, smallest_cosine(features, x)) - distance**2
    multi_head_error = worst_case_error(after, own_head, target)
    relaxation = worst_case_error(after, head_after, linear_map(after, own_head))  # epsilon_mh
    level = {"distance": distance, "error": error, "bound": bound.clip(0), "tightness": bound.clip(0) / error}
    return {name: float(values.mean()) for name, values in level.items()}, float(
        max((bound - error).max(), (bound - relaxation - multi_head_error).max())
    )


def _bound(head: Array, best_head: Array, target: Array, cosine: Array) -> Array:
    """The right side without its epsilon, [I]."""
    length = np.linalg.norm(target, axis=1)
    squared = np.abs((head * best_head).sum(1) ** 2 - (best_head**2).sum(1) ** 2)  # phi^2
    gain = cosine / np.sqrt(head.shape[1]) * np.minimum(np.sqrt(squared), squared / length) / (1 + length) ** 2
    return np.asarray(gain)


def check_proposition3(seed: int = 0, instances: int = 20, tasks: int = 5) -> dict[str, Any]:
    """Learn random task sequences in both ways and compare.

    `worst_violation`: the largest move of B or change of an earlier loss, probing first; `probing_first`, `plain`:
    after each task, what the tasks before it lost since they were learned, on average.
    """
    probing_first, worst = _learn(seed, instances, tasks, probe=True)
    plain, _ = _learn(seed, instances, tasks, probe=False)
    return {"holds": worst <= 1e-10, "worst_violation": worst, "probing_first": probing_first, "plain": plain}


def _learn(seed: int, instances: int, tasks: int, probe: bool) -> tuple[list[float], float]:
    chance = np.random.default_rng(seed)
    k, n, d = 3, 10, 30
    start = features = orthonormal_rows(chance, instances, k, d)
    forgotten, worst = [], 0.0
    learned: list[tuple[Array, Array, Array]] = []  # of every task: its head, its map, its loss when it was learned
    for _ in range(tasks):
        target = linear_map(start, chance.normal(size=(instances, k)))
        x = inputs(chance, instances, n, d)
        y = np.einsum("ind,id->in", x, target)
        random_head = chance.normal(size=(instances, k))
        head = probed_head(features, x, y) if probe else random_head
        # Every step is taken: stopping at a small residual would keep B still by decree.
        features, head = fine_tune(features, head, x, y, steps=2000, tolerance=0.0)
        changes = [worst_case_error(features, v, w) ** 2 - before for v, w, before in learned]
        learned.append((head, target, worst_case_error(features, head, target) ** 2))
        moved = np.linalg.norm(features - start, ord=2, axis=(1, 2))
        forgotten.append(float(np.mean(changes)) if changes else 0.0)
        worst = max(worst, float(moved.max()), *(float(np.abs(change).max()) for change in changes))
    return forgotten, worst


def checked() -> Outcome:
    """What each proposition says, what was measured of it, and whether it holds."""
    outcome = Outcome("theory", "Propositions 1 to 3, checked by numbers")
    outcome.command = f"python examples/{command_line()}"
    first, second, third = check_proposition1(), check_proposition2(), check_proposition3()
    outcome.data = {"proposition 1": first, "proposition 2": second, "proposition 3": third}
    text = "1: the mean of a convolution's output is the convolution of the mean (padding K - 1, any stride)"
    measured = f"largest difference {first['worst_violation']:.1e} in {first['cases']} random cases"
    outcome.claim(text, measured, first["holds"])
    text = "2: the loss of an earlier task is bounded below by how badly the head was aligned"
    measured = f"largest violation {second['worst_violation']:.1e} in {second['instances']} instances"
    outcome.claim(text, measured, second["holds"])
    text = "2: the bound is tighter the better the features are"
    measured = ", ".join(f"{level['distance']:.2f}: {level['tightness']:.2f}" for level in second["levels"])
    outcome.claim(text, measured, second["tighter_with_better_features"])
    text = "3: probing first, then fine-tuning moves no features and forgets nothing"
    outcome.claim(text, f"largest move or loss {third['worst_violation']:.1e}", third["holds"])
    return outcome


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Check propositions 1 to 3 of the paper by numbers.")
    parser.add_argument("--out", type=Path, default=Path("results/theory"), help="folder of the pages it writes")
    out = parser.parse_args().out
    require_writable(out)
    write_outcomes(out, [checked()])
