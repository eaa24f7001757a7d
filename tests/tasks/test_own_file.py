"""Datasets that a function of the user's own makes: `FILE.py:FUNCTION` and `package.module:FUNCTION`."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import confitune
from confitune.tasks import DataError, DataMissingError, TaskSequence, dataset_info, dataset_parts, load_tasks

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
    def read(name: str) -> list[tuple[str, tuple[int, int] | None]]:
        return [(part.dataset, part.tasks) for part in dataset_parts(name)]

    assert read("a/b.py:load") == [("a/b.py:load", None)]
    assert read("photos:1-2+a.py:f:3+p.q:g_2") == [("photos", (1, 2)), ("a.py:f", (3, 3)), ("p.q:g_2", None)]
    assert read(r"C:\me\a.py:load:1-2") == [(r"C:\me\a.py:load", (1, 2))]
    assert read("folder:x.py:load") == [("folder:x.py:load", None)]
    with pytest.raises(DataError, match="there is no dataset 'photos:load'; did you mean 'photos'"):
        read("photos:load")
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


def test_a_module_that_can_be_imported(mine, tmp_path: Path, monkeypatch) -> None:
    mine(name="stripes_package/data.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    tasks = load_tasks("stripes_package.data:load:2+digits:1", **GREY)
    assert [task.name for task in tasks] == ["stripes_package_data-task2", "digits-task1"]
    with pytest.raises(DataError, match=r"stripes_package\.data has no function 'lod'"):
        load_tasks("stripes_package.data:lod", **GREY)
    for name in ("stripes_package.nothing:load", "no_such_package:load"):
        with pytest.raises(DataError, match="raised ModuleNotFoundError: No module named"):
            load_tasks(name, **GREY)


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
