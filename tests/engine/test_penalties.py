"""What the loop does with a method's penalties, shown with ones that have a closed form."""

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from confitune.engine import CsvLog, Listener, TaskFit, TrainSettings, fit, network_sha256
from confitune.methods import METHODS, Penalty, compose, shared_parameters


class L2(Penalty):
    """strength / 2 * |theta - theta*|^2, theta* the weights at the start of the task."""

    name = "l2"
    strength = 0.5

    def __init__(self):
        self.start = {}

    def begin_task(self, context):
        self.start = {name: p.detach().clone() for name, p in shared_parameters(context.net).items()}

    def add_gradients(self, net):
        for name, p in shared_parameters(net).items():
            if p.grad is not None:
                p.grad.add_(p.detach() - self.start[name], alpha=self.strength)

    def state_dict(self):
        return {"start": self.start}

    def load_state_dict(self, state):
        self.start = state["start"]


class Entropy(Penalty):
    """-0.3 * mean entropy of the softmax output."""

    def output_loss(self, logits, labels):
        return -0.3 * entropy(logits)


def entropy(logits):
    p = logits.softmax(1)
    return -(p * p.log()).sum(1).mean()


SETTINGS = TrainSettings(epochs=2, batch_size=8, lr=0.05, device="cpu")


def with_penalties(name, *penalties):
    return dataclasses.replace(METHODS[name], penalties=penalties)


def trained_by_hand(backbone, head, recorder, extra_loss):
    """SGD on cross entropy + extra_loss(model's backbone, logits), all of it through autograd."""
    model = nn.Sequential(backbone, head).train()
    optimizer = torch.optim.SGD(model.parameters(), SETTINGS.lr)
    for x, labels in zip(recorder.inputs, recorder.labels, strict=True):
        logits = model(x)
        optimizer.zero_grad()
        (cross_entropy(logits, labels) + extra_loss(backbone, logits)).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("which", ["l2", "entropy", "both"])
def test_penalties_equal_their_terms_in_the_loss(make_net, make_task, which, batch_recorder):
    net, task = make_net("shared"), make_task("dark")
    backbone = copy.deepcopy(net.backbone)
    start = [p.detach().clone() for p in backbone.parameters()]
    recorder = batch_recorder(net)
    chosen = {"l2": [L2()], "entropy": [Entropy()], "both": [L2(), Entropy()]}[which]
    fitting = TaskFit(net, task, with_penalties("finetune", recorder, *chosen), SETTINGS, Listener())
    head = nn.Linear(16, 3)
    head.load_state_dict(net.head.state_dict())
    fitting.run()

    def extra_loss(backbone, logits):
        pull = sum(((p - s) ** 2).sum() for p, s in zip(backbone.parameters(), start, strict=True))
        terms = {"l2": L2.strength / 2 * pull, "entropy": -0.3 * entropy(logits)}
        return sum(terms.values()) if which == "both" else terms[which]

    model = trained_by_hand(backbone, head, recorder, extra_loss)
    for found, expected in zip((*net.backbone.parameters(), *net.head.parameters()), model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    # ... and the terms do matter:
    plain = make_net("shared")
    fit(plain, task, METHODS["finetune"], SETTINGS)
    assert (plain.backbone[0].weight - net.backbone[0].weight).abs().max() > 1e-4


def test_a_strong_pull_holds_the_shared_weights(make_net, make_task):
    distances = []
    for strength in (0.0, 5.0):
        net, penalty = make_net("shared"), L2()
        penalty.strength = strength
        fit(net, make_task("dark"), with_penalties("finetune", penalty), SETTINGS)
        moved = [(p - penalty.start[name]).norm() for name, p in shared_parameters(net).items()]
        distances.append(torch.stack(moved).norm().item())
    assert distances[1] < 0.5 * distances[0]


class Diary(Penalty):
    """Writes down which hook is called, and whether gradients are there and weights have moved."""

    def __init__(self, name, lines, net):
        self.name, self.lines, self.weight = name, lines, net.backbone[0].weight
        net.register_forward_hook(lambda *_: lines.append("forward") if name == "first" else None)
        self.before = self.weight.detach().clone()

    def write(self, hook):
        self.lines.append(f"{self.name} {hook}")

    def begin_task(self, context):
        self.write("begin_task")

    def output_loss(self, logits, labels):
        self.write("output_loss")
        self.before = self.weight.detach().clone()
        assert logits.requires_grad
        assert logits.shape == (len(labels), 3)

    def read_gradients(self, net):
        self.write("read_gradients")
        assert self.weight.grad is not None
        assert torch.equal(self.weight, self.before)

    def add_gradients(self, net):
        self.write("add_gradients")
        assert torch.equal(self.weight, self.before)

    def after_step(self, net):
        self.write("after_step")
        assert not torch.equal(self.weight, self.before)

    def end_task(self, context):
        self.write("end_task")
        assert not context.net.tasks["dark"].finished


def test_hooks_are_called_in_the_documented_order(make_net, make_task):
    net, lines = make_net("shared"), []
    method = with_penalties("finetune", Diary("first", lines, net), Diary("second", lines, net))
    settings = TrainSettings(epochs=2, batch_size=24, device="cpu")
    fit(net, make_task("dark"), method, settings)

    def both(hook):
        return [f"first {hook}", f"second {hook}"]

    step = ["forward", *both("output_loss"), *both("read_gradients"), *both("add_gradients"), *both("after_step")]
    assert lines == both("begin_task") + step * 4 + both("end_task")


class Reader(Penalty):
    """Compares the gradients it is shown with those of the cross entropy alone."""

    def __init__(self, net):
        self.checked = 0
        net.backbone.register_forward_pre_hook(lambda module, args: setattr(self, "x", args[0].clone()))

    def output_loss(self, logits, labels):
        self.labels = labels

    def read_gradients(self, net):
        twin = nn.Sequential(copy.deepcopy(net.backbone), copy.deepcopy(net.head))
        twin.zero_grad()
        cross_entropy(twin(self.x), self.labels).backward()
        for found, expected in zip(
            (*net.backbone.parameters(), *net.head.parameters()), twin.parameters(), strict=True
        ):
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-6)
        self.checked += 1


@pytest.mark.parametrize("reader_first", [True, False])
def test_gradients_are_read_before_any_penalty_is_added(make_net, make_task, reader_first):
    net, pull = make_net("shared"), L2()
    pull.strength = 5.0  # far above the tolerance of the comparison
    reader = Reader(net)
    penalties = (reader, pull) if reader_first else (pull, reader)
    fit(net, make_task("dark"), with_penalties("finetune", *penalties), SETTINGS)
    assert reader.checked == 12


class Context(Penalty):
    def __init__(self):
        self.contexts = []

    def begin_task(self, context):
        self.contexts.append(context)


def test_the_context_describes_the_task(make_run, sequence):
    penalty = Context()
    run = make_run(with_penalties("finetune", penalty))
    run.run()
    assert [context.index for context in penalty.contexts] == [0, 1, 2]
    assert [context.images for context in penalty.contexts] == [48, 40, 42]
    assert all(context.net is run.net for context in penalty.contexts)
    inputs, labels = zip(*penalty.contexts[1].batches(20), strict=True)
    assert [len(x) for x in inputs] == [20, 20]
    inputs, labels = zip(*penalty.contexts[2].batches(20), strict=True)
    assert [len(x) for x in inputs] == [20, 20, 2]  # the rest included: importance is of all images
    task = sequence[2]
    assert torch.equal(torch.cat(labels), task.train.labels)
    assert torch.equal(torch.cat(inputs), task.preprocess(task.train.pixels[task.train.rows]))


class Twin(Penalty):
    """Trains a copy of the network before the task, as AFEC does."""

    def begin_task(self, context):
        self.twin = copy.deepcopy(context.net)
        context.train(self.twin)


def test_a_copy_can_be_trained_on_the_task_alone(make_net, make_task):
    """It gets what the task's plain training gives, and leaves the network and its training as they were."""
    alone, net, task = make_net("shared"), make_net("shared"), make_task("dark")
    fit(alone, task, METHODS["finetune"], SETTINGS)
    penalty = Twin()
    fit(net, task, with_penalties("finetune", penalty), SETTINGS)
    assert penalty.twin.tasks["dark"].finished
    assert network_sha256(penalty.twin) == network_sha256(alone)
    assert network_sha256(net) == network_sha256(alone)


def test_the_copy_is_trained_without_penalties(make_net, make_task):
    alone, net, task = make_net("shared"), make_net("shared"), make_task("dark")
    fit(alone, task, METHODS["finetune"], SETTINGS)
    penalty, pull = Twin(), L2()
    fit(net, task, with_penalties("finetune", pull, penalty), SETTINGS)
    assert network_sha256(penalty.twin) == network_sha256(alone)
    assert network_sha256(net) != network_sha256(alone)


class Counter(L2):
    """L2 that also counts, in every kind of value a state may hold."""

    def __init__(self):
        super().__init__()
        self.begun, self.steps, self.sums, self.done = 0, 0, torch.zeros(2), []

    def begin_task(self, context):
        super().begin_task(context)
        self.begun += 1

    def read_gradients(self, net):
        self.sums += torch.stack([net.head.weight.grad.sum(), net.head.bias.grad.abs().sum()])

    def after_step(self, net):
        self.steps += 1

    def end_task(self, context):
        self.done.append({"index": context.index, "images": context.images})

    def state_dict(self):
        return {**super().state_dict(), "count": [self.begun, self.steps], "sums": self.sums, "done": self.done}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        (self.begun, self.steps), self.sums, self.done = state["count"], state["sums"], state["done"]


class Killed(Exception):
    pass


@pytest.mark.parametrize("base", ["finetune", "confit"])
@pytest.mark.parametrize("epoch", [None, 3])
def test_penalties_resume_with_the_run(make_run, tmp_path, base, epoch):
    class Killer(Listener):
        def task_started(self, task, name, first_epoch):
            if task == 1 and epoch is None:
                raise Killed

        def epoch_ended(self, end):
            if (end.task, end.epoch) == (1, epoch):
                raise Killed

    def run(folder, *listeners):
        (tmp_path / folder).mkdir(exist_ok=True)
        method = with_penalties(base, Counter())
        listeners = (CsvLog(tmp_path / folder), *listeners)
        return make_run(method, epochs=5, folder=tmp_path / folder, listeners=listeners, checkpoint_epochs=1)

    whole = run("whole")
    reference = whole.run()
    with pytest.raises(Killed):
        run("killed", Killer()).run()
    resumed = run("killed")
    assert resumed.resume()
    found = resumed.run()
    assert found.final_sha256 == reference.final_sha256
    (mine,), (expected,) = resumed.method.penalties, whole.method.penalties
    assert (mine.begun, mine.steps, mine.done) == (expected.begun, expected.steps, expected.done)
    assert (mine.begun, mine.steps) == (3, 5 * (6 + 5 + 5))
    assert [entry["index"] for entry in mine.done] == [0, 1, 2]
    assert torch.equal(mine.sums, expected.sums)


def test_penalties_meet_frozen_parts_without_gradients(make_net, make_task):
    seen = []

    class Look(Penalty):
        def read_gradients(self, net):
            seen.append((net.backbone[0].weight.grad is None, net.backbone[1].weight.grad is None))

    settings = TrainSettings(epochs=5, batch_size=48, device="cpu")
    fit(make_net("xconv"), make_task("dark"), with_penalties("confit", Look()), settings)
    assert seen == [(True, True), (True, False), (False, False), (False, False), (False, False)]


def test_a_composed_method_trains_with_both_halves(make_net, make_task):
    """l2+confit: confit's stages and norm, and the pull."""
    method = compose("l2+confit", METHODS, {"l2": L2}, "finetune")
    pulled, plain, task = make_net(method.norm), make_net("xconv"), make_task("dark")
    settings = TrainSettings(epochs=5, batch_size=8, lr=0.05, device="cpu")
    fit(pulled, task, method, settings)
    fit(plain, task, METHODS["confit"], settings)
    (penalty,) = method.penalties
    far = [
        sum((p - penalty.start[name]).norm().item() for name, p in shared_parameters(net).items())
        for net in (pulled, plain)
    ]
    assert 0 < far[0] < far[1]
    assert set(penalty.start) == {"0.weight", "3.weight", "6.weight", "6.bias"}  # batch norms are each task's own
