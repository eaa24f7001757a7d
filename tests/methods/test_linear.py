"""Linear classifiers against another library's, and leaving images out against leaving them out."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch.nn.functional import cross_entropy, one_hot

from confitune.methods.linear import _DECAY, _RIDGE, _standardised, fit_head, unexplained


def clouds(images, features, classes=3, apart=0.7, seed=0):
    """Features of classes that overlap, away from the origin, each of a scale of its own."""
    draw = np.random.default_rng(seed)
    labels = np.concatenate([np.arange(classes), draw.integers(0, classes, images - classes)])
    x = draw.normal(0, apart, (classes, features))[labels] + draw.normal(0, 1, (images, features))
    x = x * draw.uniform(0.2, 5, features) + draw.normal(0, 10, features)
    return torch.from_numpy(x).float(), torch.from_numpy(labels)


# ---- judged ----------------------------------------------------------------------------------------------------------


def left_out_by_hand(x, labels, classes):
    """Refit without each image: ridge regression on one-hot labels, whose intercept costs nothing."""
    x, missed = _standardised(x)[2].numpy(), 0.0
    target = one_hot(labels, classes).double().numpy()
    for out in range(len(x)):
        rest = np.arange(len(x)) != out
        x0, y0 = x[rest].mean(0), target[rest].mean(0)
        centred = x[rest] - x0
        weight = np.linalg.solve(centred.T @ centred + _RIDGE * np.eye(x.shape[1]), centred.T @ (target[rest] - y0))
        missed += ((y0 + (x[out] - x0) @ weight - target[out]) ** 2).sum()
    return missed / ((target - target.mean(0)) ** 2).sum()


@pytest.mark.parametrize(("images", "features"), [(20, 30), (30, 30), (31, 30), (60, 8), (7, 200)])
@pytest.mark.parametrize("classes", [2, 5])
def test_leaving_out_in_closed_form_is_leaving_out(images, features, classes):
    for seed in range(3):
        x, labels = clouds(images, features, classes, seed=seed)
        assert unexplained(x, labels, classes) == pytest.approx(left_out_by_hand(x, labels, classes), rel=1e-9)


def test_scale_place_and_order_of_features_do_not_matter():
    x, labels = clouds(40, 6)
    expected = pytest.approx(unexplained(x, labels, 3), rel=1e-5)
    assert unexplained(x * 1e-4, labels, 3) == expected
    assert unexplained(x.double() * 1e4 + 1e6, labels, 3) == expected
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    assert unexplained(x[order], labels[order], 3) == expected


def test_features_that_tell_more_leave_less_unexplained():
    shares = [unexplained(*clouds(200, 6, apart=apart), 3) for apart in (8.0, 2.0, 0.7, 0.0)]
    assert shares == sorted(shares)
    assert shares[0] < 0.1 < 0.95 < shares[-1] < 1.2


# ---- fitted ----------------------------------------------------------------------------------------------------------


def objective(x, labels, weight, bias):
    """What is minimised, for features of unit spread."""
    return float(cross_entropy(x @ weight.T + bias, labels) + 0.5 * _DECAY * weight.square().sum())


@pytest.mark.parametrize(("images", "features"), [(120, 6), (40, 60)])
def test_a_head_is_the_logistic_regression_of_scikit_learn(images, features):
    raw, labels = clouds(images, features)
    centre, spread, x = _standardised(raw)
    assert x.square().sum(1).mean().item() == pytest.approx(1)
    assert x.mean(0).abs().max().item() < 1e-12
    # It sums over images where we average: C = 1 / (images * decay).
    theirs = LogisticRegression(C=1 / (images * _DECAY), tol=1e-10, max_iter=20_000).fit(x.numpy(), labels.numpy())
    weight, bias = fit_head(raw, labels, 3)
    assert (weight.shape, bias.shape, weight.dtype, bias.dtype) == ((3, features), (3,), torch.float32, torch.float32)
    ours = objective(x, labels, weight.double() * spread, bias.double() + weight.double() @ centre)
    best = objective(x, labels, torch.from_numpy(theirs.coef_), torch.from_numpy(theirs.intercept_))
    assert ours == pytest.approx(best, rel=2e-2, abs=1e-5)
    found, expected = (raw @ weight.T + bias).softmax(1), torch.from_numpy(theirs.predict_proba(x.numpy())).float()
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02)
    assert torch.equal(found.argmax(1), expected.argmax(1))


def test_a_head_is_fitted_whether_or_not_gradients_are_on():
    x, labels = clouds(40, 6)
    with torch.no_grad():
        weight, bias = fit_head(x, labels, 3)
    again = fit_head(x, labels, 3)
    assert torch.equal(weight, again[0])
    assert torch.equal(bias, again[1])
    assert not weight.requires_grad


# ---- odd ones --------------------------------------------------------------------------------------------------------

ODD = {
    "all features equal": (torch.full((6, 4), 0.1), torch.tensor([0, 0, 1, 1, 2, 0]), 3),
    "all features zero": (torch.zeros(6, 4), torch.tensor([0, 0, 1, 1, 2, 0]), 3),
    "one class": (clouds(9, 4)[0], torch.zeros(9, dtype=torch.long), 1),
    "one class of three": (clouds(9, 4)[0], torch.ones(9, dtype=torch.long), 3),
    "one image a class": (clouds(5, 8, 5)[0], torch.arange(5), 5),
    "two images": (clouds(2, 8, 2)[0], torch.arange(2), 2),
    "every image twice": (clouds(5, 8, 5)[0].repeat(2, 1), torch.arange(5).repeat(2), 5),
    "a feature that never varies": (torch.cat([clouds(20, 3)[0], torch.ones(20, 2)], 1), clouds(20, 3)[1], 3),
    "tiny features": (clouds(20, 3)[0] * 1e-20, clouds(20, 3)[1], 3),
    "huge features": (clouds(20, 3)[0] * 1e15, clouds(20, 3)[1], 3),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_features_and_labels_have_answers(name):
    x, labels, classes = ODD[name]
    share = unexplained(x, labels, classes)
    weight, bias = fit_head(x, labels, classes)
    assert weight.isfinite().all()
    assert bias.isfinite().all()
    answers = (x.double() @ weight.double().T + bias.double()).argmax(1)
    if name.startswith("all features"):
        assert (answers == 0).all()  # the most frequent class: there is nothing else to go by
        assert share == pytest.approx((6 / 5) ** 2)  # each is told the frequencies of the other five
    elif name.startswith("one class"):
        assert share == 0  # there is nothing to be explained
        assert torch.equal(answers, labels)
    elif name == "one image a class" or name == "two images":
        assert share > 1  # no other image has its label
        assert torch.equal(answers, labels)
    elif name == "every image twice":
        assert share < 0.2
        assert torch.equal(answers, labels)
    else:
        assert share == pytest.approx(unexplained(*clouds(20, 3), 3), rel=1e-4)
        again = fit_head(*clouds(20, 3), 3)
        assert torch.equal(answers, (clouds(20, 3)[0] @ again[0].T + again[1]).argmax(1))
