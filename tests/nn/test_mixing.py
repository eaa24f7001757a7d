"""Batches that mix tasks give each image what its own task alone would give it."""

import pytest
import timm
import torch
from torch import nn

from confitune.errors import ConfituneError
from confitune.methods.ccll import Calibrations
from confitune.nn import ContinualNet, Head, Norms, XconvNorms


def tiny_efficientnet() -> nn.Module:
    """timm's smallest EfficientNet: its norms carry their activation (BatchNormAct2d)."""
    return timm.create_model("test_efficientnet")


@pytest.fixture
def three_tasks(learn):
    def three_tasks(net: ContinualNet, size: int = 8) -> ContinualNet:
        for seed, (task, classes) in enumerate({"a": 2, "b": 5, "c": 3}.items(), 1):
            learn(net, task, classes, seed=seed, size=size)
        return net.eval()

    return three_tasks


PARTS = {
    "window": lambda: [XconvNorms(), Head()],
    "phase": lambda: [XconvNorms("phase"), Head()],
    "task": lambda: [Norms(), Head()],
    "shared": lambda: [Head()],
    "pretrained": lambda: [Norms(affine=False, moments="pretrained"), Head()],
}


@pytest.fixture
def net(backbone, three_tasks) -> ContinualNet:
    torch.manual_seed(0)
    return three_tasks(ContinualNet(backbone(), PARTS["window"]()))


@pytest.mark.parametrize("make", ["residual", "efficientnet"])
@pytest.mark.parametrize("parts", PARTS)
def test_a_mixed_batch_equals_single_task_results(backbone, three_tasks, check_mixed, make, parts):
    torch.manual_seed(0)
    make_backbone, size = (backbone, 8) if make == "residual" else (tiny_efficientnet, 32)
    net = three_tasks(ContinualNet(make_backbone(), PARTS[parts]()), size)
    check_mixed(net, size)
    x = torch.randn(3, 3, size, size)
    assert net(x, torch.zeros(3, dtype=torch.long)).shape == (3, 2)
    assert net(x, torch.full((3,), 2)).shape == (3, 3)
    assert all("forward" not in vars(module) for module in net.modules())


def test_a_mixed_batch_follows_weights_that_move(net, learn, check_mixed):
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
    check_mixed(net)
    net.double()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(net(x, torch.tensor([1, 1])), net(x, "b"), rtol=0, atol=1e-12)


@pytest.mark.parametrize("parts", ["window", "task"])
def test_a_mixed_batch_follows_a_loaded_state(backbone, three_tasks, check_mixed, parts):
    torch.manual_seed(0)
    net, other = three_tasks(ContinualNet(backbone(), PARTS[parts]())), ContinualNet(backbone(), PARTS[parts]())
    other.load_state_dict(net.state_dict())
    for task in "abc":
        state = other.task_state_dict(task)
        other.load_task_state_dict(task, state | {"bn.bias": state["bn.bias"] + 1})
    check_mixed(net)
    net.load_state_dict(other.state_dict())
    check_mixed(net)


@pytest.mark.parametrize(
    "part", [XconvNorms(statistics="pass"), XconvNorms(), Norms()], ids=["pass", "running", "task"]
)
def test_what_was_mixed_before_a_task_ended_does_not_outlive_it(backbone, learn, part):
    torch.manual_seed(0)
    net = ContinualNet(backbone(), [part, Head()])
    batches = learn(net, "a", 2, seed=1, finish=False)
    x, index = batches[0], torch.zeros(6, dtype=torch.long)
    halfway = net.eval()(x, index)
    net.measure([batch * 3 for batch in batches])  # statistics move, weights do not
    net.finish_task()
    torch.testing.assert_close(net(x, index), net(x, "a"), rtol=0, atol=1e-5)
    assert not torch.allclose(net(x, index), halfway, atol=1e-2)


def test_an_unfinished_task_mixes_with_its_live_state(net, learn, check_mixed):
    learn(net, "d", 3, seed=3, finish=False)
    check_mixed(net)
    net.set_task("d")
    with torch.no_grad():
        net.backbone.bn.bias.add_(0.5)
        net.head.linear.bias.add_(0.5)
    check_mixed(net)
    assert net.current_task == "d"  # the task that was alone last


def test_the_current_task_stays_current(net):
    net.set_task("b")
    x = torch.randn(3, 3, 8, 8)
    alone = net(x).detach()
    net(x, torch.tensor([0, 2, 0]))
    assert net.current_task == "b"
    assert torch.equal(net(x), alone)


def test_a_mixed_batch_has_no_gradients(net):
    x, index = torch.randn(3, 3, 8, 8, requires_grad=True), torch.tensor([0, 1, 2])
    assert not net(x, index).requires_grad
    with torch.inference_mode():
        assert torch.equal(net(x, index), net(x, index))


def test_what_is_no_mixed_batch_is_refused(net):
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


def test_calibrated_networks_mix_too(backbone, three_tasks, check_mixed):
    torch.manual_seed(0)
    check_mixed(three_tasks(ContinualNet(backbone(), [Norms(start="pretrained"), Calibrations(), Head()])))
