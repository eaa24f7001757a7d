"""Runs on tasks of several datasets: small digits and large images of a folder, in one sequence."""

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from confitune.engine import SequenceRun
from confitune.errors import ConfituneError
from confitune.experiments.paper.figures import add_picture
from confitune.experiments.paper.outcome import Outcome
from confitune.experiments.paper.plan import Scope
from confitune.experiments.reporting.report import write_report
from confitune.experiments.reporting.table import compare
from confitune.experiments.runs.identity import filled
from confitune.experiments.runs.recipe import make_recipe
from confitune.experiments.runs.runner import run_recipe
from confitune.experiments.runs.tune import plan_search, run_search
from found import run_of


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A folder of four classes that differ in brightness, ten images each."""
    folder, draw = tmp_path_factory.mktemp("images") / "mine", np.random.default_rng(0)
    for label in range(4):
        (folder / f"c{label}").mkdir(parents=True)
        for i in range(10):
            pixels = draw.integers(60 * label, 60 * label + 60, (40, 50, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"c{label}" / f"{i}.png")
    return folder


@pytest.fixture
def mixed(values, folder, tmp_path):
    """Digits, then the folder's second task, then digits again."""
    name = f"digits:1+folder:{folder}:2+digits:2"
    return {**values, "dataset": name, "tasks": None, "batch_size": 8, "cache_dir": str(tmp_path / "cache")}


def test_two_sources_in_one_run(values, mixed, tmp_path):
    results = run_recipe(make_recipe(mixed), tmp_path / "out")
    alone = run_recipe(make_recipe({**values, "tasks": 1, "batch_size": 8}), tmp_path / "alone")
    for result, of_digits in zip(results, alone, strict=True):
        assert result.dataset == mixed["dataset"]
        assert [task["name"] for task in result.tasks] == ["digits-task1", "folder-mine-task2", "digits-task2"]
        assert [task["train_images"] for task in result.tasks] == [291, 16, 288]
        assert len(result.accuracy_matrix) == 3
        # The first task is learned as if there were no others.
        assert result.matrix[0, 0] == of_digits.matrix[0, 0]
        assert result.tasks[0]["classes"] == of_digits.tasks[0]["classes"]
        assert run_of(tmp_path / "out", result.method) == result
    (name,) = (path.name for path in (tmp_path / "out/runs").iterdir())
    assert name.startswith("digits-1+folder-")
    assert name.endswith("-mine-2+digits-2")
    page = write_report(tmp_path / "out")
    assert "folder-mine-task2" in page.read_text()
    assert f"**{mixed['dataset']}**, test_byobnet, 3 tasks" in compare([tmp_path / "out"])[0].markdown()


def test_a_run_broken_off_between_two_sources_ends_the_same(mixed, tmp_path, monkeypatch):
    recipe = make_recipe({**mixed, "methods": ["confit"]})
    (expected,) = run_recipe(recipe, tmp_path / "whole")
    learn = SequenceRun._learn

    def dies(self, index, task):
        if index == 2:
            raise KeyboardInterrupt
        learn(self, index, task)

    monkeypatch.setattr(SequenceRun, "_learn", dies)
    with pytest.raises(KeyboardInterrupt):
        run_recipe(recipe, tmp_path / "out", checkpoint_seconds=0)
    monkeypatch.setattr(SequenceRun, "_learn", learn)
    (result,) = run_recipe(recipe, tmp_path / "out", resume=True)
    assert result.final_sha256 == expected.final_sha256
    assert result.accuracy_matrix == expected.accuracy_matrix


def test_a_search_on_two_sources(mixed, tmp_path):
    search = plan_search("ewc", {**mixed, "methods": ["ewc"]}, grid=["1", "2"])
    points, _ = run_search(search, tmp_path / "out", retrain=False)
    for (result,) in points.values():
        assert [task["test_images"] for task in result.tasks] == [30, 2, 29]  # a tenth of each task's training images


def test_joint_is_refused_before_anything_is_trained(mixed, tmp_path, monkeypatch):
    monkeypatch.setattr(SequenceRun, "run", lambda self: pytest.fail("something is trained"))
    recipe = make_recipe({**mixed, "methods": ["finetune", "joint"]})
    with pytest.raises(ConfituneError, match="cannot be joined, as the method joint does"):
        run_recipe(recipe, tmp_path / "out")


def test_what_is_left_out_is_the_first_datasets():
    first = make_recipe({"dataset": "cub200:1-2+photos:1", "methods": ["mas"]})
    assert (first.train_settings(0, "finetune").epochs, first.train_settings(0, "finetune").batch_size) == (50, 32)
    other = make_recipe({"dataset": "photos:1+cub200:1-2", "methods": ["mas"]})
    assert (other.train_settings(0, "finetune").epochs, other.train_settings(0, "finetune").batch_size) == (5, 16)
    chosen = [
        filled(make_recipe({"dataset": name}).identity("mas", 0, ""))["options"]["mas"]
        for name in ("cub200", "cub200:1-2+photos:1", "photos:1+cub200:1-2", "photos")
    ]
    assert chosen[0] == chosen[1] != chosen[2] == chosen[3]


def test_a_wrong_name_is_refused_with_the_recipe():
    for name, said in (
        ("photos:1+digit", "did you mean 'digits'"),
        ("photos:1+photos", "twice"),
        ("photos:x", "Tasks are written as"),
    ):
        with pytest.raises(ConfituneError, match=said):
            make_recipe({"dataset": name})


def test_reproduce_takes_parts(tmp_path):
    scope = Scope(tmp_path)
    assert scope.recipe("flowers102:1-2+caltech101", "confit").pipeline == "published"
    assert scope.recipe("flowers102:1-2+digits", "confit").pipeline == "clean"
    outcome = Outcome("curves", "Curves")
    add_picture(outcome, scope, "photos:1+folder:/a b", Figure())
    assert outcome.pictures == [path.name for path in tmp_path.iterdir()] == ["curves-photos-1+folder-a-b.png"]
