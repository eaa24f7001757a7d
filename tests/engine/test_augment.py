"""Augmented images against .flip and against windows of the reflect-padded image."""

import numpy as np
import pytest
import torch

from confitune.engine import Listener, TaskFit, TrainSettings, evaluate
from confitune.engine.augment import augment, draw_noise
from confitune.methods import METHODS


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def augmented(images, kind, generator):
    """The second of three steps."""
    noise = draw_noise(kind, 3, len(images), generator)
    return augment(images, kind, noise[1])


@pytest.fixture
def images():
    return torch.rand(400, 3, 16, 24, generator=seeded(1))


def test_none_is_the_batch_itself(images):
    generator = seeded()
    before = generator.get_state()
    noise = draw_noise("none", 2, 400, generator)
    assert augment(images, "none", noise) is images
    assert torch.equal(generator.get_state(), before)


def test_flip_mirrors_about_half_of_the_images_exactly(images):
    result = augmented(images, "flip", seeded())
    as_is = (result == images).flatten(1).all(1)
    mirrored = (result == images.flip(-1)).flatten(1).all(1)
    assert (as_is ^ mirrored).all()
    assert 160 <= mirrored.sum() <= 240  # 4 standard deviations around 200


def test_flips_follow_the_generator(images):
    assert torch.equal(augmented(images, "flip", seeded()), augmented(images, "flip", seeded()))
    assert not torch.equal(augmented(images, "flip", seeded()), augmented(images, "flip", seeded(5)))


def windows(image, most):
    """Every window that a shift by up to `most` pixels can give, by numpy's own reflection."""
    height, width = image.shape[-2:]
    padded = np.pad(image, ((0, 0), (most, most), (most, most)), mode="reflect")
    span = range(2 * most + 1)
    return {(row, col): padded[:, row : row + height, col : col + width] for row in span for col in span}


@pytest.mark.parametrize(("height", "width", "most"), [(16, 24, 2), (32, 32, 4), (6, 9, 1)])
def test_flip_shift_gives_windows_of_the_reflected_image(height, width, most):
    images = torch.rand(200, 3, height, width, generator=seeded(2))
    result = augmented(images, "flip-shift", seeded())
    assert result.shape == images.shape
    shifts, flips = [], 0
    for image, shown in zip(images, result, strict=True):
        found = [
            (shift, flip)
            for flip, candidate in ((False, image), (True, image.flip(-1)))
            for shift, window in windows(candidate.numpy(), most).items()
            if np.array_equal(window, shown.numpy())
        ]
        ((shift, flip),) = found  # exactly one window fits
        shifts.append(shift)
        flips += flip
    assert 70 <= flips <= 130
    span = set(range(2 * most + 1))
    assert {row for row, _ in shifts} == {col for _, col in shifts} == span
    assert len(set(shifts)) > len(span)  # rows and columns are drawn apart


def inputs_of(net, task, augmentation):
    """What the backbone is fed in the first epoch, and the labels' images as stored."""
    seen = []
    handle = net.backbone.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    settings = TrainSettings(epochs=1, batch_size=8, augmentation=augmentation, device="cpu")
    TaskFit(net, task, METHODS["finetune"], settings, Listener()).run()
    handle.remove()
    return torch.cat(seen)


def test_training_feeds_the_images_as_they_are_unless_told(make_net, make_task):
    task = make_task("dark")
    stored = task.preprocess(task.train.pixels[task.train.rows])
    plain = inputs_of(make_net("shared"), task, "none")
    place = [int((stored == image).flatten(1).all(1).nonzero()) for image in plain]
    assert sorted(place) == list(range(48))
    flipped = inputs_of(make_net("shared"), task, "flip")  # the same order: noise has its own seed
    mirrored = [torch.equal(shown, image.flip(-1)) for shown, image in zip(flipped, plain, strict=True)]
    assert [torch.equal(shown, image) for shown, image in zip(flipped, plain, strict=True)] == [not m for m in mirrored]
    assert 10 < sum(mirrored) < 38


def test_evaluation_is_not_augmented(make_net, make_task):
    net, task = make_net("shared"), make_task("dark")
    inputs_of(net, task, "none")
    seen = []
    net.backbone.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    evaluate(net, task, TrainSettings(augmentation="flip-shift", device="cpu"))
    assert torch.equal(torch.cat(seen), task.preprocess(task.test.pixels[task.test.rows]))
