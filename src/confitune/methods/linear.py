"""Linear classifiers on features that do not move, in closed form; chosen are those that know images left out best."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from confitune.methods.method import TaskContext

FOLDS = 5
_RIDGES = (0.1, 0.3, 1.0, 3.0, 10.0)  # of the mean variance within classes, added to all
_TEMPERATURES = tuple(2.0**power for power in range(-1, 9))


@dataclass(frozen=True)
class LinearFit:
    """A linear classifier of features, and what it is worth."""

    weight: Tensor  # [K, F]
    bias: Tensor  # [K]
    right: Tensor  # [N], whether the fit without an image's fold classifies it correctly
    loss: float  # mean cross-entropy of images in the fits without their folds


def fit_head(context: TaskContext) -> LinearFit:
    """A head for the features that the network, as it is, gives of the task's images."""
    classes = len(context.net.tasks[context.net.current_task].classes)
    return fit_linear(context.features(), context.labels, classes, folds_of(context.labels.cpu(), context.seed))


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
    """Linear discriminant analysis of features [N, F], with all images and without each fold.

    Classes are normal distributions with means of their own and one covariance, every class as likely. A ridge is added
    to the covariance, and logits are divided by a temperature: those with the least loss on images left out.

    >>> features, labels = torch.tensor([[0.0], [1.0], [4.0], [5.0]]), torch.tensor([0, 0, 1, 1])
    >>> fit = fit_linear(features, labels, 2, torch.tensor([0, 1, 0, 1]))
    >>> (torch.tensor([[2.0], [3.0]]) @ fit.weight.T + fit.bias).argmax(1), fit.right.tolist()
    (tensor([0, 1]), [True, True, True, True])
    """
    device, images = features.device, len(features)
    fold, labels = folds.to(device), labels.to(device)
    centre = features.double().mean(0)
    x = features.double() - centre
    axes = _principal(x)  # all means lie along them: across them the covariance, a ridge alone, tells nothing apart
    z, target = x @ axes, one_hot(labels, classes).double()
    used = torch.cat([x.new_ones(1, images), (fold != torch.arange(FOLDS, device=device)[:, None]).double()])  # [P, N]
    counts = used @ target  # [P, K]
    means = (used[:, None] * target.T) @ z / counts.clamp_min(1)[..., None]  # [P, K, C]
    within = (used[:, None] * z.T) @ z - (counts[..., None] * means).mT @ means  # [P, C, C]
    within /= used.sum(1).clamp_min(1)[:, None, None]
    variance = (within.diagonal(dim1=1, dim2=2).sum(1) / x.shape[1]).clamp_min(1e-30)
    each, weights, left_out = torch.arange(images, device=device), [], []
    for ridge in _RIDGES:
        added = torch.diag_embed(ridge * variance[:, None].expand(-1, z.shape[1]))
        lower = torch.linalg.cholesky_ex(within + added).L  # which raises nothing and lets a GPU wait for nothing
        weights.append(torch.cholesky_solve(means.mT, lower).mT)  # [P, K, C]
        logits = torch.einsum("nc,pkc->npk", z, weights[-1]) - (weights[-1] * means).sum(2) / 2
        left_out.append(logits[each, fold + 1])
    known = counts[fold + 1, labels] > 0  # of a class's only image the others know nothing
    scaled = torch.stack(left_out)[:, None] / torch.tensor(_TEMPERATURES, device=device)[:, None, None]  # [R, T, N, K]
    of_images = cross_entropy(
        scaled.permute(3, 0, 1, 2)[None],
        labels.expand(scaled.shape[:-1])[None],
        reduction="none",
        label_smoothing=1 / (images + 2),  # all right is no proof of never wrong (the rule of succession)
    )
    losses = (of_images[0] * known).sum(2) / known.sum().clamp_min(1)
    ridge, temperature = divmod(int(losses.argmin()), len(_TEMPERATURES))
    along = weights[ridge][0] / _TEMPERATURES[temperature]
    weight = along @ axes.T
    bias = -(along * means[0]).sum(1) / 2 - weight @ centre
    right = known & (left_out[ridge].argmax(1) == labels)
    return LinearFit(weight.float(), bias.float(), right, float(losses[ridge, temperature]))


def _principal(x: Tensor) -> Tensor:
    """Principal components of x [N, F] as columns [F, C]; from the smaller matrix."""
    images, size = x.shape
    if size <= images:
        return torch.eye(size, dtype=x.dtype, device=x.device)
    values, sides = torch.linalg.eigh(x @ x.T)
    axes: Tensor = x.T @ sides / values.clamp_min(1e-9 * values[-1] + torch.finfo(x.dtype).tiny).sqrt()
    return axes
