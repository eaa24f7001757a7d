"""One label space over all tasks, without their images: linear discriminant analysis from sums that only add up.

Features of the pre-trained network (`nn/scales.py`) are taken for normal distributions: one mean for every class, and
one covariance that all share. Both follow from counts and sums by class and from one matrix of second
moments, so tasks may come and go in any order, and the classifier is the one that all images at once would give. An
image is unusual if it is far from its nearest class (Mahalanobis distance; Lee et al., NeurIPS 2018), compared with how
far it is from all images together (Ren et al., 2021).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

_RIDGES = (0.01, 0.03, 0.1, 0.3, 1.0)  # of the mean variance, added to all
_TEMPERATURES = tuple(2 ** (power / 2) for power in range(-2, 29))
_USUAL_RIDGE, _USUAL_TEMPERATURE = 0.1, 4.0  # where there are no images to choose them on
_NEARLY = 0.2  # of the probability: at most five tasks can have that
# The answers [n, K] of a task (its position) about some images ([N], which ones); None where it has none.
Ask = Callable[[int, Tensor], Tensor | None]
FALSE_ALARMS = 0.05  # of held-out images are said to be unknown


@dataclass(frozen=True)
class FeatureSums:
    """Sums over the features of all tasks' images, from which the classifier follows.

    >>> cats, dogs = torch.tensor([[3.0, 4.0], [4.0, 3.0]]), torch.tensor([[1.0, 0.0]])
    >>> one = FeatureSums.of(2).plus("pets", torch.cat([cats, dogs]), torch.tensor([0, 0, 1]), classes=2)
    >>> one.counts["pets"].tolist(), len(one.plus("more", dogs, torch.tensor([0]), 1).minus("more", dogs).sums)
    ([2.0, 1.0], 1)
    """

    second: Tensor  # [F, F], sum of x xT over all images
    counts: Mapping[str, Tensor]  # [K] by task, images of each class
    sums: Mapping[str, Tensor]  # [K, F] by task, sums of features of each class

    @classmethod
    def of(cls, size: int) -> FeatureSums:
        """Nothing, of features of this size."""
        return cls(torch.zeros(size, size, dtype=torch.float64), {}, {})

    def plus(self, task: str, features: Tensor, labels: Tensor, classes: int) -> FeatureSums:
        """With a task's images more."""
        x = features.double()
        counts = labels.bincount(minlength=classes).double()
        sums = x.new_zeros(classes, x.shape[1]).index_add_(0, labels, x)
        return FeatureSums(self.second + x.T @ x, {**self.counts, task: counts}, {**self.sums, task: sums})

    def minus(self, task: str, features: Tensor) -> FeatureSums:
        """Without a task, whose features are these."""
        x = features.double()
        counts = {name: values for name, values in self.counts.items() if name != task}
        sums = {name: values for name, values in self.sums.items() if name != task}
        return FeatureSums(self.second - x.T @ x, counts, sums)

    def gaussians(self, ridge: float = _USUAL_RIDGE) -> Gaussians:
        """The classifier over all classes; `ridge` times the mean variance within classes is added to all variances."""
        counts, sums = torch.cat(list(self.counts.values())), torch.cat(list(self.sums.values()))
        used, images = counts.clamp_min(1)[:, None], counts.sum()
        means, centre = sums / used, sums.sum(0) / images
        within = (self.second - means.T @ sums) / images
        around = self.second / images - torch.outer(centre, centre)
        added = (ridge * within.diagonal().mean()).clamp_min(1e-9) * torch.eye(len(within), dtype=within.dtype)
        whiten = _whitening(within + added)
        whiten_all = _whitening(around + added)
        tasks = tuple(self.counts)
        of_class = torch.cat([torch.full((len(self.counts[name]),), n) for n, name in enumerate(tasks)])
        white = means @ whiten
        return Gaussians(tasks, of_class, whiten, white, white.square().sum(1) / 2, centre, whiten_all, ridge)

    def calibrated(self, features: Tensor, labels: Tensor, inside: tuple[Tensor, Tensor] | None = None) -> Gaussians:
        """The classifier whose ridge, temperature and threshold are chosen on images that are not in the sums.

        Args:
            labels: places among all classes, task by task.
            inside: features and labels of images that are in the sums. They count for the threshold, too, as if they
                were not: with few images a limit that one in twenty is above takes more than the others.
        """
        if not len(features):
            return replace(self.gaussians(), temperature=_USUAL_TEMPERATURE)
        candidates = [self.gaussians(ridge) for ridge in _RIDGES]
        losses = [min(_by_temperature(found.logits(features), labels)) for found in candidates]
        best = candidates[losses.index(min(losses))]
        doubt = 1 / (len(features) + 2)  # all right is no proof of never wrong (the rule of succession)
        losses = _by_temperature(best.logits(features), labels, doubt)
        best = replace(best, temperature=_TEMPERATURES[losses.index(min(losses))])
        scores = best.unusual(features)
        if inside is not None:
            scores = torch.cat([scores, self._unusual_left_out(best, *inside)])
        # A new image is equally likely to come anywhere in the order of all: so the limit is above its share of n + 1,
        # and a little higher, so that rounding does not decide about the image that sets it.
        rank = math.ceil((len(scores) + 1) * (1 - FALSE_ALARMS))
        if rank > len(scores):
            return replace(best, threshold=math.inf)
        return replace(best, threshold=float(scores.sort().values[rank - 1] + 1e-3 * scores.std()))

    def _unusual_left_out(self, gaussians: Gaussians, features: Tensor, labels: Tensor) -> Tensor:
        """`Gaussians.unusual` of images that are in the sums, each as if it were not: rank-one changes of moments.

        Without x a class mean moves by (x - mean) / (n - 1), and a scatter loses n / (n - 1) (x - mean)(x - mean)T.
        Images that are their class's only one are passed over.
        """
        counts = torch.cat(list(self.counts.values()))
        several = counts[labels] > 1
        x, labels, images = features[several].double(), labels[several], float(counts.sum())
        n = counts[labels]
        white = x @ gaussians.whiten
        own = white - gaussians.means[labels]
        own_length, share = own.square().sum(1), n / ((n - 1) * images)
        shrunk = share / (1 - share * own_length)
        lengths = white.square().sum(1, keepdim=True) - 2 * (white @ gaussians.means.T - gaussians.offsets)
        along = (own * white).sum(1, keepdim=True) - own @ gaussians.means.T
        distances = lengths + shrunk[:, None] * along.square()
        distances[torch.arange(len(x)), labels] *= (n / (n - 1)).square()
        around = ((x - gaussians.centre) @ gaussians.whiten_all).square().sum(1)
        around = around * (images / (images - 1)) ** 2 / (1 - around / (images - 1))
        return distances.min(1).values - around


@dataclass(frozen=True)
class Gaussians:
    """Classes of all tasks as normal distributions."""

    tasks: tuple[str, ...]  # names
    of_class: Tensor  # [C], for each class the position of its task
    whiten: Tensor  # [F, F]; features times it have unit variance within classes
    means: Tensor  # [C, F], of classes, whitened
    offsets: Tensor  # [C], half of the squared lengths of the means
    centre: Tensor  # [F], of all images
    whiten_all: Tensor  # [F, F]; features times it have unit variance
    ridge: float
    temperature: float = 1.0  # that logits are divided by
    threshold: float = math.inf  # images that are more unusual are unknown

    def logits(self, features: Tensor) -> Tensor:
        """[N, C], log-likelihoods up to what all classes share."""
        return features.double() @ self._towards - self.offsets

    @cached_property
    def _towards(self) -> Tensor:
        """[F, C], what features are multiplied with for logits."""
        return self.whiten @ self.means.T

    @cached_property
    def _apart(self) -> tuple[Tensor, Tensor, Tensor]:
        """[F, F], [F] and a number: by how much the distances from zero and from all images differ, as a polynomial."""
        whole = self.whiten_all @ self.whiten_all.T
        inside = whole @ self.centre
        return (self.whiten @ self.whiten.T - whole).float(), 2 * inside, -self.centre @ inside

    def probabilities(self, features: Tensor, allowed: Tensor | None = None) -> Tensor:
        """[N, C], of the classes of all tasks, or of the tasks that are allowed: [T], or [N, T] for each image."""
        logits = self.logits(features) / self.temperature
        if allowed is not None:
            logits = logits.masked_fill(~allowed[..., self.of_class], -math.inf)
        return logits.softmax(1)

    def of_tasks(self, probabilities: Tensor) -> Tensor:
        """[N, T], of tasks."""
        found = probabilities.new_zeros(len(probabilities), len(self.tasks))
        return found.index_add_(1, self.of_class, probabilities)

    def two_passes(self, features: Tensor, ask: Ask, allowed: Tensor | None = None) -> Tensor:
        """[N, C], probabilities, where each task's are shared out by the features and its own network together.

        They err differently, so their geometric mean is right more often than either. Only networks of the likeliest
        tasks are asked, and of others that are nearly as likely.
        """
        found = self.probabilities(features, allowed)
        of_tasks = self.of_tasks(found)
        leading = (of_tasks == of_tasks.max(1, keepdim=True).values) | (of_tasks >= _NEARLY)
        for task, images in enumerate(leading.T):
            own = ask(task, images) if images.any() else None
            if own is not None:
                rows, mine = images.nonzero(), (self.of_class == task).nonzero().flatten()
                first = found[rows, mine].clamp_min(1e-300)  # the two may rule out all classes between them
                both = (first * own.to(found)).sqrt()
                found[rows, mine] = of_tasks[images, task, None] * both / both.sum(1, keepdim=True)
        return found

    def unusual(self, features: Tensor) -> Tensor:
        """[N], how much farther images are from the nearest class than from all images together."""
        x, (quadratic, linear, constant) = features.double(), self._apart
        apart = (((x.float() @ quadratic).double() + linear) * x).sum(1) + constant
        return apart - 2 * self.logits(features).max(1).values


def _by_temperature(logits: Tensor, labels: Tensor, doubt: float = 0.0) -> list[float]:
    """The loss of logits at each temperature; one after the other, as all classes of many tasks are large."""
    return [float(cross_entropy(logits / by, labels, label_smoothing=doubt)) for by in _TEMPERATURES]


def _whitening(covariance: Tensor) -> Tensor:
    """W with W WT the inverse of a covariance."""
    lower = torch.linalg.cholesky(covariance)
    inverse: Tensor = torch.linalg.solve_triangular(lower, torch.eye(len(lower), dtype=lower.dtype), upper=False)
    return inverse.T
