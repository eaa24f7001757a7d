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


def left_out_mistakes(features: Tensor, labels: Tensor, classes: int) -> Tensor:
    """For each image whether a linear classifier is wrong on it that was fitted to all the others, as bools [N].

    The classifier is ridge regression on one-hot labels Y with an intercept. For it leaving an image out has a closed
    form: with H the matrix that takes Y to the fitted values, the value that image i gets from the others is
    (H Y - h Y)_i / (1 - h_i), h the diagonal of H.

    >>> left_out_mistakes(torch.tensor([[0.0], [1.0], [2.0], [7.0], [8.0], [1.0]]), torch.tensor([0, 0, 0, 1, 1, 1]), 2)
    tensor([False, False, False, False, False,  True])
    """
    _, _, x = _standardised(features)
    target, images = one_hot(labels, classes).to(x), len(x)
    # Of the two forms of the same matrix, the one with the smaller system to solve.
    if images <= x.shape[1]:
        gram = x @ x.T
        hat = torch.linalg.solve(gram + _RIDGE * torch.eye(images).to(x), gram)
    else:
        hat = x @ torch.linalg.solve(x.T @ x + _RIDGE * torch.eye(x.shape[1]).to(x), x.T)
    hat = hat + 1 / images
    own = hat.diagonal()[:, None]
    wrong: Tensor = ((hat @ target - own * target) / (1 - own)).argmax(1) != labels
    return wrong


def _standardised(features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The mean, the root mean square distance to it, and the features in those terms, in float64."""
    x = features.double()
    centre = x.mean(0)
    spread = (x - centre).square().sum(1).mean().sqrt().clamp_min(torch.finfo(x.dtype).tiny)
    return centre, spread, (x - centre) / spread
