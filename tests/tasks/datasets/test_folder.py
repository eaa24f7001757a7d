from pathlib import Path

import pytest
import torch

from confitune.errors import DataError, DataMissingError, UnreadableImageError
from confitune.tasks import TaskSequence, load_tasks
from confitune.tasks.task import IMAGENET_MEAN, IMAGENET_STD


@pytest.fixture
def load(tmp_path: Path):
    def load(path: Path, **options: object) -> TaskSequence:
        return load_tasks(
            f"folder:{path}", mean=IMAGENET_MEAN, std=IMAGENET_STD, cache_dir=tmp_path / "cache", **options
        )

    return load


def test_class_folders_are_split_80_20(load, class_folders: Path, label_of) -> None:
    tasks = load(class_folders, classes_per_task=3)
    (task,) = tasks
    assert sorted(task.classes) == ["ant", "bee", "cat"]
    assert (len(task.train), len(task.test)) == (12, 3)
    for images in (task.train, task.test):
        pixels, labels = images.batch(torch.arange(len(images)))
        assert pixels.shape[1:] == (3, 224, 224)
        assert [task.classes[i] for i in labels] == [["ant", "bee", "cat"][label_of(p)] for p in pixels]
    assert load(class_folders, classes_per_task=3)[0].test.rows.tolist() == task.test.rows.tolist()


def test_train_and_test_folders_are_kept_apart(load, tmp_path: Path, write_image) -> None:
    for split, count in (("train", 3), ("test", 1)):
        for label, name in enumerate(["ant", "bee"]):
            for i in range(count):
                write_image(tmp_path / "mine" / split / name / f"{i}.jpg", label, (30 + count, 30))
    (task,) = load(tmp_path / "mine")
    assert (task.train.rows.tolist(), task.test.rows.tolist()) == ([0, 1, 2, 3, 4, 5], [6, 7])
    assert task.train.labels.bincount().tolist() == [3, 3]


def test_one_image_a_class_is_fine_where_the_user_made_the_split(load, tmp_path: Path, write_image) -> None:
    for split in ("train", "test"):
        for label, name in enumerate(["ant", "bee"]):
            write_image(tmp_path / "mine" / split / name / "0.jpg", label)
    assert len(load(tmp_path / "mine")[0].train) == 2


def test_default_number_of_classes(load, tmp_path: Path, write_image) -> None:
    for label in range(11):
        for i in range(5):
            write_image(tmp_path / "mine" / f"c{label:02}" / f"{i}.jpg", label)
    tasks = load(tmp_path / "mine")
    assert [len(task.classes) for task in tasks] == [2] * 5
    assert [task.name for task in tasks] == ["task1", "task2", "task3", "task4", "task5"]
    assert set(tasks.unused_classes) == {f"c{i:02}" for i in range(11)} - {c for t in tasks for c in t.classes}
    assert len(tasks.unused_classes) == 1


def test_odd_names(load, class_folders: Path, write_image) -> None:
    write_image(class_folders / "ant/SHOUTING.JPEG", 0)
    write_image(class_folders / "ant/süß [1] *\n.Jpg", 0)
    write_image(class_folders / "ant/deeper/0.jpg", 0)
    write_image(class_folders / "ant/._hidden.jpg", 0)
    write_image(class_folders / "ant/.thumbs/0.jpg", 0)
    write_image(class_folders / ".git/0.jpg", 0)
    (class_folders / "ant/notes.txt").write_text("notes")
    (class_folders / "readme.txt").write_text("notes")
    (class_folders / "cat").rename(class_folders / "Ünïcode class")
    (task,) = load(class_folders, classes_per_task=3)
    assert sorted(task.classes) == ["ant", "bee", "Ünïcode class"]
    assert len(task.train) + len(task.test) == 18


def test_a_class_called_train_is_a_class(load, class_folders: Path) -> None:
    (class_folders / "ant").rename(class_folders / "train")
    (class_folders / "bee").rename(class_folders / "test")
    assert sorted(load(class_folders, classes_per_task=3)[0].classes) == ["cat", "test", "train"]


def test_unreadable_images_and_broken_links_are_named(load, class_folders: Path) -> None:
    (class_folders / "bee/2.jpg").write_bytes(b"")
    with pytest.raises(UnreadableImageError, match=r"bee/2\.jpg"):
        load(class_folders)
    (class_folders / "bee/2.jpg").unlink()
    (class_folders / "bee/2.jpg").symlink_to(class_folders / "gone.jpg")
    with pytest.raises(UnreadableImageError, match=r"bee/2\.jpg: No such file"):
        load(class_folders)


def test_thin_images_are_named(load, class_folders: Path, write_image) -> None:
    write_image(class_folders / "bee/2.jpg", 1, (500, 4))
    with pytest.raises(UnreadableImageError, match=r"bee/2\.jpg: it is too thin: 500 x 4 pixels"):
        load(class_folders)


def test_bad_folders_are_explained(load, class_folders: Path, tmp_path: Path, write_image) -> None:
    for name in ("nowhere", "n" * 300):
        with pytest.raises(DataMissingError, match=f"{name} is not there"):
            load(tmp_path / name)
    with pytest.raises(DataMissingError, match="the folder ~nobody-of-that-name/x is not there"):
        load(Path("~nobody-of-that-name/x"))
    with pytest.raises(DataError, match=r"has no class folders; 2 or more are needed\. A folder needs train"):
        load(class_folders / "ant")
    (class_folders / "empty").mkdir()
    with pytest.raises(DataError, match=r"class folder .*empty has no images\. Fill or remove it\. A folder"):
        load(class_folders)
    (class_folders / "empty/inner").mkdir()
    with pytest.raises(DataError, match="only folders without images"):
        load(class_folders)
    (class_folders / "empty/inner").rmdir()
    (class_folders / "empty").rmdir()
    write_image(class_folders / "rare/0.jpg", 3)
    with pytest.raises(DataError, match=r"too few images to train and to test on: 'rare' \(1\)"):
        load(class_folders)
    (class_folders / "rare").rename(class_folders / "Ant")
    with pytest.raises(DataError, match=r"'Ant' and 'ant' .* differ only in case"):
        load(class_folders)


def test_classes_of_train_and_test_must_agree(load, class_folders: Path, tmp_path: Path, write_image) -> None:
    (tmp_path / "both").mkdir()
    class_folders.rename(tmp_path / "both/train")
    for label, name in enumerate(["ant", "bee"]):
        write_image(tmp_path / "both/test" / name / "0.jpg", label)
    with pytest.raises(DataError, match=r"test has no folder for the classes \['cat'\]"):
        load(tmp_path / "both")
    write_image(tmp_path / "both/test/cat/0.jpg", 2)
    write_image(tmp_path / "both/test/dog/0.jpg", 3)
    with pytest.raises(DataError, match=r"train has no folder for the classes \['dog'\]"):
        load(tmp_path / "both")


def test_one_half_of_a_split_is_not_taken_for_a_class(load, class_folders: Path, tmp_path: Path, write_image) -> None:
    (tmp_path / "half").mkdir()
    class_folders.rename(tmp_path / "half/train")
    for other in ("test", "val"):
        (tmp_path / "half" / other).mkdir()
        with pytest.raises(DataError, match=r"half has class folders in train/ but not in test/; add them there, or"):
            load(tmp_path / "half")
    write_image(tmp_path / "half/plane/0.jpg", 1)  # now train/ may well be one of the classes
    with pytest.raises(DataError, match=r"class folder .*test has no images"):
        load(tmp_path / "half")


def test_there_is_no_published_pipeline(load, class_folders: Path) -> None:
    with pytest.raises(DataError, match=r"those that have it: cifar100, cub200, caltech101, flowers102\); use 'clean'"):
        load(class_folders, pipeline="published")
