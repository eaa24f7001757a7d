import json
import math
import multiprocessing
import platform
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch

from confitune import metrics
from confitune.engine import RunResult, evaluate, read_results
from confitune.engine.result import add_result, command_line, summary_of
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
    assert 0 < run.state.train_seconds < result.seconds + 0.001
    images = 2 * (48 + 40 + 40) if method != "joint" else 2 * 128  # 130 images together: 16 batches of 8
    assert result.images_per_second == pytest.approx(images / run.state.train_seconds, abs=0.06)
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


def test_where_means_are_recovered_tasks_are_tested_before_that_too(make_run, make_method):
    look = AtTheEnd()
    run = make_run(make_method("confit", look), epochs=3, lr=0.3)
    result = run.run()
    assert len(result.as_learned) == 3
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


def test_added_and_read_is_the_same(make_run, tmp_path):
    result = make_run("confit", epochs=1).run()
    path = tmp_path / "runs.jsonl"
    add_result(path, result)
    add_result(path, result.model_copy(update={"seed": 7}))
    assert read_results(path) == [result, result.model_copy(update={"seed": 7})]
    saved = json.loads(path.read_bytes().splitlines()[0])
    assert saved["accuracy_matrix"][1][0] is None  # NaN is not JSON
    assert saved["accuracy_matrix"][0] == result.accuracy_matrix[0]
    assert [p.name for p in tmp_path.iterdir()] == ["runs.jsonl"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"acc": 1}', b"\xff\xfe"])
def test_a_line_that_is_no_result_is_named(saved, tmp_path, content):
    path = tmp_path / "runs.jsonl"
    path.write_bytes(saved[0] + content + b"\n")
    with pytest.raises(ConfituneError, match=f"{re.escape(str(path))}, line 2 is (not a result|damaged)"):
        read_results(path)


def test_a_missing_file_holds_no_results(tmp_path):
    assert read_results(tmp_path / "runs.jsonl") == []


def test_half_a_line_is_not_counted_and_makes_room_for_the_next(saved, tmp_path):
    data, result = saved
    path = tmp_path / "runs.jsonl"
    for half in (1, len(data) // 2, len(data) - 1):
        path.write_bytes(data + data[:half])
        assert read_results(path) == [result]
        add_result(path, result)
        assert path.read_bytes() == data + data


def test_many_processes_add_lines_and_none_is_lost(saved, tmp_path):
    path, result = tmp_path / "runs.jsonl", saved[1]
    add = partial(add_result, path)
    with ProcessPoolExecutor(3, multiprocessing.get_context("fork")) as pool:
        list(pool.map(add, [result.model_copy(update={"seed": seed}) for seed in range(60)]))
    assert sorted(result.seed for result in read_results(path)) == list(range(60))


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
def saved():
    """A result's line, and what it says."""
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
    return result.line(), result


def test_no_changed_byte_passes_for_another_result(saved):
    data, result = saved
    noticed = 0
    for place in range(len(data) - 1):
        for bit in (0, 5):
            changed = bytearray(data)
            changed[place] ^= 1 << bit
            try:
                assert RunResult.of_line(bytes(changed), "here") == result  # e.g. a capital letter of an escape
            except ConfituneError as error:
                noticed += str(error).startswith("here is ")
    assert noticed > 1.9 * len(data)


def test_a_changed_number_is_damage(saved):
    changed = saved[0].replace(b'"acc": 87.625', b'"acc": 97.625')
    with pytest.raises(DamagedFileError, match="line 3 is damaged: its checksum does not match; restore it, or run"):
        RunResult.of_line(changed, "runs.jsonl, line 3")


def test_layout_and_order_are_not_part_of_what_is_said(saved):
    data, result = saved
    assert RunResult.of_line(json.dumps(json.loads(data), sort_keys=True, indent=4).encode(), "here") == result


def test_every_result_that_came_with_the_program_is_read():
    paths = sorted((Path(__file__).parents[2] / "results").rglob("runs.jsonl"))
    results = [result for path in paths for result in read_results(path)]
    assert len(results) > 300
    assert all(result.acc > 0 for result in results)


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
    ],
)
def test_what_no_run_measures_is_refused_under_a_true_checksum(saved, change):
    values = {**json.loads(saved[0]), **change}
    del values["checksum"]
    with pytest.raises(ConfituneError, match="here is not a result of this program"):
        RunResult.of_line(json.dumps({**values, "checksum": checksum_of(values)}).encode(), "here")
