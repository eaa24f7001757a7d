"""Pairing by what flows: traps that names and module order would fall into."""

import pytest
import torch
from timm.layers import BatchNormAct2d, StdConv2d, StdConv2dSame
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

from confitune.errors import ConfituneError
from confitune.nn import TaskBatchNorm1d, TaskBatchNorm2d, XconvBatchNorm1d, XconvBatchNorm2d, convert_xconv_bn
from confitune.nn.xconv import XconvBatchNormAct2d


class Net(nn.Module):
    """conv and bn, and a forward to be written by each test."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.bn = norm or nn.BatchNorm2d(3)


def measured(model: nn.Module, conv: str, x: Tensor) -> Tensor:
    """Mean of what leaves a convolution while `model` runs as it is, in evaluation mode."""
    seen: list[Tensor] = []
    handle = model.get_submodule(conv).register_forward_hook(lambda _, args, output: seen.append(output.detach()))
    model.eval()(x)
    handle.remove()
    return seen[0].mean([d for d in range(seen[0].dim()) if d != 1])


def fallback(model: nn.Module, norm: str = "bn") -> str:
    """Why `norm` was not paired; it must then be plain task-specific BN."""
    report = convert_xconv_bn(model)
    assert isinstance(model.get_submodule(norm), TaskBatchNorm2d)
    assert not isinstance(model.get_submodule(norm), XconvBatchNorm2d)
    return report.fallbacks[norm]


class InPlaceRelu(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.bn(functional.relu(self.conv(x), inplace=True))


class HandedThrough(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x).relu().contiguous().to(x.dtype))  # the last two hand back what they got


class InPlaceThroughAView(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        y.flatten(1).relu_()  # the same memory: y itself is changed
        return self.bn(y)


class Dropout(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.bn(functional.dropout(self.conv(x), 0.5, self.training))


class Addition(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x) + x)


class AdditionInPlace(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        y += x
        return self.bn(y)


class Reshaped(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x).transpose(2, 3))


class FunctionalConvolution(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.bn(functional.conv2d(x, self.conv.weight, padding=1))


class ScaledOutput(Net):
    class Conv(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.conv = self.Conv(3, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x))


@pytest.mark.parametrize(
    ("net", "maker"),
    [
        (InPlaceRelu, "relu"),
        (HandedThrough, "relu"),
        (Dropout, "dropout"),
        (Addition, "add"),
        (AdditionInPlace, "add"),
        (Reshaped, "transpose"),
        (FunctionalConvolution, "conv2d"),
        (ScaledOutput, "mul"),
        (InPlaceThroughAView, "no operation that was seen"),
    ],
)
def test_anything_between_convolution_and_norm_is_seen_and_named(net, maker):
    assert fallback(net()) == f"reads the output of {maker}"


class ConvTwice(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(self.conv(x)))


class NormTwice(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.bn(self.conv(x)))


class NormUnused(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class ChangedInput(Net):
    class Conv(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.relu())

    def __init__(self) -> None:
        super().__init__()
        self.conv = self.Conv(3, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x))


class PaddedByItself(ChangedInput):
    def __init__(self) -> None:
        super().__init__()
        self.conv = StdConv2dSame(3, 3, 3, stride=2)  # pads as TensorFlow does, and is no Conv2dSame


class PaddedWithOnes(ChangedInput):
    class Conv(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return functional.conv2d(functional.pad(x, (1, 1, 1, 1), value=1.0), self.weight, self.bias)

    def __init__(self) -> None:
        super().__init__()
        self.conv = self.Conv(3, 3, 3, padding=1)  # the amount agrees with what it says, the value does not


@pytest.mark.parametrize(
    ("net", "reason"),
    [
        (ConvTwice, "its convolution conv is called more than once"),
        (NormTwice, "is called more than once"),
        (NormUnused, "is not called in a forward pass"),
        (ChangedInput, "its convolution conv changes its input before convolving"),
        (PaddedByItself, "its convolution conv changes its input before convolving"),
        (PaddedWithOnes, "its convolution conv changes its input before convolving"),
    ],
)
def test_what_cannot_be_recovered_keeps_all_its_moments(net, reason):
    assert fallback(net()) == reason


def test_a_norm_without_running_statistics_has_nothing_to_recover():
    class Straight(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.bn(self.conv(x))

    assert fallback(Straight(nn.BatchNorm2d(3, track_running_stats=False))) == "keeps no running statistics"


class Twofold(Net):
    """The convolution's output goes to the norm and elsewhere, unchanged and then changed in place."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        z = self.bn(y)
        return z + y.relu_()


def test_an_output_that_goes_elsewhere_too_is_still_the_norms_input():
    torch.manual_seed(0)
    model, x = Twofold(), torch.rand(2, 3, 6, 6)
    assert convert_xconv_bn(model).pairs == {"bn": "conv"}
    model.train()(x)
    torch.testing.assert_close(model.bn.recovered_mean(), model.conv(x).mean((0, 2, 3)))


def test_two_norms_may_read_one_convolution():
    class Two(Net):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return self.bn(y) + self.other(y)

    torch.manual_seed(0)
    model, x = Two(), torch.rand(2, 3, 6, 6)
    assert convert_xconv_bn(model).pairs == {"bn": "conv", "other": "conv"}
    model.train()(x)
    assert model.bn.input_statistics is model.other.input_statistics
    assert model.bn.input_statistics.batches == 1
    torch.testing.assert_close(model.other.recovered_mean(), model.conv(x).mean((0, 2, 3)))


def test_modules_that_pass_a_tensor_through_do_not_part_a_pair():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Identity(), nn.Sequential(), nn.BatchNorm2d(4))
    assert convert_xconv_bn(model).pairs == {"3": "0"}


def test_names_and_order_mean_nothing():
    class Swapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
            self.conv2, self.bn2 = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.bn1(self.conv2(self.bn2(self.conv1(x))))

    assert convert_xconv_bn(Swapped()).pairs == {"bn1": "conv2", "bn2": "conv1"}


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
@pytest.mark.parametrize(("stride", "in_place", "shares"), [(2, False, True), (1, False, False), (2, True, False)])
def test_two_convolutions_that_read_one_tensor_share_its_statistics(means, stride, in_place, shares):
    torch.manual_seed(0)
    model, x = Block(stride, in_place), torch.randn(2, 3, 8, 8)
    report = convert_xconv_bn(model, means=means)
    assert report.pairs == {"shortcut_bn": "shortcut", "bn": "conv"}
    # The statistics are named after the first of the two in module order.
    sharing = {layer.conv: layer.shares_with for layer in report.layers}
    assert sharing == {"shortcut": None, "conv": "shortcut" if shares else None}
    model.train()(x)
    # Distinct storage: one table of 3x3 windows (2x2 phases), or one of 1x1 besides.
    statistics = {norm.input_statistics for norm in (model.bn, model.shortcut_bn)}
    numbers = sum(table.numel() for kept in statistics for table in kept.tables)
    own = {"window": 27, "phase": 12}[means]
    shortcut = 3 if means == "window" or stride == 1 else 12
    assert numbers == (own if shares else own + shortcut)
    # 8x8 at stride 2: the phase means of a 3x3 with padding 1 are not exact, those of a 1x1 are.
    after = x.relu() if in_place else x
    torch.testing.assert_close(model.shortcut_bn.recovered_mean(), model.shortcut(after).mean((0, 2, 3)))
    if means == "window":
        torch.testing.assert_close(model.bn.recovered_mean(), model.conv(x).mean((0, 2, 3)))


def test_batch_norm_with_an_activation_inside():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), BatchNormAct2d(4)), torch.rand(2, 3, 6, 6)
    assert convert_xconv_bn(model).pairs == {"1": "0"}
    assert isinstance(model[1], XconvBatchNormAct2d)
    assert (model.train()(x) >= 0).all()
    torch.testing.assert_close(model[1].recovered_mean(), model[0](x).mean((0, 2, 3)))


def test_batch_norm_1d_after_a_linear_layer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.BatchNorm1d(4))
    report = convert_xconv_bn(model)
    assert report.pairs == {"1": "0"}
    assert report.fallbacks == {"3": "reads the output of relu"}
    assert isinstance(model[1], XconvBatchNorm1d)
    assert isinstance(model[3], TaskBatchNorm1d)
    x = torch.rand(8, 6)
    model.train()(x)
    with torch.no_grad():
        model[0].weight.normal_()
    assert model[1].input_means.shape == (6, 1, 1)
    torch.testing.assert_close(model[1].recovered_mean(), model[0](x).mean(0))


def test_a_linear_layer_on_more_than_vectors_is_left_alone():
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.bn = nn.Linear(6, 6), nn.BatchNorm1d(5)

        def forward(self, x: Tensor) -> Tensor:
            return self.bn(self.linear(x))  # [N, 5, 6]: the norm's channels are not the linear layer's outputs

    report = convert_xconv_bn(Tokens(), example_input=torch.zeros(2, 5, 6))
    assert report.pairs == {}
    assert list(report.fallbacks) == ["bn"]


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def doubled_bias(conv: nn.Module) -> nn.Module:
    return parametrize.register_parametrization(conv, "bias", Doubled())


@pytest.mark.parametrize(
    "make",
    [
        lambda: parametrizations.weight_norm(nn.Conv2d(3, 5, 3, padding=1)),
        lambda: parametrizations.spectral_norm(nn.Conv2d(3, 5, 3, padding=1)),
        lambda: parametrizations.weight_norm(nn.Linear(3, 5)),
        lambda: doubled_bias(nn.Conv2d(3, 5, 3)),
        lambda: StdConv2d(3, 5, 3, padding=1, bias=True),
    ],
    ids=["weight_norm", "spectral_norm", "weight_norm linear", "bias", "StdConv2d"],
)
def test_recovery_uses_the_weight_that_forward_uses(make):
    torch.manual_seed(0)
    conv = make()
    flat = isinstance(conv, nn.Linear)
    model = nn.Sequential(conv, nn.BatchNorm1d(5) if flat else nn.BatchNorm2d(5))
    x = torch.rand(4, 3) if flat else torch.rand(4, 3, 9, 9)
    assert convert_xconv_bn(model).pairs == {"1": "0"}
    model.train()(x)
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.add_(torch.rand_like(parameter))
    model(x)  # spectral norm moves its vectors here, in training mode
    tracked = model[1].input_means.clone()
    buffers = [buffer.clone() for buffer in conv.buffers()]
    recovered = model[1].recovered_mean()
    assert conv.training
    # Looking the weight up is no batch, and moves nothing.
    assert model[1].input_statistics.batches == 2
    assert torch.equal(model[1].input_means, tracked)
    assert all(map(torch.equal, conv.buffers(), buffers))
    torch.testing.assert_close(recovered, measured(model, "0", x))
    torch.testing.assert_close(model[1].recovered_mean(), recovered, rtol=0, atol=0)


def test_a_users_network_with_one_input_channel():
    torch.manual_seed(0)

    class Digits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(1, 4, 5, padding=2)
            self.norm = nn.BatchNorm2d(4)

        def forward(self, image: Tensor) -> Tensor:
            return self.norm(self.stem(image)).relu().mean((2, 3))

    model, x = Digits(), torch.rand(4, 1, 28, 28)
    assert convert_xconv_bn(model).pairs == {"norm": "stem"}
    model.train()(x)
    torch.testing.assert_close(model.norm.recovered_mean(), model.stem(x).mean((0, 2, 3)))


class Leaky(nn.BatchNorm2d):
    """A user's own batch norm."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.leaky_relu(super().forward(x), 0.2)


def test_a_users_own_batch_norm_keeps_its_forward():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), Leaky(4)), torch.rand(2, 3, 6, 6)
    stock = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.LeakyReLU(0.2))
    stock.load_state_dict(model.state_dict())
    assert convert_xconv_bn(model).pairs == {"1": "0"}
    assert isinstance(model[1], Leaky)
    assert isinstance(model[1], XconvBatchNorm2d)
    assert torch.equal(model.train()(x), stock.train()(x))
    torch.testing.assert_close(model[1].recovered_mean(), model[0](x).mean((0, 2, 3)))
    assert torch.equal(model.eval()(x), stock.eval()(x))


def test_tracing_runs_for_real_where_meta_tensors_cannot_go():
    class DataDependent(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return self.bn(y) if bool(torch.isfinite(y).all()) else y

    torch.manual_seed(0)
    model, x = DataDependent(), torch.rand(2, 3, 6, 6)
    running, state = model.bn.running_mean.clone(), torch.get_rng_state()
    assert convert_xconv_bn(model, example_input=x).pairs == {"bn": "conv"}
    assert torch.equal(model.bn.running_mean, running)
    assert int(model.bn.num_batches_tracked) == 0
    assert torch.equal(torch.get_rng_state(), state)


def test_a_network_in_float64_needs_no_example():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).double()
    assert convert_xconv_bn(model).pairs == {"1": "0"}
    assert model[1].input_means.dtype == torch.float64


def test_a_network_that_does_not_run_says_on_what():
    class Picky(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.bn(self.conv(x)) + torch.zeros(7, 7)

    with pytest.raises(ConfituneError, match=r"Picky does not run .* shape \(2, 3, 224, 224\).*pass example_input"):
        convert_xconv_bn(Picky())
    assert convert_xconv_bn(Picky(), example_input=torch.zeros(2, 3, 7, 7)).pairs == {"bn": "conv"}
