"""Linear classifiers against another library's, and what they are worth against leaving images out by hand."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch.nn.functional import cross_entropy

from confitune.methods import linear
from confitune.methods.linear import FOLDS, fit_linear, folds_of, gain


def clouds(images, features, classes=3, apart=0.7, seed=0):
    """Features of classes that overlap, away from the origin, each of a scale of its own."""
    draw = np.random.default_rng(seed)
    labels = np.concatenate([np.arange(classes), draw.integers(0, classes, images - classes)])
    x = draw.normal(0, apart, (classes, features))[labels] + draw.normal(0, 1, (images, features))
    x = x * draw.uniform(0.2, 5, features) + draw.normal(0, 10, features)
    return torch.from_numpy(x).float(), torch.from_numpy(labels)


def by_scikit(x, labels, decay, centre, spread):
    """Logistic regression with the same penalty, on features in the same terms."""
    scaled = ((x - centre) / spread).numpy()
    model = LogisticRegression(C=1 / (decay * len(x)), tol=1e-10, max_iter=10_000).fit(scaled, labels.numpy())
    return lambda test: torch.from_numpy(model.decision_function(((test - centre) / spread).numpy())).float()


@pytest.mark.parametrize(("images", "features"), [(60, 8), (40, 60)])
@pytest.mark.parametrize("decay", [1e-3, 1e-2])
def test_fits_are_those_of_another_library(monkeypatch, images, features, decay):
    monkeypatch.setattr(linear, "_DECAYS", (decay,))
    x, labels = clouds(images, features)
    folds = folds_of(labels, 0)
    fit = fit_linear(x, labels, 3, folds)
    centre = x.mean(0)
    spread = (x - centre).square().sum(1).mean().sqrt()
    theirs = by_scikit(x, labels, decay, centre, spread)(x)
    ours = x @ fit.weight.T + fit.bias
    torch.testing.assert_close(
        ours - ours.mean(1, keepdim=True), theirs - theirs.mean(1, keepdim=True), atol=2e-2, rtol=0
    )
    left_out = torch.empty_like(ours)
    for fold in range(FOLDS):
        out = folds == fold
        left_out[out] = by_scikit(x[~out], labels[~out], decay, centre, spread)(x[out])
    assert fit.loss == pytest.approx(float(cross_entropy(left_out, labels)), rel=2e-2)
    assert int((fit.right != (left_out.argmax(1) == labels)).sum()) <= 1


def test_the_strength_with_the_least_loss_on_images_left_out_is_kept(monkeypatch):
    for apart in (0.2, 3.0):
        x, labels = clouds(60, 40, apart=apart)
        folds, alone = folds_of(labels, 0), []
        for decay in linear._DECAYS:
            with monkeypatch.context() as patch:
                patch.setattr(linear, "_DECAYS", (decay,))
                alone.append(fit_linear(x, labels, 3, folds))
        best = min(alone, key=lambda fit: fit.loss)
        found = fit_linear(x, labels, 3, folds)
        assert found.loss == pytest.approx(best.loss, rel=1e-4)
        torch.testing.assert_close(found.weight, best.weight, rtol=1e-3, atol=1e-4)


def test_features_that_tell_more_are_worth_more():
    fits = [
        fit_linear(*(both := clouds(200, 6, apart=apart)), 3, folds_of(both[1], 0)) for apart in (8.0, 2.0, 0.7, 0.0)
    ]
    assert [fit.loss for fit in fits] == sorted(fit.loss for fit in fits)
    assert fits[0].right.double().mean() > 0.97 > 0.5 > fits[-1].right.double().mean()


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_the_scale_of_features_does_not_matter(scale):
    x, labels = clouds(40, 6)
    folds = folds_of(labels, 0)
    fit, plain = fit_linear(x * scale, labels, 3, folds), fit_linear(x, labels, 3, folds)
    assert fit.loss == pytest.approx(plain.loss, rel=1e-3)
    torch.testing.assert_close(
        (x * scale) @ fit.weight.T + fit.bias, x @ plain.weight.T + plain.bias, rtol=1e-2, atol=1e-2
    )


def test_features_that_say_nothing_give_the_classes_frequencies():
    labels = torch.tensor([0] * 30 + [1] * 10)
    fit = fit_linear(torch.full((40, 4), 3.0), labels, 2, folds_of(labels, 0))
    assert torch.isfinite(fit.weight).all()
    probabilities = (torch.full((1, 4), 3.0) @ fit.weight.T + fit.bias).softmax(1)
    torch.testing.assert_close(probabilities, torch.tensor([[0.75, 0.25]]), atol=1e-2, rtol=0)


def test_every_class_is_spread_over_the_folds_by_the_seed():
    labels = torch.tensor([0] * 23 + [1] * 5 + [2] * 2)
    folds = folds_of(labels, 0)
    for label, count in ((0, 23), (1, 5), (2, 2)):
        of_class = folds[labels == label].bincount(minlength=FOLDS)
        assert of_class.sum() == count
        assert of_class.max() - of_class.min() <= 1
    assert torch.equal(folds, folds_of(labels, 0))
    assert not torch.equal(folds, folds_of(labels, 1))


def test_a_gain_is_told_with_its_standard_error():
    old = torch.tensor([True] * 50 + [False] * 50)
    new = torch.tensor([True] * 60 + [False] * 40)
    assert gain(new, old) == pytest.approx((10.0, 100 * 10**0.5 / 100))
    assert gain(old, old) == (0.0, 0.0)
