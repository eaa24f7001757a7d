"""Averaged weights are the mean over a task's last steps, and nothing else changes on the way."""

import copy

import pytest
import torch

from confitune.methods import Penalty, create_method
from confitune.methods.averaging import Averaging


class Path(Penalty):
    """Keeps every step's weights."""

    def __init__(self):
        super().__init__()
        self.weights, self.epochs, self.epoch = [], [], 0

    def begin_epoch(self, context, epoch):
        self.epoch = epoch

    def after_step(self, net):
        self.weights.append({name: p.detach().clone() for name, p in net.named_parameters()})
        self.epochs.append(self.epoch)


@pytest.mark.parametrize(("share", "last"), [(0.3, 1), (0.4, 2), (0.01, 1), (1.0, 5)])
def test_the_mean_over_the_last_epochs_steps(make_run, tasks, share, last):
    path = Path()
    method = create_method("confit+averaging", {"averaging": {"share": share}})
    method = copy.copy(method)
    object.__setattr__(method, "penalties", (*method.penalties, path))
    run = make_run(method, epochs=5, tasks=tasks[:1])
    run.run()
    chosen = [w for w, epoch in zip(path.weights, path.epochs, strict=True) if epoch >= 5 - last]
    assert 0 < len(chosen) < len(path.weights) or share == 1
    for name, parameter in run.net.named_parameters():
        torch.testing.assert_close(parameter, torch.stack([w[name] for w in chosen]).mean(0), rtol=1e-5, atol=1e-6)


def test_training_itself_is_left_alone(make_run, tasks):
    paths = []
    for name in ("confit", "confit+averaging"):
        path = Path()
        method = copy.copy(create_method(name))
        object.__setattr__(method, "penalties", (*method.penalties, path))
        make_run(method, epochs=5, tasks=tasks[:1]).run()
        paths.append(path.weights)
    for one, other in zip(*paths, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_every_task_is_averaged_for_itself(make_run, tasks):
    """Two tasks give what the second alone gives, started where the first ended."""
    both = make_run("finetune+averaging", tasks=tasks[:2])
    both.run()
    sums = both.method.penalties[0]
    assert isinstance(sums, Averaging)
    per_epoch = len(tasks[1].train) // 8
    assert sums.state_dict()["steps"] == per_epoch  # of one epoch of the last task


def test_nothing_is_kept_between_tasks():
    assert create_method("confit+averaging").penalties[0].storage() == 0
