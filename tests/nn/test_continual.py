"""The life of a task: added, trained, finished, evaluated under weights that moved on, reopened, dropped."""

import copy

import pytest
import torch
from torch import Tensor, nn

from confitune.errors import ConfituneError
from confitune.methods.ccll import Calibrations
from confitune.nn import ContinualNet, Head, Norms, XconvNorms


@pytest.fixture
def net(backbone) -> ContinualNet:
    torch.manual_seed(0)
    return ContinualNet(backbone(), [XconvNorms(), Head()])


def state_of(net: ContinualNet) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in net.backbone.state_dict().items()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return list(found) == list(expected) and all(torch.equal(found[key], expected[key]) for key in expected)


def test_a_new_task_starts_from_the_last_ones_state_with_empty_statistics(net, learn):
    learn(net, "a", 2, seed=1)
    before = state_of(net)
    net.add_task("b", 3)
    assert same(net.backbone.state_dict(), before)
    assert net.observer.counts == [(0, 0), (0, 0)]
    assert net.current_task == "b"
    assert net.head.linear.weight.shape == (3, 8)
    # Also where another task was in use in between.
    learn(net, "b", 3, seed=2)
    before = state_of(net)
    net.eval()(torch.rand(2, 3, 8, 8), "a")
    assert not same(net.backbone.state_dict(), before)
    net.add_task("c", 3)
    assert same(net.backbone.state_dict(), before)


def test_a_finished_task_is_not_trained_until_it_is_reopened(net, learn):
    x = learn(net, "a", 2)[0]
    with pytest.raises(ConfituneError, match=r"task 'a' is finished; reopen\('a'\) to train it on"):
        net.train()(x)
    with pytest.raises(ConfituneError, match="task 'a' is finished already"):
        net.finish_task()
    learn(net, "b", 3, seed=1)
    outputs = net.eval()(x, "a").detach()
    net.reopen("a")
    # Its state under today's weights is where it goes on from.
    assert torch.equal(net(x), outputs)
    assert net.observer.counts == [(0, 0), (0, 0)]
    assert not net.tasks["a"].finished
    with pytest.raises(ConfituneError, match=r"task 'a' is not finished: set_task\('a'\)"):
        net.reopen("a")
    with pytest.raises(ConfituneError, match="task 'a' has seen no training batch"):
        net.finish_task()
    learn(net, "a", seed=2)
    assert net.tasks["a"].finished
    assert list(net.tasks) == ["a", "b"]
    assert not torch.allclose(net.eval()(x), outputs)
    with pytest.raises(ConfituneError, match="no task 'z'; tasks: 'a', 'b'"):
        net.reopen("z")


def test_a_dropped_task_leaves_the_others_as_they_are(net, learn):
    x = torch.rand(3, 3, 8, 8)
    with pytest.raises(ConfituneError, match="no task 'a'; tasks: none yet"):
        net.drop_task("a")
    for seed, task in enumerate("abc"):
        learn(net, task, 2 + seed, seed=seed)
    expected = {task: net.eval()(x, task).detach() for task in "ac"}
    net.set_task("b")
    net.drop_task("b")
    assert list(net.tasks) == ["a", "c"]
    with pytest.raises(ConfituneError, match=r"no task is live: .* set_task\(name\)"):
        net(x)
    assert len(net.groups()["weights"]) == 4
    assert net.groups()["head"] == []
    mixed = net(x, torch.tensor([1, 0, 1]))  # the index is the place in `tasks`
    torch.testing.assert_close(mixed[1, :2], expected["a"][1])
    torch.testing.assert_close(mixed[[0, 2]], expected["c"][[0, 2]])
    for task, logits in expected.items():
        assert torch.equal(net(x, task), logits)
    twin = copy.deepcopy(net)
    twin.drop_task("c")
    twin.load_state_dict(net.state_dict())
    assert torch.equal(twin(x, "c"), expected["c"])


def test_names_of_tasks_and_classes_are_their_own(net):
    net.add_task("a", ["cat", "dog"])
    assert net.tasks["a"].classes == ("cat", "dog")
    with pytest.raises(ConfituneError, match="there is a task 'a' already"):
        net.add_task("a", 3)
    for classes in (["cat", "cat"], [], 0):
        with pytest.raises(ConfituneError, match="task 'b' needs one or more classes with names of their own"):
            net.add_task("b", classes)
    assert list(net.tasks) == ["a"]
    assert net.current_task == "a"


def test_an_unknown_task_is_answered_with_the_known_ones(net):
    with pytest.raises(ConfituneError, match="no task is live: add_task"):
        net(torch.rand(2, 3, 8, 8))
    net.add_task("birds", 2)
    net.add_task("cars", 2)
    for call in (net.set_task, net.prepare, net.task_state_dict, lambda name: net(torch.rand(2, 3, 8, 8), name)):
        with pytest.raises(ConfituneError, match=r"no task 'bird'; tasks: 'birds', 'cars'\. Add it with add_task"):
            call("bird")
    assert net.current_task == "cars"


def test_a_network_needs_one_head_and_each_part_once(backbone):
    for parts in ([], [Norms()], [Head(), Head()], [Norms(), XconvNorms(), Head()]):
        with pytest.raises(ConfituneError, match="a network needs one Head and each part once, got"):
            ContinualNet(backbone(), parts)


def test_a_backbone_must_return_feature_vectors():
    maps = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    with pytest.raises(ConfituneError, match=r"returns \[N, 4, 222, 222\], not vectors \[N, F\]: add pooling"):
        ContinualNet(maps, [XconvNorms(), Head()])
    assert not maps[0]._forward_pre_hooks

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.bn(self.conv(x)).mean((2, 3))
            return y, y

    with pytest.raises(ConfituneError, match="returns no single tensor, not vectors"):
        ContinualNet(Pair(), [XconvNorms(), Head()])


@pytest.mark.parametrize("parts", [[Head()], [Norms(), Head()]], ids=["shared", "task"])
def test_plain_norms_take_images_of_any_size(backbone, learn, parts):
    torch.manual_seed(0)
    net = ContinualNet(backbone(), parts)
    before = net.backbone.bn.running_mean.clone()
    learn(net, "a", 2, size=8)
    assert not torch.equal(net.backbone.bn.running_mean, before)
    assert net.eval()(torch.rand(2, 3, 16, 16)).shape == (2, 2)
    # The layers, their keys and their addresses are those of the backbone.
    assert type(net.backbone.bn) is nn.BatchNorm2d
    assert list(net.backbone.state_dict()) == list(backbone().state_dict())


def test_every_parameter_is_in_one_group(backbone):
    net = ContinualNet(backbone(), [Norms(), Calibrations(), Head()])
    assert net.groups()["head"] == []  # before the first task
    net.add_task("a", 2)
    groups = net.groups()
    assert list(groups) == ["head", "norms", "weights", "calibrations"]
    members = [id(p) for parameters in groups.values() for p in parameters]
    assert sorted(members) == sorted(id(p) for p in net.parameters())
    layers = [net.backbone.stem_bn, net.backbone.bn, net.backbone.shortcut_bn, net.backbone.last_bn]
    assert groups["norms"] == [p for layer in layers for p in (layer.weight, layer.bias)]
    assert list(net.shared_parameters()) == ["stem.weight", "stem.bias", "conv.weight", "shortcut.weight"]
    shared = ContinualNet(backbone(), [Head()])
    assert list(shared.shared_parameters()) == [name for name, _ in shared.backbone.named_parameters()]


def test_a_deep_copy_is_a_network_of_its_own(net, learn):
    x = learn(net, "a", 2)[0]
    learn(net, "b", 3, seed=1)
    before = {task: net.eval()(x, task).detach() for task in "ab"}
    state, twin = state_of(net), copy.deepcopy(net)
    assert twin.parts["norms"].layers["bn"].conv is twin.backbone.conv
    learn(twin, "c", 2, seed=2)
    assert list(net.tasks) == ["a", "b"]
    assert same(net.backbone.state_dict(), state)
    for task, expected in before.items():
        assert torch.equal(net.eval()(x, task), expected)
        assert not torch.allclose(twin.eval()(x, task), expected)
    twin.prepare("a")
    assert torch.equal(twin.backbone.bn.running_mean, twin.parts["norms"].layers["bn"].recovered_mean())


@pytest.mark.parametrize(
    "parts", [[XconvNorms(), Head()], [Norms(keep_pretrained=True), Head()]], ids=["xconv", "task"]
)
def test_moves_take_everything_of_a_task_along(backbone, learn, parts):
    torch.manual_seed(0)
    net = ContinualNet(backbone(), parts)
    x = learn(net, "a", 2)[0]
    expected = net.eval()(x).detach()
    net.double()
    assert {tensor.dtype for tensor in net.task_state_dict("a").values() if tensor.is_floating_point()} == {
        torch.float64
    }
    torch.testing.assert_close(net(x.double()).float(), expected, rtol=1e-4, atol=1e-5)
    net.add_task("b", 5)
    assert net.head.linear.weight.dtype == torch.float64
    net.to("meta")
    net.add_task("c", 3)
    assert {entry.row.device.type for entry in net.tasks.values()} == {"meta"}
    assert {tensor.device.type for tensor in [*net.parameters(), *net.buffers()]} == {"meta"}
