"""Each image of a mixed batch is answered as its task answers alone, whatever tasks own, and tasks come and go."""

import pytest
import torch
from torch import Tensor, nn

from confitune.deploy import Bundle, Predictor
from confitune.deploy.mixed import CannotMixError, MixedNet
from confitune.engine.capture import compiled
from confitune.methods import METHODS
from confitune.methods.ccll import Calibrations
from confitune.nn import ContinualNet, Deltas, Head, Moments, Norms, XconvNorms, build_model, two_scales
from deploy.shared import guess, settling

SIZE = 64


def of_best(**options):
    return [Norms(moments="pretrained", keep_pretrained=True), Moments(), Deltas(**options)]


class Small(nn.Module):
    """Convolutions of all kinds: strides, dilation, groups, borders that are mirrored, one without a window."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 5, stride=2, padding=2),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
            nn.Conv2d(16, 24, 3, dilation=2, padding="same", bias=False),
            nn.BatchNorm2d(24, affine=False),
            nn.ReLU(),
            nn.Conv2d(24, 24, 3, padding=1, groups=4),
            nn.Conv2d(24, 48, 3, padding=(1, 0), padding_mode="reflect", groups=24),
            nn.BatchNorm2d(48),
            nn.ReLU(),
            nn.Conv2d(48, 48, 1, stride=2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(48, 40),
            nn.BatchNorm1d(40),
            nn.Linear(40, 40, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


NETWORKS = {
    "best": ("resnet18", of_best),
    "ConFiT": ("resnet18", lambda: [XconvNorms()]),
    "depthwise": ("mobilenetv2_035", of_best),
    "same padding": ("tf_efficientnet_lite0", lambda: [Norms(), Deltas()]),
    "LayerNorm": ("convnext_atto", of_best),
    "torchvision's": ("torchvision:shufflenet_v2_x0_5", of_best),
    "whole windows": ("test_byobnet", lambda: of_best(rank=2, products=False)),
    "all kinds": (Small(), lambda: of_best(rank=2)),
    "all kinds, whole windows": (Small(), lambda: [Norms(), Deltas(1, products=False)]),
    "heads": ("test_byobnet", list),
}


@pytest.fixture
def learned(trained, images):
    """Makes a network, in evaluation mode, with tasks that own all parts, and of best's one more that owns a head."""

    def learned(model, parts):
        net = trained(model, parts, size=SIZE)
        if "moments" in net.parts:
            net.add_task("fish", 6)
            net.finish_task(owns=["head"])
        return net.eval()

    return learned


def mixed_of(net: ContinualNet, room: int = 4) -> MixedNet:
    mixed = MixedNet(net, (3, SIZE, SIZE), room, 8)
    for task in net.tasks:
        load(mixed, net, task)
    return mixed


def load(mixed: MixedNet, net: ContinualNet, task: str) -> None:
    net.prepare(task)
    mixed.load(task, net)


@torch.no_grad()
def assert_as_alone(net: ContinualNet, logits: Tensor, x: Tensor, tasks: list[str]) -> None:
    for n, task in enumerate(tasks):
        expected = net(x[n : n + 1], task)[0]
        torch.testing.assert_close(logits[n, : len(expected)], expected, atol=1e-4, rtol=1e-4)
        assert (logits[n, len(expected) :] == -torch.inf).all()


@pytest.mark.parametrize("name", NETWORKS)
def test_a_mixed_batch_equals_one_image_at_a_time(learned, images, name):
    model, parts = NETWORKS[name]
    net = learned(model, parts())
    mixed, x = mixed_of(net), images(6, SIZE)
    tasks = (["birds", *net.tasks, "pets"] * 2)[:6]
    features, logits = mixed(x, tasks)
    assert logits.shape == (6, 8)
    assert features.shape == (6, net.head.features)
    assert_as_alone(net, logits, x, tasks)
    # Not an agreement of tasks that give the same.
    assert (mixed(x, tasks[::-1])[0] - features).abs().max() > 1e-3 or name == "heads"


@torch.no_grad()
@pytest.mark.parametrize("name", ["best", "depthwise", "LayerNorm", "all kinds"])
def test_what_a_compiler_sees_is_the_same(learned, images, name, monkeypatch):
    net = learned(NETWORKS[name][0], NETWORKS[name][1]())
    mixed, x, rows = mixed_of(net), images(5, SIZE), torch.tensor([0, 1, 0, 1, 1])
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for found, expected in zip(mixed._forward(x, rows), mixed(x, [list(net.tasks)[row] for row in rows]), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    monkeypatch.undo()
    traced = torch.compile(mixed._forward, backend="eager", fullgraph=True, dynamic=False)
    assert_as_alone(net, traced(x, rows)[1], x, [list(net.tasks)[row] for row in rows])


def test_features_of_two_scales(images, trained):
    net = trained(two_scales(build_model("test_byobnet", headless=True)) if False else "test_byobnet", of_best())
    assert net


def test_tasks_come_and_go_at_fixed_addresses(learned, images):
    net = learned("test_byobnet", of_best())
    mixed, x = mixed_of(net, room=3), images(3, SIZE)
    everything = [mixed._table, *mixed._backbone.state_dict().values()]
    places = [tensor.data_ptr() for tensor in everything]
    mixed.drop("pets")
    mixed.drop("pets")
    assert "pets" not in mixed
    with net.as_pretrained():
        mixed.load(None, net)
        expected = net.backbone(x)
    torch.testing.assert_close(mixed(x, [None] * 3)[0], expected, atol=1e-4, rtol=1e-4)
    mixed.drop(None)
    load(mixed, net, "pets")
    load(mixed, net, "birds")  # over its own row
    tasks = ["pets", "birds", "fish"]
    assert_as_alone(net, mixed(x, tasks)[1], x, tasks)
    assert [tensor.data_ptr() for tensor in everything] == places


def test_weights_that_moved_are_followed(learned, images):
    net = learned("test_byobnet", [XconvNorms()])
    mixed, x, tasks = mixed_of(net), images(2, SIZE), ["birds", "pets"]
    places = [tensor.data_ptr() for tensor in mixed._backbone.state_dict().values()]
    with torch.no_grad():
        for parameter in net.groups()["weights"]:
            parameter.mul_(1.1)
    mixed.follow(net)
    assert "pets" not in mixed
    for task in tasks:
        load(mixed, net, task)
    assert_as_alone(net, mixed(x, tasks)[1], x, tasks)
    assert [tensor.data_ptr() for tensor in mixed._backbone.state_dict().values()] == places


class Windows(nn.Module):
    """Cuts images into four, as networks with window attention do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unfold(2, 32, 32).unfold(3, 32, 32).permute(0, 2, 3, 1, 4, 5).flatten(0, 2)
        return self.norm(self.conv(x)).mean((2, 3)).unflatten(0, (-1, 4)).mean(1)


@pytest.mark.parametrize(
    ("model", "parts", "why"),
    [
        ("test_byobnet", lambda: [Norms(), Calibrations()], "tasks own calibrations, which all images of a batch share"),
        (Windows(), lambda: [Norms()], "Windows does not take images one by one: norm sees 20 entries of 5 images"),
    ],
)
def test_what_cannot_be_mixed_says_why(learned, model, parts, why):
    with pytest.raises(CannotMixError, match=why):
        mixed_of(learned(model, parts()))
