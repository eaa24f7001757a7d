"""When a task is left at a head on pre-trained features, that deciding leaves no trace, that nothing is forgotten."""

import copy
import csv
import dataclasses
import io
import re

import pytest
import torch
from rich.console import Console
from torch.nn.functional import cross_entropy

from confitune.engine import Checkpoint, CsvLog, Listener, LiveProgress, RunResult, Turns, evaluate, fit
from confitune.methods import METHODS, Method, create_method, hierarchical
from confitune.methods.linear import fit_head, unexplained
from confitune.tasks import Images

NEVER = {"best": {"most": 0}}
ALWAYS = {"best": {"worse": 0, "most": 1e9}}
SOME = {"best": {"worse": 0, "most": 0.12}}  # of `mixed` the second task


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


def owned(net):
    return [entry.owns for entry in net.tasks.values()]


ALL, HEAD = ("norms", "deltas", "head"), ("head",)


def answers(net, task):
    with torch.no_grad():
        return net.eval()(task.inputs(task.test.pixels[task.test.rows]), task.name).clone()


# ---- when it stays ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "cases"),
    [
        # what is unexplained with pre-trained statistics, with the task's own -> stays
        ({}, {(0.07, 0.29): True, (0.28, 0.36): False, (0.2, 0.39): False, (0.2, 0.4): True, (0.0, 0.0): True}),
        ({}, {(0.5, 1.0): True, (0.51, 9.0): False, (0.5,): True, (0.51,): False}),
        ({"worse": 3}, {(0.1, 0.29): False, (0.1, 0.31): True}),
        ({"worse": 0}, {(0.4, 0.0): True, (0.6, 0.7): False}),
        ({"most": 0.2}, {(0.2, 0.5): True, (0.21, 0.9): False}),
        ({"worse": 0, "most": 9}, {(8.0, 0.0): True}),
    ],
)
def test_when_it_stays(options, cases):
    best = METHODS["best"](**options)
    assert {case: best.may_stay(*case) for case in cases} == cases
    assert all(type(best.may_stay(*case)) is bool for case in cases)


def test_the_note_says_what_was_left_unexplained(make_net, tasks, make_fit):
    """27 images in batches of 8: both classifiers are judged on 24 of them, drawn at random."""
    task, net, hears = tasks[0], make_net("best"), Hears()
    original = copy.deepcopy(net.backbone)
    fitting = make_fit(net, task, create_method("best", ALWAYS))
    fitting.listener = hears
    chosen = fitting.sample(256)
    fitting.fit()
    assert len(chosen) == 24
    x, labels = task.inputs(task.train.pixels[task.train.rows[chosen]]), task.train.labels[chosen]
    with torch.no_grad():
        pretrained = unexplained(original.eval()(x), labels, 3)
        for norm in (original[1], original[4]):
            norm.train()
        own = unexplained(original(x), labels, 3)
    assert hears.notes == [
        f"task 'dark': a head on pre-trained features is enough: it leaves {pretrained:.0%} of left-out labels "
        f"unexplained, one with the task's own statistics {own:.0%}"
    ]


# ---- a task that settles ---------------------------------------------------------------------------------------------


def test_a_task_that_settles_owns_a_head_alone_and_moves_nothing(make_net, tasks, make_settings):
    net, hears, task = make_net("best", dropout=0.3), Hears(), tasks[0]
    original, before = copy.deepcopy(net.backbone).eval(), copy.deepcopy(net.backbone.state_dict())
    fit(net, task, create_method("best", ALWAYS), make_settings(), hears)
    after = net.backbone.state_dict()
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert (hears.epochs, hears.stages, hears.steps, len(hears.notes)) == (0, 0, 0, 1)
    entry = net.tasks["dark"]
    assert (entry.finished, entry.owns, entry.row.numel()) == (True, HEAD, 3 * 12 + 3)
    assert dict(net.storage()["dark"].parts) == {"head": 39}
    assert all(p.requires_grad and p.grad is None for p in net.parameters())
    # The head is the one that is fitted to what the original network makes of all training images.
    x = task.inputs(task.train.pixels[task.train.rows])
    with torch.no_grad():
        features = original(x)
        weight, bias = fit_head(features, task.train.labels, 3)
        torch.testing.assert_close(net.eval()(x), features @ weight.T + bias, rtol=1e-3, atol=1e-2)
    assert evaluate(net, task, make_settings()) > 60


def test_a_task_that_is_trained_on_is_not_asked_again(make_net, tasks, make_settings):
    net, hears = make_net("best"), Hears()
    fit(net, tasks[0], create_method("best", NEVER), make_settings(epochs=5))
    net.reopen("dark")
    fit(net, tasks[0], create_method("best", ALWAYS), make_settings(epochs=5), hears)
    assert (hears.epochs, net.tasks["dark"].owns) == (5, ALL)


# ---- a task that does not --------------------------------------------------------------------------------------------


def at_random(task):
    """The same images with labels that say nothing."""
    labels = task.train.labels[torch.randperm(len(task.train.labels), generator=torch.Generator().manual_seed(0))]
    return dataclasses.replace(task, train=Images(task.train.pixels, task.train.rows, labels))


class Draws(Method):
    """Draws random numbers where methods may."""

    def __init__(self):
        super().__init__()
        self.drawn = []

    def draw(self):
        self.drawn.append(torch.rand(2).tolist())

    def begin_task(self, context):
        self.draw()

    def begin_epoch(self, context, epoch):
        self.draw()

    def end_task(self, context):
        self.draw()


class Unasked(METHODS["best"]):
    def settle(self, context):
        return False


def test_a_task_that_does_not_settle_is_trained_as_if_nobody_had_asked(make_net, tasks, make_settings, assert_same):
    """To the bit, random numbers included: judging it has left no trace."""
    found = []
    for kind in (Unasked, METHODS["best"]):
        # Both classifiers are judged: only the second says no.
        method, draws, hears = kind(worse=1e9, most=1e9), Draws(), Hears()
        method.added, net = (draws,), make_net("best", dropout=0.3)
        settings = make_settings(epochs=5, augmentation="flip-shift", momentum=0.9, lr=0.003)
        torch.manual_seed(5)
        for task in tasks[:2]:
            fit(net, at_random(task), method, settings, hears)
        assert (hears.epochs, hears.notes, owned(net)) == (10, [], [ALL, ALL])
        found.append({"state": dict(net.state_dict()), "drawn": draws.drawn, "random": torch.get_rng_state()})
    assert_same(found[1], found[0])


def test_changes_take_the_place_of_weights_in_the_stages_of_hierarchical_fine_tuning():
    for epochs in (1, 4, 5, 10):
        stages = create_method("best").stages(epochs, 0)
        assert [(stage.name, stage.epochs) for stage in stages] == [(s.name, s.epochs) for s in hierarchical(epochs)]
        assert stages[-1].trains == {"head", "norms", "deltas"}
        assert not any("weights" in stage.trains for stage in stages)


def test_changes_start_along_the_gradient_of_whole_batches(
    make_net, tasks, make_fit, monkeypatch, snapshot, assert_same
):
    """27 images in batches of 8 are 3 whole ones; of these two are asked for."""
    net, given = make_net("best"), []
    context = make_fit(net, tasks[0], "best", epochs=5)
    context._freeze_but(frozenset({"head", "norms", "deltas"}))
    net.train().features(next(iter(context.batches(8)))[0])  # as steps before have done
    twin, before = copy.deepcopy(net).train(), snapshot(net)
    monkeypatch.setattr(net.parts["deltas"], "start_along", given.append)
    method = create_method("best", {"best": {"batches": 2}})
    for epoch in range(5):
        method.begin_epoch(context, epoch)
        assert len(given) == (epoch >= 2)  # the third is the first of the last stage
    assert_same(snapshot(net), before)
    weights = {name: twin.backbone.get_submodule(name).weight for name in given[0]}
    assert list(weights) == ["0", "3"]
    total = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for weight in weights.values():
        weight.requires_grad_(True)
    for x, labels in list(context.batches(8))[:2]:
        gradients = torch.autograd.grad(cross_entropy(twin(x), labels), list(weights.values()))
        for name, gradient in zip(total, gradients, strict=True):
            total[name] += gradient
    for name, expected in total.items():
        torch.testing.assert_close(given[0][name], expected, rtol=1e-4, atol=1e-6)


# ---- sequences in which some settle ----------------------------------------------------------------------------------


def test_tasks_answer_to_the_bit_as_before_after_later_ones(make_net, mixed, make_settings):
    """Those that settled and those that were trained, in whatever order."""
    for order in ((0, 1, 2), (1, 0, 2), (1, 2, 0)):
        net, method, seen = make_net("best", dropout=0.3), create_method("best", SOME), {}
        weights = {key: p.detach().clone() for key, p in net.backbone.named_parameters() if key[0] in "03"}
        assert len(weights) == 3
        for place in order:
            fit(net, mixed[place], method, make_settings(epochs=5))
            for name, (task, expected) in seen.items():
                assert torch.equal(answers(net, task), expected), (order, name)
            seen[mixed[place].name] = mixed[place], answers(net, mixed[place])
        assert {name: entry.owns for name, entry in net.tasks.items()} == {"dark": ALL, "bright": HEAD, "minus": ALL}
        for key, weight in weights.items():
            assert torch.equal(net.backbone.get_parameter(key), weight)  # convolutions never move


def test_a_task_after_one_that_settled_starts_from_the_last_trained_one(make_net, mixed, make_settings):
    net = make_net("best")
    fit(net, mixed[0], create_method("best", NEVER), make_settings(epochs=5))
    trained = net.task_state_dict("dark")
    fit(net, mixed[1], create_method("best", ALWAYS), make_settings(epochs=5))
    net.add_task("next", 2)
    started = net.task_state_dict("next")
    for key in ("1.weight", "1.running_mean", "4.bias", "4.running_var"):
        assert torch.equal(started[key], trained[key]), key


@pytest.fixture
def best(make_run, mixed):
    def make(**options):
        return make_run("best", SOME, tasks=mixed, **{"epochs": 5, "dropout": 0.3, **options})

    return make


def test_a_run_forgets_nothing(best):
    run = best()
    result = run.run()
    assert owned(run.net) == [ALL, HEAD, ALL]
    assert (result.fgt, result.bwt) == (0.0, 0.0)
    for task, row in enumerate(result.accuracy_matrix):
        assert len(set(row[task:])) == 1
    # Four numbers a channel, and of both convolutions' weights (8 x 27, 12 x 72) a change of rank one.
    assert [task["norm_numbers"] for task in result.tasks] == [4 * 20 + 35 + 84, 0, 4 * 20 + 35 + 84]
    assert run.images == 5 * (24 + 24)  # the second task's are not trained on
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
    assert owned(run.net) == [ALL, HEAD, ALL]
    assert found.final_sha256 == expected.final_sha256
    assert found.accuracy_matrix == expected.accuracy_matrix
    assert (run.images, found.tasks) == (whole.images, expected.tasks)
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
    assert console.file.getvalue().count("note: task 'bright': a head on pre-trained features is enough") == 1


def test_a_run_in_which_nothing_is_trained_is_a_result(make_run, tmp_path):
    console = Console(file=io.StringIO(), force_terminal=True, width=160)
    run = make_run("best", ALWAYS, folder=tmp_path, listeners=(CsvLog(tmp_path), LiveProgress(console, "tiny")))
    result = run.run()
    assert owned(run.net) == [HEAD] * 3
    assert (result.images_per_second, run.images, result.fgt) == (0.0, 0, 0.0)
    result.save(tmp_path / "result.json")
    assert RunResult.load(tmp_path / "result.json") == result
    assert list(csv.DictReader((tmp_path / "epochs.csv").open())) == []
    assert "nan" not in console.file.getvalue()
    checkpoint = Checkpoint.load(tmp_path, {})
    assert (checkpoint.task, checkpoint.fit, checkpoint.images) == (3, None, 0)
    again = make_run("best", ALWAYS, folder=tmp_path)
    assert again.resume()
    assert again.run().final_sha256 == result.final_sha256
