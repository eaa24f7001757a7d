"""True moments against a forward pass written out, against batch norm in training mode, and in chunks against whole."""

import copy
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from confitune.analysis.transductive import transductive_accuracy
from confitune.engine import evaluate
from confitune.nn import ContinualNet, Head

METHODS = ["confit", "finetune", "task-bn"]
SOURCES = ("running", "true")


class Logits:
    """What the heads give, in the order in which tasks and combinations are tested; copies of a network share it."""

    def __init__(self, net):
        self.seen = []
        for linear in net.head.linears.values():
            linear.register_forward_hook(lambda module, args, output: self.seen.append(output.detach().clone()))


def accuracy_of(result, mean, variance):
    return next(found for found in result["accuracies"] if (found["mean"], found["variance"]) == (mean, variance))


@pytest.fixture
def trained(make_run):
    def train(method):
        net = make_run(method).net
        make_run(method, net=net).run()
        return net

    return train


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [64, 7])
def test_every_combination_layer_by_layer(trained, sequence, settings, by_hand, method, size):
    net = trained(method)
    logits = Logits(net)
    result = transductive_accuracy(net, sequence, settings.model_copy(update={"eval_batch_size": size}))
    images = [len(task.test) for task in sequence]
    seen = iter(logits.seen)
    for mean, variance in product(SOURCES, SOURCES):
        found = accuracy_of(result, mean, variance)
        for index, task in enumerate(sequence):
            net.eval()
            net.prepare(task.name)

            def moments(norm, x, mean=mean, variance=variance):
                true = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
                running = norm.running_mean, norm.running_var
                return (true if mean == "true" else running)[0], (true if variance == "true" else running)[1]

            with torch.no_grad():
                _, expected = by_hand(net, task, moments)
            got = torch.cat([next(seen) for _ in range(-(-images[index] // size))])
            np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4)
            right = (expected.argmax(1) == task.test.labels).double().mean().item()
            assert found["per_task"][index] == pytest.approx(100 * right)
        assert found["acc"] == pytest.approx(np.mean(found["per_task"]))
    assert next(seen, None) is None
    assert result["tasks"] == ["dark", "bright", "minus"]


@pytest.mark.parametrize("method", METHODS)
def test_running_moments_are_what_evaluation_uses(trained, sequence, settings, method):
    net = trained(method)
    expected = [evaluate(net, task, settings) for task in sequence]
    result = transductive_accuracy(net, sequence, settings)
    assert accuracy_of(result, "running", "running")["per_task"] == expected


def in_training_mode(net, task):
    """Logits of the whole test set with batch norms in training mode, all else in evaluation mode."""
    net = copy.deepcopy(net).eval()
    net.prepare(task.name)
    for module in net.backbone.modules():
        if isinstance(module, _BatchNorm):
            module.training = True
    with torch.no_grad():
        return net.head(net.backbone(task.preprocess(task.test.pixels[task.test.rows])))


@pytest.mark.parametrize("size", [64, 7])
@pytest.mark.parametrize("method", ["confit", "ccll"])
def test_both_true_is_training_mode_with_the_whole_test_set(trained, sequence, settings, method, size):
    net = trained(method)
    expected = [in_training_mode(net, task) for task in sequence]
    logits = Logits(net)
    transductive_accuracy(net, sequence, settings.model_copy(update={"eval_batch_size": size}))
    images = sum(len(task.test) for task in sequence)
    np.testing.assert_allclose(
        np.concatenate([e.flatten() for e in expected]),
        np.concatenate([s.flatten() for s in logits.seen])[-sum(e.numel() for e in expected) :],
        rtol=1e-3,
        atol=1e-4,
    )
    assert sum(len(s) for s in logits.seen) == 4 * images


def test_a_batch_norm_that_is_called_twice(sequence, settings):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
            self.norm = nn.BatchNorm2d(4)

        def forward(self, x):
            x = self.norm(self.first(x)).relu()
            return self.norm(self.second(x)).relu().mean((2, 3))

    torch.manual_seed(0)
    net = ContinualNet(Twice(), [Head()])
    net.add_task("dark", 3, torch.Generator().manual_seed(0))
    expected = in_training_mode(net, sequence[0])
    for size in (64, 7):
        logits = Logits(net)
        transductive_accuracy(net, sequence[:1], settings.model_copy(update={"eval_batch_size": size}))
        np.testing.assert_allclose(torch.cat(logits.seen)[-len(expected) :], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("method", [*METHODS, "ccll"])
@pytest.mark.parametrize("size", [64, 7])
def test_the_network_is_as_it_was_to_the_bit(trained, sequence, settings, same_state, state_of, method, size):
    net = trained(method).train()
    net.set_task("bright")
    before = state_of(net)
    transductive_accuracy(net, sequence, settings.model_copy(update={"eval_batch_size": size}))
    assert same_state(before, state_of(net))
