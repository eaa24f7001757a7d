"""run, tune and their recipes, from arguments to exit code, output and files."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from confitune import metrics
from confitune.engine import SequenceRun
from confitune.engine.checkpoint import values_of
from confitune.errors import ConfituneError
from confitune.experiments.runs.identity import filled, finished_runs
from confitune.experiments.runs.recipe import read_recipe
from confitune.experiments.runs.tune import plan_search
from confitune.files import read_sealed
from confitune.methods import METHODS
from confitune.nn import create_backbone, state_sha256
from found import contents, folder_of, forget, run_of
from program import SOURCE, cells, refused

# ---- a whole run -----------------------------------------------------------------------------------------------------


def test_a_run_leaves_results_tables_logs_and_pictures(ran):
    out, _ = ran
    assert {path.name for path in out.iterdir()} == {
        *("README.md", "overview-digits.png", "runs", "runs.jsonl", "table.md")
    }
    for method in ("finetune", "confit"):
        folder, result = folder_of(out, method), run_of(out, method)
        assert (result.method, result.seed, result.dataset) == (method, 0, "digits")
        assert result.acc == metrics.average_accuracy(result.matrix)
        assert result.fgt == metrics.average_forgetting(result.matrix)
        assert len((folder / "epochs.csv").read_text().splitlines()) == 1 + 2
        assert len((folder / "accuracy.csv").read_text().splitlines()) == 1 + 3
    with Image.open(out / "overview-digits.png") as picture:
        assert picture.format == "PNG"
    assert f"| confit | {result.acc:.1f} |" in (out / "table.md").read_text()
    assert "![overview-digits](overview-digits.png)" in (out / "README.md").read_text()


def test_the_result_holds_the_command(ran_once):
    out, arguments = ran_once
    result = run_of(out, "confit")
    shown = [Path(argument).name if argument.startswith("/") else argument for argument in arguments]
    assert result.command == " ".join(["confitune", *shown])  # without the folders of this machine
    assert "/" not in result.command


def test_a_run_prints_its_tasks_and_the_table(confitune, tiny, tmp_path):
    out = tmp_path / "out"
    said = confitune("run", *tiny, "--method", "linear-probe", "--method", "joint", "--seeds", 2, "--out", out)
    assert said.code == 0
    results = [run_of(out, "linear-probe", seed) for seed in (0, 1)]
    for seed, result in enumerate(results):
        assert f"digits linear-probe seed {seed}: task 2 of 2, loss" in said.out
        assert f"average accuracy so far {result.acc:.1f}%" in said.out
    (row,) = (line for line in said.out.splitlines() if "│ linear-probe " in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells[1:3] == [", ".join(f"{result.acc:.1f}" for result in results), "0.0, 0.0"]
    assert f"Everything is in {out}; the picture to look at first: {out / 'overview-digits.png'}" in said.out


def test_the_task_of_test_images_may_not_be_given(confitune, tiny, tmp_path):
    """Side by side or alone, and the tables say so."""
    methods = ["--method", "bn-only", "--method", "lda", "--method", "joint"]
    found = []
    for folder, parallel in (("alone", 1), ("beside", 2)):
        out = tmp_path / folder
        said = confitune(
            "run", *tiny, *methods, "--scenario", "class", "--seeds", 2, "--parallel-seeds", parallel, "--out", out
        )
        assert said.code == 0
        assert "digits: test_byobnet, 2 tasks, class-incremental (task not given), 2 seeds, on cpu" in " ".join(
            said.out.split()
        )
        results = sorted(finished_runs(out).values(), key=lambda result: (result.method, result.seed))
        assert {result.config["scenario"] for result in results} == {"class"}
        found.append([(result.method, result.seed, result.accuracy_matrix) for result in results])
        for page in ("table.md", "report.html"):
            confitune("report", out)
            assert "class-incremental (task not given)" in (out / page).read_text()
    assert len(found[0]) == 6
    assert found[0] == found[1]
    assert "**digits**, test_byobnet, 2 tasks, class-incremental (task not given)" in confitune("compare", out).out


@pytest.mark.parametrize(
    ("method", "scenario", "message"),
    [
        ("single-task", "class", "keeps none of the earlier ones to ask"),
        ("lda", "domain", "scenario=domain needs the same classes in every task"),
    ],
)
def test_what_a_scenario_is_not_for_is_refused_before_anything_is_trained(
    confitune, tiny, tmp_path, no_runs, method, scenario, message
):
    methods = ["--method", "finetune", "--method", method]
    assert message in refused(confitune("run", *tiny, *methods, "--scenario", scenario, "--out", tmp_path / "out"))


def test_the_default_network_with_the_weights_that_are_installed(confitune, tmp_path):
    out = tmp_path / "out"
    options = ["--dataset", "photos", "--tasks", 2, "--epochs", 2, "--method", "confit"]
    said = confitune("run", *options, "--device", "cpu", "--out", out)
    assert said.code == 0
    result = run_of(out, "confit")
    backbone = create_backbone("tf_efficientnet_lite0")
    assert result.weights_sha256 == state_sha256(backbone.module)
    assert result.weights == "efficientnet-lite0-57934424.pth"
    assert result.tasks[0]["norm_numbers"] == 255_835
    assert "with 2 epochs no stage is left for the head alone" in said.out
    assert result.learning_acc > 60  # chance is 25


def folder_of_images(root):
    """Four classes of plain colours, 5 or 6 images each."""
    draw = np.random.default_rng(0)
    for k, colour in enumerate([(220, 30, 30), (30, 220, 30), (30, 30, 220), (220, 220, 30)]):
        (root / f"class {k}").mkdir(parents=True)
        for i in range(5 + k % 2):
            noisy = np.clip(np.array(colour) + draw.normal(0, 20, (40, 50, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(noisy).save(root / f"class {k}" / f"{i}.png")


def test_a_folder_of_own_images(confitune, weights, tmp_path):
    images = tmp_path / "my [red] images"
    folder_of_images(images)
    said = confitune(
        *["run", "--dataset", f"folder:{images}", "--model", "test_byobnet", "--weights", weights, "--device", "cpu"],
        *["--method", "finetune", "--epochs", 1, "--batch-size", 4, "--out", tmp_path / "out"],
    )
    assert said.code == 0
    name = re.sub(r"[^A-Za-z0-9._+-]+", "-", f"folder:{images}")
    assert (folder_of(tmp_path / "out", "finetune", dataset=name) / "epochs.csv").exists()
    result = run_of(tmp_path / "out", "finetune")
    assert len(result.tasks) == 2
    assert sorted(c for task in result.tasks for c in task["classes"]) == [f"class {k}" for k in range(4)]
    assert sum(task["train_images"] + task["test_images"] for task in result.tasks) == 22
    assert "my [red] images" in said.out  # not taken for a colour


@pytest.mark.parametrize(("model", "norms"), [("test_vit", 13 * 2 * 64), ("test_convnext", 1200)])
def test_a_network_without_batch_norm(confitune, tmp_path, model, norms):
    methods = ["finetune", "bn-only", "linear-probe"]
    options = ["--dataset", "digits", "--tasks", 2, "--epochs", 1, "--weights", "none", "--device", "cpu"]
    asked = [word for method in methods for word in ("--method", method)]
    said = confitune("run", *options, "--model", model, *asked, "--out", tmp_path / "out")
    assert said.code == 0, said.err
    found = {m: run_of(tmp_path / "out", m) for m in methods}
    numbers = {m: [task["norm_numbers"] for task in result.tasks] for m, result in found.items()}
    assert numbers == {"finetune": [0, 0], "bn-only": [norms] * 2, "linear-probe": [0, 0]}
    assert (found["bn-only"].fgt, found["linear-probe"].fgt) == (0.0, 0.0)
    assert len({result.final_sha256 for result in found.values()}) == 3


@pytest.fixture
def own_method(tmp_path):
    """A file with a method, and what stands for it; methods that were known stay the only ones."""
    before = dict(METHODS)
    path = tmp_path / "my method.py"
    path.write_text(
        "from pydantic import Field\n"
        "from confitune.methods import Method, Options\n"
        "class Choices(Options):\n"
        "    strength: float = Field(0.5, description='of the pull')\n"
        "class Mine(Method):\n"
        "    name, summary, Options = 'mine', 'keeps logits small', Choices\n"
        "    def loss(self, step):\n"
        "        return self.options.strength * step.logits.square().mean()\n"
    )
    yield f"{path}:Mine"
    METHODS.clear()
    METHODS.update(before)


@pytest.mark.filterwarnings("error:constrained_layout")  # names that leave no room for a picture
def test_a_method_and_a_dataset_of_ones_own(confitune, weights, tmp_path, monkeypatch, own_method):
    dataset = f"{SOURCE.parent / 'examples/own_dataset.py'}:load"
    arguments = ["run", "--dataset", dataset, "--tasks", 2, "--epochs", 1, "--device", "cpu", "--model", "test_byobnet"]
    arguments += ["--weights", weights, "--method", own_method, "--checkpoint-seconds", 0]
    learn = SequenceRun._learn

    def dies(self, index, task):
        if index == 1:
            raise KeyboardInterrupt
        learn(self, index, task)

    monkeypatch.setattr(SequenceRun, "_learn", dies)
    strong, out = ["--set", "mine.strength=2"], tmp_path / "out"
    assert confitune(*arguments, *strong, "--out", out).code == 130
    monkeypatch.setattr(SequenceRun, "_learn", learn)
    assert confitune(*arguments, *strong, "--out", out, "--resume").code == 0
    assert confitune(*arguments, *strong, "--out", tmp_path / "whole").code == 0
    resumed, whole = (run_of(folder, own_method) for folder in (out, tmp_path / "whole"))
    assert resumed.final_sha256 == whole.final_sha256
    assert (resumed.method, resumed.config["options"]) == (own_method, {"mine": {"strength": 2.0}})
    assert [task["name"] for task in resumed.tasks] == ["straight", "slanted"]
    assert "strength: Input should be" in refused(confitune(*arguments, "--set", "mine.strength=x", "--out", out))
    # Without its term it is fine-tuning, and '+' joins it with another method.
    off = ["--set", "mine.strength=0", "--method", "finetune", "--method", f"ewc+{own_method}"]
    said = confitune(*arguments, *off, "--out", tmp_path / "off")
    assert said.code == 0, said.err
    of_none, plain_one = (run_of(tmp_path / "off", name) for name in (own_method, "finetune"))
    assert of_none.final_sha256 == plain_one.final_sha256 != whole.final_sha256
    assert confitune("report", tmp_path / "off").code == 0
    page = (tmp_path / "off/report.html").read_text()
    assert own_method in page
    assert f"ewc+{own_method}" in page
    assert plan_search(own_method, {}, "mine.strength", ["2", "1"]).grid == (1.0, 2.0)
    said = confitune("methods", own_method)
    assert cells(said.out, "mine.strength") == ["mine.strength", "0.5", "of the pull"]


def test_a_method_that_diverges_does_not_cost_the_table_of_the_others(confitune, tiny, tmp_path):
    said = confitune(
        *("run", *tiny, "--method", "linear-probe", "--method", "ewc", "--set", "ewc.strength=1e30"),
        *("--set", "clip_norm=null", "--set", "pull_limit=null", "--out", tmp_path / "out"),
    )
    assert said.code == 2
    assert "the loss of task 'task2' became" in said.err
    assert "linear-probe" in said.out


# ---- going on --------------------------------------------------------------------------------------------------------


def test_an_existing_result_is_refused_and_untouched(confitune, ran, no_runs):
    out, arguments = ran
    before = contents(out)
    message = refused(confitune(*arguments))
    assert message.startswith(f"{out} holds a finished run of digits finetune: add --resume")
    assert contents(out) == before


def test_resume_of_a_finished_folder_prints_the_table_and_runs_nothing(confitune, ran, no_runs):
    out, arguments = ran
    before = (out / "runs.jsonl").read_bytes()
    said = confitune(*arguments, "--resume")
    assert said.code == 0
    for method in ("finetune", "confit"):
        acc = run_of(out, method).acc
        assert re.search(rf"│ {method} +│ +{acc:.1f} ", said.out)
    assert "overview-digits.png" in said.out
    assert (out / "runs.jsonl").read_bytes() == before


def test_resume_with_one_more_method(confitune, ran, monkeypatch):
    out, arguments = ran
    before = (out / "runs.jsonl").read_bytes()
    started, run = [], SequenceRun.run
    monkeypatch.setattr(SequenceRun, "run", lambda self: (started.append(self.method.name), run(self))[1])
    said = confitune(*arguments, "--resume", "--method", "linear-probe")
    assert said.code == 0
    assert started == ["linear-probe"]
    assert (out / "runs.jsonl").read_bytes().startswith(before)
    assert "│ linear-probe" in said.out
    assert {run.method for run in finished_runs(out).values()} == {"finetune", "confit", "linear-probe"}


def test_resume_with_another_configuration_says_so_and_adds_runs(confitune, ran):
    out, arguments = ran
    before = finished_runs(out)
    said = confitune(*arguments, "--resume", "--lr", "0.5")
    assert said.code == 0
    assert "with other settings (lr was 0.01, now 0.5); it stays, this is another run" in " ".join(said.out.split())
    assert before.items() < finished_runs(out).items()
    table = (out / "table.md").read_text()
    assert ("lr 0.01" in table, "lr 0.5" in table) == (True, True)


def test_a_damaged_checkpoint_is_named(confitune, ran, no_runs):
    out, arguments = ran
    folder = folder_of(out, "finetune")
    forget(out)
    path = folder / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:1000])
    (folder / "checkpoint.before.pt").unlink(missing_ok=True)
    message = refused(confitune(*arguments, "--resume"))
    assert message.startswith(f"{path} is damaged")
    assert f"delete {folder} to start this run anew" in message


def in_a_process(*arguments):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "confitune", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_killed_process_resumes_to_the_same_result(confitune, weights, tmp_path):
    options = "--dataset digits --tasks 2 --epochs 6 --batch-size 32 --model test_byobnet --method confit --device cpu"
    arguments = [
        "run",
        *options.split(),
        "--weights",
        str(weights),
        "--set",
        "momentum=0.9",
        "--checkpoint-seconds",
        "0",
    ]
    process = in_a_process(*arguments, "--out", str(tmp_path / "killed"))
    until = time.monotonic() + 120
    while not (found := [*(tmp_path / "killed").rglob("checkpoint.pt")]) and process.poll() is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    (checkpoint,) = found
    process.send_signal(signal.SIGKILL)
    output, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL, output
    saved = values_of(read_sealed(checkpoint))
    done = 6 * saved["task"] + (saved["fit"]["epoch"] if saved["fit"] else 0)
    assert 1 <= done < 12
    assert not finished_runs(tmp_path / "killed")

    before = (checkpoint.parent / "epochs.csv").read_text().splitlines()[: 1 + done]

    message = refused(confitune(*arguments, "--out", tmp_path / "killed"))
    assert "holds a broken-off run of digits confit: add --resume" in message
    assert confitune(*arguments, "--out", tmp_path / "killed", "--resume").code == 0
    assert confitune(*arguments, "--out", tmp_path / "whole").code == 0
    resumed, whole = (run_of(tmp_path / name, "confit") for name in ("killed", "whole"))
    assert resumed.accuracy_matrix == whole.accuracy_matrix
    assert resumed.final_sha256 == whole.final_sha256
    assert resumed.config == whole.config
    after = (checkpoint.parent / "epochs.csv").read_text().splitlines()
    assert after[: 1 + done] == before  # to the last digit of their seconds: they were not done again
    logs = [
        [line.split(",")[:7] for line in (folder_of(tmp_path / name, "confit") / "epochs.csv").read_text().splitlines()]
        for name in ("killed", "whole")
    ]
    assert logs[0] == logs[1]
    assert len(logs[0]) == 1 + 2 * 6


# ---- recipes and options ---------------------------------------------------------------------------------------------


def test_options_win_over_the_recipe(confitune, weights, tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        f"dataset: digits\ntasks: 1\nepochs: 7\nlr: 0.5\nmodel: test_byobnet\nweights: {weights}\n"
        "methods: [finetune, confit]\nmeans: phase\nbatch_size: 16\ndevice: cpu\n"
    )
    said = confitune("run", recipe, "--epochs", 1, "--lr", 0.02, "--method", "confit", "--out", tmp_path / "out")
    assert said.code == 0
    config = filled(run_of(tmp_path / "out", "confit").config)
    assert (config["epochs"], config["lr"], config["method"]) == (1, 0.02, "confit")  # given
    assert (config["dataset"], config["means"], config["batch_size"], config["tasks"]) == ("digits", "phase", 16, 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("epoch: 3", "mine.yaml: no option 'epoch'; did you mean 'epochs'?"),
        ("means: windows", "mine.yaml: means='windows': Input should be 'window' or 'phase'"),
        ("dataset: digit", "there is no dataset 'digit'; did you mean 'digits'?"),
        ("methods: [confi]", "no method 'confi': did you mean 'confit'?"),
        ("[confit]", "mine.yaml must hold options by name"),
        ("a: [b", "mine.yaml is not YAML"),
        ("1: 2", "mine.yaml"),
    ],
)
def test_a_wrong_recipe(confitune, tmp_path, text, expected):
    (tmp_path / "mine.yaml").write_text(text)
    assert expected in refused(confitune("run", tmp_path / "mine.yaml", "--out", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_missing_recipe(confitune, tmp_path):
    assert refused(confitune("run", tmp_path / "none.yaml")).endswith("none.yaml: No such file or directory")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--means windows", "means='windows': Input should be 'window' or 'phase'"),
        ("--method finetun", "no method 'finetun': did you mean 'finetune'?"),
        ("--method confit --method confit", "name a method twice"),
        ("--method confit+finetune", "names 2 that say what is trained and when (confit, finetune); give one"),
        ("--epochs 0", "epochs=0"),
        ("--tasks 9", "digits has 5 tasks, so tasks=9 is impossible"),
        ("--device nonsense", "device 'nonsense' cannot be used"),
        ("--device cuda:99", "device 'cuda:99' cannot be used"),
        ("--step nonsense", "step='nonsense': Input should be 'auto', 'eager', 'graph' or 'compile'"),
        ("--step grap", "step='grap': Input should be 'auto', 'eager', 'graph' or 'compile'"),
        ("--step graph", "step='graph' captures CUDA graphs and needs a GPU; leave it at 'auto'"),
        ("--set pixels=hist", "pixels='hist': Input should be 'auto', 'device' or 'host'"),
        ("--set weight_deca=1", "--set weight_deca=1: there is no setting 'weight_deca'; did you mean 'weight_decay'?"),
        ("--set strength=3", "there is no setting 'strength'; did you mean 'ewc.strength'?"),
        ("--set lr", "--set lr: write NAME=VALUE, e.g. lr=0.1, or PART.OPTION=VALUE"),
        ("--set .x=1", "--set .x=1: write NAME=VALUE"),
        ("--set options=1", "there is no setting 'options'"),
        ("--set ewcc.strength=1", "set options of 'ewcc', which is not part of any method; did you mean 'ewc'?"),
        ("--set tasks=0", "tasks=0.0: Input should be greater than or equal to 1"),
        ("--pipeline published", "digits has no 'published' pipeline"),
        ("--model resnet81", "no model 'resnet81' in timm or torchvision. Did you mean resnet18"),
        ("--model vit_tiny_patch16_224 --weights none", "VisionTransformer has no batch norm"),
        (
            "--model vit_tiny_patch16_224 --weights none --method bn-only",
            "vit_tiny_patch16_224 does not take images of 64 x 64 as in task 'task1' (Input height (64) doesn't match",
        ),
        ("--weights none.pth", "no weights file none.pth"),
        ("--method nowhere.py:Mine", "nowhere.py: FileNotFoundError"),
        ("--method own/file.py", "no method 'own/file.py': write own/file.py:CLASS"),
        ("--dataset nowhere.py:load", "there is no file nowhere.py; write FILE.py:FUNCTION with its path"),
        ("--model test_resnet", "start.pth does not fit"),
        ("--dataset folder:nowhere", "the folder nowhere is not there"),
        ("--dataset folder:", "a folder set needs its path"),
        ("--dataset photos:1+digit:2", "there is no dataset 'digit'; did you mean 'digits'?"),
        ("--dataset photos:1+digits:6", "digits has 5 tasks, so digits:6 is impossible"),
        ("--dataset photos:1+digits:1 --tasks 3", "photos:1+digits:1 has 2 tasks, so tasks=3 is impossible"),
        ("--dataset photos:1+digits:1 --method finetune --method joint", "or leave joint out"),
    ],
)
def test_what_cannot_be_run_is_said_in_one_message(confitune, tiny, tmp_path, no_runs, options, expected):
    assert expected in refused(confitune("run", *tiny, *options.split(), "--out", tmp_path / "out"))
    assert not finished_runs(tmp_path / "out")


def test_weights_of_another_shape_say_which(confitune, tiny, weights, tmp_path, no_runs):
    state = torch.load(weights, weights_only=True)
    name = next(key for key, value in state.items() if value.dim() == 4)
    state[name] = state[name][:, :1]
    torch.save(state, tmp_path / "narrow.pth")
    message = refused(confitune("run", *tiny, "--weights", tmp_path / "narrow.pth", "--out", tmp_path / "out"))
    assert "narrow.pth does not fit" in message
    assert f"1 tensors are missing or of another shape ({name})" in message


def test_a_missing_data_folder(confitune, weights, tmp_path, no_runs):
    options = [
        "--dataset",
        "cub200",
        "--data-dir",
        tmp_path / "nowhere",
        "--model",
        "test_byobnet",
        "--weights",
        weights,
    ]
    message = refused(confitune("run", *options, "--out", tmp_path / "out"))
    assert str(tmp_path / "nowhere") in message


@pytest.mark.parametrize("count", ["0", "-1", "two"])
def test_there_is_at_least_one_seed_at_a_time(confitune, tiny, tmp_path, no_runs, count):
    said = confitune("run", *tiny, "--parallel-seeds", count, "--out", tmp_path / "out")
    assert said.code == 2
    assert "--parallel-seeds" in said.err
    assert "Traceback" not in said.err
    assert not (tmp_path / "out").exists()


def test_how_it_is_run_goes_into_the_result_and_not_into_what_was_run(confitune, tiny, tmp_path):
    out = tmp_path / "out"
    options = ["--method", "finetune", "--seeds", 2, "--parallel-seeds", 2, "--step", "eager"]
    options += ["--set", "deterministic=true", "--set", "pixels=host"]
    assert confitune("run", *tiny, *options, "--out", out).code == 0
    results = [run_of(out, "finetune", seed) for seed in (0, 1)]
    for result in results:
        assert result.execution == "fp32, eager, deterministic"
        assert not {"parallel_seeds", "step", "pixels", "deterministic"} & set(result.config)
    alone = tmp_path / "alone"
    assert confitune("run", *tiny, "--method", "finetune", "--seeds", 2, "--out", alone).code == 0
    for seed, result in enumerate(results):
        other = run_of(alone, "finetune", seed)
        assert (other.final_sha256, other.config) == (result.final_sha256, result.config)
        assert other.execution == "fp32, eager"


@pytest.mark.parametrize("command", [["run"], ["tune", "ewc"], ["reproduce", "table2", "--datasets", "digits"]])
def test_runs_are_done_where_they_are_asked_for(confitune, tmp_path, monkeypatch, command):
    asked = []

    def nowhere(**options):
        asked.append({name: value for name, value in options.items() if name != "console"})
        raise ConfituneError("there is no such place")

    monkeypatch.setattr("confitune.experiments.runs.runner.open_place", nowhere)
    there = ["--on", "head:6379", "--gpus-per-run", 0.2, "--cpus-per-run", 3, "--parallel-seeds", 2]
    for options in ([], there):
        assert "there is no such place" in refused(confitune(*command, *options, "--out", tmp_path))
    assert asked == [
        {"on": "local", "parallel_seeds": 1, "gpus_per_run": None, "cpus_per_run": None},
        {"on": "head:6379", "parallel_seeds": 2, "gpus_per_run": 0.2, "cpus_per_run": 3},
    ]


# ---- tune ------------------------------------------------------------------------------------------------------------


def test_tune_searches_retrains_and_says_where_everything_is(confitune, tiny, tmp_path):
    out = tmp_path / "tuned"
    arguments = ["tune", "ewc", *tiny, "--grid", "100", "--grid", "1", "--out", out]
    said = confitune(*arguments)
    assert said.code == 0
    assert "digits ewc (ewc.strength=1, 1 of 2): task 1 of 2" in said.out
    best = read_recipe(out / "winner.yaml")["options"]["ewc"]["strength"]
    for strength in (1, 100):
        chosen = {"ewc": {"strength": float(strength)}}
        result = run_of(out, "ewc", held_out=0.1, options=chosen)
        rows = [line.split("│")[1:-1] for line in said.out.splitlines() if f"(ewc.strength={strength})" in line]
        shown = [[cell.strip() for cell in row[1:3]] for row in rows]
        tests = [run_of(out, "ewc", held_out=None, options=chosen)] if strength == best else []
        assert shown == [[f"{run.acc:.1f}", f"{run.fgt:.1f}"] for run in (result, *tests)]
        for test in tests:
            assert "held_out" not in test.config
    assert f"Everything is in {out}; to run the winner again: confitune run {out / 'winner.yaml'}" in said.out

    message = refused(confitune(*arguments))
    assert "holds a finished run of digits ewc (ewc.strength=1, 1 of 2): add --resume" in message
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SequenceRun, "run", lambda self: pytest.fail("a run was started"))
        assert confitune(*arguments, "--resume").code == 0

    said = confitune("run", out / "winner.yaml", "--out", tmp_path / "again")
    assert said.code == 0
    again = run_of(tmp_path / "again", "ewc")
    assert again.final_sha256 == test.final_sha256


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("confit", "confit has no options to search"),
        ("ewcc", "no method 'ewcc': did you mean 'ewc'?"),
        ("ewc --option mas.strength", "ewc has no option 'mas.strength'; there are ewc.strength"),
        ("ewc --option ewc.mode", "the paper has no grid for ewc.mode"),
        ("ewc --grid 1", "a search needs two or more values"),
        ("ewc --grid 1 --grid x", "options of ewc: strength"),
        ("ewc --set strength=3", "there is no setting 'strength'; did you mean 'ewc.strength'?"),
        ("ewc --tasks 9", "digits has 5 tasks, so tasks=9 is impossible"),
        ("ewc --weights none.pth", "no weights file none.pth"),
        ("ewc none.yaml", "no recipe none.yaml"),
        ("ewc --epochs 0", "epochs=0"),
    ],
)
def test_what_cannot_be_tuned_is_said_in_one_message(confitune, tiny, tmp_path, no_runs, arguments, expected):
    method, *options = arguments.split()
    assert expected in refused(confitune("tune", method, *tiny, *options, "--out", tmp_path / "out"))
    assert not list((tmp_path / "out").rglob("*.json"))


def test_tune_takes_a_recipe_and_options_win_over_it(confitune, tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text("dataset: digits\nmethods: [finetune]\nlr: 0.5\nseeds: 4\nmeans: phase\n")
    seen = []

    def stopped(search, out, **how):
        seen.append((search, out, how))
        raise KeyboardInterrupt

    monkeypatch.setattr("confitune.experiments.runs.tune.run_search", stopped)
    options = ["--seeds", 2, "--set", "mas.strength=7", "--parallel-seeds", 2, "--no-retrain", "--resume"]
    said = confitune("tune", "mas-cpr", tmp_path / "mine.yaml", *options, "--out", tmp_path / "out")
    assert said.code == 130
    assert "stopped; the same command with --resume goes on where it was" in said.err
    ((search, out, how),) = seen
    recipe = search.recipe
    assert (recipe.dataset, recipe.methods, recipe.lr, recipe.seeds, recipe.means) == (
        "digits",
        ("mas-cpr",),
        0.5,
        2,
        "phase",
    )
    assert search.validation(0.5).options == {"mas": {"strength": 7.0}, "cpr": {"beta": 0.5}}
    assert out == tmp_path / "out"
    assert (how["resume"], how["place"].parallel_seeds, how["retrain"]) == (True, 2, False)
