"""A folded task gives the network's logits, of stock layers alone, and leaves the network as it was."""

import copy
import pickle

import pytest
import torch
from timm.layers import BatchNormAct2d, ScaledStdConv2d
from torch import Tensor, nn

from confitune.deploy.folding import folded
from confitune.errors import ConfituneError
from confitune.methods.ccll import Calibrations
from confitune.nn import ContinualNet, Deltas, Norms, XconvNorms


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
def test_known_networks_agree(trained, images, model, means):
    net = trained(model, [XconvNorms(means)])
    for task, classes in (("pets", 3), ("birds", 4)):
        plain = folded(net, task)
        assert plain(images()).shape == (10, classes)
        assert difference(net, plain, task, images()) < 1e-4
        assert not any(part.training for part in plain.modules())
        assert not any(parameter.requires_grad for parameter in plain.parameters())
        assert {parameter.dtype for parameter in plain.parameters()} == {torch.float32}
    # Not an agreement of networks that give the same to everything.
    assert (plain(images()) - plain(images(seed=8))).abs().max() > 0.01


def test_norms_have_the_recovered_mean(trained):
    net = trained("resnet18")
    plain = folded(net, "pets").get_submodule("backbone")
    net.set_task("pets")
    for name in ("bn1", "layer2.0.downsample.1", "layer3.1.bn2"):
        mean, stored = net.parts["norms"].layers[name].recovered_mean(), net.backbone.get_submodule(name).running_mean
        torch.testing.assert_close(plain.get_submodule(name).running_mean, mean)
        assert (mean - stored).abs().max() > 0.01, name  # of before the weights moved


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


# ---- whatever a network is made of ----------------------------------------------------------------------------------


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
    "model",
    [
        Chain(),
        HeldInAList(),
        Chain(conv2=ScaledStdConv2d(8, 8, 3, padding=1)),  # computes its weight on the way
        Chain(bn2=nn.BatchNorm2d(8, affine=False)),
        Chain(bn2=nn.BatchNorm2d(8, track_running_stats=False)),
        Chain(bn=BatchNormAct2d(8, drop_layer=nn.Dropout, act_layer=nn.SiLU)),
        nn.Sequential(nn.Conv2d(3, 8, 8), nn.Flatten(), nn.Linear(8, 6, bias=False), nn.BatchNorm1d(6)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_layers_there_are(trained, images, model):
    net = trained(copy.deepcopy(model), size=8, example_input=images(2, 8))
    for task in net.tasks:
        plain = folded(net, task)
        assert not any(type(part).__module__.startswith("confitune") for part in plain.modules())
        assert difference(net, plain, task, images(6, 8)) < 1e-5


def test_a_hook_of_the_users_own_stays(trained, images):
    net = trained(Chain(), size=8)
    net.backbone.bn.register_forward_hook(lambda module, args, output: output + 1)
    assert difference(net, folded(net, "pets"), "pets", images(6, 8)) < 1e-5


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
def test_networks_without_recovery_agree(trained, images, parts):
    net = trained("resnet18", parts())
    for task in net.tasks:
        plain = folded(net, task)
        assert difference(net, plain, task, images()) < 1e-4


def test_calibrated_layers_agree(trained, images):
    net = trained(Chain(), [Norms(), Calibrations()], size=8)
    assert difference(net, folded(net, "pets"), "pets", images(6, 8)) < 1e-5
