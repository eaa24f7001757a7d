"""Measuring importance is looking on: nothing of the network changes, whatever is measured and however."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from confitune.methods import Method, create_method

CASES = {
    "ewc": ("ewc", {}),
    "ewc train": ("ewc", {"mode": "train"}),
    "mas": ("mas", {}),
    "mas train": ("mas", {"mode": "train"}),
    "afec": ("afec", {}),
    "afec train": ("afec", {"mode": "train"}),
    "si": ("si", {}),
    "rwalk": ("rwalk", {}),
}


class Onlooker(Method):
    """Compares the network before and after the hooks of another method that measures it."""

    def __init__(self, inner, snapshot, same):
        super().__init__()
        self.inner, self.snapshot, self.same, self.looks = inner, snapshot, same, 0

    def check(self, hook, context, *args):
        """Once in training mode with gradients there, once with some frozen, once in evaluation mode."""
        net = context.net
        for prepared in (self.with_gradients, self.with_frozen, net.eval):
            prepared(*([net] if prepared != net.eval else []))
            before = self.snapshot(net)
            hook(context, *args)
            self.same(self.snapshot(net), before)
            self.looks += 1
            self.restore(net)
        net.train()

    def with_gradients(self, net):
        net.train()
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)

    def with_frozen(self, net):
        net.train()
        for parameter in net.head.linear.parameters():
            parameter.requires_grad_(False)

    def restore(self, net):
        for parameter in net.parameters():
            parameter.requires_grad_(True)
            parameter.grad = None

    def attach(self, net, index):
        self.inner.attach(net, index)

    def begin_task(self, context):
        self.check(self.inner.begin_task, context)

    def end_task(self, context):
        self.check(self.inner.end_task, context)


def importance(method):
    """What was measured."""
    return {"ewc": "fisher", "mas": "omega", "afec": "weight"}.get(method.name, "")


@pytest.mark.parametrize("base", ["finetune", "finetune-xconv", "task-bn"])
@pytest.mark.parametrize(("name", "options"), CASES.values(), ids=CASES)
def test_no_pass_moves_anything_of_the_network(
    make_method, make_net, make_fit, tasks, snapshot, assert_same, name, options, base
):
    inner = create_method(name, {name: options})
    onlooker = Onlooker(inner, snapshot, assert_same)
    method = make_method(base, hooks=[onlooker])
    net = make_net(base)
    for task in tasks[:2]:
        make_fit(net, task, method, epochs=1).fit()
    assert onlooker.looks == 12
    if field := importance(inner):
        assert any(tensor.abs().max() > 0 for tensor in getattr(inner, field).values())


@pytest.mark.parametrize("name", ["ewc", "mas"])
def test_on_confit_a_pass_leaves_input_statistics_alone(make_run, name):
    """Measuring with a strength of nothing: the stored state of every task is that of ConFiT alone."""
    for statistics in ("running", "pass"):
        options = {"confit": {"statistics": statistics}, name: {"strength": 0}}
        alone = make_run("confit", options, epochs=5).run()
        found = make_run(f"confit+{name}", options, epochs=5).run()
        assert found.final_sha256 == alone.final_sha256


def measured(name, net, context, **options):
    method = create_method(name, {name: options})
    method.attach(net, context.index)
    method.end_task(context)
    return getattr(method, importance(method))


@pytest.mark.parametrize("name", ["ewc", "mas"])
def test_dropout_is_off_while_measuring(make_net, tasks, context_of, name):
    found = []
    for dropout in (0.0, 0.9):
        net = make_net("finetune", dropout=dropout)
        context = context_of(net, tasks[0])
        found.append(measured(name, net, context))
    for parameter, tensor in found[0].items():
        assert torch.equal(found[1][parameter], tensor)


@pytest.mark.parametrize("name", ["ewc", "mas"])
def test_batches_of_a_batch_norm_network_one_by_one(make_net, tasks, context_of, name):
    """Against autograd on a network that is not linear."""
    net, task = make_net("finetune"), tasks[0]
    context = context_of(net, task)
    found = measured(name, net, context)
    twin = copy.deepcopy(net).eval()
    parameters = twin.shared_parameters()
    total = {parameter: torch.zeros_like(p) for parameter, p in parameters.items()}
    for x, labels in context.batches(20):
        logits = twin(x)
        value = logits.norm(dim=1).mean() if name == "mas" else cross_entropy(logits, labels)
        for parameter, gradient in zip(total, torch.autograd.grad(value, list(parameters.values())), strict=True):
            total[parameter] += 20 * gradient.abs() ** (1 if name == "mas" else 2) / context.images
    for parameter, tensor in found.items():
        torch.testing.assert_close(tensor, total[parameter], rtol=1e-3, atol=1e-6)
        assert tensor.abs().max() > 1e-6 or parameter == "3.bias"


@pytest.mark.parametrize("name", ["ewc", "mas"])
def test_training_mode_takes_a_last_batch_of_one_image(make_task, context_of, name):
    """21 images in batches of 20."""
    layers = nn.Conv2d(3, 4, 3, 2), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(4), nn.Flatten()
    net = Method().network(nn.Sequential(*layers))
    context = context_of(net, make_task("one", (11, 10)))
    assert measured(name, net, context, mode="train")["0.weight"].max() > 0
