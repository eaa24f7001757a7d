"""EWC: the Fisher information against its closed form on a linear model, and how tasks are merged."""

import copy

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from confitune.methods.ewc import EWC

CLOSE = {"rtol": 2e-5, "atol": 1e-9}  # the loss is taken in float32


def measured(net, context, **options):
    """The importance that a first task leaves."""
    ewc = EWC(**options)
    ewc.attach(net, context.index)
    ewc.end_task(context)
    return ewc


def assert_importance(ewc, expected, **tolerance):
    assert list(ewc.fisher) == list(expected)
    for name, tensor in ewc.fisher.items():
        np.testing.assert_allclose(tensor.numpy(), expected[name], **(tolerance or CLOSE))


def one_hot(labels, classes):
    return np.eye(classes)[np.asarray(labels)]


@pytest.fixture
def case(linear_model, float_task, context_of, image_colours):
    """A linear model, the context of its task, and the mean colours and labels of the images as they come."""

    def make(images=47, classes=3, index=-1, name="colours"):
        model = linear_model()
        context = context_of(model.net, float_task(name, images, classes), index)
        return model, context, *image_colours(context)

    return make


def batch_fisher(model, x, labels, softmax):
    """(gradient of the mean loss of 20)^2 * 20, summed, divided by all images; the last batch is smaller."""
    gradients = model.shared_gradients(x, softmax(model.logits(x)) - one_hot(labels, len(model.arrays()[3])))
    return {
        name: sum(20 * g[i : i + 20].mean(0) ** 2 for i in range(0, len(x), 20)) / len(x)
        for name, g in gradients.items()
    }


@pytest.mark.parametrize("images", [47, 40, 13])
def test_the_batch_fisher_is_the_squared_mean_gradient_of_twenty_times_twenty(case, numpy_softmax, images):
    model, context, x, labels = case(images)
    assert_importance(measured(model.net, context), batch_fisher(model, x, labels, numpy_softmax))


def test_tasks_are_averaged(linear_model, float_task, context_of, image_colours, numpy_softmax):
    """(F_new + t * F_old) / (t + 1) with t from 0 is the mean over all tasks."""
    model, ewc, each = linear_model(), EWC(), []
    for index, (images, classes) in enumerate([(47, 3), (25, 2), (33, 4)]):
        task = float_task(f"task{index}", images, classes)
        context = context_of(model.net, task)
        assert context.index == index
        with torch.no_grad():
            for parameter in model.net.shared_parameters().values():
                parameter += 0.1 * (index + 1)
        ewc.attach(model.net, index)
        ewc.end_task(context)
        each.append(batch_fisher(model, *image_colours(context), numpy_softmax))
        assert_importance(ewc, {name: np.mean([f[name] for f in each], 0) for name in each[0]})
        for name, parameter in model.net.shared_parameters().items():
            assert torch.equal(ewc.anchor[name], parameter)


def test_the_pull_is_lambda_times_fisher_times_distance(case):
    model, context, _, _ = case()
    ewc = measured(model.net, context, strength=300)
    ewc.attach(model.net, 1)
    moved = {}
    for name, parameter in model.net.shared_parameters().items():
        moved[name] = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1), dtype=parameter.dtype)
        with torch.no_grad():
            parameter += moved[name]
        parameter.grad = torch.full_like(parameter, 0.25)
    ewc.add_gradients(model.net)
    for name, parameter in model.net.shared_parameters().items():
        expected = 0.25 + 300 * ewc.fisher[name] * moved[name]
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-9, atol=1e-12)


def test_before_the_first_task_is_learned_there_is_no_pull(case):
    model, _, _, _ = case()
    ewc = EWC()
    ewc.attach(model.net, 0)
    for tensor in ewc.fisher.values():
        tensor.fill_(1)  # even with what another run left
    for parameter in model.net.shared_parameters().values():
        parameter.grad = torch.full_like(parameter, 0.25)
    ewc.add_gradients(model.net)
    assert all((parameter.grad == 0.25).all() for parameter in model.net.shared_parameters().values())


def training_mode_fisher(net, context):
    """On a copy in training mode, batch norm moving as it does."""
    twin = copy.deepcopy(net).train()
    parameters = twin.shared_parameters()
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for x, labels in context.batches(20):
        loss = cross_entropy(twin.head(twin.backbone(x)), labels)
        for name, gradient in zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True):
            total[name] += gradient**2 * 20 / context.images
    return total


@pytest.mark.parametrize("base", ["finetune", "finetune-xconv"])
def test_training_mode_measures_a_copy(make_net, tasks, context_of, snapshot, assert_same, base):
    net = make_net(base)
    context = context_of(net, tasks[0])
    expected, before = training_mode_fisher(net, context), snapshot(net)
    found = measured(net, context, mode="train")
    assert_same(snapshot(net), before)
    evaluated = measured(net, context)
    for name, tensor in found.fisher.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-9)
    assert (found.fisher["0.weight"] - evaluated.fisher["0.weight"]).abs().max() > 1e-4


def test_batch_norm_is_in_evaluation_mode_while_measuring(make_net, tasks, context_of):
    net, seen = make_net("finetune"), []
    context = context_of(net, tasks[0])
    net.backbone[1].register_forward_hook(lambda module, args, output: seen.append(module.training))
    net.train()
    measured(net, context)
    assert seen
    assert not any(seen)


def test_a_whole_run_adds_the_term_to_the_loss(
    linear_model, float_task, make_method, make_fit, record_steps, train_by_hand, numpy_softmax, image_colours
):
    """Two tasks: training with the term in the loss, by autograd and a Fisher by hand, ends at the same weights."""
    model, twin, steps = linear_model(), linear_model(), record_steps()
    method = make_method("ewc", {"ewc": {"strength": 20}}, [steps])

    def recorded(task):
        """A task that the model learns, and the head it starts from."""
        steps.inputs.clear()
        steps.labels.clear()
        fitting = make_fit(model.net, task, method, epochs=2, lr=0.1)
        head = copy.deepcopy(model.net.head.linear)
        fitting.fit()
        return fitting, head

    context, head = recorded(float_task("first"))
    train_by_hand(torch.nn.Sequential(twin.net.backbone, head), steps, 0.1, lambda backbone, logits: 0.0)
    twin.net.add_task("first", 3)
    twin.net.head.linear.load_state_dict(head.state_dict())
    fisher = batch_fisher(twin, *image_colours(context), numpy_softmax)
    start = {name: p.detach().clone() for name, p in twin.net.backbone.named_parameters()}

    def pull(backbone, logits):
        terms = [
            (torch.from_numpy(fisher[name]) * (p - start[name]) ** 2).sum() for name, p in backbone.named_parameters()
        ]
        return 20 / 2 * sum(terms)

    _, head = recorded(float_task("second", 30, 2))
    train_by_hand(torch.nn.Sequential(twin.net.backbone, head), steps, 0.1, pull)
    for mine, other in zip(model.net.backbone.parameters(), twin.net.backbone.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)
    moved = [(p - start[name]).abs().max() for name, p in model.net.backbone.named_parameters()]
    assert min(moved) > 1e-3
