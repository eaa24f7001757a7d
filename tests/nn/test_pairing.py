"""Pairing by what flows: traps that names and module order would fall into."""

import pytest
import torch
from timm.layers import BatchNormAct2d
from torch import Tensor, nn
from torch.nn import functional

from confitune.errors import ConfituneError
from confitune.nn import trace_flow
from confitune.nn.pairing import Flow


class Net(nn.Module):
    """conv and bn, and a forward to be written by each test."""

    def __init__(self, run=lambda net, x: net.bn(net.conv(x)), conv: nn.Module | None = None) -> None:
        super().__init__()
        self.conv, self.bn, self.other = conv or nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.BatchNorm2d(3)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def pairs(flow: Flow) -> dict[str, str]:
    found = {name: flow.conv_before(name)[0] for name, _ in flow.norms}
    return {name: call.module for name, call in found.items() if call}


def fallback(model: nn.Module) -> str:
    """Why the norm was not paired."""
    call, reason = trace_flow(model).conv_before("bn")
    assert call is None
    return reason


def through_a_view(net: Net, x: Tensor) -> Tensor:
    y = net.conv(x)
    y.flatten(1).relu_()  # the same memory: y itself is changed
    return net.bn(y)


def added_in_place(net: Net, x: Tensor) -> Tensor:
    y = net.conv(x)
    y += x
    return net.bn(y)


@pytest.mark.parametrize(
    "net",
    [
        Net(lambda net, x: net.bn(functional.relu(net.conv(x), inplace=True))),
        Net(lambda net, x: net.bn(net.conv(x).relu().contiguous().to(x.dtype))),
        Net(lambda net, x: net.bn(functional.dropout(net.conv(x), 0.5, net.training))),
        Net(lambda net, x: net.bn(net.conv(x) + x)),
        Net(added_in_place),
        Net(lambda net, x: net.bn(net.conv(x).transpose(2, 3))),
        Net(lambda net, x: net.bn(functional.conv2d(x, net.conv.weight, padding=1))),
        Net(through_a_view),
    ],
)
def test_anything_between_convolution_and_norm_is_seen(net):
    assert fallback(net) == "reads no convolution's output as it is"


@pytest.mark.parametrize(
    ("net", "reason"),
    [
        (Net(lambda net, x: net.bn(net.conv(net.conv(x)))), "its convolution conv is called more than once"),
        (Net(lambda net, x: net.bn(net.bn(net.conv(x)))), "is called more than once"),
        (Net(lambda net, x: net.conv(x)), "is not called in a forward pass"),
    ],
)
def test_what_is_called_more_than_once_or_never_has_no_pair(net, reason):
    assert fallback(net) == reason


def twofold(net: Net, x: Tensor) -> Tensor:
    """The convolution's output goes to the norm and elsewhere, unchanged and then changed in place."""
    y = net.conv(x)
    z = net.bn(y)
    return z + y.relu_()


def two_norms(net: Net, x: Tensor) -> Tensor:
    y = net.conv(x)
    return net.bn(y) + net.other(y)


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
        (lambda: Net(twofold), {"bn": "conv"}),
        (lambda: Net(two_norms), {"bn": "conv", "other": "conv"}),
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
    assert flow.conv_before("bn")[0].geometry is None


def test_tracing_runs_for_real_where_meta_tensors_cannot_go():
    torch.manual_seed(0)
    model, x = Net(lambda net, x: net.bn(y) if bool((y := net.conv(x)).isfinite().all()) else y), torch.rand(2, 3, 6, 6)
    running, state = model.bn.running_mean.clone(), torch.get_rng_state()
    assert pairs(trace_flow(model, x)) == {"bn": "conv"}
    assert torch.equal(model.bn.running_mean, running)
    assert int(model.bn.num_batches_tracked) == 0
    assert torch.equal(torch.get_rng_state(), state)


def test_a_network_that_does_not_run_says_on_what():
    picky = Net(lambda net, x: net.bn(net.conv(x)) + torch.zeros(7, 7))
    with pytest.raises(ConfituneError, match=r"Net does not run .* shape \(2, 3, 224, 224\).*pass example_input"):
        trace_flow(picky)
    assert pairs(trace_flow(picky, torch.zeros(2, 3, 7, 7))) == {"bn": "conv"}
