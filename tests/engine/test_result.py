import json
import math
import platform
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch

from confitune import metrics
from confitune.engine import RunResult, evaluate
from confitune.engine.result import command_line, summary_of
from confitune.errors import ConfituneError
from confitune.files import DamagedFileError, checksum_of
from confitune.methods import Method
from confitune.nn import state_sha256


@pytest.mark.parametrize("method", ["confit", "finetune", "joint", "single-task"])
def test_every_field_says_what_happened(make_run, make_net, method, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/some/where/confitune", "run", "--dataset", "tiny"])
    run = make_run(method, epochs=2, seed=3, config={"lr": 0.05}, weights="own.pth")
    before = state_sha256(make_net(method).backbone)
    result = run.run()
    assert (result.dataset, result.method, result.seed) == ("tiny", method, 3)
    assert (result.config, result.weights) == ({"lr": 0.05}, "own.pth")
    assert result.weights_sha256 == before
    assert result.final_sha256 != before
    assert len(result.final_sha256) == 64
    assert result.command == "confitune run --dataset tiny"
    assert result.device == f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)"
    assert result.versions["torch"] == version("torch")
    assert result.versions["python"] == platform.python_version()
    assert {"confitune", "timm", "torchvision", "numpy"} <= set(result.versions)
    assert 0 < run.train_seconds < result.seconds + 0.001
    images = 2 * (48 + 40 + 40) if method != "joint" else 2 * 128  # 130 images together: 16 batches of 8
    assert result.images_per_second == pytest.approx(images / run.train_seconds, abs=0.06)
    matrix = result.matrix
    assert result.acc == metrics.average_accuracy(matrix)
    if method == "joint":
        assert (result.fgt, result.learning_acc, result.bwt) == (None, None, None)
    else:
        assert result.fgt == metrics.average_forgetting(matrix)
        assert result.learning_acc == metrics.learning_accuracy(matrix)
        assert result.bwt == metrics.backward_transfer(matrix)


class AtTheEnd(Method):
    """Accuracy of the task at hand after its last step, when nothing is recovered yet."""

    def __init__(self):
        super().__init__()
        self.found = []

    def end_task(self, context):
        self.found.append(evaluate(context.net, context.task, context.settings))


@pytest.mark.parametrize("validation", [0.0, 0.2])
def test_where_means_are_recovered_tasks_are_tested_before_that_too(make_run, make_method, sequence, validation):
    look = AtTheEnd()
    run = make_run(make_method("confit", look), epochs=3, lr=0.3, validation=validation)
    result = run.run()
    assert len(result.as_learned) == 3
    if not validation:  # else the task at hand has its own test images
        assert result.as_learned == look.found
    assert result.as_learned != result.matrix.diagonal().tolist()
    expected = result.matrix
    expected[[0, 1, 2], [0, 1, 2]] = result.as_learned
    np.testing.assert_array_equal(result.published_matrix, expected)


def test_testing_a_task_as_learned_leaves_no_trace(make_run, monkeypatch):
    found = make_run("confit", epochs=3).run()
    half = torch.tensor([True, False])
    monkeypatch.setattr("confitune.engine.run.right_answers", lambda net, task, settings: half)
    without = make_run("confit", epochs=3).run()
    assert without.as_learned == [50.0] * 3
    assert (found.final_sha256, found.accuracy_matrix) == (without.final_sha256, without.accuracy_matrix)


@pytest.mark.parametrize("method", ["finetune", "task-bn", "joint", "single-task"])
def test_elsewhere_there_is_nothing_to_recover(make_run, method):
    result = make_run(method, epochs=1).run()
    assert result.as_learned is None
    np.testing.assert_array_equal(result.published_matrix, result.matrix)


def test_a_pass_takes_statistics_that_the_published_code_has_not(make_run):
    assert make_run("confit", statistics="pass", epochs=1).run().as_learned is None


def test_tasks_are_described_with_what_they_take(make_run):
    run = make_run("confit", epochs=1)
    tasks = run.run().tasks
    assert [task["name"] for task in tasks] == ["dark", "bright", "minus"]
    assert [task["classes"] for task in tasks][1] == ["bright-0", "bright-1"]
    assert [(task["train_images"], task["test_images"]) for task in tasks] == [(48, 44), (40, 32), (42, 36)]
    # weight, bias and variance of 8 + 12 + 16 channels; 3 x 3 window means of 3 + 8 + 12 input channels
    assert {task["norm_numbers"] for task in tasks} == {3 * 36 + 9 * 23}
    assert [task["head_numbers"] for task in tasks] == [17 * 3, 17 * 2, 17 * 3]


@pytest.mark.parametrize(
    ("method", "numbers"),
    [
        ("finetune", 0),
        ("linear-probe", 0),
        ("task-bn", 4 * 36),
        ("single-task", 9 * (3 * 8 + 8 * 12 + 12 * 16) + 16 + 2 * 36),  # a network of its own
    ],
)
def test_what_a_task_adds_by_method(make_run, method, numbers):
    assert {task["norm_numbers"] for task in make_run(method, epochs=1).run().tasks} == {numbers}


def test_saved_and_loaded_is_the_same(make_run, tmp_path):
    result = make_run("confit", epochs=1).run()
    path = tmp_path / "result.json"
    result.save(path)
    assert RunResult.load(path) == result
    saved = json.loads(path.read_text())
    assert saved["accuracy_matrix"][1][0] is None  # NaN is not JSON
    assert saved["accuracy_matrix"][0] == result.accuracy_matrix[0]
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"acc": 1}', b"\xff\xfe"])
def test_a_file_that_is_no_result_is_named(tmp_path, content):
    path = tmp_path / "result.json"
    path.write_bytes(content)
    with pytest.raises(ConfituneError, match="is not a result of this program") as caught:
        RunResult.load(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfituneError, match=r"result\.json is not a result"):
        RunResult.load(tmp_path / "result.json")


def test_summary_of_a_matrix_has_none_for_what_is_not_defined():
    nan = math.nan
    summary = summary_of(np.array([[nan, 80.0], [nan, 90.0]]))
    assert summary == {
        "acc": 85.0,
        "fgt": None,
        "learning_acc": None,
        "bwt": None,
        "accuracy_matrix": [[None, 80.0], [None, 90.0]],
    }
    summary = summary_of(np.array([[90.0, 80.0], [nan, 95.0]]))
    assert (summary["acc"], summary["fgt"], summary["learning_acc"], summary["bwt"]) == (87.5, 10.0, 92.5, -10.0)


def test_the_command_has_no_path(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/a/b/confitune", "run", "--epochs", "3"])
    assert command_line() == "confitune run --epochs 3"


# ---- the checksum ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A result's file, as bytes, and what it says."""
    path = tmp_path_factory.mktemp("saved") / "result.json"
    task = {
        "name": "t",
        "classes": ["ä", "b"],
        "train_images": 8,
        "test_images": 2,
        "norm_numbers": 5,
        "head_numbers": 6,
    }
    result = RunResult(
        dataset="digits",
        method="confit",
        seed=1,
        **summary_of(np.array([[90.5, 80.25], [math.nan, 95.0]])),
        tasks=[task, task],
        config={"lr": 0.01, "options": {"ewc": {"strength": 3000.0}}},
        versions={"torch": "2"},
        device="cpu",
        weights="own.pth",
        weights_sha256="ab" * 32,
        final_sha256="cd" * 32,
        seconds=1.5,
        images_per_second=100.0,
        command="confitune run",
    )
    result.save(path)
    return path.read_bytes(), result


def test_no_changed_byte_passes_for_another_result(saved, tmp_path):
    data, result = saved
    path = tmp_path / "result.json"
    noticed = 0
    for place in range(len(data)):
        for bit in (0, 5):
            changed = bytearray(data)
            changed[place] ^= 1 << bit
            path.write_bytes(changed)
            try:
                assert RunResult.load(path) == result  # e.g. a capital letter of an escape: it says the same
            except ConfituneError as error:
                noticed += str(path) in str(error)
    assert noticed > 1.9 * len(data)


def test_a_changed_number_is_damage(saved, tmp_path):
    data, _ = saved
    path = tmp_path / "result.json"
    path.write_bytes(data.replace(b'"acc": 87.625', b'"acc": 97.625'))
    with pytest.raises(
        DamagedFileError, match=r"result\.json is damaged: its checksum does not fit; restore it, or run"
    ):
        RunResult.load(path)


def test_layout_and_order_are_not_part_of_what_is_said(saved, tmp_path):
    data, result = saved
    (tmp_path / "result.json").write_text(json.dumps(json.loads(data), sort_keys=True, indent=4))
    assert RunResult.load(tmp_path / "result.json") == result


def test_results_from_before_there_was_a_checksum_are_read(saved, tmp_path):
    data, result = saved
    values = json.loads(data)
    del values["checksum"]
    (tmp_path / "result.json").write_text(json.dumps(values))
    assert RunResult.load(tmp_path / "result.json") == result


def test_every_result_that_came_with_the_program_is_read():
    paths = sorted((Path(__file__).parents[2] / "results").rglob("result.json"))
    assert len(paths) > 100
    assert all(RunResult.load(path).acc > 0 for path in paths)


@pytest.mark.parametrize(
    "change",
    [
        {"acc": 101.0},
        {"acc": 50.0},  # its matrix gives another
        {"bwt": None},
        {"config": {"options": 5}},
        {"acc": math.nan},
        {"seed": -1},
        {"accuracy_matrix": [[1.0, 2.0]]},
        {"accuracy_matrix": []},
        {"tasks": []},
        {"tasks": [{"name": "t"}]},
        {"seconds": math.inf},
        {"more": 1},
        {"command": "\ud800"},
    ],
)
def test_what_no_run_measures_is_refused_under_a_true_checksum(saved, tmp_path, change):
    values = {**json.loads(saved[0]), **change}
    del values["checksum"]
    if "command" not in change:  # what is no text has no checksum
        values["checksum"] = checksum_of(values)
    (tmp_path / "result.json").write_text(json.dumps(values))
    with pytest.raises(ConfituneError, match="is not a result of this program"):
        RunResult.load(tmp_path / "result.json")
