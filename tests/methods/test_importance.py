"""Measuring importance is looking on: nothing of the network changes, whatever is measured and however."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

from confitune.engine import Listener, TaskFit
from confitune.methods import Penalty, create_method, shared_parameters
from confitune.nn import ContinualNet

CASES = {
    **{f"ewc {fisher}": ("ewc", {"fisher": fisher}) for fisher in ("batch", "exact", "sampled", "empirical")},
    "ewc batch train": ("ewc", {"mode": "train"}),
    **{
        f"mas {output} {gradients}": ("mas", {"output": output, "gradients": gradients})
        for output in ("norm", "squared")
        for gradients in ("batch", "sample")
    },
    "mas train": ("mas", {"mode": "train"}),
    "afec": ("afec", {}),
    "afec exact": ("afec", {"fisher": "exact"}),
    "afec train": ("afec", {"mode": "train"}),
    "si": ("si", {}),
    "rwalk": ("rwalk", {}),
}


class Onlooker(Penalty):
    """Compares the network before and after the hooks of another penalty that measures it."""

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
        for parameter in net.head.parameters():
            parameter.requires_grad_(False)

    def restore(self, net):
        for parameter in net.parameters():
            parameter.requires_grad_(True)
            parameter.grad = None

    def attach(self, net):
        self.inner.attach(net)

    def begin_task(self, context):
        self.check(self.inner.begin_task, context)

    def end_task(self, context):
        self.check(self.inner.end_task, context)


@pytest.mark.parametrize("norm", ["shared", "xconv", "task"])
@pytest.mark.parametrize(("name", "options"), CASES.values(), ids=CASES)
def test_no_pass_moves_anything_of_the_network(
    make_net, tasks, make_settings, snapshot, assert_same, name, options, norm
):
    base = {"shared": "finetune", "xconv": "finetune-xconv", "task": "task-bn"}[norm]
    method = create_method(f"{base}+{name}", {name: options})
    (inner,) = method.penalties
    onlooker = Onlooker(inner, snapshot, assert_same)
    method = dataclasses.replace(method, penalties=(onlooker,))
    net = make_net(norm)
    for task in tasks[:2]:
        TaskFit(net, task, method, make_settings(epochs=1), Listener()).run()
    assert onlooker.looks == 12
    assert any(tensor.abs().max() > 0 for tensor in inner.weight.values()) or name in ("si", "rwalk")


@pytest.mark.parametrize("name", ["ewc", "mas"])
def test_on_confit_a_pass_leaves_input_statistics_alone(make_run, name):
    """Measuring with a strength of nothing: the stored state of every task is that of ConFiT alone."""
    for statistics in ("running", "pass"):
        of_net = {"statistics": statistics}
        alone = make_run("confit", epochs=5, of_net=of_net).run()
        found = make_run(f"confit+{name}", {name: {"strength": 0}}, epochs=5, of_net=of_net).run()
        assert found.final_sha256 == alone.final_sha256


ESTIMATORS = {
    "batch": ("ewc", {}),
    "exact": ("ewc", {"fisher": "exact"}),
    "sampled": ("ewc", {"fisher": "sampled"}),
    "empirical": ("ewc", {"fisher": "empirical"}),
    "mas": ("mas", {}),
    "mas sample": ("mas", {"gradients": "sample"}),
}


@pytest.mark.parametrize(("name", "options"), ESTIMATORS.values(), ids=ESTIMATORS)
def test_dropout_is_off_while_measuring(make_net, tasks, context_of, name, options):
    found = []
    for dropout in (0.0, 0.9):
        net = make_net("shared", dropout=dropout)
        context = context_of(net, tasks[0])
        (penalty,) = create_method(name, {name: options}).penalties
        penalty.attach(net)
        penalty.end_task(context)
        found.append(penalty.weight)
    for parameter, tensor in found[0].items():
        assert torch.equal(found[1][parameter], tensor)


@pytest.mark.parametrize(("name", "options"), ESTIMATORS.values(), ids=ESTIMATORS)
def test_images_of_one_batch_norm_network_one_by_one(make_net, tasks, context_of, name, options):
    """Against autograd, image by image or batch by batch, on a network that is not linear."""
    net, task = make_net("shared"), tasks[0]
    context = context_of(net, task)
    (penalty,) = create_method(name, {name: options}).penalties
    penalty.attach(net)
    penalty.end_task(context)
    twin = copy.deepcopy(net).eval()
    parameters = shared_parameters(twin)
    total = {parameter: torch.zeros_like(p) for parameter, p in parameters.items()}
    chance = torch.Generator().manual_seed(context.seed)

    def add(value, weight, power):
        gradients = torch.autograd.grad(value, list(parameters.values()), retain_graph=True)
        for parameter, gradient in zip(total, gradients, strict=True):
            total[parameter] += weight * gradient.abs() ** power / context.images

    for x, labels in context.batches(20):
        logits = twin(x)
        log_p = logits.log_softmax(1)
        drawn = torch.multinomial(log_p.detach().exp(), 1, generator=chance)[:, 0]
        nll = -log_p[torch.arange(len(x)), drawn if options.get("fisher") == "sampled" else labels]
        if name == "mas":
            norms = logits.norm(dim=1)
            if options:
                for norm in norms:
                    add(norm, 1, 1)
            else:
                add(norms.mean(), 20, 1)
        elif not options:
            add(nll.mean(), 20, 2)
        elif options["fisher"] == "exact":
            for image in log_p:
                for value in image:
                    add(value, value.detach().exp(), 2)
        else:
            for value in nll:
                add(value, 1, 2)
    for parameter, tensor in penalty.weight.items():
        torch.testing.assert_close(tensor, total[parameter], rtol=1e-3, atol=1e-6)
        assert tensor.abs().max() > 1e-6 or parameter == "3.bias"


@pytest.mark.parametrize("name", ["ewc", "mas"])
def test_training_mode_takes_a_last_batch_of_one_image(make_task, context_of, name):
    """21 images in batches of 20."""
    layers = nn.Conv2d(3, 4, 3, 2), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(4), nn.Flatten()
    net = ContinualNet(nn.Sequential(*layers), norm="shared")
    context = context_of(net, make_task("one", (11, 10)))
    (penalty,) = create_method(name, {name: {"mode": "train"}}).penalties
    penalty.attach(net)
    penalty.end_task(context)
    assert penalty.weight["0.weight"].max() > 0
