"""The life of a task: added, trained, finished, evaluated under weights that moved on, reopened, dropped.

And batches that mix tasks.
"""

import copy

import pytest
import timm
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
    assert [inputs.batches for inputs in net.parts["norms"].input_means] == [0, 0]
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
    assert [inputs.batches for inputs in net.parts["norms"].input_means] == [0, 0]
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


# ---- batches that mix tasks give each image what its own task alone would give it ------------------------------------


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
def taught(backbone, three_tasks) -> ContinualNet:
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


def test_a_mixed_batch_follows_weights_that_move(taught, learn, check_mixed):
    check_mixed(taught)
    with torch.no_grad():
        taught.backbone.conv.weight.add_(0.1)
    check_mixed(taught)
    taught.backbone.conv.weight.data.add_(0.1)
    taught.weights_moved()
    check_mixed(taught)
    taught.load_task_state_dict("b", taught.task_state_dict("b") | {"bn.bias": torch.ones(8)})
    check_mixed(taught)
    taught.reopen("a")
    learn(taught, "a", seed=9)
    check_mixed(taught)
    taught.double()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(taught(x, torch.tensor([1, 1])), taught(x, "b"), rtol=0, atol=1e-12)


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


def test_an_unfinished_task_mixes_with_its_live_state(taught, learn, check_mixed):
    learn(taught, "d", 3, seed=3, finish=False)
    check_mixed(taught)
    taught.set_task("d")
    with torch.no_grad():
        taught.backbone.bn.bias.add_(0.5)
        taught.head.linear.bias.add_(0.5)
    check_mixed(taught)
    assert taught.current_task == "d"  # the task that was alone last


def test_the_current_task_stays_current(taught):
    taught.set_task("b")
    x = torch.randn(3, 3, 8, 8)
    alone = taught(x).detach()
    taught(x, torch.tensor([0, 2, 0]))
    assert taught.current_task == "b"
    assert torch.equal(taught(x), alone)


def test_a_mixed_batch_has_no_gradients(taught):
    x, index = torch.randn(3, 3, 8, 8, requires_grad=True), torch.tensor([0, 1, 2])
    assert not taught(x, index).requires_grad
    with torch.inference_mode():
        assert torch.equal(taught(x, index), taught(x, index))


def test_what_is_no_mixed_batch_is_refused(taught):
    x = torch.randn(3, 3, 8, 8)
    for index, message in (
        (torch.tensor([0, 1]), r"one task index per image, got \(2,\) for 3"),
        (torch.tensor([0.0, 1.0, 2.0]), "one task index per image"),
        (torch.tensor([0, 1, 3]), r"task indices run from 0 to 2, got \[0, 1, 3\]"),
        (torch.tensor([-1, 1, 2]), "task indices run from 0 to 2"),
    ):
        with pytest.raises(ConfituneError, match=message):
            taught(x, index)
    with pytest.raises(ConfituneError, match=r"a mixed batch is for evaluation.*call eval\(\) first"):
        taught.train()(x, torch.tensor([0, 1, 2]))


def test_calibrated_networks_mix_too(backbone, three_tasks, check_mixed):
    torch.manual_seed(0)
    check_mixed(three_tasks(ContinualNet(backbone(), [Norms(start="pretrained"), Calibrations(), Head()])))
