"""One label space over all tasks, without their images: linear discriminant analysis from sums that only add up.

Features of the pre-trained network (`nn/scales.py`) are taken for normal distributions: one mean for every class, and
one covariance that all share. Both follow from counts and sums by class and from one matrix of second
moments, so tasks may come and go in any order, and the classifier is the one that all images at once would give. An
image is unusual if it is far from its nearest class (Mahalanobis distance; Lee et al., NeurIPS 2018), compared with how
far it is from all images together (Ren et al., 2021).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

_RIDGES = (0.01, 0.03, 0.1, 0.3, 1.0)  # of the mean variance, added to all
_TEMPERATURES = tuple(2 ** (power / 2) for power in range(-2, 29))
_USUAL_RIDGE, _USUAL_TEMPERATURE = 0.1, 4.0  # where there are no images to choose them on
_NEARLY = 0.2  # of the probability: at most five tasks can have that
Answers = Iterator[tuple[int, Tensor]]  # of tasks, by their positions, about the images [n, K] they are asked about
FALSE_ALARMS = 0.05  # of held-out images are said to be unknown


@dataclass(frozen=True)
class FeatureSums:
    """Sums over the features of all tasks' images, from which the classifier follows; at first of none.

    >>> cats, dogs = torch.tensor([[3.0, 4.0], [4.0, 3.0]]), torch.tensor([[1.0, 0.0]])
    >>> one = FeatureSums().plus("pets", torch.cat([cats, dogs]), torch.tensor([0, 0, 1]), classes=2)
    >>> one.counts["pets"].tolist(), len(one.plus("more", dogs, torch.tensor([0]), 1).minus("more", dogs).sums)
    ([2.0, 1.0], 1)
    """

    second: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))  # [F, F], x xT of all images
    counts: Mapping[str, Tensor] = field(default_factory=dict)  # [K] by task, images of each class
    sums: Mapping[str, Tensor] = field(default_factory=dict)  # [K, F] by task, sums of features of each class

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
        images = counts.sum()
        means = sums / counts.clamp_min(1)[:, None]
        within = (self.second - means.T @ sums) / images
        within.diagonal().add_((ridge * within.diagonal().mean()).clamp_min(1e-9))
        tasks = tuple(self.counts)
        of_class = torch.cat([torch.full((len(self.counts[name]),), n) for n, name in enumerate(tasks)])
        return Gaussians(tasks, of_class, means, torch.linalg.cholesky(within), counts / images, ridge)

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
        n, each = counts[labels], torch.arange(len(x))
        length: Tensor = torch.linalg.solve_triangular(gaussians.lower, x.T, upper=False).square().sum(0)
        distances = length[:, None] - 2 * gaussians.logits(x)
        own, share = distances[each, labels], n / ((n - 1) * images)
        # (x - mean) towards (x - mean of each class), by the inverse covariance
        across = (x - gaussians.means[labels]) @ gaussians.towards
        along = own[:, None] + across[each, labels, None] - across
        shrunk = share / (1 - share * own)
        distances = distances + shrunk[:, None] * along.square()
        distances[each, labels] *= (n / (n - 1)).square()
        around = length - gaussians.apart(x)
        around = around * (images / (images - 1)) ** 2 / (1 - around / (images - 1))
        return distances.min(1).values - around


@dataclass(frozen=True)
class Gaussians:
    """Classes of all tasks as normal distributions."""

    tasks: tuple[str, ...]  # names
    of_class: Tensor  # [C], for each class the position of its task
    means: Tensor  # [C, F], of classes
    lower: Tensor  # [F, F], times its transpose the covariance within classes, with a ridge
    shares: Tensor  # [C], of all images
    ridge: float
    temperature: float = 1.0  # that logits are divided by
    threshold: float = math.inf  # images that are more unusual are unknown

    def logits(self, features: Tensor) -> Tensor:
        """[N, C], log-likelihoods up to what all classes share."""
        return features.double() @ self.towards - self._offsets

    @cached_property
    def towards(self) -> Tensor:
        """[F, C], the inverse covariance times the means: what features are multiplied with for logits."""
        return torch.cholesky_solve(self.means.T, self.lower)

    @cached_property
    def _offsets(self) -> Tensor:
        return (self.means.T * self.towards).sum(0) / 2

    @cached_property
    def _spread(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of what `apart` is, as a polynomial: a factor of the quadratic part, the linear and the constant part.

        The covariance of all images is that within classes plus one of the means, U UT. So its inverse is less by a
        matrix of no higher rank (Woodbury), S U (1 + UT S U)^-1 UT S with the inverse S of the former.
        """
        centre = self.shares @ self.means
        u = torch.linalg.qr(self.shares.sqrt()[:, None] * (self.means - centre), mode="r").R.T
        both = torch.cholesky_solve(torch.cat([u, centre[:, None]], 1), self.lower)
        solved, towards_centre = both[:, :-1], both[:, -1]
        inner = torch.linalg.cholesky(torch.eye(u.shape[1], dtype=u.dtype) + u.T @ solved)
        factor = torch.linalg.solve_triangular(inner, solved.T, upper=False).T
        linear = towards_centre - factor @ (factor.T @ centre)
        return factor, 2 * linear, -centre @ linear

    def apart(self, features: Tensor) -> Tensor:
        """[N], squared distances from zero within classes, less those from the centre among all images."""
        x, (factor, linear, constant) = features.double(), self._spread
        return (x @ factor).square().sum(1) + x @ linear + constant

    def probabilities(self, features: Tensor, allowed: Tensor | None = None) -> Tensor:
        """[N, C], of the classes of all tasks, or of those that are allowed for each image: [N, T]."""
        logits = self.logits(features) / self.temperature
        if allowed is not None:
            logits = logits.masked_fill(~allowed[:, self.of_class], -math.inf)
        return logits.softmax(1)

    def of_tasks(self, probabilities: Tensor) -> Tensor:
        """[N, T], of tasks."""
        found = probabilities.new_zeros(len(probabilities), len(self.tasks))
        return found.index_add_(1, self.of_class, probabilities)

    def shared_out(self, probabilities: Tensor, ask: Callable[[Tensor], Answers]) -> Tensor:
        """[N, C], where each task's probability is shared out by the features and its own network together.

        They err differently, so their geometric mean is right more often than either. Only networks of the likeliest
        tasks are asked, and of others that are nearly as likely: `ask` is told which about which images, [T, N].
        """
        found, of_tasks = probabilities.clone(), self.of_tasks(probabilities)
        leading = (of_tasks == of_tasks.max(1, keepdim=True).values) | (of_tasks >= _NEARLY)
        for task, own in ask(leading.T):
            rows, mine = leading[:, task].nonzero(), (self.of_class == task).nonzero().flatten()
            first = found[rows, mine].clamp_min(1e-300)  # the two may rule out all classes between them
            both = (first * own.to(found)).sqrt()
            found[rows, mine] = of_tasks[leading[:, task], task, None] * both / both.sum(1, keepdim=True)
        return found

    def unusual(self, features: Tensor) -> Tensor:
        """[N], how much farther images are from the nearest class than from all images together."""
        return self.apart(features) - 2 * self.logits(features).max(1).values


def _by_temperature(logits: Tensor, labels: Tensor, doubt: float = 0.0) -> list[float]:
    """The loss of logits at each temperature; one after the other, as all classes of many tasks are large."""
    return [float(cross_entropy(logits / by, labels, label_smoothing=doubt)) for by in _TEMPERATURES]
