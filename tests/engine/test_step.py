"""Augmented images against .flip; the joint loss against its definition."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from confitune.engine import TrainSettings, evaluate, fit
from confitune.engine.step import augment, classification_loss, count_right, draw_noise, within_own_task
from confitune.errors import ConfituneError


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


def inputs_of(net, task, augmentation):
    """What the backbone is fed in the first epoch, and the labels' images as stored."""
    seen = []
    handle = net.backbone.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    settings = TrainSettings(epochs=1, batch_size=8, augmentation=augmentation, device="cpu")
    fit(net, task, "finetune", settings)
    handle.remove()
    return torch.cat(seen)


def test_training_feeds_the_images_as_they_are_unless_told(make_net, make_task):
    task = make_task("dark")
    stored = task.preprocess(task.train.pixels[task.train.rows])
    plain = inputs_of(make_net("finetune"), task, "none")
    place = [int((stored == image).flatten(1).all(1).nonzero()) for image in plain]
    assert sorted(place) == list(range(48))
    flipped = inputs_of(make_net("finetune"), task, "flip")  # the same order: noise has its own seed
    mirrored = [torch.equal(shown, image.flip(-1)) for shown, image in zip(flipped, plain, strict=True)]
    assert [torch.equal(shown, image) for shown, image in zip(flipped, plain, strict=True)] == [not m for m in mirrored]
    assert 10 < sum(mirrored) < 38


def test_evaluation_is_not_augmented(make_net, make_task):
    net, task = make_net("finetune"), make_task("dark")
    inputs_of(net, task, "none")
    seen = []
    net.backbone.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    evaluate(net, task, TrainSettings(augmentation="flip", device="cpu"))
    assert torch.equal(torch.cat(seen), task.preprocess(task.test.pixels[task.test.rows]))


# ---- the loss --------------------------------------------------------------------------------------------------------


GROUPS = ((0, 3), (3, 5), (5, 8))


def random_batch(seed=0, count=50):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, 8, generator=generator) * 3
    return logits, torch.randint(0, 8, (count,), generator=generator)


def test_the_joint_loss_is_the_cross_entropy_of_every_image_within_its_own_task():
    logits, labels = random_batch()
    total = 0.0
    for first, stop in GROUPS:
        mine = (labels >= first) & (labels < stop)
        total += cross_entropy(logits[mine, first:stop], labels[mine] - first, reduction="sum").item()
    assert classification_loss(logits, labels, TrainSettings(), GROUPS).item() == pytest.approx(total / 50, rel=1e-6)
    alone = classification_loss(logits, labels, TrainSettings())
    assert alone.item() == pytest.approx(cross_entropy(logits, labels).item(), rel=1e-6)


def test_the_loss_is_what_settings_say():
    logits, labels = random_batch()
    smoothed = classification_loss(logits, labels, TrainSettings(label_smoothing=0.1))
    assert torch.equal(smoothed, cross_entropy(logits, labels, label_smoothing=0.1))
    assert torch.equal(classification_loss(logits, labels, TrainSettings()), cross_entropy(logits, labels))
    with pytest.raises(ConfituneError, match="label_smoothing would spread labels over all tasks' classes"):
        classification_loss(logits, labels, TrainSettings(label_smoothing=0.1), GROUPS)


def test_gradients_of_the_joint_loss_stay_in_the_images_own_task():
    logits, labels = random_batch()
    logits.requires_grad_()
    classification_loss(logits, labels, TrainSettings(), GROUPS).backward()
    expected = torch.zeros(50, 8)
    for row, label in enumerate(labels.tolist()):
        first, stop = next(group for group in GROUPS if group[0] <= label < group[1])
        expected[row, first:stop] = logits[row, first:stop].detach().softmax(0) / 50
        expected[row, label] -= 1 / 50
    torch.testing.assert_close(logits.grad, expected)


def test_right_answers_are_counted_within_the_images_own_task():
    logits = torch.tensor([[1.0, 2, 0, 9, 9, 9, 9, 9], [9, 9, 9, 3, 4, 9, 9, 9], [9, 9, 9, 9, 9, 1, 1, 2]])
    labels = torch.tensor([1, 3, 7])
    assert count_right(logits, labels, GROUPS).tolist() == [True, False, True]
    assert count_right(logits, labels).tolist() == [False, False, False]


def test_the_loss_of_half_precision_logits_is_computed_in_float32():
    logits, labels = random_batch()
    loss = classification_loss(logits.bfloat16(), labels, TrainSettings())
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(cross_entropy(logits.bfloat16().float(), labels).item(), rel=1e-6)


def test_without_groups_logits_are_left_alone():
    logits, labels = random_batch()
    assert within_own_task(logits, labels, ()) is logits
