"""Sequences of parts of several datasets: how their names are read, and which tasks they give."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from confitune.tasks import (
    DATASETS,
    DataError,
    DataMissingError,
    DatasetInfo,
    TaskSequence,
    dataset_info,
    dataset_parts,
    load_tasks,
)
from confitune.tasks.names import READERS

GREY = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
NAMED = sorted(set(DATASETS) - {"folder"})


def read(name: str) -> list[tuple[str, tuple[int, int] | None]]:
    return [(part.dataset, part.tasks) for part in dataset_parts(name)]


def pictures(tasks: TaskSequence) -> list[torch.Tensor]:
    """What the network is trained on, task by task."""
    return [task.inputs(task.train.batch(torch.arange(len(task.train)))[0]) for task in tasks]


# ---- names -----------------------------------------------------------------------------------------------------------


def test_parts_and_their_tasks() -> None:
    assert read("photos") == [("photos", None)]
    assert read("photos:4") == [("photos", (4, 4))]
    assert read("photos:1-2+digits:1+photos:3-5") == [("photos", (1, 2)), ("digits", (1, 1)), ("photos", (3, 5))]
    assert read("digits+cub200:10-12") == [("digits", None), ("cub200", (10, 12))]
    assert read("folder:a/b:2+digits+folder:x:y:1-3") == [
        ("folder:a/b", (2, 2)),
        ("digits", None),
        ("folder:x:y", (1, 3)),
    ]
    # What does not look like tasks belongs to the path; 'folder:3' is a folder called 3.
    assert read("folder:a:b+folder:c:1-+folder:3") == [("folder:a:b", None), ("folder:c:1-", None), ("folder:3", None)]
    assert read("folder:a:١") == [("folder:a:١", None)]


@given(st.lists(st.tuples(st.sampled_from(NAMED), st.integers(0, 4)), min_size=1, unique=True))
def test_a_name_made_of_parts_gives_those_parts(chosen: list[tuple[str, int]]) -> None:
    parts = [(dataset, (3 * n + 1, 3 * n + 1 + n % 3)) for dataset, n in chosen]
    texts = [f"{d}:{a}" if a == b else f"{d}:{a}-{b}" for d, (a, b) in parts]
    assert read("+".join(texts)) == parts
    assert [str(part) for part in dataset_parts("+".join(texts))] == texts


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("photo:1-2+digits", "there is no dataset 'photo'; did you mean 'photos'?"),
        ("photos:1+digit", "there is no dataset 'digit'; did you mean 'digits'?"),
        ("photos + digits", "there is no dataset 'photos '; did you mean 'photos'?"),
        ("photos+", "'photos+' has an empty part: write datasets with '+' between them, e.g. photos:1-2+digits:1"),
        ("+photos", "'+photos' has an empty part"),
        ("", "'' has an empty part"),
        ("photos:", "'photos:': '' are no tasks of photos: write one as photos:2 or several as photos:1-3"),
        ("photos:1,3", "'1,3' are no tasks of photos"),
        ("photos:1-2-3", "'1-2-3' are no tasks of photos"),
        ("photos:-2", "'-2' are no tasks of photos"),
        ("photos:1-", "'1-' are no tasks of photos"),
        ("photos: 1", "' 1' are no tasks of photos"),
        ("photos:1:2", "'1:2' are no tasks of photos"),
        ("photos:²", "'²' are no tasks of photos"),
        ("photos:" + "9" * 5000, "are no tasks of photos"),
        ("photos:0", "'photos:0': tasks are counted from 1, the smaller number first, e.g. 2 or 1-3; got 0"),
        ("photos:0-2", "tasks are counted from 1"),
        ("digits+photos:3-2", "'photos:3-2': tasks are counted from 1, the smaller number first"),
        ("photos+folder", "a folder set needs its path"),
        ("photos+folder:", "a folder set needs its path"),
        ("folder::3", "a folder set needs its path"),
        ("folder:a+b", "there is no folder a+b, and as parts joined by '+': there is no dataset 'b'; there are"),
        ("digits+folder:a+b:1", "there is no dataset 'b'; there are"),
        ("folder:\0+photos", "has a character of code 0"),
        ("folder:~\ud800", "has a character that no name of a file has"),
    ],
)
def test_what_is_wrong_with_a_name_is_said(name: str, said: str) -> None:
    with pytest.raises(DataError) as caught:
        dataset_parts(name)
    assert said in str(caught.value)
    assert ("a folder whose path has a '+' can only stand alone" in str(caught.value)) == ("folder:a+b" in name)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("photos:1-3+digits+photos:3", r"takes task 3 of photos twice \(photos:1-3 and photos:3\)"),
        ("photos:3+photos:1-9", r"takes task 3 of photos twice \(photos:1-9 and photos:3\)"),
        ("photos:2+digits+photos", r"takes task 2 of photos twice \(photos and photos:2\)"),
        ("digits+digits", r"takes task 1 of digits twice \(digits and digits\)"),
        ("folder:a:2+folder:./b/../a/:2", r"takes task 2 of folder:a twice \(folder:a:2 and folder:./b/../a/:2\)"),
    ],
)
def test_a_task_is_taken_once(name: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        dataset_parts(name)


def test_a_folder_that_is_there_is_taken_by_its_whole_name(tmp_path: Path) -> None:
    for name in ("c++photos", "a:3", "a"):
        (tmp_path / name).mkdir()
    here = f"folder:{tmp_path}"
    assert read(f"{here}/c++photos") == [(f"{here}/c++photos", None)]
    assert read(f"{here}/c++photos:1-2") == [(f"{here}/c++photos", (1, 2))]
    assert read(f"{here}/a:3") == [(f"{here}/a:3", None)]
    assert read(f"{here}/a:4") == [(f"{here}/a", (4, 4))]
    assert read(f"{here}/a/:3") == [(f"{here}/a/", (3, 3))]
    assert read(f"{here}/a:3:1+digits") == [(f"{here}/a:3", (1, 1)), ("digits", None)]
    with pytest.raises(DataError) as caught:
        dataset_parts(f"digits+{here}/a:3")
    assert f"tasks of {tmp_path}/a or the folder {tmp_path}/a:3: write {here}/a/:3 for the former" in str(caught.value)
    assert read(f"digits+{here}/a/:3") == [("digits", None), (f"{here}/a/", (3, 3))]


def test_a_home_is_a_folder_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a+b").mkdir()
    assert read("folder:~/a+b") == [("folder:~/a+b", None)]


def test_parts_are_learned_as_the_first_of_them() -> None:
    assert dataset_info("photos") is DATASETS["photos"]
    assert dataset_info("folder:somewhere") is DATASETS["folder"]
    info = dataset_info("cub200:1-2+photos")
    assert (info.name, info.epochs, info.batch_size, info.image_size) == ("cub200:1-2+photos", 50, 32, 224)
    assert (info.tasks, info.classes_per_task, info.pipelines) == (None, None, ("clean",))
    assert dataset_info("photos+cub200:1-2").epochs == 5
    assert dataset_info("flowers102:1+caltech101:2").classes_per_task == 10
    assert dataset_info("flowers102:1+caltech101:2").pipelines == ("clean", "published")
    assert dataset_info("digits:2").tasks is None


# ---- tasks -----------------------------------------------------------------------------------------------------------


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

    def spy(info: DatasetInfo, reader: Callable) -> Callable:
        return lambda *options: (read_names.append(info.name), reader(*options))[1]

    for info in (DATASETS["digits"], DATASETS["photos"]):
        monkeypatch.setitem(READERS, info, spy(info, READERS[info]))
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
    with pytest.raises(DataError, match=r"digits:2-3\+photos:1 has 3 tasks, so tasks=4 is impossible; .* from 1 to 3"):
        load_tasks("digits:2-3+photos:1", tasks=4, **GREY)
    with pytest.raises(DataError, match="has 3 tasks, so tasks=0 is impossible"):
        load_tasks("digits:2-3+photos:1", tasks=0, **GREY)


def test_tasks_that_a_dataset_has_not_are_named() -> None:
    with pytest.raises(
        DataError, match=r"digits has 5 tasks of 2 classes, so digits:4-6 is impossible; .* from 1 to 5"
    ):
        load_tasks("photos:1+digits:4-6", **GREY)
    with pytest.raises(DataError, match="digits has 2 tasks of 5 classes, so digits:3 is impossible"):
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
    with pytest.raises(DataError) as caught:
        load_tasks("photos:1-2+digits:1", **GREY).joined()
    said = str(caught.value)
    assert said.startswith("the tasks of 'photos:1-2+digits:1' are preprocessed differently and cannot be joined: ")
    assert said.index("'photos-task1' by") < said.index("'digits-task1' by")
    assert "photos-task2" not in said
    assert said.endswith(
        "leave the method joint out, or take tasks of datasets whose images are stored and preprocessed alike"
    )
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
