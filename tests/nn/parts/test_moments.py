"""Moments of a task's own, and tasks that do without."""

import pytest
import torch
from torch import nn

from confitune.nn import ContinualNet, Head, Moments, Norms


@pytest.fixture
def net():
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    backbone[1].running_mean.normal_()
    return ContinualNet(backbone, [Norms(moments="pretrained", keep_pretrained=True), Moments(), Head()])


def learn(net, name, own):
    net.add_task(name, 2)
    net.parts["moments"].own = own
    with torch.no_grad():
        net.train()(torch.randn(16, 3, 8, 8) + 3)
        net.backbone[1].weight.add_(0.5)
    net.finish_task(None if own else ["norms", "head"])


def test_only_a_task_with_own_moments_is_trained_with_those_of_batches_and_stores_them(net):
    pretrained = net.backbone[1].running_mean.clone()
    learn(net, "near", own=False)
    assert torch.equal(net.backbone[1].running_mean, pretrained)
    learn(net, "far", own=True)
    assert not torch.equal(net.backbone[1].running_mean, pretrained)
    storage = net.storage()
    assert dict(storage["near"].parts) == {"norms": 8, "head": 10}
    assert dict(storage["far"].parts) == {"norms": 8, "moments": 8, "head": 10}
    net.prepare("near")
    assert torch.equal(net.backbone[1].running_mean, pretrained)


def test_mixed_batches_treat_each_image_with_its_tasks_moments(net):
    learn(net, "near", own=False)
    learn(net, "far", own=True)
    x = torch.randn(6, 3, 8, 8) + 3
    index = torch.tensor([0, 1, 1, 0, 1, 0])
    with torch.no_grad():
        mixed = net.eval()(x, index)
        for place, name in enumerate(("near", "far")):
            torch.testing.assert_close(mixed[index == place], net(x, name)[index == place], rtol=1e-4, atol=1e-5)


def test_a_task_without_own_moments_comes_back_from_its_state(net):
    learn(net, "near", own=False)
    state, x = net.task_state_dict("near"), torch.randn(4, 3, 8, 8)
    with torch.no_grad():
        expected = net.eval()(x, "near").clone()
        net.drop_task("near")
        learn(net, "far", own=True)
        net.load_task_state_dict("near", state)
        assert net.tasks["near"].owns == ("norms", "head")
        assert torch.equal(net.eval()(x, "near"), expected)
