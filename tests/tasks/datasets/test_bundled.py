"""The two sets that need no download: photos and digits."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from sklearn.datasets import load_digits

from confitune.errors import DataError
from confitune.tasks import TaskSequence, load_tasks
from confitune.tasks.datasets import bundled

GREY = {"mean": (0.5,) * 3, "std": (0.5,) * 3}


@pytest.fixture(scope="module")
def photo_tasks() -> TaskSequence:
    return load_tasks("photos", **GREY)


def test_photos_are_five_tasks_of_four(photo_tasks: TaskSequence) -> None:
    assert [(len(t.classes), len(t.train), len(t.test)) for t in photo_tasks] == [(4, 240, 160)] * 5
    assert len({c for t in photo_tasks for c in t.classes}) == 20
    assert {"astronaut", "china", "text", "motorcycle_left"} <= {c for t in photo_tasks for c in t.classes}
    assert photo_tasks[0].train.pixels.shape == (2000, 3, 64, 64)
    for task in photo_tasks:
        assert task.train.labels.bincount().tolist() == [60] * 4
        assert task.test.labels.bincount().tolist() == [40] * 4


def test_photos_are_the_same_every_time_and_do_not_depend_on_class_order(photo_tasks: TaskSequence) -> None:
    other = load_tasks("photos", order_seed=5, **GREY)
    assert [t.classes for t in other] != [t.classes for t in photo_tasks]

    def patches(tasks: TaskSequence, name: str) -> torch.Tensor:
        task = next(t for t in tasks if name in t.classes)
        return task.test.pixels[task.test.rows[task.test.labels == task.classes.index(name)]]

    for name in ("retina", "china"):
        assert torch.equal(patches(photo_tasks, name), patches(other, name))


@settings(deadline=None, max_examples=40)
@given(st.integers(96, 700), st.integers(96, 700), st.text(max_size=8))
def test_train_and_test_patches_lie_in_different_cells(width: int, height: int, name: str) -> None:
    owner = np.full((height, width), -1)
    for number, split in enumerate(("train", "test")):
        for left, top, right, bottom in bundled.board_cells((width, height), split):
            assert (owner[top:bottom, left:right] == -1).all()
            owner[top:bottom, left:right] = number
    assert (owner >= 0).all()
    for number, split in enumerate(("train", "test")):
        boxes = bundled.patch_boxes(name, (width, height), split)
        assert len(boxes) == bundled.PATCHES[split]
        for left, top, right, bottom in boxes:
            assert right - left == bottom - top >= 32
            assert owner[top:bottom, left:right].shape == (bottom - top, right - left)
            assert (owner[top:bottom, left:right] == number).all()


def test_patches_use_all_cells_and_sizes() -> None:
    boxes = bundled.patch_boxes("any", (600, 600), "train")
    assert len({(left // 200, top // 200) for left, top, _, _ in boxes}) == 5
    sides = [right - left for left, _, right, _ in boxes]
    assert min(sides) < 60
    assert max(sides) > 170


def test_missing_photographs_are_named(monkeypatch) -> None:
    monkeypatch.setattr(bundled, "PHOTOGRAPHS", {"skimage/data": "unicorn.png"})
    with pytest.raises(DataError, match=r"unicorn\.png, which this version of skimage lacks"):
        load_tasks("photos", **GREY)
    monkeypatch.setattr(bundled, "PHOTOGRAPHS", {"no_such_package/data": "unicorn.png"})
    with pytest.raises(DataError, match="no_such_package, which is not installed"):
        load_tasks("photos", **GREY)


def test_digits() -> None:
    tasks = load_tasks("digits", **GREY)
    assert [t.classes for t in tasks] == [("4", "1"), ("7", "5"), ("3", "9"), ("0", "8"), ("6", "2")]
    joint = tasks.joined()[0]
    assert (len(joint.train), len(joint.test)) == (1437, 360)
    data = load_digits()
    pixels, labels = tasks[0].test.batch(torch.arange(len(tasks[0].test)))
    rows = tasks[0].test.rows.numpy()
    assert data.target[rows].tolist() == [int(tasks[0].classes[i]) for i in labels]
    assert pixels[:, 1].tolist() == np.rint(data.images[rows] * 255 / 16).astype(int).tolist()
    ready = tasks[0].preprocess(pixels)
    assert ready.shape[1:] == (3, 64, 64)
    assert ready.min() == -1.0
    assert ready.max() == pytest.approx(1.0)
