"""How names of datasets, and of sequences of parts of several, are read."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from confitune.tasks import DATASETS, DataError, dataset_info, dataset_parts

NAMED = sorted(set(DATASETS) - {"folder"})


def read(name: str) -> list[tuple[str, tuple[int, int] | None]]:
    return [(part.dataset, part.tasks) for part in dataset_parts(name)]


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
        ("Flowers-102", "there is no dataset 'Flowers-102'; did you mean 'flowers102'?"),
        ("xyz", "caltech101, flowers102, photos, digits, folder:PATH and FILE.py:FUNCTION"),
        ("folder", "a folder set needs its path: write folder:PATH"),
        ("photos:1+digit", "there is no dataset 'digit'; did you mean 'digits'?"),
        ("photos + digits", "there is no dataset 'photos '; did you mean 'photos'?"),
        ("photos+", "there is no dataset ''; there are"),
        ("", "there is no dataset ''; there are"),
        ("photos:", "there is no dataset 'photos:'; did you mean 'photos'? Tasks are written as photos:2"),
        ("photos:1,3", "there is no dataset 'photos:1,3'; did you mean 'photos'? Tasks are written as photos:2"),
        ("photos:1-2-3", "there is no dataset 'photos:1-2-3'; did you mean 'photos'? Tasks are written as photos:2"),
        ("photos:-2", "there is no dataset 'photos:-2'; did you mean 'photos'? Tasks are written as photos:2"),
        ("photos:1-", "there is no dataset 'photos:1-'; did you mean 'photos'? Tasks are written as photos:2"),
        ("photos: 1", "there is no dataset 'photos: 1'; did you mean 'photos'? Tasks are written as photos:2"),
        ("photos:1:2", "there is no dataset 'photos:1'; did you mean 'photos'?"),
        ("photos:²", "there is no dataset 'photos:²'; did you mean 'photos'? Tasks are written as photos:2"),
        ("photos:" + "9" * 5000, "did you mean 'photos'?"),
        ("photos:0", "'photos:0': tasks are counted from 1, the smaller number first, e.g. 2 or 1-3; got 0"),
        ("photos:0-2", "tasks are counted from 1"),
        ("digits+photos:3-2", "'digits+photos:3-2': tasks are counted from 1, the smaller number first"),
        ("photos+folder", "a folder set needs its path"),
        ("photos+folder:", "a folder set needs its path"),
        ("folder::3", "a folder set needs its path"),
        ("folder:a+b", "there is no dataset 'b'; there are"),
        ("digits+folder:a+b:1", "there is no dataset 'b'; there are"),
        ("folder:\0+photos", "cannot be looked for: embedded null byte"),
        ("folder:~\ud800", "cannot be looked for: "),
    ],
)
def test_what_is_wrong_with_a_name_is_said(name: str, said: str) -> None:
    with pytest.raises(DataError) as caught:
        dataset_parts(name)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("photos:1-3+digits+photos:3", r"takes tasks of photos twice \(photos:1-3 and photos:3\)"),
        ("photos:2+digits+photos", r"takes tasks of photos twice \(photos:2 and photos\)"),
        ("folder:a:2+folder:./b/../a/:2", r"takes tasks of folder:a twice \(folder:a:2 and folder:./b/../a/:2\)"),
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
    assert read(f"{here}/a:3") == [(f"{here}/a", (3, 3))]
    assert read(f"{here}/a:3/") == [(f"{here}/a:3/", None)]
    assert read(f"{here}/a:3:1+digits") == [(f"{here}/a:3", (1, 1)), ("digits", None)]


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


def test_the_papers_settings() -> None:
    """Sec. 5.1: mini-batches of {128, 32, 32, 32} for {10, 50, 20, 10} epochs; 20, 10, 10 and 10 tasks."""
    paper = {n: (i.tasks, i.classes_per_task, i.batch_size, i.epochs) for n, i in DATASETS.items() if i.from_paper}
    assert paper == {
        "cifar100": (20, 5, 128, 10),
        "cub200": (10, 20, 32, 50),
        "caltech101": (10, 10, 32, 20),
        "flowers102": (10, 10, 32, 10),
    }
