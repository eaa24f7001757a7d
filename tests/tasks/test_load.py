"""Which tasks a name gives: of one dataset, and of parts of several."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from confitune.errors import DataError, DataMissingError
from confitune.tasks import DATASETS, TaskSequence, load_tasks
from confitune.tasks.datasets.dataset import DatasetInfo

GREY = {"mean": (0.5,) * 3, "std": (0.5,) * 3}


def pictures(tasks: TaskSequence) -> list[torch.Tensor]:
    """What the network is trained on, task by task."""
    return [task.inputs(task.train.batch(torch.arange(len(task.train)))[0]) for task in tasks]


def test_bad_options_are_explained() -> None:
    with pytest.raises(DataError, match="digits has 5 tasks, so tasks=6 is impossible"):
        load_tasks("digits", tasks=6, **GREY)
    with pytest.raises(DataError, match="tasks=0 is impossible"):
        load_tasks("digits", tasks=0, **GREY)
    with pytest.raises(DataError, match="classes_per_task is 0"):
        load_tasks("digits", classes_per_task=0, **GREY)
    with pytest.raises(DataError, match=r"no 'dirty' pipeline \(those that have it: none\); use 'clean'"):
        load_tasks("digits", pipeline="dirty", **GREY)


def test_tasks_and_order_seed() -> None:
    whole = load_tasks("digits", **GREY)
    assert [t.classes for t in load_tasks("digits", tasks=2, **GREY)] == [t.classes for t in whole][:2]
    other = load_tasks("digits", order_seed=1, **GREY)
    assert [t.classes for t in other] != [t.classes for t in whole]
    assert load_tasks("digits", classes_per_task=3, **GREY).unused_classes == ("2",)


def test_folders_come_from_the_environment(flowers_dir: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("CONFITUNE_DATA", str(flowers_dir))
    monkeypatch.setenv("CONFITUNE_CACHE", str(tmp_path / "from_environment"))
    seen: list[tuple[str, int, int]] = []
    load_tasks("flowers102", classes_per_task=2, progress=lambda *call: seen.append(call), **GREY)
    assert seen == [("decoding flowers102", 60, 60)]
    assert len(list((tmp_path / "from_environment").glob("flowers102-clean-*.u8"))) == 1


def test_folders_default_to_the_users_cache(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("CONFITUNE_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(DataError, match=str(tmp_path / ".cache/confitune/data/flowers-102")):
        load_tasks("flowers102", download=False, **GREY)


def test_every_task_is_the_datasets_own() -> None:
    name = "photos:1-2+digits:4+photos:5+digits:1"
    photos, digits, tasks = (load_tasks(n, **GREY) for n in ("photos", "digits", name))
    own = [photos[0], photos[1], digits[3], photos[4], digits[0]]
    assert [task.name for task in tasks] == [
        "photos-task1",
        "photos-task2",
        "digits-task4",
        "photos-task5",
        "digits-task1",
    ]
    assert (tasks.name, tasks.pipeline, tasks.unused_classes) == (name, "clean", ())
    for task, other in zip(tasks, own, strict=True):
        assert (task.classes, task.preprocess) == (other.classes, other.preprocess)
        for split in ("train", "test"):
            images, expected = getattr(task, split), getattr(other, split)
            (pixels, labels), (wanted, own_labels) = (i.batch(torch.arange(len(i))) for i in (images, expected))
            assert torch.equal(pixels, wanted)
            assert torch.equal(labels, own_labels)
    # Each dataset was read once: its tasks share their pixels.
    assert len({id(task.train.pixels) for task in tasks}) == 2
    assert {task.train.pixels.shape[-1] for task in tasks} == {8, 64}
    assert {tuple(x.shape[1:]) for x in pictures(tasks)} == {(3, 64, 64)}


def test_a_dataset_is_read_once_however_many_parts_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    read_names: list[str] = []

    def spied(info: DatasetInfo) -> DatasetInfo:
        return replace(info, read=lambda *options: (read_names.append(info.name), info.read(*options))[1])

    spies = {name: spied(DATASETS[name]) for name in ("digits", "photos")}
    monkeypatch.setattr("confitune.tasks.names.DATASETS", spies)
    load_tasks("digits:5+photos:1+digits:1-2+photos:3", **GREY)
    assert read_names == ["digits", "photos"]


def test_tasks_of_one_dataset_in_another_order() -> None:
    assert [t.name for t in load_tasks("digits:5+digits:1-2", **GREY)] == [f"digits-task{n}" for n in (5, 1, 2)]
    assert [t.name for t in load_tasks("digits:3", **GREY)] == ["digits-task3"]
    assert [t.name for t in load_tasks("digits", tasks=1, **GREY)] == ["task1"]


def test_options_hold_for_every_part() -> None:
    tasks = load_tasks("photos:2+digits", classes_per_task=3, order_seed=1, **GREY)
    photos, digits = (load_tasks(n, classes_per_task=3, order_seed=1, **GREY) for n in ("photos", "digits"))
    assert [t.classes for t in tasks] == [photos[1].classes, *(t.classes for t in digits)]
    assert tasks.unused_classes == (*photos.unused_classes, *digits.unused_classes)
    with pytest.raises(DataError, match="digits: classes_per_task is 11, but there are only 10"):
        load_tasks("photos:1+digits", classes_per_task=11, **GREY)
    with pytest.raises(DataError, match="digits has no 'published' pipeline"):
        load_tasks("flowers102:1+digits", pipeline="published", download=False, **GREY)  # said before any is read


def test_only_the_first_tasks_of_all_parts(tmp_path: Path) -> None:
    options = {**GREY, "data_dir": tmp_path, "download": False}
    first = load_tasks("digits:2-3+photos:1+flowers102:1", tasks=3, **options)  # which is not there, and not needed
    assert [t.name for t in first] == ["digits-task2", "digits-task3", "photos-task1"]
    assert [t.name for t in load_tasks("digits:2-3+photos:1", tasks=1, **GREY)] == ["digits-task2"]
    with pytest.raises(DataMissingError, match="flowers102"):
        load_tasks("digits:2-3+photos:1+flowers102:1", tasks=4, **options)
    with pytest.raises(DataError, match=r"digits:2-3\+photos:1 has 3 tasks, so tasks=4 is impossible; give 1 to 3"):
        load_tasks("digits:2-3+photos:1", tasks=4, **GREY)
    with pytest.raises(DataError, match="has 3 tasks, so tasks=0 is impossible"):
        load_tasks("digits:2-3+photos:1", tasks=0, **GREY)


def test_tasks_that_a_dataset_has_not_are_named() -> None:
    with pytest.raises(DataError, match=r"digits has 5 tasks, so digits:4-6 is impossible"):
        load_tasks("photos:1+digits:4-6", **GREY)
    with pytest.raises(DataError, match="digits has 2 tasks, so digits:3 is impossible"):
        load_tasks("digits:3", classes_per_task=5, **GREY)


def test_folders_of_the_same_name_are_told_apart(class_folders: Path, tmp_path: Path, label_of) -> None:
    shutil.copytree(class_folders, tmp_path / "other/mine")
    shutil.copytree(class_folders, tmp_path / "a+b")
    options = {**GREY, "cache_dir": tmp_path / "cache"}
    name = f"folder:{class_folders}:1+digits:1+folder:{tmp_path / 'other/mine'}"
    tasks = load_tasks(name, **options)
    assert [t.name for t in tasks] == ["folder-mine-task1", "digits-task1", "folder-mine-2-task1"]
    for task in (tasks[0], tasks[2]):
        pixels, labels = task.train.batch(torch.arange(len(task.train)))
        assert [task.classes[i] for i in labels] == [["ant", "bee", "cat"][label_of(p)] for p in pixels]
    assert [x.shape[-1] for x in pictures(tasks)] == [224, 64, 224]
    assert [t.name for t in load_tasks(f"folder:{tmp_path}/a+b", **options)] == ["task1"]
    assert [t.name for t in load_tasks(f"folder:{tmp_path}/a+b:1", **options)] == ["folder-a_b-task1"]


def test_held_out_images_are_each_tasks_own() -> None:
    tasks = load_tasks("photos:1+digits:1", **GREY)
    for before, after in zip(tasks, tasks.validating(0.1, seed=3), strict=True):
        assert sorted([*after.train.rows.tolist(), *after.test.rows.tolist()]) == before.train.rows.tolist()
        assert after.test.pixels is before.train.pixels
        assert after.preprocess == before.preprocess


def test_joint_training_of_what_is_stored_differently_is_refused() -> None:
    with pytest.raises(DataError, match=r"the tasks of 'photos:1-2\+digits:1' cannot be joined"):
        load_tasks("photos:1-2+digits:1", **GREY).joined()
    (whole,) = load_tasks("photos:4-5+photos:1", **GREY).joined()
    assert whole.groups == ((0, 4), (4, 8), (8, 12))


def test_two_datasets_that_are_stored_alike_are_joined(class_folders: Path, tmp_path: Path, label_of) -> None:
    shutil.copytree(class_folders, tmp_path / "other")
    name = f"folder:{class_folders}+folder:{tmp_path / 'other'}"
    (whole,) = load_tasks(name, classes_per_task=3, cache_dir=tmp_path / "cache", **GREY).joined()
    assert sorted(whole.classes) == sorted(
        f"folder-{f}-task1:{c}" for f in ("mine", "other") for c in ("ant", "bee", "cat")
    )
    pixels, labels = whole.test.batch(torch.arange(len(whole.test)))
    found = [whole.classes[label].partition(":")[2] for label in labels]
    assert found == [["ant", "bee", "cat"][label_of(p)] for p in pixels]


def test_folders_beside_each_other_are_tasks_of_their_own_sizes(class_folders: Path, tmp_path: Path) -> None:
    shutil.copytree(class_folders, tmp_path / "other")
    for folder in list((tmp_path / "other").rglob("cat")):
        shutil.rmtree(folder)
    name, cache = f"folder:{class_folders}+folder:{tmp_path / 'other'}", str(tmp_path / "cache")
    tasks = load_tasks(name, cache_dir=cache, **GREY)
    assert [sorted(task.classes) for task in tasks] == [["ant", "bee", "cat"], ["ant", "bee"]]
    assert tasks.unused_classes == ()
