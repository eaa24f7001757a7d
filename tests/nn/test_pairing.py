"""Pairing by what flows: traps that names and module order would fall into."""

import pytest
import torch
from timm.layers import BatchNormAct2d, StdConv2dSame
from torch import Tensor, nn
from torch.nn import functional

from confitune.errors import ConfituneError
from confitune.nn import trace_flow
from confitune.nn.pairing import Flow


class Net(nn.Module):
    """conv and bn, and a forward to be written by each test."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.bn = norm or nn.BatchNorm2d(3)


def pairs(flow: Flow) -> dict[str, str]:
    found = {name: flow.conv_before(name)[0] for name, _ in flow.norms}
    return {name: call.module for name, call in found.items() if call}


def fallback(model: nn.Module) -> str:
    """Why the norm was not paired."""
    call, reason = trace_flow(model).conv_before("bn")
    assert call is None
    return reason


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


class Twofold(Net):
    """The convolution's output goes to the norm and elsewhere, unchanged and then changed in place."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        z = self.bn(y)
        return z + y.relu_()


class TwoNorms(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.bn(y) + self.other(y)


class Swapped(nn.Module):
    """Names and order mean nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn1(self.conv2(self.bn2(self.conv1(x))))


class Leaky(nn.BatchNorm2d):
    """A user's own batch norm."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.leaky_relu(super().forward(x), 0.2)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (Twofold, {"bn": "conv"}),
        (TwoNorms, {"bn": "conv", "other": "conv"}),
        (Swapped, {"bn1": "conv2", "bn2": "conv1"}),
        (
            lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Identity(), nn.Sequential(), nn.BatchNorm2d(4)),
            {"3": "0"},  # modules that pass a tensor through do not part a pair
        ),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), BatchNormAct2d(4)), {"1": "0"}),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), Leaky(4)), {"1": "0"}),
        (lambda: nn.Sequential(nn.Conv2d(1, 4, 5), nn.BatchNorm2d(4)), {"1": "0"}),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).double(), {"1": "0"}),
        (lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.BatchNorm1d(4)), {"1": "0"}),
    ],
    ids=["twofold", "two norms", "swapped", "identity", "act", "own norm", "one channel", "float64", "linear"],
)
def test_pairs_are_found_without_an_example(make, found):
    assert pairs(trace_flow(make())) == found


def test_a_linear_layer_on_more_than_vectors_is_left_alone():
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.bn = nn.Linear(6, 6), nn.BatchNorm1d(5)

        def forward(self, x: Tensor) -> Tensor:
            return self.bn(self.linear(x))  # [N, 5, 6]: the norm's channels are not the linear layer's outputs

    flow = trace_flow(Tokens(), torch.zeros(2, 5, 6))
    assert flow.features == (5, 6)
    assert pairs(flow) == {}


def test_tracing_runs_for_real_where_meta_tensors_cannot_go():
    class DataDependent(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return self.bn(y) if bool(torch.isfinite(y).all()) else y

    torch.manual_seed(0)
    model, x = DataDependent(), torch.rand(2, 3, 6, 6)
    running, state = model.bn.running_mean.clone(), torch.get_rng_state()
    assert pairs(trace_flow(model, x)) == {"bn": "conv"}
    assert torch.equal(model.bn.running_mean, running)
    assert int(model.bn.num_batches_tracked) == 0
    assert torch.equal(torch.get_rng_state(), state)


def test_a_network_that_does_not_run_says_on_what():
    class Picky(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.bn(self.conv(x)) + torch.zeros(7, 7)

    with pytest.raises(ConfituneError, match=r"Picky does not run .* shape \(2, 3, 224, 224\).*pass example_input"):
        trace_flow(Picky())
    assert pairs(trace_flow(Picky(), torch.zeros(2, 3, 7, 7))) == {"bn": "conv"}
