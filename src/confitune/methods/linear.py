"""Linear classifiers on features that do not move: fitted to convergence, and judged without a test set."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

_DECAY = 1e-5  # of the head's weights, for features of unit spread: enough for one best answer to be there
_RIDGE = 0.1  # likewise of the classifier that is judged: it has to be as good as it gets on images that were left out
_STEPS = 200


def fit_head(features: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Weight [K, F] and bias [K] of the logistic regression for features [N, F] and labels [N].

    >>> weight, bias = fit_head(torch.tensor([[0.0], [1.0], [4.0], [5.0]]), torch.tensor([0, 0, 1, 1]), 2)
    >>> (torch.tensor([[2.0], [3.0]]) @ weight.T + bias).argmax(1)
    tensor([0, 1])
    """
    centre, spread, x = _standardised(features)
    weight = torch.zeros(classes, x.shape[1], dtype=x.dtype, device=x.device, requires_grad=True)
    bias = torch.zeros(classes, dtype=x.dtype, device=x.device, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight, bias], max_iter=_STEPS, tolerance_grad=1e-6, tolerance_change=1e-9, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        total: Tensor = cross_entropy(x @ weight.T + bias, labels) + 0.5 * _DECAY * weight.square().sum()
        total.backward()  # type: ignore[no-untyped-call]
        return total

    with torch.enable_grad():
        optimizer.step(loss)  # type: ignore[arg-type]
    scaled = weight.detach() / spread
    return scaled.to(features), (bias.detach() - scaled @ centre).to(features)


def unexplained(features: Tensor, labels: Tensor, classes: int) -> float:
    """What a linear classifier that was fitted to all other images does not tell of an image's class: a share.

    0 is all right for sure, 1 is as good as the classes' frequencies, more is worse than those. The classifier is ridge
    regression on one-hot labels Y with an intercept. For it leaving an image out has a closed form: with H the matrix
    that takes Y to the fitted values, what image i gets from the others is P_i = (H Y - h Y)_i / (1 - h_i), h the
    diagonal of H. The share is |P - Y|^2 / |Y - mean Y|^2.

    >>> far, near = torch.tensor([[0.0], [1.0], [8.0], [9.0]]), torch.tensor([[0.0], [2.0], [1.0], [3.0]])
    >>> labels = torch.tensor([0, 0, 1, 1])
    >>> round(unexplained(far, labels, 2), 3), round(unexplained(near, labels, 2), 3)
    (0.056, 2.341)
    """
    _, _, x = _standardised(features)
    target, images = one_hot(labels, classes).to(x), len(x)
    # Of the two forms of the same matrix, the one with the smaller system to solve.
    if images <= x.shape[1]:
        gram = x @ x.T
        hat = torch.cholesky_solve(gram, _factor(gram)) + 1 / images
    else:
        hat = x @ torch.cholesky_solve(x.T, _factor(x.T @ x)) + 1 / images
    own = hat.diagonal()[:, None]
    predicted = (hat @ target - own * target) / (1 - own)
    total = (target - target.mean(0)).square().sum()
    return float((predicted - target).square().sum() / total) if total > 0 else 0.0


def _factor(gram: Tensor) -> Tensor:
    """Of the matrix with the ridge added, without waiting for a GPU to say that it is positive: it is."""
    ridge = _RIDGE * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    factor: Tensor = torch.linalg.cholesky_ex(gram + ridge)[0]
    return factor


def _standardised(features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The mean, the root mean square distance to it, and the features in those terms, in float64."""
    x = features.double()
    centre = x.mean(0)
    spread = (x - centre).square().sum(1).mean().sqrt().clamp_min(torch.finfo(x.dtype).tiny)
    return centre, spread, (x - centre) / spread
