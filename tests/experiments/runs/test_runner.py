"""From a recipe to results in folders: what is run, what is left alone, what is refused."""

import io
import json
import platform

import pytest
import timm
import torch
from rich.console import Console

from confitune import metrics
from confitune.engine import RunResult, SequenceRun
from confitune.engine.checkpoint import Checkpoint
from confitune.errors import ConfituneError
from confitune.experiments.reporting.table import sections_of
from confitune.experiments.runs.identity import file_name, filled, finished_runs
from confitune.experiments.runs.job import Job, TrainingError
from confitune.experiments.runs.recipe import make_recipe
from confitune.experiments.runs.runner import Place, run_recipe
from confitune.nn import create_backbone, state_sha256
from found import contents, folder_of, forget, run_of


def test_each_run_has_a_line_and_a_folder_of_its_own(finished):
    runs = {(run.method, run.seed) for run in finished_runs(finished).values()}
    assert runs == {(method, seed) for method in ("finetune", "confit") for seed in (0, 1)}
    assert len(list(finished.glob("runs/digits/*/seed-*"))) == 4
    names = {path.name for path in folder_of(finished, "confit").iterdir()}
    assert names - {"checkpoint.before.pt"} == {"checkpoint.pt", "epochs.csv", "accuracy.csv", "tensorboard", ".lock"}
    assert {path.name for path in finished.iterdir()} == {"README.md", "runs.jsonl", "runs", "table.md"}


@pytest.mark.parametrize(
    ("dataset", "folder"),
    [
        ("digits", "digits"),
        ("folder:/data/my images", "folder-data-my-images"),
        ("folder:../x/[y]/", "folder-..-x-y"),
        ("folder:~/a+b_c.d", "folder-a+b_c.d"),
        ("photos:1-2+digits:1+photos:3-5", "photos-1-2+digits-1+photos-3-5"),
        ("folder:/a b:1-2+photos", "folder-a-b-1-2+photos"),
        ("folder:" + "a" * 193, "folder-" + "a" * 193),
    ],
)
def test_a_datasets_path_becomes_one_plain_name(tmp_path, dataset, folder):
    assert file_name(dataset) == folder
    recipe = make_recipe({"dataset": "digits", "methods": ["ewc+confit"]})
    job = Job(recipe, tmp_path, "ewc+confit", 7, "abc", "confitune run")
    assert job.folder == tmp_path / "runs/digits/ewc+confit" / f"seed-7-{job.key[:8]}"


def test_names_that_no_file_can_have_are_cut_and_still_differ(tmp_path):
    names = ["+".join(f"folder:/data/of/somebody/{last}{k}:1" for k in range(40)) for last in ("a", "b")]
    folders = [tmp_path / file_name(name) for name in (*names, names[0] + "0")]
    assert len(set(folders)) == 3
    for folder in folders:
        folder.mkdir()
        assert len(folder.name) == 200
    assert folders[0].name.startswith("folder-data-of-somebody-a0-1+folder-data-of-somebody-a1-1+")


def test_a_result_holds_everything_it_takes_to_repeat_it(finished, values, weights):
    recipe = make_recipe({**values, "seeds": 2})
    backbone = create_backbone("test_byobnet", str(weights))
    for method in ("finetune", "confit"):
        for seed in (0, 1):
            result = run_of(finished, method, seed)
            assert json.loads(result.line()).keys() == {*RunResult.model_fields, "checksum"}
            assert (result.dataset, result.method, result.seed) == ("digits", method, seed)
            assert result.config == recipe.identity(method, seed, state_sha256(backbone.module))
            assert filled(result.config)["means"] == ("window" if method == "confit" else None)
            assert result.weights_sha256 == state_sha256(backbone.module)
            assert result.weights == "start.pth"
            assert result.versions["timm"] == timm.__version__
            assert result.versions["python"] == platform.python_version()
            assert result.seconds > 0
            assert result.images_per_second > 0
            assert result.device.startswith("cpu (")
            assert result.command
            matrix = result.matrix
            assert matrix.shape == (2, 2)
            assert (result.acc, result.fgt) == (metrics.average_accuracy(matrix), metrics.average_forgetting(matrix))
            assert (result.learning_acc, result.bwt) == (
                metrics.learning_accuracy(matrix),
                metrics.backward_transfer(matrix),
            )
            assert [task["name"] for task in result.tasks] == ["task1", "task2"]


def test_the_same_recipe_gives_the_same_result_and_other_seeds_others(finished, values, tmp_path):
    again = run_recipe(make_recipe({**values, "methods": ["confit"]}), tmp_path / "again")[0]
    first, other = (run_of(finished, "confit", seed) for seed in (0, 1))
    assert again.final_sha256 == first.final_sha256
    assert again.accuracy_matrix == first.accuracy_matrix
    assert other.final_sha256 != first.final_sha256
    assert other.weights_sha256 == first.weights_sha256


@pytest.mark.parametrize("left", ["finished", "broken-off"])
def test_what_is_there_is_refused_and_untouched(finished, values, started, left):
    folder = folder_of(finished, "confit")
    for path in finished.rglob("checkpoint*.pt"):
        if left == "finished" or path.parent != folder:
            path.unlink()
    forget(finished, "finetune")
    forget(finished, "confit", 1)
    if left == "broken-off":
        forget(finished)
    before = contents(finished)
    with pytest.raises(ConfituneError) as caught:
        run_recipe(make_recipe(values), finished)
    assert str(caught.value).startswith(f"{finished} holds a {left} run of digits confit: add --resume")
    assert contents(finished) == before
    assert started == []


def test_resume_on_an_empty_folder_just_starts(values, tmp_path, started):
    out = tmp_path / "not" / "there"
    (result,) = run_recipe(make_recipe({**values, "methods": ["linear-probe"], "tasks": 1}), out, resume=True)
    assert started == [("linear-probe", 0)]
    assert run_of(out, "linear-probe") == result


def test_resume_on_a_finished_folder_runs_nothing(finished, values, started, monkeypatch):
    monkeypatch.setattr(
        "confitune.experiments.runs.recipe.load_tasks", lambda *_, **__: pytest.fail("no images are needed")
    )
    before = {path: content for path, content in contents(finished).items() if path.suffix != ".md"}
    results = run_recipe(make_recipe({**values, "seeds": 2}), finished, resume=True)
    assert started == []
    assert [(r.method, r.seed) for r in results] == [("finetune", 0), ("finetune", 1), ("confit", 0), ("confit", 1)]
    assert results[2] == run_of(finished, "confit")
    after = {path: content for path, content in contents(finished).items() if path.suffix != ".md"}
    assert after == before


def test_one_more_method_runs_alone(finished, values, started):
    before = contents(finished / "runs")
    more = make_recipe({**values, "methods": ["finetune", "linear-probe", "confit"]})
    results = run_recipe(more, finished, resume=True)
    assert started == [("linear-probe", 0)]
    assert [result.method for result in results] == ["finetune", "linear-probe", "confit"]
    after = contents(finished / "runs")
    assert {path: after[path] for path in before} == before
    (section,) = sections_of(finished_runs(finished).values())
    seeds = {name: [run.seed for run in row.runs] for name, row in zip(section.names, section.rows, strict=True)}
    assert seeds == {"finetune": [0, 1], "linear-probe": [0], "confit": [0, 1]}
    assert "linear-probe" in (finished / "table.md").read_text()


def test_one_more_seed_runs_alone(finished, values, started):
    recipe = make_recipe({**values, "methods": ["finetune"], "seeds": 3})
    results = run_recipe(recipe, finished, resume=True)
    assert started == [("finetune", 2)]
    assert [result.seed for result in results] == [0, 1, 2]


def test_another_configuration_is_another_run_and_what_differs_is_said(finished, values, started):
    before = contents(finished / "runs")
    console = Console(file=io.StringIO(), width=500)
    recipe = make_recipe({**values, "lr": 0.5, "methods": ["finetune"]})
    (result,) = run_recipe(recipe, finished, resume=True, place=Place(console))
    told = f"note: {finished} has digits finetune with other settings (lr was 0.01, now 0.5); it stays, this is"
    assert console.file.getvalue().startswith(told)
    assert started == [("finetune", 0)]
    assert {path: content for path, content in contents(finished / "runs").items() if path in before} == before
    assert len(finished_runs(finished)) == 5
    assert run_of(finished, "finetune", lr=0.5) == result
    assert run_of(finished, "finetune", lr=None).final_sha256 != result.final_sha256
    first, second = sections_of(finished_runs(finished).values())
    assert ("lr 0.01" in first.about, "lr 0.5" in second.about) == (True, True)


def test_other_weights_are_another_run(finished, values, started, tmp_path):
    state = torch.load(values["weights"], weights_only=True)
    next(iter(state.values()))[0] += 0.01
    torch.save(state, tmp_path / "other.pth")
    given = {**values, "weights": str(tmp_path / "other.pth"), "methods": ["linear-probe", "finetune"], "tasks": 1}
    run_recipe(make_recipe({**given, "weights": values["weights"]}), finished, resume=True)
    run_recipe(make_recipe(given), finished, resume=True)
    assert started == [("linear-probe", 0), ("finetune", 0)] * 2


def test_the_device_may_change(finished, values, started):
    run_recipe(make_recipe({**values, "device": "auto"}), finished, resume=True)
    assert started == []


@pytest.mark.parametrize("name", ["checkpoint.pt", "runs.jsonl"])
def test_a_damaged_file_is_named(finished, values, started, name):
    forget(finished)
    folder = folder_of(finished, "finetune")
    (folder / "checkpoint.before.pt").unlink(missing_ok=True)
    path = (finished if name == "runs.jsonl" else folder) / name
    path.write_bytes(b"damaged\n")
    with pytest.raises(ConfituneError) as caught:
        run_recipe(make_recipe(values), finished, resume=True)
    assert str(path) in str(caught.value)
    assert started == []


class Killed(Exception):
    pass


def kill_after_first_task(monkeypatch):
    save = Checkpoint.save

    def save_and_die(self, folder):
        save(self, folder)
        if self.task == 1:
            raise Killed

    monkeypatch.setattr(Checkpoint, "save", save_and_die)


def test_a_broken_off_run_goes_on(finished, values, tmp_path, monkeypatch):
    out = tmp_path / "killed"
    recipe = make_recipe(values)
    with monkeypatch.context() as patch:
        kill_after_first_task(patch)
        with pytest.raises(Killed):
            run_recipe(recipe, out, checkpoint_seconds=0)
    assert finished_runs(out) == {}
    begun, run = [], SequenceRun.run
    monkeypatch.setattr(
        SequenceRun, "run", lambda self: (begun.append((self.method.name, self.state.task)), run(self))[1]
    )
    results = run_recipe(recipe, out, resume=True)
    assert begun == [("finetune", 1), ("confit", 0)]  # the first task of finetune is not done again
    for result in results:
        undisturbed = run_of(finished, result.method)
        assert result.final_sha256 == undisturbed.final_sha256
        assert result.accuracy_matrix == undisturbed.accuracy_matrix
        assert result.config == undisturbed.config


def test_a_random_start_is_the_same_one_when_resumed(values, tmp_path, monkeypatch):
    recipe = make_recipe({**values, "weights": "none", "methods": ["finetune"]})
    torch.manual_seed(1)
    (whole,) = run_recipe(recipe, tmp_path / "whole")
    torch.manual_seed(2)
    with monkeypatch.context() as patch:
        kill_after_first_task(patch)
        with pytest.raises(Killed):
            run_recipe(recipe, tmp_path / "killed", checkpoint_seconds=0)
    torch.manual_seed(3)
    (resumed,) = run_recipe(recipe, tmp_path / "killed", resume=True)
    assert resumed.weights == "none (random start)"
    assert resumed.weights_sha256 == whole.weights_sha256
    assert resumed.final_sha256 == whole.final_sha256


def test_what_is_finished_is_summarised_even_if_the_next_run_fails(values, tmp_path, monkeypatch):
    run = SequenceRun.run

    def second_fails(self):
        if self.method.name == "confit":
            raise Killed
        return run(self)

    monkeypatch.setattr(SequenceRun, "run", second_fails)
    with pytest.raises(Killed):
        run_recipe(make_recipe({**values, "tasks": 1}), tmp_path)
    assert [run.method for run in finished_runs(tmp_path).values()] == ["finetune"]
    assert "| finetune |" in (tmp_path / "table.md").read_text()


def test_a_run_that_diverges_does_not_stop_the_others(values, tmp_path):
    given = {**values, "methods": ["ewc", "linear-probe", "ewc+confit"], "clip_norm": None, "pull_limit": None}
    given["options"] = {"ewc": {"strength": 1e30}}
    with pytest.raises(TrainingError) as caught:
        run_recipe(make_recipe(given), tmp_path)
    first, second = str(caught.value).splitlines()
    assert first.startswith("digits ewc: the loss of task 'task2' became")
    assert second.startswith("digits ewc+confit: the loss of task 'task2' became")
    assert [run.method for run in finished_runs(tmp_path).values()] == ["linear-probe"]


def test_a_network_without_batch_norm_is_refused_before_anything_is_trained(values, tmp_path, started):
    recipe = make_recipe({**values, "model": "vit_tiny_patch16_224", "weights": "none"})
    with pytest.raises(ConfituneError, match="VisionTransformer has no batch norm"):
        run_recipe(recipe, tmp_path)
    assert started == []
    assert list(tmp_path.iterdir()) == []


def test_progress_is_told_to_the_console(values, tmp_path):
    console = Console(file=io.StringIO(), force_terminal=False, width=150)
    (result,) = run_recipe(make_recipe({**values, "methods": ["linear-probe"]}), tmp_path, place=Place(console))
    lines = [line for line in console.file.getvalue().splitlines() if line]
    assert [line.split(", loss")[0] for line in lines] == [f"digits linear-probe: task {task} of 2" for task in (1, 2)]
    assert lines[-1].endswith(f"average accuracy so far {result.acc:.1f}%")


def test_tasks_and_classes_can_be_chosen(values, tmp_path):
    options = {"methods": ["linear-probe"], "tasks": 2, "classes_per_task": 3, "order_seed": 1}
    (result,) = run_recipe(make_recipe({**values, **options}), tmp_path)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(1)).tolist()
    assert [task["classes"] for task in result.tasks] == [[str(c) for c in order[:3]], [str(c) for c in order[3:6]]]
