import csv

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from confitune.engine import EpochEnd, Listener
from confitune.engine.logs import CsvLog, TensorBoardLog, run_logs


class Ends(Listener):
    def __init__(self):
        self.ends = []

    def epoch_ended(self, end):
        self.ends.append(end)


def test_csv_holds_what_was_measured(make_run, tmp_path):
    ends = Ends()
    result = make_run("confit", epochs=5, listeners=(CsvLog(tmp_path), ends)).run()
    epochs = list(csv.DictReader((tmp_path / "epochs.csv").open()))
    assert list(epochs[0]) == ["task", "task_name", "stage", "epoch", "loss", "accuracy", "lr", "seconds", "images"]
    assert len(epochs) == len(ends.ends) == 15
    for row, end in zip(epochs, ends.ends, strict=True):
        assert (int(row["task"]), row["task_name"], row["stage"]) == (end.task, end.task_name, end.stage)
        assert (int(row["epoch"]), float(row["loss"]), float(row["accuracy"])) == (end.epoch, end.loss, end.accuracy)
        assert (float(row["lr"]), float(row["seconds"]), int(row["images"])) == (end.lr, end.seconds, end.images)
    accuracy = list(csv.DictReader((tmp_path / "accuracy.csv").open()))
    found = {(int(row["task"]), int(row["after_task"])): float(row["accuracy"]) for row in accuracy}
    matrix = result.accuracy_matrix
    assert found == {(i, j): matrix[i][j] for i in range(3) for j in range(i, 3)}
    assert [row["task_name"] for row in accuracy[-3:]] == ["dark", "bright", "minus"]


def test_a_fresh_run_starts_fresh_files(make_run, tmp_path):
    for _ in range(2):
        make_run("finetune", epochs=1, listeners=(CsvLog(tmp_path),)).run()
    assert len(list(csv.DictReader((tmp_path / "epochs.csv").open()))) == 3
    assert len(list(csv.DictReader((tmp_path / "accuracy.csv").open()))) == 6


def test_joint_training_logs_the_accuracy_of_every_task(make_run, tmp_path):
    result = make_run("joint", epochs=1, listeners=(CsvLog(tmp_path),)).run()
    rows = list(csv.DictReader((tmp_path / "accuracy.csv").open()))
    assert [float(row["accuracy"]) for row in rows] == [row[-1] for row in result.accuracy_matrix]


def test_going_on_within_a_task_keeps_its_earlier_epochs(tmp_path):
    def end(task, epoch, loss):
        return EpochEnd(task, f"t{task}", "all", epoch, 3, loss, 50.0, 0.01, 0.1, 8)

    log = CsvLog(tmp_path)
    log.run_started("confit", ["t0", "t1"], 3, 0)
    for task in range(2):
        log.task_started(task, f"t{task}", 0)
        for epoch in range(3):
            log.epoch_ended(end(task, epoch, loss=1.0))
        log.task_ended(task, [60.0] * (task + 1))

    again = CsvLog(tmp_path)
    again.run_started("confit", ["t0", "t1"], 3, 1)
    again.task_started(1, "t1", 2)
    again.epoch_ended(end(1, 2, loss=2.0))
    rows = [(row["task"], row["epoch"], row["loss"]) for row in csv.DictReader((tmp_path / "epochs.csv").open())]
    first = [("0", "0", "1.0"), ("0", "1", "1.0"), ("0", "2", "1.0"), ("1", "0", "1.0"), ("1", "1", "1.0")]
    assert rows == [*first, ("1", "2", "2.0")]
    left = [(row["after_task"], row["task"]) for row in csv.DictReader((tmp_path / "accuracy.csv").open())]
    assert left == [("0", "0")]


def test_without_tensorboard_there_are_csv_files_alone(tmp_path, monkeypatch):
    assert [type(log) for log in run_logs(tmp_path)] == [CsvLog, TensorBoardLog]
    monkeypatch.setattr("confitune.engine.logs.find_spec", lambda name: None)
    assert [type(log) for log in run_logs(tmp_path)] == [CsvLog]


def test_tensorboard_holds_what_was_measured(make_run, tmp_path):
    ends = Ends()
    result = make_run("confit", epochs=5, listeners=(TensorBoardLog(tmp_path), ends)).run()
    (file,) = (tmp_path / "tensorboard").iterdir()
    events = EventAccumulator(str(file))
    events.Reload()

    def scalars(tag):
        return {event.step: event.value for event in events.Scalars(tag)}

    for tag in ("loss", "accuracy", "lr"):
        expected = {step + 1: getattr(end, tag) for step, end in enumerate(ends.ends)}
        assert scalars(f"train/{tag}") == pytest.approx(expected, rel=1e-6)
    matrix = result.matrix
    for task in range(3):
        expected = {after + 1: matrix[task, after] for after in range(task, 3)}
        assert scalars(f"test/task {task + 1}") == pytest.approx(expected, rel=1e-6)
    averages = {after + 1: matrix[: after + 1, after].mean() for after in range(3)}
    assert scalars("test/average") == pytest.approx(averages, rel=1e-6)


def test_half_a_line_of_a_killed_process_is_dropped_when_a_run_goes_on(tmp_path):
    log = CsvLog(tmp_path)
    log.run_started("confit", ["dark", "bright"], 2, 0)
    log.task_started(0, "dark", 0)
    log.epoch_ended(EpochEnd(0, "dark", "head", 0, 2, 1.5, 50.0, 0.01, 1.0, 8))
    whole = (tmp_path / "epochs.csv").read_bytes()
    for left in (
        b"0,dark,he",
        b"x,dark,head,0,1.5,50.0,0.01,1.0,8",
        b"0,dark,head,",
        b"\xff\x00,",
        b'"' + b"x" * 200_000,
    ):
        (tmp_path / "epochs.csv").write_bytes(whole + left)
        again = CsvLog(tmp_path)
        again.run_started("confit", ["dark", "bright"], 2, 0)
        again.task_started(0, "dark", 1)
        assert (tmp_path / "epochs.csv").read_bytes() == whole
