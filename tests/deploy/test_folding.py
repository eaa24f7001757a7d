"""A folded task gives the network's logits, of stock layers alone, and leaves the network as it was."""

import copy
import pickle

import pytest
import timm
import torch
from timm.layers import BatchNormAct2d, ScaledStdConv2d
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from confitune.deploy.folding import folded
from confitune.errors import ConfituneError
from confitune.nn import Calibrations, ContinualNet, Deltas, Norms, XconvNorms


def norms_of(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.modules() if isinstance(part, _BatchNorm)]


@torch.no_grad()
def difference(net: ContinualNet, plain: nn.Module, task: str, x: Tensor) -> float:
    return (plain(x) - net.eval()(x, task)).abs().max().item()


@pytest.mark.parametrize(
    ("model", "means"),
    [
        ("resnet18", "window"),
        ("resnet18", "phase"),
        ("tf_efficientnet_lite0", "window"),
        ("tf_efficientnet_lite0", "phase"),
        ("torchvision:resnet18", "phase"),
        ("torchvision:mobilenet_v2", "window"),
    ],
)
def test_known_networks_fold_completely_and_agree(trained, images, model, means):
    net = trained(model, [XconvNorms(means)])
    for task, classes in (("pets", 3), ("birds", 4)):
        plain = folded(net, task)
        assert plain(images()).shape == (10, classes)
        assert difference(net, plain, task, images()) < 1e-4
        assert norms_of(plain) == []
        assert not any(part.training for part in plain.modules())
        assert not any(parameter.requires_grad for parameter in plain.parameters())
        assert {parameter.dtype for parameter in plain.parameters()} == {torch.float32}
    # Not an agreement of networks that give the same to everything.
    assert (plain(images()) - plain(images(seed=8))).abs().max() > 0.01


@pytest.mark.parametrize("means", ["window", "phase"])
def test_a_convolution_takes_over_scale_and_recovered_mean(trained, means):
    net = trained("resnet18", [XconvNorms(means)])
    plain = folded(net, "pets").get_submodule("backbone")
    stored = net.task_state_dict("pets")
    net.set_task("pets")
    shortcut = ("layer2.0.downsample.0", "layer2.0.downsample.1")
    for conv, norm in (("conv1", "bn1"), shortcut, ("layer3.1.conv2", "layer3.1.bn2")):
        layer = net.backbone.get_submodule(norm)
        mean = net.parts["norms"].layers[norm].recovered_mean()
        scale = stored[f"{norm}.weight"] / (stored[f"{norm}.running_var"] + layer.eps).sqrt()
        weight = net.backbone.get_submodule(conv).weight * scale[:, None, None, None]
        torch.testing.assert_close(plain.get_submodule(conv).weight, weight.detach())
        torch.testing.assert_close(plain.get_submodule(conv).bias, stored[f"{norm}.bias"] - mean * scale)
        # The mean of before the weights moved would have been another one.
        assert ((mean - layer.running_mean) * scale).abs().max() > 0.05, norm


def test_timms_layer_leaves_its_activation(trained):
    plain = folded(trained("tf_efficientnet_lite0"), "pets").get_submodule("backbone")
    assert type(plain.bn1) is nn.ReLU6
    assert type(plain.blocks[1][0].bn3) is nn.Identity


def test_a_folded_task_needs_nothing_of_ours(trained, images):
    plain = folded(trained("resnet18"), "pets")
    assert b"confitune" not in pickle.dumps(plain)
    assert not any(part._forward_pre_hooks for part in plain.modules())
    again = pickle.loads(pickle.dumps(plain))
    assert torch.equal(again(images()), plain(images()))


# ---- the network it came from ----------------------------------------------------------------------------------------


def same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize("training", [True, False])
def test_folding_leaves_the_network_bit_for_bit(trained, images, training):
    net = trained("resnet18")
    net.add_task("fish", 2)
    net.train()
    for seed in range(2):
        net(images(4, seed=seed))  # statistics of a task that is still being trained, not yet brought together
    net.train(training)
    before, modes = copy.deepcopy(net.state_dict()), [module.training for module in net.modules()]
    random = torch.get_rng_state()
    plain = folded(net, "pets")
    assert same(net.state_dict(), before)
    assert [module.training for module in net.modules()] == modes
    assert net.current_task == "fish"
    assert torch.equal(torch.get_rng_state(), random)
    assert not {p.data_ptr() for p in plain.parameters()} & {p.data_ptr() for p in net.parameters()}


def test_the_task_in_training_folds_as_it_stands(trained, images):
    net = trained("resnet18")
    net.add_task("fish", 2)
    net.train()(images(4))
    plain = folded(net, "fish")
    assert norms_of(plain) == []
    assert difference(net, plain, "fish", images()) < 1e-4


def test_other_number_formats_become_float32(trained, images):
    net = trained("resnet18").double()
    plain = folded(net, "pets")
    assert plain(images()).dtype == torch.float32
    with torch.no_grad():
        torch.testing.assert_close(plain(images()), net.eval()(images().double(), "pets").float(), atol=1e-4, rtol=0)


def test_an_unknown_task_is_named(trained):
    with pytest.raises(ConfituneError, match="no task 'cars'; tasks: 'pets', 'birds'"):
        folded(trained(Chain()), "cars")


# ---- batch norms that no convolution can take over -------------------------------------------------------------------


class Chain(nn.Module):
    """Two pairs, one after the other; what is special is put between or in place of its layers."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.conv(x)).relu()
        return self.bn2(self.conv2(x)).relu().mean((2, 3))


class PreActivation(Chain):
    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return (x + self.conv2(self.bn(x).relu())).mean((2, 3)) + self.bn2(x).mean((2, 3))


class OneConvolutionTwoNorms(Chain):
    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return (self.bn(x).relu() + self.bn2(x).sigmoid()).mean((2, 3))


class OutputUsedTwice(Chain):
    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        x = self.bn(x).relu() + 0.1 * x
        return self.bn2(self.conv2(x)).relu().mean((2, 3))


class CalledTwice(Chain):
    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.conv(x)).relu()
        x = self.bn2(self.conv2(x)).relu()
        return self.conv2(x).mean((2, 3))


class WeightUsedTwice(Chain):
    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.conv(x)).relu()
        x = self.bn2(self.conv2(x)).relu()
        return nn.functional.conv2d(x, self.conv2.weight).mean((2, 3))


class TrainsOtherwise(Chain):
    """In evaluation the convolution's output goes past its norm, too."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        x = self.bn(x).relu() + (0 if self.training else x)
        return self.bn2(self.conv2(x)).relu().mean((2, 3))


class Doubling(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class HeldInAList(Chain):
    """Calls its layers by references that are no registered children."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [self.conv, self.bn, nn.ReLU(), self.conv2, self.bn2]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean((2, 3))


@pytest.mark.parametrize(
    ("model", "kept"),
    [
        (Chain(), 0),
        (PreActivation(), 2),
        (OneConvolutionTwoNorms(), 2),
        (OutputUsedTwice(), 1),
        (CalledTwice(), 1),
        (WeightUsedTwice(), 1),
        (TrainsOtherwise(), 1),
        (HeldInAList(), 0),
        (Chain(bn=Doubling(8)), 1),
        (Chain(conv2=ScaledStdConv2d(8, 8, 3, padding=1)), 1),  # computes its weight on the way
        (Chain(bn2=nn.BatchNorm2d(8, affine=False)), 0),
        (Chain(bn2=nn.BatchNorm2d(8, track_running_stats=False)), 1),
        (Chain(bn=BatchNormAct2d(8, drop_layer=nn.Dropout, act_layer=nn.SiLU)), 0),
        (nn.Sequential(nn.Conv2d(3, 8, 8), nn.Flatten(), nn.Linear(8, 6, bias=False), nn.BatchNorm1d(6)), 0),
        (nn.Sequential(nn.Conv2d(3, 8, 8), nn.Flatten(), nn.Linear(8, 6), nn.BatchNorm1d(6, affine=False)), 0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_norm_is_folded_only_where_that_changes_nothing(trained, images, model, kept):
    net = trained(copy.deepcopy(model), size=8, example_input=images(2, 8))
    for task in net.tasks:
        plain = folded(net, task)
        assert len(norms_of(plain)) == kept
        assert not any(type(part).__module__.startswith("confitune") for part in plain.modules())
        assert difference(net, plain, task, images(6, 8)) < 1e-5


def test_a_norm_that_is_listened_to_stays(trained, images):
    net = trained(Chain(), size=8)
    net.backbone.bn.register_forward_hook(lambda module, args, output: output + 1)
    plain = folded(net, "pets")
    assert len(norms_of(plain)) == 1
    assert difference(net, plain, "pets", images(6, 8)) < 1e-5


def test_a_pre_activation_network_of_timm_keeps_norms_after_additions(trained, images):
    net = trained("resnetv2_18")
    plain = folded(net, "pets")
    assert len(norms_of(plain)) == len(net.parts["norms"].fallbacks) == 9
    assert {type(norm) for norm in norms_of(plain)} == {BatchNormAct2d}
    assert difference(net, plain, "pets", images()) < 1e-4


@pytest.mark.parametrize(
    "parts",
    [
        lambda: [Norms()],
        lambda: [],
        lambda: [Norms(affine=False, moments="pretrained")],
        lambda: [Norms(keep_pretrained=True), Deltas(2)],
    ],
    ids=["own norms", "shared norms", "pre-trained norms", "norms and deltas"],
)
def test_networks_without_recovery_fold_by_what_flows(trained, images, parts):
    net = trained("resnet18", parts())
    for task in net.tasks:
        plain = folded(net, task)
        assert norms_of(plain) == []
        assert difference(net, plain, task, images()) < 1e-4


def test_calibrated_layers_stay_as_they_are(trained, images):
    net = trained(Chain(), [Norms(), Calibrations()], size=8)
    plain = folded(net, "pets")
    assert [type(norm) for norm in norms_of(plain)] == [type(net.backbone.bn)] * 2
    assert difference(net, plain, "pets", images(6, 8)) < 1e-5


# ---- input that cannot be guessed ------------------------------------------------------------------------------------


def test_a_network_built_for_other_channels_folds(trained, images):
    model = timm.create_model("test_byobnet", in_chans=2)
    net = trained(model, channels=2, example_input=images(2, channels=2))
    plain = folded(net, "pets")
    assert len(norms_of(plain)) == len(net.parts["norms"].fallbacks)
    assert difference(net, plain, "pets", images(channels=2)) < 1e-4


class Unfolding(Chain):
    """Takes images of six channels, half of them for its only convolutions."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, :3] * x[:, 3:])


def test_where_no_input_can_be_guessed_norms_stay_and_are_stock_ones(trained, images):
    net = trained(Unfolding(), size=8, channels=6, example_input=images(2, 8, channels=6))
    plain = folded(net, "pets")
    assert [type(norm) for norm in norms_of(plain)] == [nn.BatchNorm2d] * 2
    assert difference(net, plain, "pets", images(6, 8, channels=6)) < 1e-5
