"""`TaskSequence.from_datasets` with the kinds of datasets that people have."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, Subset, TensorDataset

from confitune.tasks import DataError, TaskSequence


class Listed(Dataset):
    """A map-style dataset of given items."""

    def __init__(self, items: list, classes: list[str] | None = None) -> None:
        self.items = items
        if classes is not None:
            self.classes = classes

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int):
        return self.items[index]


def pillow(value: int, mode: str = "RGB") -> Image.Image:
    return Image.new(mode, (6, 4), value if mode == "L" else (value, 2, 3))


def test_pillow_pairs_with_labels_of_any_value() -> None:
    train = Listed([(pillow(10 * i), label) for i, label in enumerate([7, 3, 7, 3])])
    test = Listed([(pillow(99), 3), (pillow(98, "L"), 7)])
    tasks = TaskSequence.from_datasets([(train, test)], name="mine")
    (task,) = tasks
    assert (tasks.name, task.name, task.classes) == ("mine", "task1", ("3", "7"))
    pixels, labels = task.train.batch(torch.arange(4))
    assert pixels.dtype == torch.uint8
    assert pixels.shape == (4, 3, 4, 6)
    assert pixels[:, :, 0, 0].tolist() == [[0, 2, 3], [10, 2, 3], [20, 2, 3], [30, 2, 3]]
    assert labels.tolist() == [1, 0, 1, 0]
    pixels, labels = task.test.batch(torch.arange(2))
    assert pixels[:, :, 0, 0].tolist() == [[99, 2, 3], [98, 98, 98]]
    assert labels.tolist() == [0, 1]


def test_byte_tensors_are_normalised_and_single_sets_split() -> None:
    images = torch.arange(20, dtype=torch.uint8)[:, None, None, None].expand(20, 1, 8, 8)
    data = TensorDataset(images, torch.arange(20) % 2)
    task = TaskSequence.from_datasets([data], name="mine", mean=(0.5,) * 3, std=(0.25,) * 3, resize=16)[0]
    assert (len(task.train), len(task.test)) == (16, 4)
    assert not set(task.train.rows.tolist()) & set(task.test.rows.tolist())
    assert task.test.labels.bincount().tolist() == [2, 2]
    pixels, labels = task.train.batch(torch.arange(16))
    assert torch.equal(pixels[:, 0, 0, 0] % 2, labels.to(torch.uint8))
    ready = task.preprocess(pixels)
    assert ready.shape == (16, 3, 16, 16)
    assert ready[3, 1, 0, 0].item() == pytest.approx((int(pixels[3, 0, 0, 0]) / 255 - 0.5) / 0.25)


def test_float_tensors_reach_the_network_as_they_are() -> None:
    data = Listed([(torch.full((3, 5, 5), float(i)), np.int64(i % 2)) for i in range(10)])
    task = TaskSequence.from_datasets([data], name="mine", resize=256, crop=224, test_share=0.4)[0]
    pixels, _ = task.test.batch(torch.arange(4))
    assert torch.equal(task.preprocess(pixels), pixels)
    assert pixels[:, 0, 0, 0].tolist() == [float(row) for row in task.test.rows]


def test_class_and_task_names() -> None:
    names = ["ant", "bee", "cat", "dog"]
    whole = Listed([(pillow(i), i % 4) for i in range(40)], names)
    halves = [Subset(whole, [i for i in range(40) if i % 4 in wanted]) for wanted in ((0, 2), (1, 3))]
    tasks = TaskSequence.from_datasets(halves, name="mine", task_names=["even", "odd"])
    assert [(t.name, t.classes) for t in tasks] == [("even", ("ant", "cat")), ("odd", ("bee", "dog"))]
    renamed = TaskSequence.from_datasets(halves, name="mine", class_names=[("A", "C"), ("B", "D")])
    assert [t.classes for t in renamed] == [("A", "C"), ("B", "D")]
    joint = tasks.joined()[0]
    pixels, labels = joint.train.batch(torch.arange(len(joint.train)))
    assert [joint.classes[label] for label in labels] == [names[int(p) % 4] for p in pixels[:, 0, 0, 0]]


def test_progress_is_reported() -> None:
    seen: list[tuple[str, int, int]] = []
    data = Listed([(pillow(i), i % 2) for i in range(300)])
    TaskSequence.from_datasets([data], name="mine", progress=lambda *call: seen.append(call))
    assert seen == [("reading task1", 256, 300), ("reading task1", 300, 300)]


GOOD = [(pillow(i), i % 2) for i in range(10)]


@pytest.mark.parametrize(
    ("datasets", "options", "message"),
    [
        ([Listed([])], {}, "empty"),
        ([iter([])], {}, "map-style"),
        ([Listed([(pillow(1), "cat")])], {}, "label 0 is 'cat'; expected an integer"),
        ([Listed([(pillow(1), 0.5)])], {}, "expected an integer"),
        ([Listed([(np.zeros((4, 4)), 0)])], {}, "image 0 is ndarray"),
        ([Listed([(torch.zeros(2, 4, 4), 0)])], {}, r"image 0 is torch.float32 \[2, 4, 4\]"),
        ([Listed([*GOOD, (Image.new("RGB", (9, 9)), 0)])], {}, "equal size.*; give the datasets a transform"),
        ([[Listed(GOOD), Listed(GOOD)]], {}, r"tuple \(train, test\)"),
        ([(Listed(GOOD), Listed([(pillow(1), 5)]))], {}, r"labels that the training set lacks: \[5\]"),
        ([(Listed(GOOD), Listed([(torch.zeros(3, 4, 6), 0)]))], {}, "give the datasets a transform"),
        ([(Listed(GOOD),) * 3], {}, "got 3 datasets"),
        ([Listed(GOOD)], {"class_names": [("only one",)]}, "2 labels .* but 1 class names"),
        ([Listed(GOOD)], {"task_names": ["a", "b"]}, "task_names has 2 entries for 1 tasks"),
        ([Listed(GOOD)], {"test_share": 1.5}, "test_share is 1.5"),
        ([Listed([*GOOD, (pillow(3), 8)])], {}, r"fewer than two images: '8' \(1\)"),
        ([], {}, "empty"),
    ],
)
def test_bad_input_is_explained(datasets: list, options: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        TaskSequence.from_datasets(datasets, name="mine", **options)
