import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, Subset, TensorDataset

from confitune.errors import DataError
from confitune.tasks import Images, Preprocess, Task, TaskSequence

PLAIN = Preprocess((0.0,) * 3, (1.0,) * 3)


def pixels(first: int, count: int, side: int = 2) -> torch.Tensor:
    return torch.arange(first, first + count, dtype=torch.uint8)[:, None, None, None].repeat(1, 3, side, side)


def task(name: str, block: torch.Tensor, train: list[int], test: list[int], classes: tuple[str, ...]) -> Task:
    count = len(classes)
    splits = (Images(block, torch.tensor(r), torch.arange(len(r)) % count) for r in (train, test))
    return Task(name, classes, *splits, PLAIN)


def two_tasks(second_block: torch.Tensor | None = None, names: tuple[str, ...] = ("x", "y", "z")) -> TaskSequence:
    shared = pixels(0, 10)
    block = shared if second_block is None else second_block
    rows = [4, 5, 6] if second_block is None else [0, 1, 2]
    tasks = (task("one", shared, [0, 1], [2, 3], ("a", "b")), task("two", block, rows, rows[::-1], names))
    return TaskSequence("pair", "clean", tasks)


def test_is_a_sequence() -> None:
    tasks = two_tasks()
    assert [t.name for t in tasks] == ["one", "two"]
    assert tasks[-1].name == "two"
    assert isinstance(tasks[1:], TaskSequence)
    assert tasks[:1][0] is tasks[0]
    assert (tasks[:1].name, tasks[:1].pipeline) == ("pair", "clean")


def test_joined_has_all_classes_all_data_and_says_where_they_came_from() -> None:
    tasks = two_tasks()
    joint = tasks.joined()
    (whole,) = joint
    assert whole.classes == ("a", "b", "x", "y", "z")
    assert whole.groups == ((0, 2), (2, 5))
    assert whole.train.rows.tolist() == [0, 1, 4, 5, 6]
    assert whole.train.labels.tolist() == [0, 1, 2, 3, 4]
    assert whole.test.rows.tolist() == [2, 3, 6, 5, 4]
    assert whole.train.pixels is tasks[0].train.pixels  # nothing was copied
    assert joint.joined() is joint


def test_joined_of_separate_blocks_keeps_each_image_with_its_label() -> None:
    whole = two_tasks(second_block=pixels(100, 3)).joined()[0]
    found, labels = whole.train.batch(torch.arange(5))
    assert found[:, 0, 0, 0].tolist() == [0, 1, 100, 101, 102]
    assert labels.tolist() == [0, 1, 2, 3, 4]


def test_joined_tells_classes_of_the_same_name_apart() -> None:
    assert two_tasks(names=("a", "b", "c")).joined()[0].classes == ("one:a", "one:b", "two:a", "two:b", "two:c")


def test_joined_by_name_has_one_class_of_each_name_and_no_groups() -> None:
    whole = two_tasks(names=("b", "c", "a")).joined(by_name=True)[0]
    assert (whole.classes, whole.groups) == (("a", "b", "c"), ())
    assert whole.train.labels.tolist() == [0, 1, 1, 2, 0]


def test_what_cannot_be_joined_is_explained() -> None:
    with pytest.raises(DataError, match="cannot be joined, as the method joint does: their images differ"):
        two_tasks(second_block=pixels(0, 3, side=4)).joined()
    one, two = two_tasks()
    other = Task(two.name, two.classes, two.train, two.test, Preprocess((0.5,) * 3, (1.0,) * 3))
    with pytest.raises(DataError, match="differ in size, type or preprocessing"):
        TaskSequence("pair", "clean", (one, other)).joined()


def test_empty_sequences_and_twice_used_names_are_refused() -> None:
    one, _ = two_tasks()
    with pytest.raises(DataError, match="empty"):
        TaskSequence("none", "clean", ())
    with pytest.raises(DataError, match="same name"):
        TaskSequence("pair", "clean", (one, one))


def larger(name: str, block: torch.Tensor, first: int) -> Task:
    """Twenty images of class a, ten of b, then three test images."""
    train = Images(block, torch.arange(first, first + 30), torch.tensor([0] * 20 + [1] * 10))
    test = Images(block, torch.arange(first + 30, first + 33), torch.tensor([0, 1, 1]))
    return Task(name, ("a", "b"), train, test, PLAIN)


def test_validating_tests_on_training_images_that_are_not_trained_on() -> None:
    block = pixels(0, 66)
    tasks = TaskSequence("pair", "clean", (larger("one", block, 0), larger("two", block, 33)))
    split = tasks.validating(0.1, seed=0)
    assert [task.name for task in split] == ["one", "two"]
    for before, after in zip(tasks, split, strict=True):
        trained, tested = after.train.rows.tolist(), after.test.rows.tolist()
        assert sorted(trained + tested) == before.train.rows.tolist()  # the test images are nowhere
        assert after.test.labels.bincount().tolist() == [2, 1]
        assert after.train.labels.bincount().tolist() == [18, 9]
        label_of = dict(zip(before.train.rows.tolist(), before.train.labels.tolist(), strict=True))
        assert [label_of[row] for row in trained + tested] == [*after.train.labels, *after.test.labels]
        assert after.train.pixels is after.test.pixels is block  # nothing was copied
    ones, twos = ([row % 33 for row in task.test.rows.tolist()] for task in split)
    assert ones != twos  # each task draws for itself


def test_what_is_held_out_depends_on_the_seed_alone() -> None:
    block = pixels(0, 66)
    tasks = TaskSequence("pair", "clean", (larger("one", block, 0), larger("two", block, 33)))

    def held(seed: int, sequence: TaskSequence = tasks) -> list[list[int]]:
        return [task.test.rows.tolist() for task in sequence.validating(0.1, seed)]

    with torch.random.fork_rng():
        torch.manual_seed(5)
        first = held(0)
        state = torch.get_rng_state()
        assert held(0) == first
        assert torch.equal(torch.get_rng_state(), state)
    assert held(1) != first
    assert held(0, tasks[:1]) == first[:1]  # the same for whoever tries a few tasks first


def test_nothing_to_hold_out_is_explained() -> None:
    with pytest.raises(DataError, match="task 'one' has one training image per class"):
        two_tasks().validating(0.1)


# `TaskSequence.from_datasets` with the kinds of datasets that people have.


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
    data = Listed([(torch.full((3, 5, 5), float(i), dtype=torch.float64), np.int64(i % 2)) for i in range(10)])
    task = TaskSequence.from_datasets([data], name="mine", resize=256, crop=224, test_share=0.4)[0]
    pixels, _ = task.test.batch(torch.arange(4))
    assert torch.equal(task.preprocess(pixels), pixels)
    assert pixels.dtype == torch.float32  # whatever they were: networks compute in it
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
        ([Listed([(torch.zeros(2, 4, 4), 0)])], {}, r"image 0 is a torch.float32 tensor of shape \[2, 4, 4\]"),
        (
            [Listed([*GOOD, (Image.new("RGB", (9, 9)), 0)])],
            {},
            r"2 kinds, such as torch\.uint8 \[3, 4, 6\] and torch\.uint8 \[3, 9, 9\]; make them one type and size",
        ),
        ([[Listed(GOOD), Listed(GOOD)]], {}, r"tuple \(train, test\)"),
        ([(Listed(GOOD), Listed([(pillow(1), 5)]))], {}, r"labels that the training set lacks: \[5\]"),
        (
            [(Listed(GOOD), Listed([(torch.zeros(3, 4, 6), 0)]))],
            {},
            r"torch.float32 .* and torch.uint8 .*; make them one type",
        ),
        ([(Listed(GOOD),) * 3], {}, "got 3 datasets"),
        ([Listed(GOOD)], {"class_names": [("only one",)]}, "2 labels .* but 1 class names"),
        ([Listed(GOOD)], {"task_names": ["a", "b"]}, "task_names has 2 entries for 1 tasks"),
        ([Listed(GOOD)], {"test_share": 1.5}, "test_share is 1.5"),
        ([Listed([*GOOD, (pillow(3), 8)])], {}, r"too few images .*: '8' \(1\)"),
        ([], {}, "empty"),
    ],
)
def test_bad_input_is_explained(datasets: list, options: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        TaskSequence.from_datasets(datasets, name="mine", **options)
