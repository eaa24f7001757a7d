"""Batches that mix tasks give each image what its own task alone would give it."""

import pytest
import timm
import torch
from torch import nn

from confitune.errors import ConfituneError
from confitune.nn import ContinualNet
from confitune.nn.xconv import TaskNorm

CLASSES = {"a": 2, "b": 5, "c": 3}


def tiny_efficientnet() -> nn.Module:
    """timm's smallest EfficientNet: its norms carry their activation (BatchNormAct2d)."""
    return timm.create_model("test_efficientnet")


def three_tasks(net: ContinualNet, learn, size: int = 8) -> ContinualNet:
    for seed, (task, classes) in enumerate(CLASSES.items(), 1):
        learn(net, task, classes, seed=seed, size=size)
    return net.eval()


def check_mixed(net: ContinualNet, size: int = 8) -> None:
    """Twelve images in shuffled order, four a task, against each task alone."""
    x = torch.randn(12, 3, size, size, generator=torch.Generator().manual_seed(7))
    index = (torch.arange(12) % 3)[torch.randperm(12, generator=torch.Generator().manual_seed(8))]
    with torch.no_grad():
        mixed = net(x, index)
        assert mixed.shape == (12, 5)
        for place, (task, classes) in enumerate(CLASSES.items()):
            own = index == place
            alone = net(x, task)[own]
            torch.testing.assert_close(mixed[own, :classes], alone, rtol=0, atol=1e-5)
            assert (mixed[own, classes:] == float("-inf")).all()
        again = net(x, index)
    assert torch.equal(again, mixed)


@pytest.mark.parametrize("make", ["residual", "efficientnet"])
@pytest.mark.parametrize(
    ("norm", "means"),
    [("xconv", "window"), ("xconv", "phase"), ("task", "window"), ("shared", "window"), ("frozen", "window")],
)
def test_a_mixed_batch_equals_single_task_results(backbone, learn, make, norm, means):
    torch.manual_seed(0)
    make_backbone, size = (backbone, 8) if make == "residual" else (tiny_efficientnet, 32)
    net = three_tasks(ContinualNet(make_backbone(), norm=norm, means=means), learn, size)
    check_mixed(net, size)
    x = torch.randn(3, 3, size, size)
    outputs = net(x, torch.zeros(3, dtype=torch.long)), net(x, torch.full((3,), 2))
    assert outputs[0].shape == (3, 2)
    assert outputs[1].shape == (3, 3)
    assert not any(norm._mixed for norm in net.modules() if isinstance(norm, TaskNorm))


def test_a_mixed_batch_follows_weights_that_move(backbone, learn):
    torch.manual_seed(0)
    net = three_tasks(ContinualNet(backbone()), learn)
    check_mixed(net)
    with torch.no_grad():
        net.backbone.conv.weight.add_(0.1)
    check_mixed(net)
    net.backbone.conv.weight.data.add_(0.1)
    net.weights_moved()
    check_mixed(net)
    net.load_task_state_dict("b", net.task_state_dict("b") | {"bn.bias": torch.ones(8)})
    check_mixed(net)
    net.reopen("a")
    learn(net, "a", seed=9)
    net.eval()
    check_mixed(net)
    net.double()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(net(x, torch.tensor([1, 1])), net(x, "b"), rtol=0, atol=1e-12)


@pytest.mark.parametrize("norm", ["xconv", "task"])
def test_a_mixed_batch_follows_a_loaded_state(backbone, learn, norm):
    torch.manual_seed(0)
    net = three_tasks(ContinualNet(backbone(), norm=norm), learn)
    other = ContinualNet(backbone(), norm=norm)
    other.load_state_dict(net.state_dict())
    for task in "abc":
        state = other.task_state_dict(task)
        other.load_task_state_dict(task, state | {"bn.bias": state["bn.bias"] + 1})
    check_mixed(net)
    net.load_state_dict(other.state_dict())
    check_mixed(net)


@pytest.mark.parametrize(("norm", "statistics"), [("xconv", "pass"), ("xconv", "running"), ("task", "running")])
def test_what_was_mixed_before_a_task_ended_does_not_outlive_it(backbone, learn, norm, statistics):
    torch.manual_seed(0)
    net = ContinualNet(backbone(), norm=norm, statistics=statistics)
    batches = learn(net, "a", 2, seed=1, finish=False)
    x, index = batches[0], torch.zeros(6, dtype=torch.long)
    halfway = net.eval()(x, index)
    net.train()
    with torch.no_grad():
        for batch in batches:  # statistics move, weights do not
            net(batch * 3)
    net.finish_task(batch * 3 for batch in batches)
    net.eval()
    torch.testing.assert_close(net(x, index), net(x, "a"), rtol=0, atol=1e-5)
    assert not torch.allclose(net(x, index), halfway, atol=1e-2)


def test_an_unfinished_task_mixes_with_its_live_state(backbone, learn):
    torch.manual_seed(0)
    net = ContinualNet(backbone())
    learn(net, "a", 2, seed=1)
    learn(net, "b", 5, seed=2)
    learn(net, "c", 3, seed=3, finish=False)
    net.eval()
    check_mixed(net)
    net.set_task("c")
    with torch.no_grad():
        net.backbone.bn.bias.add_(0.5)
        net.head.bias.add_(0.5)
    check_mixed(net)
    assert net.current_task == "c"  # the task that was alone last


def test_the_current_task_stays_current(backbone, learn):
    torch.manual_seed(0)
    net = three_tasks(ContinualNet(backbone()), learn)
    net.set_task("b")
    x = torch.randn(3, 3, 8, 8)
    alone = net(x).detach()
    net(x, torch.tensor([0, 2, 0]))
    assert net.current_task == "b"
    assert torch.equal(net(x), alone)


def test_mixing_in_inference_mode_leaves_rows_that_gradients_can_use(backbone, learn):
    torch.manual_seed(0)
    net = three_tasks(ContinualNet(backbone()), learn)
    x, index = torch.randn(3, 3, 8, 8), torch.tensor([0, 1, 2])
    with torch.inference_mode():
        expected = net(x, index)
    x.requires_grad_()
    found = net(x, index)
    torch.testing.assert_close(found, expected)
    found[:, :2].sum().backward()
    assert x.grad.abs().sum() > 0


def test_what_is_no_mixed_batch_is_refused(backbone, learn):
    torch.manual_seed(0)
    net = three_tasks(ContinualNet(backbone()), learn)
    x = torch.randn(3, 3, 8, 8)
    for index, message in (
        (torch.tensor([0, 1]), r"one task index per image, got \(2,\) for 3"),
        (torch.tensor([0.0, 1.0, 2.0]), "one task index per image"),
        (torch.tensor([0, 1, 3]), r"task indices run from 0 to 2, got \[0, 1, 3\]"),
        (torch.tensor([-1, 1, 2]), "task indices run from 0 to 2"),
    ):
        with pytest.raises(ConfituneError, match=message):
            net(x, index)
    with pytest.raises(ConfituneError, match=r"a mixed batch is for evaluation.*call eval\(\) first"):
        net.train()(x, torch.tensor([0, 1, 2]))


def test_a_norm_with_a_forward_of_its_own_cannot_be_mixed(learn):
    class Doubled(nn.BatchNorm2d):
        def forward(self, x):
            return 2 * super().forward(x)

    torch.manual_seed(0)
    net = ContinualNet(nn.Sequential(nn.Conv2d(3, 4, 3), Doubled(4), nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    x = learn(net, "a", 2)[0]
    assert net.eval()(x).shape == (6, 2)
    with pytest.raises(ConfituneError, match="1 is a XconvDoubled, whose forward cannot be done per image"):
        net(x, torch.zeros(6, dtype=torch.long))


def test_variances_that_followed_reach_a_mixed_batch(backbone, learn):
    """The end of a task moves no weight, but it is when the variances of earlier ones follow."""
    torch.manual_seed(0)
    net = ContinualNet(backbone(), variance="ratio")
    learn(net, "a", 2, seed=1)
    batches = learn(net, "b", 2, seed=2, finish=False)
    x, index = batches[0], torch.zeros(6, dtype=torch.long)
    before = net.eval()(x, index)
    net.finish_task(batches)
    torch.testing.assert_close(net(x, index), net(x, "a"), rtol=0, atol=1e-5)
    assert (net(x, "a") - before).abs().max() > 1e-4
