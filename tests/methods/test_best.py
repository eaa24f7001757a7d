"""What a task is given and why, that choosing leaves no trace, that nothing is forgotten."""

import copy
import csv
import io
import math
import re
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from confitune.engine import CsvLog, Listener, RunResult, TaskFit, Turns, evaluate, fit
from confitune.engine.checkpoint import Checkpoint
from confitune.engine.progress import LiveProgress
from confitune.methods import best as best_file, create_method, hierarchical
from confitune.methods.linear import fit_linear, folds_of

HEAD, CHANGES, ALL = ("head",), ("norms", "deltas", "head"), ("norms", "moments", "deltas", "head")
ONLY_HEADS, TRAINED = {"best": {"owns": "head"}}, {"best": {"owns": "moments"}}


class Hears(Listener):
    def __init__(self):
        self.notes, self.epochs, self.stages, self.steps = [], 0, 0, 0

    def note(self, message):
        self.notes.append(message)

    def stage_started(self, stage):
        self.stages += 1

    def step_done(self, step, steps):
        self.steps += 1

    def epoch_ended(self, end):
        self.epochs += 1


@pytest.fixture
def mixed(make_task, tasks):
    """Three tasks; the classes of the second are far apart."""
    return tasks[0], make_task("bright", (12, 13), base=120, step=100), tasks[2]


@pytest.fixture
def heads(monkeypatch):
    """Let heads be right about left-out images of some tasks always, and of others never; no images are far."""

    def set_right(*good):
        def right(context):
            return torch.full((context.images,), context.net.current_task in good)

        monkeypatch.setattr(best_file, "fit_head", head_that_is(right))

    monkeypatch.setattr(best_file, "_FAR", math.inf)
    return set_right


def head_that_is(right, plain=best_file.fit_head):
    """A fit whose left-out answers are right where `right(context)` says so."""
    return lambda context: replace(plain(context), right=right(context))


def owned(net):
    return [entry.owns for entry in net.tasks.values()]


def answers(net, task):
    with torch.no_grad():
        return net.eval()(task.inputs(task.test.pixels[task.test.rows]), task.name).clone()


# ---- a head ----------------------------------------------------------------------------------------------------------


def test_a_task_that_settles_owns_a_head_alone_and_moves_nothing(make_net, tasks, make_settings):
    net, hears, task = make_net("best", dropout=0.3), Hears(), tasks[0]
    original, before = copy.deepcopy(net.backbone).eval(), copy.deepcopy(net.backbone.state_dict())
    fit(net, task, create_method("best", ONLY_HEADS), make_settings(), hears)
    after = net.backbone.state_dict()
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert (hears.epochs, hears.stages, hears.steps) == (0, 0, 0)
    assert hears.notes == ["task 'dark': a head on pre-trained features (as asked for)"]
    entry = net.tasks["dark"]
    assert (entry.finished, entry.owns, entry.row.numel()) == (True, HEAD, 3 * 12 + 3)
    assert dict(net.storage()["dark"].parts) == {"head": 39}
    assert all(p.requires_grad and p.grad is None for p in net.parameters())
    # The head is the one that is fitted to what the original network makes of all training images.
    x, labels = task.inputs(task.train.pixels[task.train.rows]), task.train.labels
    with torch.no_grad():
        features = original(x)
        expected = fit_linear(features, labels, 3, folds_of(labels, 0))
        found = net.eval()(x)
    torch.testing.assert_close(found.argmax(1), (features @ expected.weight.T + expected.bias).argmax(1))
    assert evaluate(net, task, make_settings()) > 60


def test_a_head_that_tells_left_out_images_apart_stays(make_net, tasks, make_settings, heads):
    heads("dark")
    net, hears, method = make_net("best"), Hears(), create_method("best")
    fit(net, tasks[0], method, make_settings(), hears)
    assert (hears.epochs, owned(net)) == (0, [HEAD])
    assert hears.notes == ["task 'dark': a head on pre-trained features (it tells left-out images apart)"]
    assert method.choices == {"dark": {"only_head": "it tells left-out images apart"}}


def test_few_images_get_a_head(make_net, make_task, make_settings, heads):
    heads()
    net, hears = make_net("best"), Hears()
    fit(net, make_task("few", (5, 4, 5)), create_method("best"), make_settings(), hears)
    assert owned(net) == [HEAD]
    assert "fewer than 5 images a class are too few to train on" in hears.notes[-1]


def test_a_task_that_is_trained_on_is_not_asked_again(make_net, tasks, make_settings):
    net, hears = make_net("best"), Hears()
    fit(net, tasks[0], create_method("best", TRAINED), make_settings(epochs=5))
    net.reopen("dark")
    fit(net, tasks[0], create_method("best", ONLY_HEADS), make_settings(epochs=5), hears)
    assert (hears.epochs, net.tasks["dark"].owns) == (5, ALL)


# ---- more than a head ------------------------------------------------------------------------------------------------


def test_a_task_is_trained_on_all_images_where_a_head_is_not_enough(make_net, tasks, make_settings, heads):
    heads()
    net, hears, method, task = make_net("best"), Hears(), create_method("best"), tasks[0]
    fit(net, task, method, make_settings(epochs=10), hears)
    assert (hears.epochs, hears.steps, owned(net)) == (10, 10 * 3, [CHANGES])
    choice = method.choices["dark"]
    assert (choice["head"], choice["start"], choice["own_moments"]) == (0.0, "pre-training", False)
    right = answers(net, replace(task, test=task.train)).argmax(1) == task.train.labels
    assert choice["trained"] == pytest.approx(100 * float(right.double().mean()))
    words = "own scales and shifts of norms and rank-4 changes (a head alone: 0.0% of left-out images)"
    assert hears.notes == [f"task 'dark': {words}"]


@pytest.mark.parametrize("fails", [True, False])
def test_training_that_fails_leaves_the_head(make_net, tasks, make_settings, monkeypatch, fails):
    """Its own images are then known less well than the head knew them when they were left out."""

    def right(context):  # three wrong of 27 are reason enough to try
        return torch.arange(context.images) >= 3

    monkeypatch.setattr(best_file, "fit_head", head_that_is(right))
    monkeypatch.setattr(best_file, "_FAR", math.inf)
    if fails:
        monkeypatch.setattr(TaskFit, "_train_epoch", lambda *given: None)
    net, hears, method = make_net("best"), Hears(), create_method("best")
    before = copy.deepcopy(net.backbone.state_dict())
    fit(net, tasks[0], method, make_settings(epochs=20, optimizer="adamw", lr=0.01), hears)
    choice = method.choices["dark"]
    assert choice["head"] == pytest.approx(100 * 24 / 27)
    assert (choice["trained"] < choice["head"]) is fails
    assert owned(net) == [HEAD if fails else CHANGES]
    if fails:
        after = net.backbone.state_dict()
        assert all(torch.equal(after[key], before[key]) for key in before if "num_batches" not in key)
        words = f"training failed: {choice['trained']:.1f}% of its own images are right"
        assert hears.notes == [f"task 'dark': a head on pre-trained features ({words})"]


@pytest.mark.parametrize(("far", "lost"), [(True, False), (True, True), (False, False)])
def test_tasks_far_from_pre_training_own_moments(make_net, tasks, make_settings, heads, monkeypatch, far, lost):
    """Unless those take away what tells classes apart."""
    heads()
    net, method = make_net("best"), create_method("best")
    with net.evaluating(), net.parts["moments"].shifts() as shifts:
        images = tasks[0].train
        net.backbone(tasks[0].inputs(images.pixels[images.rows]))
    shift = float(torch.stack(shifts).mean())
    monkeypatch.setattr(best_file, "_FAR", 0.5 * shift if far else 2 * shift)
    monkeypatch.setattr(best_file, "_LOST", 0.0 if lost else math.inf)
    start = net.backbone.state_dict()["1.running_mean"].clone()
    for task in tasks[:2]:
        fit(net, task, method, make_settings(epochs=5))
    own = far and not lost
    assert net.tasks["dark"].owns == (ALL if own else CHANGES)
    net.prepare("dark")
    assert torch.equal(net.backbone.state_dict()["1.running_mean"], start) is not own
    choice = method.choices["dark"]
    assert choice["shift"] == pytest.approx(shift, rel=0.3)  # a few images are in a batch twice
    assert choice["own_moments"] is own
    assert list(choice["left_out_losses"]) == ["pre-training"]
    assert list(method.choices["bright"]["left_out_losses"]) == ["pre-training", "the task before"]


def test_changes_take_the_place_of_weights_in_the_stages_of_hierarchical_fine_tuning():
    for options, epochs in ((None, 1), (None, 5), (None, 10), (TRAINED, 4), (TRAINED, 10)):
        stages = create_method("best", options).stages(epochs, 0)
        expected = [(stage.name, stage.epochs) for stage in hierarchical(epochs)]
        assert [(stage.name, stage.epochs) for stage in stages] == expected
        assert stages[-1].trains == {"head", "norms", "deltas"}
        assert not any("weights" in stage.trains for stage in stages)


def test_changes_start_along_the_gradient_when_their_stage_begins(make_net, tasks, make_fit, monkeypatch):
    net, given = make_net("best"), []
    context = make_fit(net, tasks[0], "best", epochs=5)
    monkeypatch.setattr(net.parts["deltas"], "start_along", given.append)
    method = create_method("best", TRAINED)
    for epoch in range(5):
        method.begin_epoch(context, epoch)
        assert len(given) == (epoch >= 2)  # the third is the first of the last stage
    weights = [net.backbone.get_submodule(name).weight for name in given[0]]
    for found, expected in zip(given[0].values(), context.gradients(weights, 16), strict=True):
        torch.testing.assert_close(found, expected)


# ---- sequences in which some settle ----------------------------------------------------------------------------------


def test_tasks_answer_to_the_bit_as_before_after_later_ones(make_net, mixed, make_settings, heads):
    """Those that settled and those that were trained, in whatever order."""
    heads("bright")
    for order in ((0, 1, 2), (1, 0, 2), (1, 2, 0)):
        net, method, seen = make_net("best", dropout=0.3), create_method("best"), {}
        weights = {key: p.detach().clone() for key, p in net.backbone.named_parameters() if key[0] in "03"}
        assert len(weights) == 3
        for place in order:
            fit(net, mixed[place], method, make_settings(epochs=5))
            for name, (task, expected) in seen.items():
                assert torch.equal(answers(net, task), expected), (order, name)
            seen[mixed[place].name] = mixed[place], answers(net, mixed[place])
        assert {name: entry.owns for name, entry in net.tasks.items()} == {
            "dark": CHANGES,
            "bright": HEAD,
            "minus": CHANGES,
        }
        for key, weight in weights.items():
            assert torch.equal(net.backbone.get_parameter(key), weight)  # convolutions never move


def test_a_task_after_one_that_settled_starts_from_the_last_trained_one(make_net, mixed, make_settings):
    net = make_net("best")
    fit(net, mixed[0], create_method("best", TRAINED), make_settings(epochs=5))
    trained = net.task_state_dict("dark")
    fit(net, mixed[1], create_method("best", ONLY_HEADS), make_settings(epochs=5))
    net.add_task("next", 2)
    started = net.task_state_dict("next")
    for key in ("1.weight", "1.running_mean", "4.bias", "4.running_var"):
        assert torch.equal(started[key], trained[key]), key


@pytest.fixture
def best(make_run, mixed, heads):
    heads("bright")

    def make(**options):
        return make_run("best", tasks=mixed, **{"epochs": 5, "dropout": 0.3, **options})

    return make


def test_a_run_forgets_nothing(best):
    run = best()
    result = run.run()
    assert owned(run.net) == [CHANGES, HEAD, CHANGES]
    assert (result.fgt, result.bwt) == (0.0, 0.0)
    for task, row in enumerate(result.accuracy_matrix):
        assert len(set(row[task:])) == 1
    # Two numbers a channel, and of both convolutions' weights (8 x 3 x 9, 12 x 8 x 9) a change of rank 4.
    assert [task["norm_numbers"] for task in result.tasks] == [2 * 20 + 4 * (20 + 29), 0, 2 * 20 + 4 * (20 + 29)]
    assert run.state.images == 5 * (24 + 24)  # whole batches of 8; the second task's are not trained on
    assert result.learning_acc > 60


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


@pytest.mark.parametrize(
    ("task", "when"), [(0, 1), (0, 2), (1, "start"), (1, "settled"), (2, "start"), (2, 3)], ids=lambda at: str(at)
)
def test_resumed_equals_undisturbed(best, tmp_path, task, when):
    logs = {name: tmp_path / name for name in ("whole", "killed")}
    for folder in logs.values():
        folder.mkdir()
    whole = best(listeners=(CsvLog(logs["whole"]),))
    expected = whole.run()
    with pytest.raises(Killed):
        best(folder=logs["killed"], listeners=(CsvLog(logs["killed"]), Killer(task, when))).run()
    run = best(folder=logs["killed"], listeners=(CsvLog(logs["killed"]),))
    assert run.resume()
    found = run.run()
    assert owned(run.net) == [CHANGES, HEAD, CHANGES]
    assert found.final_sha256 == expected.final_sha256
    assert found.accuracy_matrix == expected.accuracy_matrix
    assert (run.state.images, found.tasks) == (whole.state.images, expected.tasks)
    for log in ("epochs.csv", "accuracy.csv"):
        mine, other = ([{**row, "seconds": ""} for row in csv.DictReader((logs[name] / log).open())] for name in logs)
        assert mine == other


def test_seeds_side_by_side_give_what_they_give_alone(best):
    turns = Turns(3)
    runs = [best(seed=seed, listeners=(turns.listener(seed),)) for seed in range(3)]
    together = turns.run([run.run for run in runs])
    assert any(HEAD in owned(run.net) for run in runs)
    for seed, found in enumerate(together):
        expected = best(seed=seed).run()
        assert (found.final_sha256, found.accuracy_matrix) == (expected.final_sha256, expected.accuracy_matrix)


def test_logs_have_nothing_of_a_task_that_was_not_trained(best, tmp_path):
    console = Console(file=io.StringIO(), force_terminal=False, width=200)
    result = best(listeners=(CsvLog(tmp_path), LiveProgress(console, "tiny"))).run()
    epochs = list(csv.DictReader((tmp_path / "epochs.csv").open()))
    assert [(row["task"], row["epoch"]) for row in epochs] == [(t, str(e)) for t in "02" for e in range(5)]
    lines = [line for line in console.file.getvalue().splitlines() if line.startswith("tiny: ")]
    averages = [sum(row[j] for row in result.accuracy_matrix[: j + 1]) / (j + 1) for j in range(3)]
    assert re.fullmatch(rf"tiny: task 1 of 3, loss \d\.\d{{3}}, average accuracy so far {averages[0]:.1f}%", lines[0])
    assert lines[1] == f"tiny: task 2 of 3, average accuracy so far {averages[1]:.1f}%"  # it has no loss
    assert console.file.getvalue().count("note: task 'bright': a head on pre-trained features") == 1


def test_a_run_in_which_nothing_is_trained_is_a_result(make_run, tmp_path):
    console = Console(file=io.StringIO(), force_terminal=True, width=160)
    run = make_run("best", ONLY_HEADS, folder=tmp_path, listeners=(CsvLog(tmp_path), LiveProgress(console, "tiny")))
    result = run.run()
    assert owned(run.net) == [HEAD] * 3
    assert (result.images_per_second, run.state.images, result.fgt) == (0.0, 0, 0.0)
    assert RunResult.of_line(result.line(), "here") == result
    assert list(csv.DictReader((tmp_path / "epochs.csv").open())) == []
    assert "nan" not in console.file.getvalue()
    checkpoint = Checkpoint.load(tmp_path, {})
    assert (checkpoint.task, checkpoint.fit, checkpoint.images) == (3, None, 0)
    again = make_run("best", ONLY_HEADS, folder=tmp_path)
    assert again.resume()
    assert again.run().final_sha256 == result.final_sha256
