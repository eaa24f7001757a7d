"""Switching, storing and saving tasks: nothing moves, nothing is lost, and the numbers stored are the paper's."""

import copy

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from confitune.errors import ConfituneError
from confitune.nn import ContinualNet, Head, Norms, Part, XconvNorms


def live(net: ContinualNet) -> dict[str, Tensor]:
    """Every parameter and buffer, the input statistics included, which no state dict of a backbone holds."""
    net.observer.fold()
    return dict(net.named_parameters()) | dict(net.named_buffers())


def snapshot(net: ContinualNet) -> dict[str, Tensor]:
    """All but planes of sums, which are zero now and made where a network is trained."""
    return {name: tensor.detach().clone() for name, tensor in live(net).items() if ".plane" not in name}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


PARTS = {"window": XconvNorms, "phase": lambda: XconvNorms("phase"), "plain": Norms}


@pytest.fixture(params=PARTS)
def kind(request) -> str:
    return request.param


@pytest.fixture
def make(kind, backbone):
    return lambda: ContinualNet(backbone(), [PARTS[kind](), Head()])


@pytest.fixture
def net(make) -> ContinualNet:
    torch.manual_seed(0)
    return make()


def test_a_finished_task_stays_bit_identical_while_others_move_the_weights(net, learn):
    learn(net, "a", 2, seed=1)
    stored = net.task_state_dict("a")
    weights = net.backbone.conv.weight.detach().clone()
    for seed, task in enumerate("bcd", 2):
        learn(net, task, 2, seed=seed)  # the same number of classes: the live head is the same tensor
    assert not torch.equal(net.backbone.conv.weight, weights)
    net.eval()(torch.rand(2, 3, 8, 8), "a")  # which puts a recovered mean into the layers
    with torch.no_grad():
        for parameter in net.groups()["norms"]:
            parameter.add_(1)  # a stray write to the live slot does not reach what is stored
    assert_same(net.task_state_dict("a"), stored)
    net.set_task("b")
    net.set_task("a")
    assert torch.equal(net.head.linear.weight, stored["head.weight"])
    assert torch.equal(net.backbone.bn.weight, stored["bn.weight"])
    assert_same(net.task_state_dict("a"), stored)


def test_live_tensors_keep_their_addresses(net, learn):
    learn(net, "a", 2, seed=1)
    learn(net, "b", 3, seed=2)
    addresses = {name: tensor.data_ptr() for name, tensor in live(net).items()}
    assert {"backbone.bn.running_mean", "parts.head.linears.2.weight", "parts.head.linears.3.bias"} <= set(addresses)
    x = torch.rand(2, 3, 8, 8)
    net.eval()
    for task in ("a", "b", "a"):
        net.set_task(task)
        net(x)
    net(x, torch.tensor([0, 1]))
    learn(net, "c", 3, seed=3)
    net.reopen("a")
    learn(net, "a", seed=4)
    net.load_state_dict(net.state_dict())
    net.load_task_state_dict("d", net.task_state_dict("b"))
    assert {name: tensor.data_ptr() for name, tensor in live(net).items()} == addresses


def test_leaving_a_task_in_the_middle_of_training_loses_nothing(net, learn):
    learn(net, "a", 2, seed=1)
    learn(net, "b", 2, seed=2, finish=False)
    before = snapshot(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    x = torch.rand(4, 3, 8, 8)
    uninterrupted = copy.deepcopy(net)
    net.eval()(x, "a")
    assert net.current_task == "a"
    assert not torch.equal(net.backbone.bn.weight, before["backbone.bn.weight"])
    net.set_task("b")
    assert_same(snapshot(net), before)
    net.eval()(x, torch.tensor([0, 1, 0, 1]))
    assert_same(snapshot(net), before)
    # ... and training goes on as if nothing had been.
    twin_optimizer = torch.optim.SGD(uninterrupted.parameters(), 0.1)
    for network, own in ((net, optimizer), (uninterrupted, twin_optimizer)):
        own.zero_grad()
        network.train()(x).square().sum().backward()
        own.step()
        network.finish_task()
    assert_same(snapshot(net), snapshot(uninterrupted))
    assert_same(net.task_state_dict("b"), uninterrupted.task_state_dict("b"))


@pytest.mark.parametrize("finish", [True, False], ids=["finished", "in training"])
def test_a_saved_network_goes_on_as_the_original(net, make, learn, tmp_path, finish):
    learn(net, "a", 2, seed=1)
    learn(net, "b", 3, seed=2)
    learn(net, "c", 3, seed=3, finish=finish)
    net.eval()
    torch.save(net.state_dict(), tmp_path / "net.pth")
    torch.manual_seed(99)
    fresh = make()
    fresh.load_state_dict(torch.load(tmp_path / "net.pth", weights_only=True), strict=True)
    fresh.eval()
    assert list(fresh.tasks) == ["a", "b", "c"]
    assert fresh.current_task == "c"
    assert_same(snapshot(fresh), snapshot(net))
    x = torch.rand(4, 3, 8, 8)
    for task in "cab":
        assert torch.equal(fresh(x, task), net(x, task)), task
        assert fresh.tasks[task].classes == net.tasks[task].classes
    mixed = torch.tensor([2, 0, 1, 0])
    assert torch.equal(fresh(x, mixed), net(x, mixed))
    for network in (net, fresh):
        network.set_task("c")
        if finish:
            learn(network, "d", 2, seed=4)
        else:
            learn(network, "c", 3, seed=4)
    assert_same(snapshot(fresh), snapshot(net))
    for task in net.tasks:
        assert_same(fresh.task_state_dict(task), net.task_state_dict(task))


def test_a_state_of_another_kind_is_refused(backbone, learn):
    torch.manual_seed(0)
    window = ContinualNet(backbone(), [XconvNorms(), Head()])
    learn(window, "a", 2)
    others: list[list[Part]] = [
        [XconvNorms("phase"), Head()],
        [XconvNorms(statistics="pass"), Head()],
        [Norms(), Head()],
    ]
    for parts in others:
        other = ContinualNet(backbone(), parts)
        with pytest.raises(
            ConfituneError, match=r"a network with \['XconvNorms\(window, running\)', 'Head'\], this one"
        ):
            other.load_state_dict(window.state_dict())
        assert not other.tasks


def test_a_state_of_another_network_of_the_kind_is_refused(backbone, learn):
    torch.manual_seed(0)
    source = ContinualNet(backbone(), [XconvNorms(), Head()])
    other = ContinualNet(timm.create_model("test_resnet"), [XconvNorms(), Head()])
    learn(source, "a", 2)
    with pytest.raises(ConfituneError, match=r"input means belong to other layers: .* another network"):
        other.load_state_dict(source.state_dict())


def test_an_earlier_state_can_be_gone_back_to(net, learn):
    learn(net, "a", 2, seed=1)
    state, before = copy.deepcopy(net.state_dict()), snapshot(net)
    learn(net, "b", 7, seed=2)
    net.load_state_dict(state, strict=True)
    assert list(net.tasks) == ["a"]
    assert_same(snapshot(net), before)


def test_a_task_travels_through_a_file_under_another_name(net, make, learn, tmp_path):
    learn(net, "a", 2, seed=1)
    learn(net, "b", 3, seed=2)
    x = torch.rand(4, 3, 8, 8)
    expected = net.eval()(x, "b").detach()
    saved = net.task_state_dict("b")
    assert not any(key.startswith("b.") for key in saved)  # the task's name is in no key
    save_file(saved, tmp_path / "task.safetensors")
    other = make()
    other.backbone.load_state_dict(net.backbone.state_dict())
    other.add_task("unfinished", 2)
    other.train()(x)
    unfinished = snapshot(other)
    other.load_task_state_dict("birds", load_file(tmp_path / "task.safetensors"), ["tit", "crow", "owl"])
    assert other.current_task == "birds"
    assert other.tasks["birds"].classes == ("tit", "crow", "owl")
    assert other.tasks["birds"].finished
    assert torch.equal(other.eval()(x), expected)
    assert_same(other.task_state_dict("birds"), saved)
    other.set_task("unfinished")
    now = snapshot(other)
    assert_same({name: now[name] for name in unfinished}, unfinished)
    # Over an existing task, also the live one, what was there is replaced and not stored.
    with pytest.raises(ConfituneError, match="task 'a': 2 class names for a head of 3 classes"):
        net.load_task_state_dict("a", saved)
    net.set_task("a")
    net.load_task_state_dict("a", saved, ["x", "y", "z"])
    assert torch.equal(net(x), expected)
    assert net.tasks["a"].classes == ("x", "y", "z")
    assert list(net.tasks) == ["a", "b"]


def test_an_unfinished_task_travels_with_its_statistics(net, learn):
    learn(net, "a", 2, seed=1, finish=False)
    state = net.task_state_dict("a")
    other = copy.deepcopy(net)
    learn(net, "a", seed=2)
    other.load_task_state_dict("again", state)
    learn(other, "again", seed=2)
    assert_same(other.task_state_dict("again"), net.task_state_dict("a"))


def test_a_task_that_does_not_fit_is_refused_and_leaves_everything_as_it_was(net, learn):
    learn(net, "a", 2)
    state = net.task_state_dict("a")
    before = snapshot(net)
    wrong = {
        r"bn\.weight must have shape \(8,\) and is of shape \(9,\)": state | {"bn.weight": torch.zeros(9)},
        r"bn\.running_var must .* and is missing": {k: v for k, v in state.items() if k != "bn.running_var"},
        r"no head\.weight of shape": {k: v for k, v in state.items() if k != "head.weight"},
        r"head\.weight must have shape \(2, 8\)": state | {"head.weight": torch.zeros(2, 7)},
        r"no head\.weight of shape \(classes, features\)": state | {"head.weight": torch.zeros(2)},
        r"image_size must hold whole numbers": state | {"image_size": torch.tensor([-1, 8])},
        r"head\.bias must have shape \(2,\)": state | {"head.bias": torch.zeros(3)},
        r"task 'b': .* is missing": {k: v for k, v in state.items() if k != "finished"},
    }
    for message, broken in wrong.items():
        with pytest.raises(ConfituneError, match=message):
            net.load_task_state_dict("b", broken)
    with pytest.raises(ConfituneError, match="3 class names for a head of 2 classes"):
        net.load_task_state_dict("b", state, ["x", "y", "z"])
    with pytest.raises(ConfituneError, match="1 class names for a head of 2 classes"):
        net.load_task_state_dict("b", state, ["x", "x"])
    assert list(net.tasks) == ["a"]
    assert net.current_task == "a"
    assert_same(snapshot(net), before)


def test_a_task_of_a_network_with_other_means_is_refused(backbone, learn):
    torch.manual_seed(0)
    window, phase = (ContinualNet(backbone(), [XconvNorms(means), Head()]) for means in ("window", "phase"))
    learn(window, "a", 2)
    with pytest.raises(ConfituneError, match=r"stem\.input_means must have shape \(3, 1, 1\) .* other means"):
        phase.load_task_state_dict("a", window.task_state_dict("a"))


# ResNet18: 4,800 channels have a norm; weight, bias and variance are 14,400 numbers, with a running mean 19,200.
# Phase means of what its convolutions read: stem 3 * 4; layer1 4 * 64; layer2 64 * 4 + 3 * 128; layer3
# 128 * 4 + 3 * 256; layer4 256 * 4 + 3 * 512; the shortcuts share: 12 + 256 + 640 + 1280 + 2560 = 4,748.
# Window means: 3 * 49 + 9 * (4 * 64 + 64 + 3 * 128 + 128 + 3 * 256 + 256 + 3 * 512) = 147 + 9 * 3392 = 30,675, and
# 64 + 128 + 256 = 448 of the shortcuts.
@pytest.mark.parametrize(
    ("parts", "numbers"),
    [
        ([XconvNorms("phase"), Head()], 19_148),
        ([XconvNorms(), Head()], 45_523),
        ([Norms(), Head()], 19_200),
        ([Norms(moments="pretrained"), Head()], 9_600),
        ([Norms(affine=False), Head()], 9_600),
        ([Head()], 0),
    ],
    ids=["phase", "window", "task", "affine", "moments", "shared"],
)
def test_what_a_task_of_resnet18_takes(parts, numbers):
    net = ContinualNet(timm.create_model("resnet18"), parts)
    for task, classes in (("a", 10), ("b", 3)):
        net.add_task(task, classes)
        with torch.no_grad():
            net.train()(torch.rand(2, 3, 32, 32))
        net.finish_task()
    for task, classes in (("a", 10), ("b", 3)):
        head = classes * 512 + classes
        storage = net.storage()[task]
        assert (storage.beside_head, storage.parts["head"]) == (numbers, head)
        # Measured from what is saved, not from a formula: all but the sizes, which are integers.
        saved = [tensor for tensor in net.task_state_dict(task).values() if tensor.is_floating_point()]
        assert sum(tensor.numel() for tensor in saved) == numbers + head


def test_an_unfinished_task_also_keeps_its_running_means(net, learn, kind):
    learn(net, "a", 2, finish=False)
    unfinished = net.storage()["a"].beside_head
    net.finish_task()
    recovering = 0 if kind == "plain" else 6 + 8 + 8  # channels of the norms that recover their mean
    assert unfinished - net.storage()["a"].beside_head == recovering
    keys = set(net.task_state_dict("a"))
    assert ("bn.running_mean" in keys) == (kind == "plain")
    assert "last_bn.running_mean" in keys  # reads an addition: nothing to recover it from


def test_a_task_goes_on_after_one_of_another_size(backbone, learn):
    torch.manual_seed(0)
    net = ContinualNet(backbone(), [XconvNorms(), Head()])
    learn(net, "a", 2, size=8, finish=False)
    layer = net.parts["norms"].layers["stem_bn"]
    stem = layer.inputs
    earlier = stem.window_means(layer.geometry).clone()
    learn(net, "b", 2, size=12, finish=False)
    net.set_task("a")
    x = torch.randn(6, 3, 8, 8)
    net.train()(x)
    columns = nn.functional.unfold(x, 3, padding=1).mean((0, 2)).reshape(3, 3, 3)
    torch.testing.assert_close(stem.window_means(layer.geometry), 0.9 * earlier + 0.1 * columns)


def test_what_is_shared_is_the_backbone_without_what_tasks_own(net, make, learn):
    learn(net, "a", 2, seed=1)
    shared = net.shared_state_dict()
    assert set(shared) == {"stem.weight", "stem.bias", "conv.weight", "shortcut.weight"}
    torch.manual_seed(9)
    other = make()
    other.load_shared_state_dict(shared)  # before it has any task
    other.load_task_state_dict("a", net.task_state_dict("a"))
    x = torch.rand(2, 3, 8, 8)
    assert torch.equal(other.eval()(x), net.eval()(x))


def test_a_layer_of_the_backbone_may_be_called_head(learn):
    class Projected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.bn(self.conv(x)).mean((2, 3)))

    net = ContinualNet(Projected(), [Norms(), Head()])
    learn(net, "a", 2)
    assert set(net.shared_state_dict()) == {"conv.weight", "conv.bias", "head.weight", "head.bias"}
    assert net.shared_state_dict()["head.weight"].shape == (5, 4)
    assert net.task_state_dict("a")["head.weight"].shape == (2, 5)
