"""MAS: the sensitivity of the outputs against its closed form on a linear model."""

import numpy as np
import pytest
import torch

from confitune.methods import create_method
from confitune.methods.mas import MAS


def by_logits(z):
    """Gradient of an image's |z|."""
    return z / np.linalg.norm(z, axis=1, keepdims=True)


def sensitivity(model, x):
    return {
        name: sum(20 * np.abs(g[i : i + 20].mean(0)) for i in range(0, len(x), 20)) / len(x)
        for name, g in model.shared_gradients(x, by_logits(model.logits(x))).items()
    }


def assert_importance(mas, expected):
    assert list(mas.omega) == list(expected)
    for name, tensor in mas.omega.items():
        np.testing.assert_allclose(tensor.numpy(), expected[name], rtol=2e-5, atol=1e-8)


def measured(net, context, **options):
    mas = MAS(**options)
    mas.attach(net, context.index)
    mas.end_task(context)
    return mas


@pytest.mark.parametrize("images", [47, 20, 7])
def test_importances_are_the_mean_absolute_gradient_of_the_norm_of_the_logits(
    linear_model, float_task, context_of, image_colours, images
):
    model = linear_model()
    context = context_of(model.net, float_task(images=images))
    assert_importance(measured(model.net, context), sensitivity(model, image_colours(context)[0]))
    (mas,) = create_method("mas").hooks
    assert mas.options.model_dump() == {"strength": 30.0, "mode": "eval"}


def test_importances_are_summed_over_tasks_each_with_its_own_head(linear_model, float_task, context_of, image_colours):
    model, mas, total = linear_model(), MAS(), {"0.weight": 0.0, "0.bias": 0.0}
    for index, (images, classes) in enumerate([(47, 3), (25, 2), (33, 4)]):
        task = float_task(f"task{index}", images, classes)
        context = context_of(model.net, task)
        with torch.no_grad():
            for parameter in model.net.shared_parameters().values():
                parameter += 0.1 * (index + 1)
        mas.attach(model.net, index)
        mas.end_task(context)
        total = {name: total[name] + new for name, new in sensitivity(model, image_colours(context)[0]).items()}
        assert_importance(mas, total)
        for name, parameter in model.net.shared_parameters().items():
            assert torch.equal(mas.anchor[name], parameter)


def test_the_pull_is_lambda_times_omega_times_distance(linear_model, float_task, context_of):
    model = linear_model()
    mas = measured(model.net, context_of(model.net, float_task()), strength=12)
    mas.attach(model.net, 1)
    for parameter in model.net.shared_parameters().values():
        with torch.no_grad():
            parameter += 0.5
        parameter.grad = torch.full_like(parameter, 0.25)
    mas.add_gradients(model.net)
    for name, parameter in model.net.shared_parameters().items():
        expected = 0.25 + 12 * mas.omega[name] * (parameter.detach() - mas.anchor[name])
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-9, atol=1e-12)


def test_labels_do_not_matter(linear_model, float_task, context_of):
    found = []
    for label in (0, 1):
        model, task = linear_model(), float_task()
        task.train.labels.fill_(label)
        found.append(measured(model.net, context_of(model.net, task)).omega["0.weight"])
    assert torch.equal(*found)


def test_training_mode_measures_a_copy(make_net, tasks, context_of, snapshot, assert_same):
    net = make_net("finetune")
    context = context_of(net, tasks[0])
    before = snapshot(net)
    found = measured(net, context, mode="train")
    assert_same(snapshot(net), before)
    other = measured(net, context)
    assert (found.omega["0.weight"] - other.omega["0.weight"]).abs().max() > 1e-4
    expected = {name: torch.zeros_like(p) for name, p in net.shared_parameters().items()}
    for x, _ in context.batches(20):  # moves the network's own statistics: nothing is measured after it
        norm = net.train()(x).norm(dim=1).mean()
        for name, gradient in zip(expected, torch.autograd.grad(norm, list(net.backbone.parameters())), strict=True):
            expected[name] += 20 * gradient.abs() / context.images
    for name, tensor in found.omega.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-7)
