"""What the loop does with a method's hooks, shown with ones that have a closed form."""

import copy
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from confitune.engine import CsvLog, Listener, TrainSettings, fit, network_sha256
from confitune.methods import Method


class L2(Method):
    """strength / 2 * |theta - theta*|^2, theta* the weights at the start of the task."""

    strength = 0.5

    def __init__(self):
        super().__init__()
        self.start = {}

    def begin_task(self, context):
        self.start = {name: p.detach().clone() for name, p in context.net.shared_parameters().items()}

    def add_gradients(self, net):
        for name, p in net.shared_parameters().items():
            if p.grad is not None:
                p.grad.add_(p.detach() - self.start[name], alpha=self.strength)

    def state_dict(self):
        return {"start": self.start}

    def load_state_dict(self, state):
        self.start = state["start"]


class Entropy(Method):
    """-0.3 * mean entropy of the softmax output."""

    def loss(self, step):
        return -0.3 * entropy(step.logits)


def entropy(logits):
    p = logits.softmax(1)
    return -(p * p.log()).sum(1).mean()


SETTINGS = TrainSettings(epochs=2, batch_size=8, lr=0.05, device="cpu")


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
def test_terms_and_gradients_equal_their_terms_in_the_loss(
    make_fit, make_method, make_net, make_task, which, batch_recorder
):
    net, task = make_net("finetune"), make_task("dark")
    backbone = copy.deepcopy(net.backbone)
    start = [p.detach().clone() for p in backbone.parameters()]
    recorder = batch_recorder()
    chosen = {"l2": [L2()], "entropy": [Entropy()], "both": [L2(), Entropy()]}[which]
    fitting = make_fit(net, task, make_method("finetune", recorder, *chosen), SETTINGS)
    head = nn.Linear(16, 3)
    head.load_state_dict(net.head.linear.state_dict())
    fitting.fit()

    def extra_loss(backbone, logits):
        pull = sum(((p - s) ** 2).sum() for p, s in zip(backbone.parameters(), start, strict=True))
        terms = {"l2": L2.strength / 2 * pull, "entropy": -0.3 * entropy(logits)}
        return sum(terms.values()) if which == "both" else terms[which]

    model = trained_by_hand(backbone, head, recorder, extra_loss)
    for found, expected in zip(
        (*net.backbone.parameters(), *net.head.linear.parameters()), model.parameters(), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    # ... and the terms do matter:
    plain = make_net("finetune")
    fit(plain, task, "finetune", SETTINGS)
    assert (plain.backbone[0].weight - net.backbone[0].weight).abs().max() > 1e-4


def test_a_strong_pull_holds_the_shared_weights(make_method, make_net, make_task):
    distances = []
    for strength in (0.0, 5.0):
        net, penalty = make_net("finetune"), L2()
        penalty.strength = strength
        fit(net, make_task("dark"), make_method("finetune", penalty), SETTINGS)
        moved = [(p - penalty.start[name]).norm() for name, p in net.shared_parameters().items()]
        distances.append(torch.stack(moved).norm().item())
    assert distances[1] < 0.5 * distances[0]


class Diary(Method):
    """Writes down which hook is called, and whether gradients are there and weights have moved."""

    def __init__(self, name, lines, net):
        super().__init__()
        self.name, self.lines, self.weight = name, lines, net.backbone[0].weight
        net.backbone.register_forward_hook(lambda *_: lines.append("forward") if name == "first" else None)
        self.before = self.weight.detach().clone()

    def write(self, hook):
        self.lines.append(f"{self.name} {hook}")

    def begin_task(self, context):
        self.write("begin_task")

    def begin_epoch(self, context, epoch):
        self.write(f"begin_epoch {epoch}")

    def loss(self, step):
        self.write("loss")
        self.before = self.weight.detach().clone()
        assert step.logits.requires_grad
        assert step.logits.shape == (len(step.labels), 3)
        assert torch.equal(step.net.head(step.features), step.logits)
        assert step.inputs.shape == (len(step.labels), 3, 16, 16)

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


def test_hooks_are_called_in_the_documented_order(make_method, make_net, make_task):
    net, lines = make_net("finetune"), []
    method = make_method("finetune", Diary("first", lines, net), Diary("second", lines, net))
    settings = TrainSettings(epochs=2, batch_size=24, device="cpu")
    fit(net, make_task("dark"), method, settings)

    def both(hook):
        return [f"first {hook}", f"second {hook}"]

    step = ["forward", *both("loss"), *both("read_gradients"), *both("add_gradients"), *both("after_step")]
    epochs = [both(f"begin_epoch {epoch}") + 2 * step for epoch in range(2)]
    assert lines == both("begin_task") + epochs[0] + epochs[1] + both("end_task")


class Reader(Method):
    """Compares the gradients it is shown with those of the cross entropy alone."""

    def __init__(self):
        super().__init__()
        self.checked = 0

    def loss(self, step):
        self.x, self.labels = step.inputs.clone(), step.labels

    def read_gradients(self, net):
        twin = nn.Sequential(copy.deepcopy(net.backbone), copy.deepcopy(net.head.linear))
        twin.zero_grad()
        cross_entropy(twin(self.x), self.labels).backward()
        for found, expected in zip(
            (*net.backbone.parameters(), *net.head.linear.parameters()), twin.parameters(), strict=True
        ):
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-6)
        self.checked += 1


@pytest.mark.parametrize("reader_first", [True, False])
def test_gradients_are_read_before_any_are_added(make_method, make_net, make_task, reader_first):
    net, pull = make_net("finetune"), L2()
    pull.strength = 5.0  # far above the tolerance of the comparison
    reader = Reader()
    penalties = (reader, pull) if reader_first else (pull, reader)
    fit(net, make_task("dark"), make_method("finetune", *penalties), SETTINGS)
    assert reader.checked == 12


class Context(Method):
    def __init__(self):
        super().__init__()
        self.contexts = []

    def begin_task(self, context):
        self.contexts.append(context)


def test_the_context_describes_the_task(make_method, make_run, sequence):
    penalty = Context()
    run = make_run(make_method("finetune", penalty))
    run.run()
    assert [context.index for context in penalty.contexts] == [0, 1, 2]
    assert [context.images for context in penalty.contexts] == [48, 40, 42]
    assert all(context.net is run.net for context in penalty.contexts)
    inputs, labels = zip(*penalty.contexts[2].batches(20), strict=True)
    assert [len(x) for x in inputs] == [20, 20, 2]  # the rest included: importance is of all images
    # In a random order, see test_context.py.
    assert sorted(torch.cat(labels).tolist()) == sequence[2].train.labels.tolist()


class Twin(Method):
    """Trains a copy of the network before the task, as AFEC does."""

    def begin_task(self, context):
        self.twin = copy.deepcopy(context.net)
        context.train(self.twin)


def test_a_copy_can_be_trained_on_the_task_alone(make_method, make_net, make_task):
    """It gets what the task's plain training gives, and leaves the network and its training as they were."""
    alone, net, task = make_net("finetune"), make_net("finetune"), make_task("dark")
    fit(alone, task, "finetune", SETTINGS)
    penalty = Twin()
    fit(net, task, make_method("finetune", penalty), SETTINGS)
    assert penalty.twin.tasks["dark"].finished
    assert network_sha256(penalty.twin) == network_sha256(alone)
    assert network_sha256(net) == network_sha256(alone)


def test_nobody_is_told_of_a_copys_training(make_method, make_run, sequence, tmp_path):
    """Its epochs are no epochs of the run: neither in logs nor in what was trained."""
    run = make_run(make_method("finetune", Twin()), tasks=sequence[:2], listeners=(CsvLog(tmp_path),))
    run.run()
    assert run.state.images == 3 * (48 + 40)
    assert len((tmp_path / "epochs.csv").read_text().splitlines()) == 1 + 2 * 3


def test_the_copy_is_trained_without_what_methods_add(make_method, make_net, make_task):
    alone, net, task = make_net("finetune"), make_net("finetune"), make_task("dark")
    fit(alone, task, "finetune", SETTINGS)
    penalty, pull = Twin(), L2()
    fit(net, task, make_method("finetune", pull, penalty), SETTINGS)
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
        self.sums += torch.stack([net.head.linear.weight.grad.sum(), net.head.linear.bias.grad.abs().sum()])

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
def test_hooks_resume_with_the_run(make_method, make_run, tmp_path, base, epoch):
    class Killer(Listener):
        def task_started(self, task, name, first_epoch):
            if task == 1 and epoch is None:
                raise Killed

        def epoch_ended(self, end):
            if (end.task, end.epoch) == (1, epoch):
                raise Killed

    def run(folder, *listeners):
        (tmp_path / folder).mkdir(exist_ok=True)
        method = make_method(base, Counter())
        listeners = (CsvLog(tmp_path / folder), *listeners)
        return make_run(method, epochs=5, folder=tmp_path / folder, listeners=listeners)

    whole = run("whole")
    reference = whole.run()
    with pytest.raises(Killed):
        run("killed", Killer()).run()
    resumed = run("killed")
    assert resumed.resume()
    found = resumed.run()
    assert found.final_sha256 == reference.final_sha256
    (mine,), (expected,) = resumed.method.added, whole.method.added
    assert (mine.begun, mine.steps, mine.done) == (expected.begun, expected.steps, expected.done)
    assert (mine.begun, mine.steps) == (3, 5 * (6 + 5 + 5))
    assert [entry["index"] for entry in mine.done] == [0, 1, 2]
    assert torch.equal(mine.sums, expected.sums)


def test_hooks_meet_frozen_groups_without_gradients(make_method, make_net, make_task):
    seen = []

    class Look(Method):
        def read_gradients(self, net):
            seen.append((net.backbone[0].weight.grad is None, net.backbone[1].weight.grad is None))

    settings = TrainSettings(epochs=5, batch_size=48, device="cpu")
    fit(make_net("confit"), make_task("dark"), make_method("confit", Look()), settings)
    assert seen == [(True, True), (True, False), (False, False), (False, False), (False, False)]


def test_a_hook_on_confit_has_its_stages_and_its_norms(make_method, make_net, make_task):
    pulled, plain, task, penalty = make_net("confit"), make_net("confit"), make_task("dark"), L2()
    settings = TrainSettings(epochs=5, batch_size=8, lr=0.05, device="cpu")
    fit(pulled, task, make_method("confit", penalty), settings)
    fit(plain, task, "confit", settings)
    far = [
        sum((p - penalty.start[name]).norm().item() for name, p in net.shared_parameters().items())
        for net in (pulled, plain)
    ]
    assert 0 < far[0] < far[1]
    assert set(penalty.start) == {"0.weight", "3.weight", "6.weight", "6.bias"}  # batch norms are each task's own


# ---- learning rates of groups ----------------------------------------------------------------------------------------


class Slow(Method):
    lr_factors: ClassVar = {"weights": 0.1}


def moved(net, start):
    return {name: p.detach() - start[name] for name, p in net.backbone.named_parameters()}


@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_a_group_moves_by_its_share_of_the_step(make_net, make_task, clip_norm):
    """One step of SGD is -lr * factor * gradient."""
    start = {name: p.detach().clone() for name, p in make_net("finetune").backbone.named_parameters()}
    settings = TrainSettings(epochs=1, batch_size=48, lr=0.05, clip_norm=clip_norm, device="cpu")
    moves, heads = [], []
    for method in (Method(), Slow()):
        net = make_net("finetune")
        fit(net, make_task("dark"), method, settings)
        moves.append(moved(net, start))
        heads.append(net.head.linear.weight.detach().clone())
    assert torch.equal(*heads)
    weights = {"0.weight", "3.weight", "6.weight", "6.bias"}
    for name, whole in moves[0].items():
        expected = whole * (0.1 if name in weights else 1)
        torch.testing.assert_close(moves[1][name], expected, rtol=1e-3, atol=1e-8)
    assert all(moves[0][name].abs().max() > 1e-5 for name in weights - {"6.bias"})


def test_shares_follow_the_schedule_of_the_learning_rate(make_fit, make_net, make_task):
    seen = []

    class Look(Slow):
        def after_step(self, net):
            seen.append([group["lr"] for group in fitting.optimizer.param_groups])

    settings = TrainSettings(epochs=2, batch_size=48, lr=0.05, lr_schedule="cosine", device="cpu")
    fitting = make_fit(make_net("finetune"), make_task("dark"), Look(), settings)
    fitting.fit()
    assert seen == [pytest.approx([0.05, 0.005]), pytest.approx([0.025, 0.0025])]


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "lr": 0.01}, {"optimizer": "adam", "lr": 0.003}])
def test_shares_resume_with_the_run(make_run, tmp_path, options):
    class Killer(Listener):
        def epoch_ended(self, end):
            if (end.task, end.epoch) == (1, 1):
                raise Killed

    whole = make_run(Slow(), **options).run()
    assert whole.final_sha256 != make_run(Method(), **options).run().final_sha256
    with pytest.raises(Killed):
        make_run(Slow(), folder=tmp_path, listeners=(Killer(),), **options).run()
    resumed = make_run(Slow(), folder=tmp_path, **options)
    assert resumed.resume()
    assert resumed.run().final_sha256 == whole.final_sha256
