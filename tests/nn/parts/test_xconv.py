"""Xconv BN on real architectures, recovered means against measured ones, and when they are recovered again."""

import copy

import pytest
import timm
import torch
from timm.layers import BatchNormAct2d, Conv2dSame, StdConv2d, StdConv2dSame
from torch import Tensor, nn
from torch.nn.functional import conv2d, pad
from torch.nn.utils import parametrizations, parametrize

from confitune.errors import ConfituneError
from confitune.nn import ContinualNet, Head, NoBatchNormError, XconvNorms
from confitune.nn.parts.xconv import XconvLayer

# Batch norm -> convolution, written down from timm's source (module names and forward methods), not from a run.
Pairs = dict[str, str]


def resnet18() -> Pairs:
    """A stem, then blocks of two convolutions; the first block of layers 2 to 4 has a 1x1 convolution as shortcut."""
    blocks = [f"layer{layer}.{block}" for layer in (1, 2, 3, 4) for block in (0, 1)]
    pairs = {f"{name}.bn{n}": f"{name}.conv{n}" for name in blocks for n in (1, 2)}
    shortcuts = {f"layer{layer}.0.downsample.1": f"layer{layer}.0.downsample.0" for layer in (2, 3, 4)}
    return {"bn1": "conv1"} | pairs | shortcuts


def efficientnet(repeats: tuple[int, ...]) -> Pairs:
    """Stage 0 is one depthwise-separable block; the others are inverted residuals: expand, depthwise, project."""
    pairs = {"bn1": "conv_stem", "bn2": "conv_head"}
    pairs |= {"blocks.0.0.bn1": "blocks.0.0.conv_dw", "blocks.0.0.bn2": "blocks.0.0.conv_pw"}
    for stage, blocks in enumerate(repeats[1:], 1):
        for block in range(blocks):
            name = f"blocks.{stage}.{block}"
            pairs |= {
                f"{name}.bn1": f"{name}.conv_pw",
                f"{name}.bn2": f"{name}.conv_dw",
                f"{name}.bn3": f"{name}.conv_pwl",
            }
    return pairs


def densenet(blocks: tuple[int, ...]) -> tuple[Pairs, set[str]]:
    """norm1 of a dense layer, the transitions and the last norm read a concatenation; norm2 reads conv1."""
    pairs, concatenated = {"features.norm0": "features.conv0"}, {"features.norm5"}
    for block, layers in enumerate(blocks, 1):
        for layer in range(1, layers + 1):
            name = f"features.denseblock{block}.denselayer{layer}"
            pairs[f"{name}.norm2"] = f"{name}.conv1"
            concatenated.add(f"{name}.norm1")
    concatenated |= {f"features.transition{n}.norm" for n in (1, 2, 3)}
    return pairs, concatenated


EXPECTED: dict[str, tuple[Pairs, set[str]]] = {
    # Layer 1 of resnet18 keeps 64 channels at stride 1: no shortcut.
    "resnet18": (resnet18(), set()),
    "tf_efficientnet_lite0": (efficientnet((1, 2, 2, 3, 3, 4, 1)), set()),
    "densenet121": densenet((6, 12, 24, 16)),
}
HOW_MANY = {
    "resnet18": 20,  # 1 + 2 * 8 + 3
    "tf_efficientnet_lite0": 49,  # 1 + 2 + 3 * 15 + 1
    "densenet121": 59,  # 1 + 58 dense layers
}


def randomise(model: nn.Module, momentum: float) -> nn.Module:
    """Batch norms with statistics and affine parameters that any mix-up would show."""
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = momentum
            with torch.no_grad():
                for tensor, low, high in (
                    (module.weight, 0.5, 1.5),
                    (module.bias, -0.5, 0.5),
                    (module.running_mean, -0.5, 0.5),
                    (module.running_var, 0.5, 2.0),
                ):
                    tensor.uniform_(low, high, generator=generator)
    return model


@pytest.fixture(scope="module", params=list(EXPECTED))
def zoo(request: pytest.FixtureRequest) -> tuple[str, nn.Module]:
    torch.manual_seed(0)
    # Momentum 1: after one training forward a running mean is that batch's measured mean.
    return request.param, randomise(timm.create_model(request.param), momentum=1.0)


def images(batch: int = 2) -> Tensor:
    return torch.rand(batch, 3, 64, 64, generator=torch.Generator().manual_seed(2)) * 2 - 1


def test_attaching_finds_the_pairs_and_changes_no_output(zoo, xconv):
    name, model = zoo
    pairs, concatenated = EXPECTED[name]
    assert len(pairs) == HOW_MANY[name]
    own = copy.deepcopy(model).eval()
    random_state = torch.get_rng_state()
    part = xconv(own)
    assert part.pairs == pairs
    assert part.fallbacks == dict.fromkeys(concatenated, "reads no convolution's output as it is")
    assert set(pairs) | concatenated == {
        name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)
    }
    assert torch.equal(torch.get_rng_state(), random_state)
    for norm, conv in pairs.items():
        layer = part.layers[norm]
        assert (layer.norm, layer.conv) == (own.get_submodule(norm), own.get_submodule(conv))
    with torch.no_grad():
        assert torch.equal(own(images()), model.eval()(images()))
    # The layers are the stock ones: nothing was added, and a checkpoint of the original fits.
    assert [(name, type(module)) for name, module in own.named_modules()] == [
        (name, type(module)) for name, module in model.named_modules()
    ]
    before, after = model.state_dict(), own.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_every_recovered_mean_is_the_measured_one(zoo, xconv):
    _, model = zoo
    own = copy.deepcopy(model).train()
    part = xconv(own)
    with torch.no_grad():
        own(images())
    for name, layer in part.layers.items():
        error = (layer.recovered_mean() - layer.norm.running_mean).abs() / (layer.norm.running_var + 1e-5).sqrt()
        assert error.max() < 1e-4, name


def test_training_is_ordinary_batch_norm_bit_for_bit(xconv):
    torch.manual_seed(0)
    model = randomise(timm.create_model("tf_efficientnet_lite0", num_classes=5), momentum=0.1).train()
    own = copy.deepcopy(model)
    xconv(own)
    outputs = []
    for network in (model, own):
        optimizer = torch.optim.SGD(network.parameters(), 0.01)
        for step in range(2):
            optimizer.zero_grad()
            output = network(images(4) * (step + 1))
            output.square().sum().backward()
            optimizer.step()
        outputs.append(output)
    assert torch.equal(*outputs)
    for (key, ours), stock in zip(own.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(ours.grad, stock.grad), key
    stock_state = model.state_dict()
    for key, ours in own.state_dict().items():
        assert torch.equal(ours, stock_state[key]), key


def test_the_report_says_it_in_words(xconv):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4))
    assert xconv(model, means="phase").report() == (
        "1 of 2 batch norms recover their mean (phase means)\n"
        "  1  after 0\n"
        "  3  keeps its mean: reads no convolution's output as it is"
    )


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "convnext_atto"])
def test_networks_without_batch_norm_are_refused(name):
    with pytest.raises(NoBatchNormError, match=r"has no batch norm .*Choose a network with batch norm"):
        ContinualNet(timm.create_model(name), [XconvNorms(), Head()])


def test_unknown_options_are_refused():
    with pytest.raises(ConfituneError, match="means='windows' is not known; choose 'window' or 'phase'"):
        XconvNorms(means="windows")
    with pytest.raises(ConfituneError, match="statistics='final' is not known; choose 'running' or 'pass'"):
        XconvNorms(statistics="final")


def test_a_network_is_attached_to_once(xconv):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    xconv(model)
    with pytest.raises(ConfituneError, match="keeps input means already: make one ContinualNet"):
        xconv(model)


# ---- one layer -------------------------------------------------------------------------------------------------------


class Leaky(nn.BatchNorm2d):
    """A user's own batch norm."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.leaky_relu(super().forward(x), 0.2)


LAYERS = {
    "plain": lambda: (nn.Conv2d(3, 5, 3, padding=1, groups=1), nn.BatchNorm2d(5)),
    "same": lambda: (Conv2dSame(3, 5, 3, stride=2, bias=True), nn.BatchNorm2d(5)),
    "act": lambda: (nn.Conv2d(3, 5, 3), BatchNormAct2d(5)),
    "own norm": lambda: (nn.Conv2d(3, 5, 3), Leaky(5)),
}


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_recovery_follows_weights_that_move(make, xconv):
    torch.manual_seed(0)
    conv, norm = make()
    model, x = nn.Sequential(conv, norm).train(), torch.rand(4, 3, 9, 9)
    layer = xconv(model).layers["1"]
    with pytest.raises(ConfituneError, match="no input statistics yet"):
        layer.recovered_mean()
    model(x)
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.add_(torch.rand_like(parameter))
    torch.testing.assert_close(layer.recovered_mean(), conv(x).mean((0, 2, 3)))


class Rectified(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.relu())


class Scaled(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class PaddedWithOnes(nn.Conv2d):
    """The amount agrees with what it says, the value does not."""

    def forward(self, x: Tensor) -> Tensor:
        return conv2d(pad(x, (1, 1, 1, 1), value=1.0), self.weight, self.bias)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def doubled_bias(conv: nn.Module) -> nn.Module:
    return parametrize.register_parametrization(conv, "bias", Doubled())


@pytest.mark.parametrize(
    "conv",
    [
        Rectified(3, 5, 3),
        Scaled(3, 5, 3),
        PaddedWithOnes(3, 5, 3, padding=1),
        nn.Conv2d(3, 5, 3, padding=1, padding_mode="reflect"),
        StdConv2d(3, 5, 3, padding=1),
        StdConv2dSame(3, 5, 3, stride=2),
        parametrizations.weight_norm(nn.Conv2d(3, 5, 3)),
        parametrizations.spectral_norm(nn.Conv2d(3, 5, 3)),
        doubled_bias(nn.Conv2d(3, 5, 3)),
        nn.Linear(3, 5),
    ],
    ids=[
        "rectified",
        "scaled",
        "ones",
        "reflect",
        "standardised",
        "same",
        "weight norm",
        "spectral norm",
        "bias",
        "linear",
    ],
)
def test_a_norm_after_anything_but_a_plain_convolution_keeps_its_mean(conv):
    norm = nn.BatchNorm1d(5) if isinstance(conv, nn.Linear) else nn.BatchNorm2d(5)
    tail = [] if isinstance(conv, nn.Linear) else [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    net = ContinualNet(nn.Sequential(conv, norm, *tail), [XconvNorms(), Head()])
    assert net.parts["norms"].fallbacks == {"1": "follows 0, which is no plain convolution"}
    net.add_task("a", 2)
    x = torch.rand(4, 3) if isinstance(conv, nn.Linear) else torch.rand(4, 3, 9, 9)
    net.train()(x)
    running = norm.running_mean.clone()
    net.finish_task()
    assert "1.running_mean" in net.task_state_dict("a")
    net.eval()(x)
    assert torch.equal(norm.running_mean, running)


def test_a_norm_without_running_statistics_has_nothing_to_recover(xconv):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False))
    assert xconv(model).fallbacks == {"1": "keeps no running statistics"}


def test_two_norms_that_read_one_convolution_share_its_statistics(xconv):
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn, self.other = nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return self.bn(y) + self.other(y)

    torch.manual_seed(0)
    model, x = Two().train(), torch.rand(2, 3, 6, 6)
    part = xconv(model)
    model(x)
    assert part.layers["bn"].inputs is part.layers["other"].inputs
    assert [inputs.batches for inputs in part.input_means] == [1]
    torch.testing.assert_close(part.layers["other"].recovered_mean(), model.conv(x).mean((0, 2, 3)))


class Block(nn.Module):
    """A residual block's two readers of one tensor, of which the shortcut is registered first and runs last."""

    def __init__(self, stride: int, in_place: bool = False) -> None:
        super().__init__()
        self.shortcut, self.shortcut_bn = nn.Conv2d(3, 5, 1, stride, bias=False), nn.BatchNorm2d(5)
        self.conv, self.bn = nn.Conv2d(3, 5, 3, 2, padding=1), nn.BatchNorm2d(5)
        self.in_place = in_place

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + 0
        y = self.bn(self.conv(x))
        if self.in_place:
            x.relu_()
        return y, self.shortcut_bn(self.shortcut(x))


@pytest.mark.parametrize("means", ["window", "phase"])
@pytest.mark.parametrize(("stride", "in_place"), [(2, False), (1, False), (2, True)])
def test_two_convolutions_that_read_one_tensor_share_its_statistics(xconv, means, stride, in_place):
    torch.manual_seed(0)
    model, x = Block(stride, in_place).train(), torch.randn(2, 3, 8, 8)
    part = xconv(model, means=means)
    assert part.pairs == {"shortcut_bn": "shortcut", "bn": "conv"}
    model(x)
    assert len(part.inputs) == (2 if in_place else 1)
    # Phases of one stride are kept once; 3x3 windows, and those of the 1x1 besides.
    numbers = sum(table.numel() for kept in part.input_means for table in kept.tables)
    own = {"window": 27, "phase": 12}[means]
    shortcut = 3 if means == "window" or stride == 1 else 12
    assert numbers == own + (0 if means == "phase" and stride == 2 and not in_place else shortcut)
    # 8x8 at stride 2: the phase means of a 3x3 with padding 1 are not exact, those of a 1x1 are.
    after = x.relu() if in_place else x
    recovered = {name: layer.recovered_mean() for name, layer in part.layers.items()}
    torch.testing.assert_close(recovered["shortcut_bn"], model.shortcut(after).mean((0, 2, 3)))
    if means == "window":
        torch.testing.assert_close(recovered["bn"], model.conv(x).mean((0, 2, 3)))


# ---- in a network ----------------------------------------------------------------------------------------------------


@pytest.fixture
def net(backbone) -> ContinualNet:
    torch.manual_seed(0)
    return ContinualNet(backbone(), [XconvNorms(), Head()])


def layers(net: ContinualNet) -> dict[str, XconvLayer]:
    return net.parts["norms"].layers


def test_an_old_task_is_normalised_by_what_its_data_would_measure_today():
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
    net = ContinualNet(nn.Sequential(conv, norm, nn.AdaptiveAvgPool2d(1), nn.Flatten()), [XconvNorms(), Head()])
    net.add_task("old", 2)
    x = torch.rand(6, 3, 8, 8)
    net.train()(x)
    net.finish_task()
    net.add_task("new", 2)
    with torch.no_grad():
        conv.weight.normal_()
        conv.bias.normal_()
    stale = norm.running_mean.clone()
    net.eval()(x, "old")
    today = conv(x).mean((0, 2, 3))
    torch.testing.assert_close(norm.running_mean, today)
    assert (stale - today).abs().max() > 0.1


def test_an_unfinished_task_is_evaluated_with_the_ordinary_running_mean(net, backbone):
    stock = backbone().train()
    stock.load_state_dict(net.backbone.state_dict())
    net.add_task("a", 2)
    x = torch.rand(4, 3, 8, 8)
    with torch.no_grad():
        net.train()(x)
        stock(x)
        assert torch.equal(net.eval()(x), net.head(stock.eval()(x)))
        running = net.backbone.bn.running_mean.clone()
        net.finish_task()
        net(x)
    # One step of momentum 0.1 lags; finishing recovers the whole mean.
    assert not torch.allclose(net.backbone.bn.running_mean, running)
    torch.testing.assert_close(net.backbone.bn.running_mean, running * 10)


@pytest.fixture
def recoveries(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for every mean that is recovered."""
    calls: list[None] = []
    original = XconvLayer.recovered_mean

    def spy(self: XconvLayer) -> Tensor:
        calls.append(None)
        return original(self)

    monkeypatch.setattr(XconvLayer, "recovered_mean", spy)
    return calls


def test_means_are_recovered_once_for_given_weights(net, learn, recoveries):
    learn(net, "a", 2)
    net.eval()
    x = torch.rand(2, 3, 8, 8)

    def evaluate() -> int:
        recoveries.clear()
        net(x)
        return len(recoveries)

    assert evaluate() == 0  # finishing the task has made it ready
    with torch.no_grad():
        net.backbone.conv.weight.mul_(1.01)
    assert evaluate() == 3
    assert evaluate() == 0
    # Neither affine parameters nor the head enter a recovered mean.
    with torch.no_grad():
        net.backbone.bn.weight.mul_(1.01)
        net.head.linear.weight.mul_(1.01)
    assert evaluate() == 0
    # What a graph replay does: memory changes and no tensor version tells.
    net.backbone.conv.weight.data.mul_(1.01)
    assert evaluate() == 0
    net.weights_moved()
    assert evaluate() == 3
    assert torch.equal(net.backbone.bn.running_mean, layers(net)["bn"].recovered_mean())
    net.set_task("a")
    assert evaluate() == 0
    learn(net, "b", 2, finish=False)
    assert len(recoveries) == 0  # an unfinished task has nothing to recover
    net.eval()
    assert evaluate() == 0
    net.set_task("a")
    assert evaluate() == 3
    # There and back without a use: the live means are the other task's.
    net.set_task("b")
    net.set_task("a")
    assert evaluate() == 3
    assert torch.equal(net.backbone.bn.running_mean, layers(net)["bn"].recovered_mean())


def test_an_optimizer_step_and_a_loaded_state_count_as_moves(net, learn, recoveries):
    learn(net, "a", 2)
    x = torch.rand(2, 3, 8, 8)
    net.eval()
    optimizer = torch.optim.SGD(net.groups()["weights"], 0.1)
    net(x).sum().backward()
    recoveries.clear()
    optimizer.step()
    net(x)
    assert len(recoveries) == 3
    net.load_state_dict(net.state_dict())
    net(x)
    assert len(recoveries) == 6
    net.double()
    net(x.double())
    assert len(recoveries) == 9
    assert net.backbone.bn.running_mean.dtype == net.tasks["a"].row.dtype == torch.float64


def test_norms_without_affine_parameters_store_what_they_have(learn):
    torch.manual_seed(0)
    backbone = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    net = ContinualNet(nn.Sequential(*backbone), [XconvNorms(), Head()])
    x = learn(net, "a", 2, seed=1)[0]
    assert net.storage()["a"].beside_head == 4 + 27  # variance, window means
    learn(net, "b", 2, seed=2)
    before = net.eval()(x, "a").detach()
    with torch.no_grad():
        net.backbone[0].bias.add_(3.0)  # a shift of all outputs is a shift of their mean, and recovered as one
    torch.testing.assert_close(net(x, "a"), before)


@pytest.mark.parametrize(("options", "momentum"), [({}, 0.1), ({"momentum": 0.3}, 0.3)])
def test_momentum_is_the_papers_unless_told_otherwise(backbone, options, momentum):
    model = backbone()
    model.bn.momentum = 0.01
    net = ContinualNet(model, [XconvNorms(), Head()], **options)
    assert net.backbone.bn.momentum == momentum
    # The input means move with the norms.
    assert [inputs.momentum for inputs in net.parts["norms"].input_means] == [momentum] * 2


def test_a_task_is_finished_only_after_training(net):
    net.add_task("a", 2)
    for use in (lambda: None, lambda: net.eval()(torch.rand(2, 3, 8, 8))):
        use()
        with pytest.raises(ConfituneError, match="task 'a' has seen no training batch: train it before finishing it"):
            net.finish_task()
    assert not net.tasks["a"].finished


def test_a_pass_needs_batches(backbone):
    net = ContinualNet(backbone(), [XconvNorms(statistics="pass"), Head()])
    net.add_task("a", 2)
    net.train()(torch.rand(2, 3, 8, 8))
    with pytest.raises(ConfituneError, match=r"train it and measure\(batches\) of its images before finishing it"):
        net.finish_task()
    assert not net.tasks["a"].finished
    net.measure([torch.rand(2, 3, 8, 8)])
    net.finish_task()
    assert net.tasks["a"].finished


def test_another_image_size_is_refused_for_finished_tasks(net, learn):
    learn(net, "a", 2, size=8)
    net.eval()(torch.rand(2, 3, 8, 8))
    with pytest.raises(ConfituneError, match=r"task 'a' was trained on 8x8 images, these are 8x10.*resize the images"):
        net(torch.rand(2, 3, 8, 10))
    with pytest.raises(ConfituneError, match="trained on 8x8"):
        net(torch.rand(2, 3, 16, 16), torch.zeros(2, dtype=torch.long))
    # Another task may have another size; an unfinished one is not bound yet. The size is the task's own, whatever was
    # trained last.
    learn(net, "b", 2, size=10, finish=False)
    learn(net, "c", 2, size=14, finish=False)
    net.eval()(torch.rand(2, 3, 8, 8))
    net.set_task("b")
    net.finish_task()
    assert net.tasks["b"].image_size == (10, 10)
    assert net(torch.rand(2, 3, 10, 10)).shape == (2, 2)
    with pytest.raises(ConfituneError, match="task 'b' was trained on 10x10"):
        net(torch.rand(2, 3, 8, 8))
