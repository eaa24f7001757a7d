"""Conversion of real architectures: what is paired with what, and that nothing else changes."""

import copy

import pytest
import timm
import torch
from torch import Tensor, nn

from confitune.errors import ConfituneError
from confitune.nn import ContinualNet, NoBatchNormError, XconvBatchNorm2d, convert_xconv_bn
from confitune.nn.xconv import TaskNorm, XconvBatchNormAct2d, XconvNorm

# Batch norm -> convolution, written down from timm's source (module names and forward methods), not from a run.
Pairs = dict[str, str]


def resnet(layers: tuple[int, ...], convs: int, with_shortcut: tuple[int, ...]) -> Pairs:
    """A stem, then blocks of `convs` convolutions; the first block of some layers has a 1x1 convolution as shortcut."""
    pairs = {"bn1": "conv1"}
    for layer, blocks in enumerate(layers, 1):
        for block in range(blocks):
            name = f"layer{layer}.{block}"
            pairs |= {f"{name}.bn{n}": f"{name}.conv{n}" for n in range(1, convs + 1)}
        if layer in with_shortcut:
            pairs[f"layer{layer}.0.downsample.1"] = f"layer{layer}.0.downsample.0"
    return pairs


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


def regnet(depths: tuple[int, ...]) -> Pairs:
    """Every convolution sits with its norm in a ConvNormAct; the squeeze-excitation has convolutions without norm."""
    pairs = {"stem.bn": "stem.conv"}
    for stage, blocks in enumerate(depths, 1):
        for block in range(1, blocks + 1):
            parts = ["conv1", "conv2", "conv3"] + (["downsample"] if block == 1 else [])
            pairs |= {f"s{stage}.b{block}.{part}.bn": f"s{stage}.b{block}.{part}.conv" for part in parts}
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


def vgg(plan: str) -> Pairs:
    """One Sequential: a convolution is followed by norm and ReLU, a pooling 'M' stands alone."""
    pairs, place = {}, 0
    for kind in plan:
        if kind == "C":
            pairs[f"features.{place + 1}"] = f"features.{place}"
        place += 3 if kind == "C" else 1
    return pairs


EXPECTED: dict[str, tuple[Pairs, set[str]]] = {
    # Layer 1 of resnet18 keeps 64 channels at stride 1: no shortcut; resnet50's goes from 64 to 256 and has one.
    "resnet18": (resnet((2, 2, 2, 2), 2, with_shortcut=(2, 3, 4)), set()),
    "resnet50": (resnet((3, 4, 6, 3), 3, with_shortcut=(1, 2, 3, 4)), set()),
    "mobilenetv2_100": (efficientnet((1, 2, 3, 4, 3, 3, 1)), set()),
    "tf_efficientnet_lite0": (efficientnet((1, 2, 2, 3, 3, 4, 1)), set()),
    "regnety_004": (regnet((1, 3, 6, 6)), set()),
    "densenet121": densenet((6, 12, 24, 16)),
    "vgg11_bn": (vgg("CMCMCCMCCMCCM"), set()),
}
HOW_MANY = {
    "resnet18": 20,  # 1 + 2 * 8 + 3
    "resnet50": 53,  # 1 + 3 * 16 + 4
    "mobilenetv2_100": 52,  # 1 + 2 + 3 * 16 + 1
    "tf_efficientnet_lite0": 49,  # 1 + 2 + 3 * 15 + 1
    "regnety_004": 53,  # 1 + 3 * 16 + 4
    "densenet121": 59,  # 1 + 58 dense layers
    "vgg11_bn": 8,
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


def test_conversion_finds_the_pairs_and_changes_no_output(zoo):
    name, model = zoo
    pairs, concatenated = EXPECTED[name]
    assert len(pairs) == HOW_MANY[name]
    converted = copy.deepcopy(model).eval()
    random_state = torch.get_rng_state()
    report = convert_xconv_bn(converted)
    assert report.pairs == pairs
    assert report.fallbacks == dict.fromkeys(concatenated, "reads the output of cat")
    assert set(pairs) | concatenated == {
        name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)
    }
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not any(module.training for module in converted.modules())
    for norm, conv in pairs.items():
        assert converted.get_submodule(norm).conv is converted.get_submodule(conv)
    with torch.no_grad():
        assert torch.equal(converted(images()), model.eval()(images()))
    before, after = model.state_dict(), converted.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)
    added = {name for name, _ in converted.named_modules()} - {name for name, _ in model.named_modules()}
    assert {name.rpartition(".")[2] for name in added} == {"input_statistics"}


def test_every_recovered_mean_is_the_measured_one(zoo):
    _, model = zoo
    converted = copy.deepcopy(model).train()
    report = convert_xconv_bn(converted)
    with torch.no_grad():
        converted(images())
    for norm_name in report.pairs:
        norm = converted.get_submodule(norm_name)
        error = (norm.recovered_mean() - norm.running_mean).abs() / (norm.running_var + norm.eps).sqrt()
        assert error.max() < 1e-4, norm_name


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv2_100", "regnety_004", "densenet121"])
def test_training_is_ordinary_batch_norm_bit_for_bit(name):
    torch.manual_seed(0)
    model = randomise(timm.create_model(name, num_classes=5), momentum=0.1).train()
    converted = copy.deepcopy(model)
    convert_xconv_bn(converted)
    outputs = []
    for network in (model, converted):
        optimizer = torch.optim.SGD(network.parameters(), 0.01)
        for step in range(2):
            optimizer.zero_grad()
            output = network(images(4) * (step + 1))
            output.square().sum().backward()
            optimizer.step()
        outputs.append(output)
    assert torch.equal(*outputs)
    for (key, ours), stock in zip(converted.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(ours.grad, stock.grad), key
    stock_state = model.state_dict()
    for key, ours in converted.state_dict().items():
        assert torch.equal(ours, stock_state[key]), key


def test_layers_become_subclasses_of_what_they_were():
    model = nn.Sequential(timm.create_model("mobilenetv2_100").blocks[0][0].conv_dw, nn.BatchNorm2d(32))
    convert_xconv_bn(model)
    assert type(model[1]) is XconvBatchNorm2d
    mobile = timm.create_model("mobilenetv2_100", num_classes=0)
    convert_xconv_bn(mobile)
    assert type(mobile.bn1) is XconvBatchNormAct2d
    assert isinstance(mobile.bn1, timm.layers.BatchNormAct2d)


def test_resnet_shortcuts_share_where_they_read_the_same_pixels():
    sharing = {}
    for name in ("resnet18", "resnet50"):
        report = convert_xconv_bn(timm.create_model(name))
        sharing[name] = {layer.conv: layer.shares_with for layer in report.layers if layer.shares_with}
    assert sharing["resnet18"] == {f"layer{n}.0.downsample.0": f"layer{n}.0.conv1" for n in (2, 3, 4)}
    # From layer 2 on, conv1 (1x1, stride 1) reads every pixel and the shortcut (1x1, stride 2) a quarter of them.
    assert sharing["resnet50"] == {"layer1.0.downsample.0": "layer1.0.conv1"}


def test_the_report_says_it_in_words():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4))
    assert str(convert_xconv_bn(model, means="phase")) == (
        "1 of 2 batch norms recover their mean (phase means)\n"
        "  1  after 0\n"
        "  3  plain task-specific BN: reads the output of relu"
    )
    shared = str(convert_xconv_bn(timm.create_model("resnet18")))
    assert "layer2.0.downsample.1  after layer2.0.downsample.0 (statistics shared with layer2.0.conv1)" in shared


def test_networks_without_batch_norm_are_refused_with_what_they_have():
    vit = timm.create_model("vit_tiny_patch16_224")
    with pytest.raises(NoBatchNormError, match=r"VisionTransformer has no batch norm \(it normalises with LayerNorm\)"):
        convert_xconv_bn(vit)
    with pytest.raises(NoBatchNormError, match="LayerNorm"):
        ContinualNet(vit)
    group = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(NoBatchNormError, match=r"normalises with GroupNorm.*Choose a network with batch norm"):
        ContinualNet(group, norm="task")
    with pytest.raises(NoBatchNormError, match="no normalisation layer"):
        convert_xconv_bn(nn.Sequential(nn.Conv2d(3, 4, 3)))
    # Sharing everything needs no batch norm.
    assert ContinualNet(group, norm="shared").numbers_per_task == 0


def test_unknown_options_are_refused():
    def backbone() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    for build in (convert_xconv_bn, ContinualNet):
        with pytest.raises(ConfituneError, match="means='windows' is not known; choose 'window' or 'phase'"):
            build(backbone(), means="windows")
        with pytest.raises(ConfituneError, match="statistics='final' is not known; choose 'running' or 'pass'"):
            build(backbone(), statistics="final")
    with pytest.raises(
        ConfituneError, match="norm='bn' is not known; choose one of 'xconv', 'task', 'shared', 'frozen', 'calibrated'"
    ):
        ContinualNet(backbone(), norm="bn")


@pytest.mark.parametrize("norm", ["xconv", "task", "shared"])
def test_a_network_is_converted_once(norm):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    convert_xconv_bn(model)
    kinds = [type(module) for module in model]
    with pytest.raises(ConfituneError, match=r"converted already \(1 keeps its state per task\)"):
        convert_xconv_bn(model)
    with pytest.raises(ConfituneError, match="converted already"):
        ContinualNet(model, norm=norm)
    assert [type(module) for module in model] == kinds


def test_a_converted_checkpoint_goes_in_and_out_of_the_original(tmp_path):
    torch.manual_seed(0)
    original = randomise(timm.create_model("resnet18", num_classes=4), momentum=0.1)
    converted = timm.create_model("resnet18", num_classes=4)
    convert_xconv_bn(converted)
    converted.load_state_dict(original.state_dict(), strict=True)
    with torch.no_grad():
        converted.train()(images())
    torch.save(converted.state_dict(), tmp_path / "weights.pth")
    original.load_state_dict(torch.load(tmp_path / "weights.pth", weights_only=True), strict=True)
    with torch.no_grad():
        assert torch.equal(original.eval()(images()), converted.eval()(images()))


def test_the_convolution_is_not_registered_a_second_time():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    convert_xconv_bn(model)
    names = [name for name, module in model.named_modules(remove_duplicate=False) if module is model[0]]
    assert names == ["0"]
    assert [name for name, _ in model.named_parameters(remove_duplicate=False)] == [
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
    ]
    assert isinstance(model[1], XconvNorm)
    assert isinstance(model[1], TaskNorm)
