"""The label space of all tasks: sums in any order give one classifier, and it is the one of all images."""

from __future__ import annotations

import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from confitune.methods.gaussian import FALSE_ALARMS, FeatureSums

SIZE = 12


def clouds(classes: int, images: int, seed: int, apart: float = 1.5) -> tuple[torch.Tensor, torch.Tensor]:
    """Features around means of classes, stretched alike."""
    generator = torch.Generator().manual_seed(seed)
    means = apart * torch.randn(classes, SIZE, generator=generator)
    stretch = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(99)) / 3
    labels = torch.arange(classes).repeat(images)
    return means[labels] + torch.randn(len(labels), SIZE, generator=generator) @ stretch, labels


@pytest.fixture
def tasks():
    return {name: clouds(classes, 30, seed) for name, classes, seed in (("a", 3, 0), ("b", 2, 1), ("c", 4, 2))}


def learned(tasks, order) -> FeatureSums:
    sums = FeatureSums()
    for name in order:
        features, labels = tasks[name]
        sums = sums.plus(name, features, labels, int(labels.max()) + 1)
    return sums


def by_task(sums: FeatureSums, features: torch.Tensor) -> dict[str, torch.Tensor]:
    gaussians = sums.gaussians()
    logits = gaussians.logits(features)
    return {name: logits[:, gaussians.of_class == place] for place, name in enumerate(gaussians.tasks)}


@pytest.mark.parametrize("order", ["abc", "cab", "bca"])
def test_the_order_of_tasks_does_not_matter(tasks, order):
    probe, _ = clouds(5, 10, seed=7)
    expected, found = (by_task(learned(tasks, names), probe) for names in ("acb", order))
    for name in "abc":
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-6)


def test_what_was_removed_was_never_there(tasks):
    probe, _ = clouds(5, 10, seed=7)
    without = learned(tasks, "abc").minus("b", tasks["b"][0])
    found, expected = by_task(without, probe), by_task(learned(tasks, "ac"), probe)
    assert found.keys() == expected.keys() == {"a", "c"}
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-6)


def test_it_is_linear_discriminant_analysis_of_all_images_at_once(tasks):
    """scikit-learn's with a covariance that has the ridge in it, and every class as likely."""
    features = torch.cat([tasks[name][0] for name in "abc"])
    labels = torch.cat([tasks["a"][1], 3 + tasks["b"][1], 5 + tasks["c"][1]])
    x = features.double().numpy()

    theirs = LinearDiscriminantAnalysis(
        solver="lsqr", priors=[1 / 9] * 9, covariance_estimator=_Pooled(x, labels.numpy(), 0.1)
    ).fit(x, labels.numpy())
    probe, _ = clouds(9, 20, seed=3)
    expected = torch.from_numpy(theirs.predict_proba(probe.double().numpy()))
    found = learned(tasks, "abc").gaussians(ridge=0.1).probabilities(probe)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)


class _Pooled:
    """The covariance within classes and the ridge, whatever it is asked of."""

    def __init__(self, x, labels, ridge):
        within = sum(
            (of_class - of_class.mean(0)).T @ (of_class - of_class.mean(0))
            for of_class in (x[labels == label] for label in set(labels.tolist()))
        ) / len(x)
        self.pooled = within + ridge * within.diagonal().mean() * torch.eye(len(within)).double().numpy()

    def fit(self, x):
        self.covariance_ = self.pooled
        return self


def test_calibration_makes_sure_answers_rarer_where_classes_overlap():
    features, labels = clouds(6, 40, seed=0, apart=0.4)
    held, held_labels = clouds(6, 40, seed=0, apart=0.4)
    held = held + 1.0 * torch.randn(held.shape, generator=torch.Generator().manual_seed(4))
    sums = FeatureSums().plus("a", features, labels, 6)
    chosen = sums.calibrated(held, held_labels)
    probabilities = chosen.probabilities(held)
    right = (probabilities.argmax(1) == held_labels).double().mean()
    assert abs(float(probabilities.max(1).values.mean() - right)) < 0.1
    assert float(sums.gaussians(0.01).probabilities(held).max(1).values.mean() - right) > 0.1


def test_few_images_that_are_all_right_do_not_make_it_certain():
    """Twelve of twelve are right by far, which still lets one of fourteen be wrong."""
    features, labels = clouds(3, 24, seed=0, apart=20.0)
    sums = FeatureSums().plus("a", features[:60], labels[:60], 3)
    probabilities = sums.calibrated(features[60:], labels[60:]).probabilities(features[60:])
    assert (probabilities.argmax(1) == labels[60:]).all()
    assert 0.85 < float(probabilities.max(1).values.mean()) < 0.99


def test_unknown_images_are_unusual_and_few_known_ones_are(tasks):
    sums = learned(tasks, "abc")
    held = [clouds(classes, 20, seed) for classes, seed in ((3, 0), (2, 1), (4, 2))]
    features = torch.cat([images for images, _ in held])
    labels = torch.cat([held[0][1], 3 + held[1][1], 5 + held[2][1]])
    chosen = sums.calibrated(features, labels)
    alarms = (chosen.unusual(features) > chosen.threshold).double().mean()
    assert abs(float(alarms) - FALSE_ALARMS) < 0.02
    others, _ = clouds(8, 20, seed=11)
    assert float((chosen.unusual(others) > chosen.threshold).double().mean()) > 0.6


@pytest.mark.parametrize(("classes", "train", "held"), [(2, 8, 2), (3, 20, 5), (10, 9, 1)])
def test_new_images_of_few_photos_are_called_unknown_no_more_often_than_stated(classes, train, held):
    """A single task of a few dozen photos, many times over."""
    alarms, strange = [], []
    for seed in range(40):
        features, labels = clouds(classes, train + held + 40, seed)
        place = torch.arange(len(labels)) // classes
        inside, out, new = place < train, (place >= train) & (place < train + held), place >= train + held
        sums = FeatureSums().plus("a", features[inside], labels[inside], classes)
        chosen = sums.calibrated(features[out], labels[out], (features[inside], labels[inside]))
        alarms.append(float((chosen.unusual(features[new]) > chosen.threshold).double().mean()))
        others, _ = clouds(8, 20, seed=1000 + seed)
        strange.append(float((chosen.unusual(others) > chosen.threshold).double().mean()))
    assert 0.01 < sum(alarms) / len(alarms) < 1.1 * FALSE_ALARMS
    assert sum(strange) / len(strange) > 0.2


def test_images_in_the_sums_count_as_if_they_were_not(tasks):
    features, labels = tasks["c"]
    sums = FeatureSums().plus("c", features, labels, 4)
    found = sums._unusual_left_out(sums.gaussians(0.1), features, labels)
    for image in (0, 7, 33):
        others = torch.arange(len(labels)) != image
        without = FeatureSums().plus("c", features[others], labels[others], 4)
        expected = without.gaussians(0.1).unusual(features[image : image + 1])
        torch.testing.assert_close(found[image : image + 1], expected, rtol=0.03, atol=0.3)


def test_probabilities_of_tasks_are_those_of_their_classes(tasks):
    gaussians = learned(tasks, "abc").gaussians()
    probabilities = gaussians.probabilities(tasks["a"][0])
    of_tasks = gaussians.of_tasks(probabilities)
    torch.testing.assert_close(of_tasks[:, 1], probabilities[:, 3:5].sum(1))
    torch.testing.assert_close(of_tasks.sum(1), torch.ones(len(of_tasks), dtype=torch.float64))
    assert float(of_tasks[:, 0].mean()) > 0.9


def test_own_networks_share_out_the_probability_of_their_tasks(tasks):
    gaussians = learned(tasks, "abc").gaussians()
    features = torch.cat([tasks["a"][0], tasks["b"][0]])
    before, asked = gaussians.probabilities(features), {}

    def ask(leading):
        asked.update((task, leading[task]) for task in range(3) if leading[task].any())
        yield 1, torch.tensor([[0.75, 0.25]]).repeat(int(leading[1].sum()), 1)

    probabilities = gaussians.shared_out(before, ask)
    of_tasks = gaussians.of_tasks(before)
    for task, images in asked.items():
        assert torch.equal(images, (of_tasks[:, task] >= 0.2) | (of_tasks.argmax(1) == task))
    assert int(asked[0][: len(tasks["a"][0])].sum()) > 80
    images = asked[1]
    torch.testing.assert_close(gaussians.of_tasks(probabilities), of_tasks)
    odds, alone = (found[images, 3] / found[images, 4] for found in (probabilities, before))
    torch.testing.assert_close(odds, (3 * alone).sqrt())  # the geometric mean of both
    assert torch.equal(probabilities[~images], before[~images])


def test_two_that_rule_out_all_classes_between_them_still_give_probabilities(tasks):
    gaussians = learned(tasks, "abc").gaussians()
    far = 1e4 * tasks["b"][0][:1]
    first = gaussians.probabilities(far)[0]
    task = int(gaussians.of_class[first.argmax()])
    inside = first[gaussians.of_class == task]
    assert inside.min() == 0  # by rounding
    own = torch.zeros(1, len(inside)).double()
    own[0, inside.argmin()] = 1
    found = gaussians.shared_out(first[None], lambda leading: [(task, own)])
    torch.testing.assert_close(found.sum(), torch.tensor(1.0).double())
