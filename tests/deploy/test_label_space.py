"""Features as a bundle keeps them, and sums of all tasks: what is added can be taken back, what is none is refused."""

import logging
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from confitune.deploy import BundleError
from confitune.deploy.bundle.store import Store
from confitune.deploy.label_space import (
    TaskFeatures,
    calibrate,
    chosen_from_state,
    space_state,
    sums_from_state,
    updated,
)
from confitune.engine import TrainSettings
from confitune.methods.gaussian import FeatureSums
from confitune.nn import ContinualNet, Head, build_model, headless, trace_flow, two_scales
from confitune.tasks import Images, Preprocess, Task
from deploy.shared import small

SIZE = 6
CLASSES = {"a": 3, "b": 2, "c": 4}


def features(classes, seed, own=False, images=8):
    """Of so many training and held-out images a class, around a mean for each class."""
    chance = torch.Generator().manual_seed(seed)
    means = 3 * torch.randn(classes, SIZE, generator=chance)
    labels = torch.arange(classes).repeat(images)

    def some():
        return means[labels] + torch.randn(len(labels), SIZE, generator=chance)

    return TaskFeatures(some(), labels, some(), labels.clone(), some() if own else None)


@pytest.fixture
def tasks():
    return {key: features(classes, seed) for seed, (key, classes) in enumerate(CLASSES.items())}


def by_hand(tasks):
    """Second moments, counts and sums of classes, in numpy."""
    units = {key: task.train.double().numpy() for key, task in tasks.items()}
    counts = {key: [int((task.labels == k).sum()) for k in range(CLASSES[key])] for key, task in tasks.items()}
    sums = {
        key: np.stack([units[key][task.labels.numpy() == k].sum(0) for k in range(CLASSES[key])])
        for key, task in tasks.items()
    }
    return sum(unit.T @ unit for unit in units.values()), counts, sums


def require_sums(found, tasks, atol=1e-6):
    second, counts, sums = by_hand(tasks)
    np.testing.assert_allclose(found.second, second, rtol=0, atol=atol)
    assert {key: values.tolist() for key, values in found.counts.items()} == counts
    assert found.sums.keys() == sums.keys()
    for key, values in sums.items():
        np.testing.assert_allclose(found.sums[key], values, rtol=0, atol=atol)


# ---- features of a task ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [False, True])
def test_features_come_back_to_a_bytes_precision(own):
    before = features(3, 1, own)
    state = before.state()
    assert {key: state[key].dtype for key in state if "." not in key and "labels" not in key} == dict.fromkeys(
        ("train", "held_out", "own") if own else ("train", "held_out"), torch.int8
    )
    after = TaskFeatures.from_state(state, 3)
    assert torch.equal(after.labels, before.labels)
    assert torch.equal(after.held_out_labels, before.held_out_labels)
    assert (after.own is None) == (not own)
    for name in ("train", "held_out", "own")[: 2 + own]:
        was, now = getattr(before, name), getattr(after, name)
        step = was.abs().amax(1, keepdim=True) / 127  # the largest number of each image is 127 steps
        assert ((now - was).abs() <= 0.5001 * step).all()
        largest = was.abs().argmax(1, keepdim=True)
        torch.testing.assert_close(now.gather(1, largest), was.gather(1, largest), rtol=1e-6, atol=0)


def test_what_came_back_comes_back_the_same_ever_after():
    once = features(2, 3, own=True).as_kept(2)
    again = once.as_kept(2)
    for name in ("train", "held_out", "own"):
        torch.testing.assert_close(getattr(again, name), getattr(once, name), rtol=1e-6, atol=0)
        assert torch.equal(again.state()[name], once.state()[name])


def test_features_that_are_all_zero_stay_zero():
    none = TaskFeatures(torch.zeros(2, SIZE), torch.arange(2), torch.zeros(1, SIZE), torch.zeros(1).long())
    assert not none.as_kept(2).train.any()


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(("gone", "labels"), [(0, [0, 1]), (1, [0, 1]), (2, [0, 1])])
def test_without_a_class_the_labels_of_the_others_close_the_gap(own, gone, labels):
    before = features(3, 2, own)
    left = before.without(gone)
    stay = [k for k in range(3) if k != gone]
    assert sorted(set(left.labels.tolist())) == labels
    assert (len(left.train), len(left.held_out)) == (16, 16)
    assert (left.own is None) == (not own)
    for label, was in enumerate(stay):
        assert torch.equal(left.train[left.labels == label], before.train[before.labels == was])
        assert torch.equal(left.held_out[left.held_out_labels == label], before.held_out[before.held_out_labels == was])
        if own:
            assert torch.equal(left.own[left.labels == label], before.own[before.labels == was])


@pytest.mark.parametrize("own", [False, True])
def test_joined_has_the_images_of_both_in_order(own):
    one, two = features(2, 4, own), features(2, 5, own, images=3)
    both = one.joined(two)
    assert (both.own is None) == (not own)
    for name in ("train", "labels", "held_out", "held_out_labels", "own")[: 4 + own]:
        assert torch.equal(getattr(both, name), torch.cat([getattr(one, name), getattr(two, name)]))


def stored(folder, state):
    """What reads it from a file."""
    files = Store(folder)
    return files.read(files.store("features", state))


def changed(**values):
    """A state with other tensors; None: without them."""
    state = {**features(3, 1, own=True).state(), **values}
    return {key: tensor for key, tensor in state.items() if tensor is not None}


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ({}, "'labels'"),
        (changed(train=None), "'train'"),
        (changed(held_out=None), "'held_out'"),
        (changed(held_out_labels=None), "'held_out_labels'"),
        (changed(**{"train.scale": None}), "train.scale"),
        (changed(train=torch.zeros(24, dtype=torch.int8)), "train has no scale for each image"),
        (changed(**{"train.scale": torch.zeros(1, 50_000)}), "train has no scale for each image"),
        (changed(**{"own.scale": torch.zeros(23, 1)}), "own has no scale for each image"),
        (changed(labels=torch.full((24,), 3)), "labels do not fit features"),
        (changed(labels=torch.full((24,), -1)), "labels do not fit features"),
        (changed(labels=torch.zeros(23)), "labels do not fit features"),
        (changed(held_out_labels=torch.zeros(24, 1)), "labels do not fit features"),
        (
            changed(**{"held_out": torch.zeros(24, SIZE + 1, dtype=torch.int8), "held_out.scale": torch.ones(24, 1)}),
            "labels do not fit features",
        ),
        (
            changed(**{"own": torch.zeros(23, SIZE, dtype=torch.int8), "own.scale": torch.ones(23, 1)}),
            "not all images have features",
        ),
    ],
)
def test_a_state_that_is_none_is_refused(tmp_path, state, why):
    with (
        pytest.raises(BundleError, match=rf"what a bundle keeps: .*{why}"),
        stored(tmp_path, state),
    ):
        TaskFeatures.from_state(state, 3)


@pytest.mark.parametrize("owns", [("head",), ("norms", "head")], ids="+".join)
def test_features_are_those_of_the_two_networks(owns, trained, images):
    """Of a task that owns norms, too, its own features are other ones than the pre-trained network's."""
    torch.manual_seed(0)
    pretrained = small().eval()
    net = ContinualNet(headless(small()), [Head()]) if owns == ("head",) else trained(small(), size=8)
    if owns == ("head",):
        net.add_task("birds", 4)
        net.finish_task()
    pixels, labels = images(10, 8), torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 0, 1])
    train, test = (Images(pixels, rows, labels[rows]) for rows in (torch.arange(7), torch.arange(7, 10)))
    task = Task("birds", ("p", "q", "r", "s"), train, test, Preprocess((0.0,) * 3, (1.0,) * 3))
    found = TaskFeatures.of(net, pretrained, task, TrainSettings(batch_size=4, device="cpu"))
    with torch.no_grad():
        torch.testing.assert_close(found.train, pretrained(pixels[:7]), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found.held_out, pretrained(pixels[7:]), rtol=1e-5, atol=1e-6)
        assert found.labels.tolist() == labels[:7].tolist()
        assert found.held_out_labels.tolist() == labels[7:].tolist()
        if owns == ("head",):
            assert found.own is None
        else:
            net.set_task("birds")
            torch.testing.assert_close(found.own, net.eval().features(pixels[:7]), rtol=1e-5, atol=1e-6)
            assert (found.own - found.train).abs().max() > 0.01


# ---- sums of all tasks -----------------------------------------------------------------------------------------------


def test_sums_of_tasks_that_come_and_go_are_those_of_the_tasks_that_are_there(tasks):
    asked = []

    def read(key):
        asked.append(key)
        return tasks[key]

    sums = FeatureSums()
    for keys, needed in (("ab", "ab"), ("abc", "c"), ("bc", "a"), ("bc", ""), ("ca", "ba")):
        sums = updated(sums, {key: CLASSES[key] for key in keys}, read)
        assert asked == list(needed)  # what is there already is not read again
        require_sums(sums, {key: tasks[key] for key in sums.counts})
        assert set(sums.counts) == set(keys)
        asked.clear()


def test_without_tasks_there_are_no_sums():
    assert not updated(FeatureSums(), {}, lambda key: pytest.fail("was read")).counts


def test_a_damaged_task_is_left_out_and_one_that_is_gone_costs_the_others_nothing(tasks, caplog):
    caplog.set_level(logging.WARNING)

    def read(key, damaged=("b",)):
        if key in damaged:
            raise BundleError(f"{key} is damaged")
        return tasks[key]

    sums = updated(FeatureSums(), CLASSES, read)
    require_sums(sums, {key: tasks[key] for key in "ac"})
    assert [record.getMessage() for record in caplog.records] == ["b is damaged. Its task is not guessed"]
    caplog.clear()
    whole = updated(FeatureSums(), CLASSES, tasks.__getitem__)
    sums = updated(whole, {key: CLASSES[key] for key in "ac"}, read)  # it cannot be subtracted
    require_sums(sums, {key: tasks[key] for key in "ac"})
    assert [record.getMessage() for record in caplog.records] == ["b is damaged"]


def test_features_of_another_network_are_left_out(tasks, caplog):
    caplog.set_level(logging.WARNING)
    narrow = TaskFeatures(torch.ones(4, 2), torch.arange(4) % 2, torch.ones(1, 2), torch.zeros(1).long())
    sums = updated(FeatureSums(), {"a": 3, "b": 2}, {"a": tasks["a"], "b": narrow}.__getitem__)
    require_sums(sums, {"a": tasks["a"]})
    assert "its features are those of another network" in caplog.text


def test_sums_and_what_was_chosen_come_back(tasks):
    sums = updated(FeatureSums(), CLASSES, tasks.__getitem__)
    chosen = calibrate(sums, tasks.__getitem__)
    state = space_state(sums, chosen)
    assert state["second"].shape == (SIZE * (SIZE + 1) // 2,)  # the other half is the same
    again = sums_from_state(state, CLASSES)
    assert torch.equal(again.second, sums.second.triu() + sums.second.triu(1).T)
    require_sums(again, tasks)
    found = chosen_from_state(again, state, {"a": "first", "b": "second", "c": "third"})
    assert found.tasks == ("first", "second", "third")
    assert (found.ridge, found.temperature, found.threshold) == (chosen.ridge, chosen.temperature, chosen.threshold)
    probe = tasks["b"].held_out
    torch.testing.assert_close(found.probabilities(probe), chosen.probabilities(probe), rtol=0, atol=1e-9)
    assert set(sums_from_state(state, {"a": 3, "gone": 2}).counts) == {"a"}


def test_a_limit_that_nothing_reaches_is_a_finite_number(tasks):
    sums = updated(FeatureSums(), CLASSES, tasks.__getitem__)
    state = space_state(sums, sums.gaussians())
    assert state["chosen"].isfinite().all()
    assert chosen_from_state(sums, state, {key: key for key in CLASSES}).threshold > 1e200


def test_the_classifier_knows_held_out_images(tasks):
    sums = updated(FeatureSums(), CLASSES, tasks.__getitem__)
    chosen = calibrate(sums, tasks.__getitem__)
    first = 0
    for key, task in tasks.items():
        right = chosen.logits(task.held_out).argmax(1) == first + task.held_out_labels
        assert right.double().mean() > 0.8  # chance is 1 in 9
        first += CLASSES[key]


def test_what_is_chosen_is_what_the_images_of_all_tasks_at_once_lead_to(tasks):
    sums = updated(FeatureSums(), CLASSES, tasks.__getitem__)
    labels = torch.cat([tasks["a"].labels, 3 + tasks["b"].labels, 5 + tasks["c"].labels])  # the same of held-out images
    held_out, train = (torch.cat([getattr(tasks[key], name) for key in "abc"]) for name in ("held_out", "train"))
    found, expected = calibrate(sums, tasks.__getitem__), sums.calibrated(held_out, labels, (train, labels))
    assert (found.ridge, found.temperature, found.threshold) == (
        expected.ridge,
        expected.temperature,
        expected.threshold,
    )
    assert math.isfinite(found.threshold)


def test_damaged_tasks_say_nothing_about_what_is_chosen(tasks):
    def none(key):
        raise BundleError(f"{key} is damaged")

    sums = updated(FeatureSums(), CLASSES, tasks.__getitem__)
    usual = calibrate(sums, none)
    assert (usual.tasks, usual.ridge, usual.temperature, usual.threshold) == (("a", "b", "c"), 0.1, 4.0, math.inf)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"second": None}, "'second'"),
        ({"a.sums": None}, "'a.sums'"),
        ({"a.counts": torch.ones(2)}, "3 classes have sums"),
        ({"a.sums": torch.ones(3, SIZE + 1)}, r"3 classes have sums \[3, 7\]"),
        ({"second": torch.ones(20)}, "."),  # no triangle has so many
    ],
)
def test_sums_that_are_none_are_refused(tmp_path, tasks, values, why):
    state = {**space_state(sums := updated(FeatureSums(), CLASSES, tasks.__getitem__), sums.gaussians()), **values}
    state = {key: tensor for key, tensor in state.items() if tensor is not None}
    with (
        pytest.raises(BundleError, match=rf"what a bundle keeps: .*{why}"),
        stored(tmp_path, state),
    ):
        sums_from_state(state, CLASSES)


def test_sums_that_make_no_classifier_are_refused(tmp_path, tasks):
    sums = updated(FeatureSums(), CLASSES, tasks.__getitem__)
    state, names = space_state(sums, sums.gaussians()), {key: key for key in CLASSES}
    impossible = FeatureSums(-sums.second, sums.counts, sums.sums)
    for found, said in (
        (impossible, state),
        (sums, {**state, "chosen": torch.ones(2)}),
        (sums, {**state, "chosen": torch.tensor(1.0)}),
        (sums, {}),
        (FeatureSums(sums.second, {}, {}), state),
    ):
        with pytest.raises(BundleError, match="is not what a bundle keeps"), stored(tmp_path, said):
            chosen_from_state(found, said, names)


def test_the_page_says_what_features_and_sums_take():
    models = ("resnet18", "tf_efficientnet_lite0")
    numbers = [trace_flow(two_scales(headless(build_model(model)))).features[0] for model in models]
    photo, sums, one_class = ([size(n) for n in numbers] for size in (int, lambda n: 4 * n * (n + 1), lambda n: 8 * n))
    page = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()
    assert (
        f"({photo[0] / 1e3:.1f} kB for a photo with ResNet18, {photo[1] / 1e3:.1f} kB with EfficientNet-Lite0, " in page
    )
    assert (
        f"({sums[0] / 1e6:.1f} MB with ResNet18, {sums[1] / 1e6:.1f} MB with EfficientNet-Lite0, "
        f"and {one_class[0] / 1e3:.0f} kB or {one_class[1] / 1e3:.0f} kB for each class)" in page
    )
