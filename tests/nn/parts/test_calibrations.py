"""CCLL's calibrations against numbers by hand, and what they take."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from confitune.nn import Calibrations, ContinualNet, Head, Norms, build_model
from confitune.nn.parts.calibrations import Calibration


def grouped(weight: np.ndarray, x: np.ndarray) -> np.ndarray:
    """A grouped convolution with padding that keeps the size, channel by channel."""
    channels, size, kernel = weight.shape[:3]
    (height, width), edge = x.shape[2:], kernel // 2
    padded = np.pad(x, ((0, 0), (0, 0), (edge, edge), (edge, edge)))
    found = np.zeros_like(x)
    for out in range(channels):
        group = out // size * size
        for k in range(size):
            for i in range(kernel):
                for j in range(kernel):
                    found[:, out] += weight[out, k, i, j] * padded[:, group + k, i : i + height, j : j + width]
    return found


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("start", "scale"), [("random", 1), ("identity", 2)])
@pytest.mark.parametrize(("channels", "most", "group"), [(8, 1, 1), (8, 4, 4), (6, 4, 3), (10, 4, 2), (5, 4, 1)])
def test_a_calibration_is_a_grouped_3x3_before_and_a_grouped_gate_after_the_norm(
    start, scale, channels, most, group, training
):
    torch.manual_seed(0)
    calibration = Calibration(channels, start, most).double().train(training)
    spatial, gate = calibration.spatial, calibration.gate
    assert (spatial.weight.shape, gate.conv.weight.shape) == ((channels, group, 3, 3), (channels, group, 1, 1))
    assert spatial.bias is None
    assert gate.conv.bias is None
    for parameter in calibration.parameters():
        nn.init.normal_(parameter, 0, 0.5)
    gate.norm.running_mean.normal_()
    gate.norm.running_var.uniform_(0.5, 2)
    mean, var = gate.norm.running_mean.numpy().copy(), gate.norm.running_var.numpy().copy()
    x = torch.randn(3, channels, 5, 4, dtype=torch.float64)
    norm = nn.BatchNorm2d(channels).double().eval()
    nn.init.normal_(norm.weight)
    norm.register_forward_pre_hook(calibration.before)
    norm.register_forward_hook(calibration.after)
    with torch.no_grad():
        found = norm(x).numpy()
        y = x.numpy() + grouped(spatial.weight.numpy(), x.numpy())
        y = y / np.sqrt(1 + norm.eps) * norm.weight.numpy()[:, None, None]
        total = grouped(gate.conv.weight.numpy(), y.mean((2, 3), keepdims=True))[:, :, 0, 0]
        if training:
            mean, var = total.mean(0), total.var(0)
        total = (total - mean) / np.sqrt(var + gate.norm.eps) * gate.norm.weight.numpy() + gate.norm.bias.numpy()
    expected = y * (scale / (1 + np.exp(-total)))[:, :, None, None]
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def assert_uniform(values: Tensor, bound: float) -> None:
    assert 0.97 * bound < values.abs().max() <= bound
    assert abs(values.mean()) < 0.05 * bound
    assert values.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)


def test_the_random_start_is_as_torch_initialises_convolutions():
    calibration = Calibration(256, "random", 4)
    calibration.reset(torch.Generator().manual_seed(0))
    assert_uniform(calibration.spatial.weight.detach(), 36**-0.5)
    assert_uniform(calibration.gate.conv.weight.detach(), 4**-0.5)


def test_calibrations_of_resnet18_have_the_half_percent_that_their_paper_states():
    net = ContinualNet(build_model("resnet18"), [Norms(start="pretrained"), Calibrations(), Head()])
    net.add_task("a", 2)
    # Of 4,800 channels: 9 of the 3x3, 1 of the gate, 2 of its norm; and on top this norm's moments and the batch norms.
    weights = sum(p.numel() for p in net.groups()["calibrations"])
    assert weights == 12 * 4_800
    of_imagenet100 = sum(p.numel() for p in net.backbone.parameters()) + 100 * 513  # with its head
    assert round(100 * weights / of_imagenet100, 2) == 0.51
    assert dict(net.storage()["a"].parts) == {"norms": 4 * 4_800, "calibrations": 14 * 4_800, "head": 1026}


def test_groups_of_four_have_the_numbers_that_confits_paper_counts():
    net = ContinualNet(build_model("resnet18"), [Norms(start="pretrained"), Calibrations(group=4), Head()])
    layers = net.parts["calibrations"].layers
    assert sum(layer.spatial.weight.numel() for layer in layers) == 172_800


@pytest.mark.parametrize("training", [True, False])
def test_the_identity_start_is_the_network_as_it_was(backbone, training):
    x, found = torch.randn(9, 3, 8, 8), []
    for parts in ([Head()], [Norms(), Calibrations("identity"), Head()], [Norms(), Calibrations(), Head()]):
        torch.manual_seed(0)
        net = ContinualNet(backbone(), parts).train(training)
        net.add_task("one", 3)
        with torch.no_grad():
            found.append(net.features(x))
    assert torch.equal(found[1], found[0])
    assert not torch.allclose(found[2], found[0], atol=1e-2)


def test_each_task_draws_and_keeps_its_own(backbone, learn):
    torch.manual_seed(0)
    net = ContinualNet(backbone(), [Norms(start="pretrained"), Calibrations(), Head()])

    def live() -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in net.groups()["calibrations"]])

    starts = []
    for task, seed in (("a", 5), ("b", 5), ("c", 6)):
        net.add_task(task, 2, torch.Generator().manual_seed(seed))
        starts.append(live())
        learn(net, task, 2, seed=seed)
        assert not torch.equal(live(), starts[-1])
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])
    state = net.task_state_dict("a")
    # Before the norms that follow a convolution; `last_bn` follows an addition.
    of_norms = ("stem_bn", "bn", "shortcut_bn")
    learned = ("spatial.weight", "gate.conv.weight", "gate.norm.weight", "gate.norm.bias")
    kept = (*learned, "gate.norm.running_mean", "gate.norm.running_var")
    assert [key for key in state if "calibration" in key] == [f"{n}.calibration.{k}" for n in of_norms for k in kept]
    net.set_task("a")
    mine = [state[f"{n}.calibration.{key}"].reshape(-1) for n in of_norms for key in learned]
    assert torch.equal(live(), torch.cat(mine))
