"""Which parts of the network move in which stage, and with what optimizer and learning rate."""

import itertools
import math

import pytest
import torch

from confitune.engine import Listener, TrainSettings, fit


class Watch(Listener):
    """A copy of everything that can move, before the first epoch and after each."""

    def __init__(self, net):
        self.net, self.stages, self.copies, self.lrs, self.notes = net, [], [], [], []

    def task_parts(self):
        moments = [b for name, b in self.net.backbone.named_buffers() if "running" in name]
        parts = {
            "head": self.net.head.linear.parameters(),
            "norms": self.net.groups()["norms"],
            "weights": self.net.groups()["weights"],
            "moments": moments,
        }
        return {part: [tensor.detach().clone() for tensor in tensors] for part, tensors in parts.items()}

    def stage_started(self, stage):
        if not self.copies:
            self.copies.append(self.task_parts())

    def epoch_ended(self, end):
        self.stages.append(end.stage)
        self.lrs.append(end.lr)
        self.copies.append(self.task_parts())

    def note(self, message):
        self.notes.append(message)

    def moved(self):
        """For each epoch: the parts of which every tensor moved, and those of which any did."""
        all_of, any_of = [], []
        for before, after in itertools.pairwise(self.copies):
            same = {part: list(map(torch.equal, before[part], after[part])) for part in before}
            all_of.append({part for part, equal in same.items() if not any(equal)})
            any_of.append({part for part, equal in same.items() if not all(equal)})
        return all_of, any_of


def watched(net, task, method, **settings):
    watch = Watch(net)
    settings = {"epochs": 10, "batch_size": 8, "lr": 0.05, "device": "cpu", **settings}
    fit(net, task, method, TrainSettings(**settings), watch)
    return watch


OPTIMIZERS = {
    "sgd": {},
    "momentum and decay": {"momentum": 0.9, "weight_decay": 0.01, "lr": 0.01},
    "adam": {"optimizer": "adam", "weight_decay": 0.01, "lr": 0.003},
    "adamw": {"optimizer": "adamw", "weight_decay": 0.01, "lr": 0.003},
}


@pytest.mark.parametrize("options", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("method", ["confit", "hierarchical"])
def test_hierarchical_stages_move_what_they_say_bit_for_bit(make_net, make_task, method, options):
    watch = watched(make_net(method), make_task("dark"), method, **options)
    assert watch.stages == ["head"] * 2 + ["head+norms"] * 3 + ["all"] * 5
    all_of, any_of = watch.moved()
    assert all_of == any_of  # a part moves whole or not at all
    head, norm, all_ = {"head", "moments"}, {"head", "norms", "moments"}, {"head", "norms", "weights", "moments"}
    assert all_of == [head] * 2 + [norm] * 3 + [all_] * 5


def test_frozen_parameters_get_no_gradient_and_all_are_free_afterwards(make_net, make_task):
    net = make_net("confit")
    wanted = []

    class Look(Watch):
        def step_done(self, step, steps):
            wanted.append([p.requires_grad for p in (*net.groups()["weights"], *net.groups()["norms"])])
            assert [p.grad is not None for p in (*net.groups()["weights"], *net.groups()["norms"])] == wanted[-1]

    fit(net, make_task("dark"), "confit", TrainSettings(epochs=5, batch_size=24, device="cpu"), Look(net))
    convs, norms = len(net.groups()["weights"]), len(net.groups()["norms"])
    head, norm, all_ = [False] * (convs + norms), [False] * convs + [True] * norms, [True] * (convs + norms)
    assert wanted == [head] * 2 + [norm] * 2 + [all_] * 6  # 2 steps an epoch
    assert all(p.requires_grad for p in net.parameters())
    assert all(p.grad is None for p in net.parameters())


def test_finetune_moves_everything_from_the_first_epoch(make_net, make_task):
    watch = watched(make_net("finetune"), make_task("dark"), "finetune", epochs=3)
    assert watch.stages == ["all"] * 3
    assert watch.moved()[0] == [{"head", "norms", "weights", "moments"}] * 3


def test_bn_only_never_moves_a_convolution(make_net, make_task):
    watch = watched(make_net("bn-only"), make_task("dark"), "bn-only")
    assert watch.stages == ["head"] * 2 + ["head+norms"] * 8
    head, norm = {"head", "moments"}, {"head", "norms", "moments"}
    assert watch.moved() == ([head] * 2 + [norm] * 8,) * 2


def test_linear_probe_moves_the_head_alone_and_never_batch_norm(make_net, make_task):
    net = make_net("linear-probe")
    before = {key: value.clone() for key, value in net.backbone.state_dict().items()}
    modes = set()

    class Look(Watch):
        def step_done(self, step, steps):
            modes.add((net.training, *(net.backbone[place].training for place in (1, 4, 7))))

    fit(net, make_task("dark"), "linear-probe", TrainSettings(epochs=3, device="cpu"), Look(net))
    after = net.backbone.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)  # num_batches_tracked too
    assert modes == {(True, False, False, False)}


class Note(Listener):
    def __init__(self):
        self.notes = []

    def note(self, message):
        self.notes.append(message)


def notes_of(make_run, method, epochs):
    note = Note()
    make_run(method, epochs=epochs, listeners=(note,)).run()
    return note.notes


@pytest.mark.parametrize("epochs", [1, 2, 3, 4])
def test_too_few_epochs_for_the_head_alone_are_noted(make_run, epochs):
    (note,) = notes_of(make_run, "confit", epochs)
    assert note == f"with {epochs} epochs no stage is left for the head alone; use more"


def test_the_note_follows_the_schedule_not_the_name(make_run):
    assert len(notes_of(make_run, "si+confit", 4)) == 1
    assert len(notes_of(make_run, "hierarchical", 4)) == 1
    assert notes_of(make_run, "confit", 5) == []
    assert notes_of(make_run, "finetune", 1) == []


def test_one_optimizer_a_task_with_the_papers_settings(make_run, monkeypatch):
    made = []
    stock = torch.optim.SGD

    def spy(*args, **kwargs):
        made.append(stock(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(torch.optim, "SGD", spy)
    make_run("confit", epochs=5, lr=TrainSettings().lr).run()
    assert len(made) == 3
    for optimizer in made:
        (group,) = optimizer.param_groups
        assert (group["lr"], group["momentum"], group["weight_decay"], group["nesterov"]) == (0.01, 0, 0, False)
    assert len({id(optimizer) for optimizer in made}) == 3


def test_the_optimizer_holds_only_what_is_ever_trained(make_run, monkeypatch):
    counts = {}
    stock = torch.optim.SGD

    def spy(parameters, *args, **kwargs):
        counts[method] = sum(p.numel() for group in parameters for p in group["params"])
        return stock(parameters, *args, **kwargs)

    monkeypatch.setattr(torch.optim, "SGD", spy)
    for method in ("linear-probe", "bn-only", "finetune"):
        make_run(method, epochs=1).run()
    head, norm = 16 * 3 + 3, 2 * (8 + 12 + 16)
    conv = 9 * (3 * 8 + 8 * 12 + 12 * 16) + 16
    assert counts == {"linear-probe": head, "bn-only": head + norm, "finetune": head + norm + conv}


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ("constant", [1] * 6),
        ("cosine", [(1 + math.cos(math.pi * epoch / 6)) / 2 for epoch in range(6)]),
        ("step", [1, 1, 0.1, 0.1, 0.01, 0.001]),
    ],
)
def test_learning_rates_over_a_task(make_net, make_task, schedule, factors):
    watch = watched(make_net("linear-probe"), make_task("dark"), "linear-probe", epochs=6, lr_schedule=schedule)
    assert watch.lrs == pytest.approx([0.05 * factor for factor in factors], rel=1e-12)
