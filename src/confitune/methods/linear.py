"""Linear classifiers on features that do not move: fitted to convergence, their strength chosen on images left out."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from confitune.methods.method import TaskContext

FOLDS = 5
_DECAYS = (1e-4, 1e-3, 1e-2)  # of weights, for features of unit spread
_STEPS = 100


@dataclass(frozen=True)
class LinearFit:
    """Logistic regression on features, and what it is worth."""

    weight: Tensor  # [K, F]
    bias: Tensor  # [K]
    right: Tensor  # [N], whether the fit without an image's fold classifies it correctly
    loss: float  # mean cross-entropy of images in the fits without their folds
    folds: Tensor  # [N], the fold of each image, on the CPU


def fit_head(context: TaskContext) -> LinearFit:
    """A head for the features that the network, as it is, gives of the task's images."""
    classes = len(context.net.tasks[context.net.current_task].classes)
    features = context.features(torch.arange(context.images))
    return fit_linear(features, context.labels, classes, folds_of(context.labels.cpu(), context.seed))


def finish_with_head(context: TaskContext) -> None:
    """Fit a head, and finish the task with it."""
    net = context.net
    with net.evaluating():
        fit = fit_head(context)
    net.head.put(fit.weight, fit.bias)
    net.finish_task()


def folds_of(labels: Tensor, seed: int) -> Tensor:
    """For each image the fold that it is in, of `FOLDS`, each with the same share of every class.

    >>> folds = folds_of(torch.tensor([0] * 10 + [1] * 5), seed=0)
    >>> folds[:10].bincount().tolist(), folds[10:].bincount().tolist()
    ([2, 2, 2, 2, 2], [1, 1, 1, 1, 1])
    """
    folds = torch.empty(len(labels), dtype=torch.int64)
    generator = torch.Generator().manual_seed(seed)
    for label in labels.unique().tolist():
        mine = (labels == label).nonzero().flatten()
        folds[mine[torch.randperm(len(mine), generator=generator)]] = torch.arange(len(mine)) % FOLDS
    return folds


@torch.no_grad()
def fit_linear(features: Tensor, labels: Tensor, classes: int, folds: Tensor) -> LinearFit:
    """Fit features [N, F] with every strength, with all images and without each fold, and keep the best strength.

    All fits are one computation. Along principal components z_j of the features the curvature of
    the loss is at most half their second moment (Boehning 1992), so accelerated gradient descent (FISTA, with restarts)
    takes steps of that size along each, and a hundred are enough.

    >>> features, labels = torch.tensor([[0.0], [1.0], [4.0], [5.0]]), torch.tensor([0, 0, 1, 1])
    >>> fit = fit_linear(features, labels, 2, torch.tensor([0, 1, 0, 1]))
    >>> (torch.tensor([[2.0], [3.0]]) @ fit.weight.T + fit.bias).argmax(1), fit.right.tolist()
    (tensor([0, 1]), [True, True, True, True])
    """
    device, images = features.device, len(features)
    fold, labels = folds.to(device), labels.to(device)
    centre, x = features.float().mean(0), features.float()
    x = x - centre
    spread = x.square().sum(1).mean().sqrt().clamp_min(torch.finfo(x.dtype).tiny)
    axes, moments = _principal(x / spread)
    z = torch.cat([x / spread @ axes, x.new_ones(images, 1)], 1)
    moments = torch.cat([moments, moments.new_ones(1)])
    used = torch.cat([x.new_ones(1, images), (fold != torch.arange(FOLDS, device=device)[:, None]).to(x.dtype)])
    used = (used / used.sum(1, keepdim=True).clamp_min(1)).repeat(len(_DECAYS), 1)  # [P, N], P fits
    decays = torch.tensor(_DECAYS, device=device).repeat_interleave(FOLDS + 1)[:, None, None]
    penalty = decays * torch.cat([x.new_ones(len(moments) - 1), x.new_zeros(1)])  # [P, 1, F]; none of the bias
    most = used.amax(1)[:, None, None] * images  # how much more an image weighs where a fold is left out
    step = 1 / (0.5 * most * moments + penalty)
    target = one_hot(labels, classes).to(x.dtype)[:, None]
    weight = ahead = x.new_zeros(len(used), classes, len(moments))
    pace = torch.ones_like(decays)
    for _ in range(_STEPS):
        logits = (z @ ahead.flatten(0, 1).T).view(images, -1, classes)
        error = (logits.softmax(2) - target) * used.T[:, :, None]
        gradient = (error.flatten(1).T @ z).view_as(weight) + penalty * ahead
        moved = ahead - step * gradient
        change = moved - weight
        uphill = (gradient * change).sum((1, 2), keepdim=True) > 0
        pace = torch.where(uphill, 1.0, pace)
        faster = (1 + (1 + 4 * pace.square()).sqrt()) / 2
        weight, ahead, pace = moved, moved + (pace - 1) / faster * change, faster
    logits = torch.einsum("nf,pkf->npk", z, weight).unflatten(1, (len(_DECAYS), FOLDS + 1))
    left_out = logits[torch.arange(images, device=device), :, fold + 1].transpose(0, 1)  # [decays, N, K]
    losses = torch.stack([cross_entropy(of_decay, labels) for of_decay in left_out])
    best = int(losses.argmin())
    scaled = weight[best * (FOLDS + 1)]
    weight = scaled[:, :-1] @ axes.T / spread
    bias = scaled[:, -1] - weight @ centre
    right = left_out[best].argmax(1) == labels
    return LinearFit(weight, bias, right, float(losses[best]), folds)


def _principal(x: Tensor) -> tuple[Tensor, Tensor]:
    """Principal components of x [N, F] as columns [F, C], and second moments along them; from the smaller matrix."""
    images, size = x.shape
    if size <= images:
        values, axes = torch.linalg.eigh(x.T @ x)
        return axes, values.clamp_min(0) / images
    values, sides = torch.linalg.eigh(x @ x.T)
    values = values.clamp_min(1e-6 * float(values[-1]) + torch.finfo(x.dtype).tiny)
    return x.T @ sides / values.sqrt(), values / images


def gain(new: Tensor, old: Tensor) -> tuple[float, float]:
    """By how many points more images are right, and the standard error of that, both told of the same images.

    >>> gain(torch.tensor([True, True, True, False]), torch.tensor([True, False, False, True]))
    (25.0, 43.30...)
    """
    change = new.double() - old.double()
    return 100 * float(change.mean()), 100 * math.sqrt(float(change.square().sum())) / len(change)
