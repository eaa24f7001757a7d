"""Linear classifiers against another library's, and what they are worth against leaving images out by hand."""

from itertools import product

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch.nn.functional import cross_entropy

from confitune.methods import linear
from confitune.methods.linear import FOLDS, fit_linear, folds_of


def clouds(images, features, classes=3, apart=0.7, seed=0):
    """Features of classes that overlap, away from the origin, each of a scale of its own."""
    draw = np.random.default_rng(seed)
    labels = np.concatenate([np.arange(classes), draw.integers(0, classes, images - classes)])
    x = draw.normal(0, apart, (classes, features))[labels] + draw.normal(0, 1, (images, features))
    x = x * draw.uniform(0.2, 5, features) + draw.normal(0, 10, features)
    return torch.from_numpy(x).float(), torch.from_numpy(labels)


class _Pooled:
    """The covariance within classes and the ridge, whatever it is asked of."""

    def __init__(self, x, labels, ridge):
        within = sum(
            (of_class - of_class.mean(0)).T @ (of_class - of_class.mean(0))
            for of_class in (x[labels == label] for label in np.unique(labels))
        ) / len(x)
        self.pooled = within + ridge * within.diagonal().mean() * np.eye(len(within))

    def fit(self, x):
        self.covariance_ = self.pooled
        return self


def by_scikit(x, labels, ridge):
    """Log-likelihoods of another library's linear discriminant analysis."""
    x, labels = x.double().numpy(), labels.numpy()
    model = LinearDiscriminantAnalysis("lsqr", priors=[1 / 3] * 3, covariance_estimator=_Pooled(x, labels, ridge))
    return lambda test: torch.from_numpy(model.fit(x, labels).decision_function(test.double().numpy())).float()


@pytest.mark.parametrize(("images", "features"), [(60, 8), (40, 60)])
@pytest.mark.parametrize(("ridge", "temperature"), [(0.3, 1.0), (3.0, 4.0)])
def test_fits_are_those_of_another_library(monkeypatch, images, features, ridge, temperature):
    monkeypatch.setattr(linear, "_RIDGES", (ridge,))
    monkeypatch.setattr(linear, "_TEMPERATURES", (temperature,))
    x, labels = clouds(images, features)
    folds = folds_of(labels, 0)
    fit = fit_linear(x, labels, 3, folds)
    theirs = by_scikit(x, labels, ridge)(x) / temperature
    ours = x @ fit.weight.T + fit.bias
    torch.testing.assert_close(
        ours - ours.mean(1, keepdim=True), theirs - theirs.mean(1, keepdim=True), atol=2e-3, rtol=1e-3
    )
    left_out = torch.empty_like(ours)
    for fold in range(FOLDS):
        out = folds == fold
        left_out[out] = by_scikit(x[~out], labels[~out], ridge)(x[out]) / temperature
    smoothed = cross_entropy(left_out, labels, label_smoothing=1 / (images + 2))
    assert fit.loss == pytest.approx(float(smoothed), rel=1e-3)
    assert torch.equal(fit.right, left_out.argmax(1) == labels)


def test_ridge_and_temperature_with_the_least_loss_on_images_left_out_are_kept(monkeypatch):
    for apart in (0.2, 3.0):
        x, labels = clouds(60, 40, apart=apart)
        folds, alone = folds_of(labels, 0), []
        for ridge, temperature in product(linear._RIDGES, linear._TEMPERATURES):
            with monkeypatch.context() as patch:
                patch.setattr(linear, "_RIDGES", (ridge,))
                patch.setattr(linear, "_TEMPERATURES", (temperature,))
                alone.append(fit_linear(x, labels, 3, folds))
        best = min(alone, key=lambda fit: fit.loss)
        found = fit_linear(x, labels, 3, folds)
        assert found.loss == pytest.approx(best.loss, rel=1e-4)
        torch.testing.assert_close(found.weight, best.weight, rtol=1e-3, atol=1e-4)


def test_images_that_are_all_right_make_no_certainty():
    x, labels = clouds(60, 8, apart=30.0)
    fit = fit_linear(x, labels, 3, folds_of(labels, 0))
    assert fit.right.all()
    sure = (x @ fit.weight.T + fit.bias).softmax(1).amax(1)
    assert 0.9 < float(sure.mean()) < 0.9999


def test_a_class_of_one_image_is_not_known_without_it():
    x, labels = clouds(30, 4, apart=5.0)
    x, labels = torch.cat([x, x[:1] + 50]), torch.cat([labels, torch.tensor([3])])
    fit = fit_linear(x, labels, 4, folds_of(labels, 0))
    assert not fit.right[-1]
    assert fit.right[:-1].double().mean() > 0.9
    assert int((x[-1:] @ fit.weight.T + fit.bias).argmax()) == 3


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


def test_features_that_say_nothing_make_all_classes_alike():
    labels = torch.tensor([0] * 30 + [1] * 10)
    fit = fit_linear(torch.full((40, 4), 3.0), labels, 2, folds_of(labels, 0))
    assert torch.isfinite(fit.weight).all()
    probabilities = (torch.full((1, 4), 3.0) @ fit.weight.T + fit.bias).softmax(1)
    torch.testing.assert_close(probabilities, torch.tensor([[0.5, 0.5]]), atol=1e-2, rtol=0)


def test_every_class_is_spread_over_the_folds_by_the_seed():
    labels = torch.tensor([0] * 23 + [1] * 5 + [2] * 2)
    folds = folds_of(labels, 0)
    for label, count in ((0, 23), (1, 5), (2, 2)):
        of_class = folds[labels == label].bincount(minlength=FOLDS)
        assert of_class.sum() == count
        assert of_class.max() - of_class.min() <= 1
    assert torch.equal(folds, folds_of(labels, 0))
    assert not torch.equal(folds, folds_of(labels, 1))


def test_features_that_are_not_finite_give_a_fit_that_is_not():
    """What uses it says so; nothing is raised here."""
    x, labels = clouds(30, 4)
    x[3, 1] = torch.nan
    assert not torch.isfinite(fit_linear(x, labels, 3, folds_of(labels, 0)).weight).all()
