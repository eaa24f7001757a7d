"""CCLL's calibrations against numbers by hand, and what they take."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from confitune.nn import Calibrations, ContinualNet, Head, Norms, build_model
from confitune.nn.parts.calibrations import Calibration


def by_hand(calibration: Calibration, x: np.ndarray, scale: float) -> np.ndarray:
    """Both calibrations channel by channel, in numpy."""
    spatial = calibration.spatial.weight.detach().numpy()
    gate, bias = calibration.gate.weight.detach().numpy()[:, :, 0, 0], calibration.gate.bias.detach().numpy()
    channels, height, width = x.shape[1:]
    size = spatial.shape[1]
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    y = x.copy()
    for out in range(channels):
        group = out // size * size
        for k in range(size):
            for i in range(3):
                for j in range(3):
                    y[:, out] += spatial[out, k, i, j] * padded[:, group + k, i : i + height, j : j + width]
    means = y.mean((2, 3))
    z = np.empty_like(y)
    for out in range(channels):
        group = out // size * size
        total = means[:, group : group + size] @ gate[out] + bias[out]
        z[:, out] = y[:, out] * (scale / (1 + np.exp(-total)))[:, None, None]
    return z


@pytest.mark.parametrize(("start", "scale"), [("random", 1), ("identity", 2)])
@pytest.mark.parametrize(("channels", "group"), [(8, 4), (6, 3), (10, 2), (5, 1)])
def test_a_calibration_is_a_grouped_3x3_and_a_grouped_gate(start, scale, channels, group):
    torch.manual_seed(0)
    calibration = Calibration(channels, start).double()
    assert calibration.spatial.weight.shape == (channels, group, 3, 3)
    assert calibration.gate.weight.shape == (channels, group, 1, 1)
    for parameter in calibration.parameters():
        nn.init.normal_(parameter, 0, 0.5)
    x = torch.randn(2, channels, 5, 4, dtype=torch.float64)
    with torch.no_grad():
        found = calibration(x).numpy()
    np.testing.assert_allclose(found, by_hand(calibration, x.numpy(), scale), rtol=1e-12, atol=1e-12)


def assert_uniform(values: Tensor, bound: float) -> None:
    assert 0.97 * bound < values.abs().max() <= bound
    assert abs(values.mean()) < 0.05 * bound
    assert values.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)


def test_the_random_start_is_as_torch_initialises_convolutions():
    calibration = Calibration(256, "random")
    calibration.reset(torch.Generator().manual_seed(0))
    assert_uniform(calibration.spatial.weight.detach(), 36**-0.5)
    assert_uniform(calibration.gate.weight.detach(), 4**-0.5)


def test_the_3x3_calibrations_of_resnet18_have_172800_numbers():
    net = ContinualNet(build_model("resnet18"), [Norms(start="pretrained"), Calibrations(), Head()])
    net.add_task("a", 2)
    # Of 4,800 channels: 36 numbers of the 3x3, 4 and 1 of the gate; and four of batch norm on top.
    assert dict(net.storage()["a"].parts) == {"norms": 4 * 4_800, "calibrations": 172_800 + 24_000, "head": 1026}
    assert sum(p.numel() for p in net.groups()["calibrations"]) == 172_800 + 24_000


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
    keys = [f"{n}.calibration.{key}" for n in of_norms for key in ("spatial.weight", "gate.weight", "gate.bias")]
    assert [key for key in state if "calibration" in key] == keys
    net.set_task("a")
    assert torch.equal(live(), torch.cat([state[key].reshape(-1) for key in keys]))
