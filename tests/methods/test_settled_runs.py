"""Whole runs in which some tasks settle and others are trained: resumed, side by side, logged, shown."""

import csv
import hashlib
import io
import json
import re

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from confitune.engine import Checkpoint, CsvLog, Listener, LiveProgress, RunResult, TensorBoardLog, network_sha256
from confitune.engine.parallel import Turns
from confitune.nn import state_sha256

ALL = {"probe": {"worse": 0, "most": 1e9}}


class Killed(Exception):
    pass


class Killer(Listener):
    """Kills the run when `task` starts, when its `epoch` has been trained, or when it has settled."""

    def __init__(self, task, when):
        self.task, self.when, self.at = task, when, -1

    def task_started(self, task, name, first_epoch):
        self.at = task
        if (task, self.when) == (self.task, "start"):
            raise Killed

    def epoch_ended(self, end):
        if (end.task, end.epoch) == (self.task, self.when):
            raise Killed

    def note(self, message):
        if (self.at, self.when) == (self.task, "settled"):
            raise Killed


def settled(net):
    return [entry.pretrained for entry in net.tasks.values()]


@pytest.fixture
def best(make_run, make_task, tasks):
    """Of three tasks the second settles: its classes are far apart."""
    tasks = (tasks[0], make_task("bright", (12, 13), base=120, step=100), tasks[2])

    def make(**options):
        of_net = {"dropout": 0.3}
        return make_run("best", {"probe": {"worse": 0, "most": 0.12}}, tasks=tasks, epochs=5, of_net=of_net, **options)

    return make


@pytest.fixture
def reference(best):
    run = best()
    return run, run.run()


def test_which_settle_here(reference):
    run, result = reference
    assert settled(run.net) == [False, True, False]
    assert [task["norm_numbers"] > 0 for task in result.tasks] == [True, False, True]
    assert run.images == 5 * (24 + 24)  # the second task's are not trained on
    assert run.net.pretrained.images == 24 + 25  # of the first, and of the one that is used in that state


@pytest.mark.parametrize(
    ("task", "when"), [(0, 1), (1, "start"), (1, "settled"), (2, "start"), (2, 3)], ids=lambda at: str(at)
)
def test_resumed_equals_undisturbed(best, reference, tmp_path, task, when):
    whole, expected = reference
    with pytest.raises(Killed):
        best(folder=tmp_path, listeners=(Killer(task, when),)).run()
    run = best(folder=tmp_path)
    assert run.resume()
    found = run.run()
    assert settled(run.net) == [False, True, False]
    assert found.final_sha256 == expected.final_sha256
    assert found.accuracy_matrix == expected.accuracy_matrix
    assert (run.images, found.tasks) == (whole.images, expected.tasks)
    assert torch.equal(run.net.pretrained.row, whole.net.pretrained.row)


def test_a_run_whose_last_task_settled_resumes_to_its_result(make_run, tmp_path):
    expected = make_run("confit+probe", ALL, folder=tmp_path).run()
    checkpoint = Checkpoint.load(tmp_path, {})
    assert (checkpoint.task, checkpoint.fit, checkpoint.images) == (3, None, 0)
    run = make_run("confit+probe", ALL, folder=tmp_path)
    assert run.resume()
    found = run.run()
    assert (found.final_sha256, found.accuracy_matrix) == (expected.final_sha256, expected.accuracy_matrix)


def test_seeds_side_by_side_give_what_they_give_alone(best):
    turns = Turns(3)
    runs = [best(seed=seed, listeners=(turns.listener(seed),)) for seed in range(3)]
    together = turns.run([run.run for run in runs])
    kinds = [settled(run.net) for run in runs]
    assert any(any(kind) for kind in kinds)
    assert not all(all(kind) for kind in kinds)
    for seed, found in enumerate(together):
        expected = best(seed=seed).run()
        assert (found.final_sha256, found.accuracy_matrix) == (expected.final_sha256, expected.accuracy_matrix)


# ---- what is logged and shown ----------------------------------------------------------------------------------------


def plain_console():
    return Console(file=io.StringIO(), force_terminal=False, width=200)


def test_logs_have_nothing_of_a_task_that_was_not_trained(best, tmp_path):
    console = plain_console()
    result = best(listeners=(CsvLog(tmp_path), TensorBoardLog(tmp_path), LiveProgress(console, "tiny"))).run()
    epochs = list(csv.DictReader((tmp_path / "epochs.csv").open()))
    assert [(row["task"], row["epoch"]) for row in epochs] == [(t, str(e)) for t in "02" for e in range(5)]
    accuracy = list(csv.DictReader((tmp_path / "accuracy.csv").open()))
    assert [(row["after_task"], row["task"]) for row in accuracy] == [
        (str(after), str(task)) for after in range(3) for task in range(after + 1)
    ]
    (file,) = (tmp_path / "tensorboard").iterdir()
    events = EventAccumulator(str(file))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4, 5, 11, 12, 13, 14, 15]
    assert [event.step for event in events.Scalars("test/average")] == [1, 2, 3]
    lines = [line for line in console.file.getvalue().splitlines() if line.startswith("tiny: ")]
    averages = [sum(row[j] for row in result.accuracy_matrix[: j + 1]) / (j + 1) for j in range(3)]
    assert re.fullmatch(rf"tiny: task 1 of 3, loss \d\.\d{{3}}, average accuracy so far {averages[0]:.1f}%", lines[0])
    assert lines[1] == f"tiny: task 2 of 3, average accuracy so far {averages[1]:.1f}%"  # it has no loss
    assert re.fullmatch(rf"tiny: task 3 of 3, loss \d\.\d{{3}}, average accuracy so far {averages[2]:.1f}%", lines[2])
    assert console.file.getvalue().count("note: task 'bright': a linear classifier leaves ") == 1


def test_logs_of_a_resumed_run_are_those_of_an_undisturbed_one(best, tmp_path):
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    best(listeners=(CsvLog(tmp_path / "whole"),)).run()
    with pytest.raises(Killed):
        best(folder=tmp_path / "killed", listeners=(CsvLog(tmp_path / "killed"), Killer(2, "start"))).run()
    run = best(folder=tmp_path / "killed", listeners=(CsvLog(tmp_path / "killed"),))
    run.resume()
    run.run()
    for log in ("epochs.csv", "accuracy.csv"):
        found, expected = (
            [{**row, "seconds": ""} for row in csv.DictReader((tmp_path / name / log).open())]
            for name in ("killed", "whole")
        )
        assert found == expected


def test_a_run_in_which_nothing_is_trained_is_a_result(make_run, tmp_path):
    console, terminal = plain_console(), Console(file=io.StringIO(), force_terminal=True, width=160)
    listeners = (CsvLog(tmp_path), TensorBoardLog(tmp_path), LiveProgress(console, "a"), LiveProgress(terminal, "b"))
    run = make_run("confit+probe", ALL, listeners=listeners)
    result = run.run()
    assert settled(run.net) == [True] * 3
    assert (result.images_per_second, run.images) == (0.0, 0)
    assert result.fgt == 0
    result.save(tmp_path / "result.json")
    assert RunResult.load(tmp_path / "result.json") == result
    assert list(csv.DictReader((tmp_path / "epochs.csv").open())) == []
    assert "nan" not in console.file.getvalue() + terminal.file.getvalue()


# ---- one hash of it all ----------------------------------------------------------------------------------------------


def test_the_hash_of_a_network_is_of_its_pretrained_state_too(reference):
    net, expected = reference[0].net, reference[1].final_sha256
    assert network_sha256(net) == expected
    for key in ("0.input_means", "1.running_mean", "4.weight"):
        part = net.pretrained.parts()[key].view(-1)
        before = part[0].clone()
        part[0] += 1
        assert network_sha256(net) != expected, key
        part[0] = before
    net.pretrained.images += 1
    assert network_sha256(net) != expected
    net.pretrained.images -= 1
    assert network_sha256(net) == expected


def test_the_hash_of_a_network_without_one_is_of_weights_and_rows_alone(make_run):
    run = make_run("confit", epochs=1)
    result = run.run()
    run.net.prepare("minus")
    digest = hashlib.sha256(state_sha256(run.net.backbone).encode())
    for name, entry in run.net.tasks.items():
        digest.update(json.dumps([name, entry.classes, True, entry.sizes]).encode() + entry.row.numpy().tobytes())
    assert result.final_sha256 == digest.hexdigest()
