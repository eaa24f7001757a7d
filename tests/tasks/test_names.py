"""How names of datasets are read, and of sequences of parts of several; and datasets that a user's own function makes:
`FILE.py:FUNCTION`.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

import confitune
from confitune.errors import DataError, DataMissingError
from confitune.tasks import DATASETS, TaskSequence, dataset_info, dataset_parts, load_tasks

NAMED = sorted(set(DATASETS) - {"folder"})
EXAMPLE = Path(__file__).parents[2] / "examples/own_dataset.py"
GREY = {"mean": (0.5,) * 3, "std": (0.25,) * 3}
# Three tasks of two classes: image i of task t is of the grey level 50 * t + i.
MINE = """
import torch
from confitune.tasks import TaskSequence

def load(mean, std, data_dir):
    data = [
        [(torch.full((3, 4, 4), 50 * t + i, dtype=torch.uint8), i % 2) for i in range(20)] for t in range(3)
    ]
    return TaskSequence.from_datasets(data, name=str(data_dir), mean=mean, std=std, test_share=0.5)
"""


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
    assert [part.text for part in dataset_parts("+".join(texts))] == texts


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
    assert (info.name, info.epochs, info.batch_size) == ("cub200:1-2+photos", 50, 32)
    assert (info.tasks, info.classes_per_task, info.pipelines) == (None, None, ("clean",))
    assert dataset_info("photos+cub200:1-2").epochs == 5
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


@pytest.fixture
def mine(tmp_path: Path) -> Callable[..., str]:
    def write(text: str = MINE, name: str = "my data.py") -> str:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        return f"{tmp_path / name}:load"

    return write


def levels(tasks: TaskSequence) -> list[set[int]]:
    return [{int(p[0, 0, 0]) for p in task.train.pixels[task.train.rows]} for task in tasks]


def test_the_function_makes_the_tasks(mine) -> None:
    tasks = load_tasks(mine(), **GREY)
    assert (tasks.name, tasks.pipeline) == (mine(), "clean")  # the text is its name, whatever the function calls it
    assert [task.name for task in tasks] == ["task1", "task2", "task3"]
    for number, task in enumerate(tasks):
        pixels, labels = task.test.batch(torch.arange(len(task.test)))
        assert ((pixels[:, 0, 0, 0] - 50 * number) % 2 == labels).all()
        expected = (pixels[0, 0, 0, 0].item() / 255 - 0.5) / 0.25
        assert task.preprocess(pixels)[0, 0, 0, 0].item() == pytest.approx(expected)


def test_it_is_given_the_networks_mean_and_std_and_the_data_folder(mine, tmp_path: Path, monkeypatch) -> None:
    spy = MINE.replace("    data = [", "    given.append((mean, std, data_dir))\n    data = [", 1) + "\ngiven = []\n"
    monkeypatch.setenv("CONFITUNE_DATA", str(tmp_path / "usual"))
    name = mine(spy)
    load_tasks(name, data_dir=Path("~/here"), **GREY)
    load_tasks(name, mean=[0, 1, 0], std=[1, 2, 3])
    (module,) = (m for m in sys.modules.values() if getattr(m, "__file__", "") == str(tmp_path / "my data.py"))
    assert module.given == [
        ((0.5,) * 3, (0.25,) * 3, Path.home() / "here"),
        ((0.0, 1.0, 0.0), (1.0, 2.0, 3.0), tmp_path / "usual"),
    ]


def test_some_of_its_tasks_and_some_of_others(mine) -> None:
    whole = levels(load_tasks(mine(), **GREY))
    assert levels(load_tasks(mine(), tasks=2, **GREY)) == whole[:2]
    assert levels(load_tasks(f"{mine()}:3+{mine()}:1", **GREY)) == [whole[2], whole[0]]
    name = f"digits:1+{mine()}:2-3"
    tasks = load_tasks(name, **GREY)
    assert (tasks.name, [task.name for task in tasks]) == (
        name,
        ["digits-task1", "my_data-task2", "my_data-task3"],
    )
    assert levels(tasks[1:]) == whole[1:]
    assert [t.name for t in load_tasks(name, tasks=1, **GREY)] == ["digits-task1"]
    with pytest.raises(DataError, match=r"load has 3 tasks, so tasks=4 is impossible; give 1 to 3"):
        load_tasks(mine(), tasks=4, **GREY)
    with pytest.raises(DataError, match=r"load has 3 tasks, so .*load:3-4 is impossible"):
        load_tasks(f"{mine()}:3-4", **GREY)


def test_how_it_is_written(mine, tmp_path: Path, monkeypatch) -> None:
    assert read("a/b.py:load") == [("a/b.py:load", None)]
    assert read("photos:1-2+a.py:f:3+b.py:g_2") == [("photos", (1, 2)), ("a.py:f", (3, 3)), ("b.py:g_2", None)]
    assert read(r"C:\me\a.py:load:1-2") == [(r"C:\me\a.py:load", (1, 2))]
    assert read("folder:x.py:load") == [("folder:x.py:load", None)]
    for name in ("photos:load", "photos.module:load"):  # modules are not imported
        with pytest.raises(DataError, match=f"there is no dataset '{name}'; did you mean 'photos'"):
            read(name)
    monkeypatch.chdir(tmp_path)
    plus = mine(name="a+b/c.py")
    assert read(f"{plus}:2") == [(plus, (2, 2))]  # a path with a '+' can stand alone


def test_defaults_are_the_files_own(mine) -> None:
    info = dataset_info(mine())
    assert (info.name, info.batch_size, info.epochs, info.pipelines) == (mine(), 32, 10, ("clean",))
    assert (info.tasks, info.classes_per_task, info.from_paper) == (None, None, False)
    name = mine(MINE + "BATCH_SIZE, EPOCHS = 7, 3\n")  # a file that has changed is run again
    assert (dataset_info(name).batch_size, dataset_info(name).epochs) == (7, 3)
    assert dataset_info(f"{name}:1+photos").epochs == 3
    assert dataset_info(f"photos+{name}").epochs == 5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def lead(mean, std, data_dir): pass", "has no function 'load'"),
        ("load = 5", "has no function 'load'"),
        ("\n\n1 / 0", "my data.py raised ZeroDivisionError: division by zero (line 3)"),
        ("import no_such_package", "my data.py raised ModuleNotFoundError: No module named 'no_such_package' (line 1)"),
        ("def load(:", "my data.py raised SyntaxError: invalid syntax (my data.py, line 1)"),
        (
            "def load(mean, std, data_dir):\n    return open('/nowhere/at/all')",
            "my data.py:load, called with mean, std and data_dir, raised FileNotFoundError: [Errno 2] No such file or "
            "directory: '/nowhere/at/all' (line 2)",
        ),
        ("def load(): pass", "called with mean, std and data_dir, raised TypeError: load() got an unexpected keyword"),
        ("def load(**given): return []", "my data.py:load returned list, but must return a TaskSequence"),
        (
            "from confitune.tasks import TaskSequence\ndef load(**_): return TaskSequence.from_datasets([], name='x')",
            "failed: the task sequence 'x' is empty",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_said(mine, text: str, said: str) -> None:
    with pytest.raises(DataError) as caught:
        load_tasks(mine(text), **GREY)
    assert said in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert len(dataset_parts(f"{tmp_path}/nothing.py:load")) == 1  # a name can be read without it
    with pytest.raises(DataMissingError, match=r"there is no file .*/nothing\.py; write FILE\.py:FUNCTION"):
        dataset_info(f"digits+{tmp_path}/nothing.py:load")


def test_options_that_do_not_reach_the_function_are_refused(mine) -> None:
    for options in ({"order_seed": 1}, {"classes_per_task": 3}):
        with pytest.raises(DataError, match="makes its tasks itself: leave order_seed and classes_per_task out"):
            load_tasks(mine(), **options, **GREY)
    with pytest.raises(DataError, match="load has no 'published' pipeline"):
        load_tasks(mine(), pipeline="published", **GREY)


def test_another_process_makes_the_same_tasks_of_the_examples_text() -> None:
    name = f"{EXAMPLE}:load"
    tasks = load_tasks(name, **GREY)
    assert [(t.name, t.classes, len(t.train), len(t.test)) for t in tasks] == [
        ("straight", ("rows", "columns"), 64, 16),
        ("slanted", ("falling", "rising"), 64, 16),
        ("curved", ("rings", "rays"), 64, 16),
    ]
    assert (dataset_info(name).batch_size, dataset_info(name).epochs) == (16, 5)
    code = f"""
from confitune.tasks import load_tasks
tasks = load_tasks({name!r}, mean=(0.5,) * 3, std=(0.25,) * 3)
print([int(task.train.pixels.long().sum()) for task in tasks], [task.test.rows.tolist() for task in tasks])
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(confitune.__file__).parents[1])}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    sums = [int(task.train.pixels.long().sum()) for task in tasks]
    assert said.stdout.strip() == f"{sums} {[task.test.rows.tolist() for task in tasks]}"
