"""Features of two scales: where the earlier stage is found, and what comes of both."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from confitune.nn import build_model, headless, trace_flow, two_scales

STAGES = {
    "resnet18": "layer3",
    "resnet50": "layer3",
    "torchvision:resnet50": "layer3",
    "tf_efficientnet_lite0": "blocks.4",
    "torchvision:mobilenet_v2": "features.13",
    "densenet121": "features.denseblock3",
    "regnety_004": "s3",
    "convnext_atto": "stages.2",
    "torchvision:googlenet": "inception4e",
    "vit_tiny_patch16_224": None,
    "torchvision:vgg11_bn": None,
}


@pytest.mark.filterwarnings("ignore:The default weight initialization")
@pytest.mark.parametrize(("name", "stage"), STAGES.items())
def test_the_last_block_before_the_last_halving_is_found(name, stage):
    assert trace_flow(headless(build_model(name))).stage == stage


def small() -> nn.Sequential:
    torch.manual_seed(0)
    stage = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 5, 3, padding=1), nn.ReLU())
    widen = nn.Conv2d(5, 9, 1)
    last = nn.Sequential(nn.Conv2d(9, 7, 3, stride=2), nn.ReLU(), nn.Conv2d(7, 6, 1), nn.ReLU())
    return nn.Sequential(stage, widen, last, nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()


def test_both_scales_are_roots_of_one_length():
    plain, x = small(), torch.rand(4, 3, 12, 12)
    with torch.no_grad():
        expected = [plain(x), plain[0](x).mean((2, 3))]
        found = two_scales(copy.deepcopy(plain))(x)
    assert list(found.shape) == [4, 11]
    for scale, part in zip(expected, found.split([6, 5], 1), strict=True):
        assert torch.allclose(part.norm(dim=1), torch.tensor(11 / 2).sqrt())
        roots = scale / (scale + 0.1 * scale.mean(1, keepdim=True)).sqrt()
        torch.testing.assert_close(part / part.norm(dim=1, keepdim=True), roots / roots.norm(dim=1, keepdim=True))


def test_states_keep_their_names_and_copies_are_on_their_own():
    net = small()
    names = list(net.state_dict())
    twin = copy.deepcopy(two_scales(net))
    x = torch.rand(2, 3, 12, 12)
    with torch.no_grad():
        before = net(x)
        twin[0][0].weight.zero_()
        assert torch.equal(net(x), before)
        assert not torch.equal(twin(x), before)
    assert list(net.state_dict()) == list(twin.state_dict()) == names


def test_a_second_time_changes_nothing():
    net, x = two_scales(small()), torch.rand(2, 3, 12, 12)
    with torch.no_grad():
        assert torch.equal(two_scales(copy.deepcopy(net))(x), net(x))


def test_gradients_are_finite_where_nothing_is_active():
    net = two_scales(small())
    with torch.no_grad():
        net[2][2].bias.fill_(-100.0)  # the last stage gives zeros
    for x in (torch.zeros(2, 3, 12, 12), torch.rand(2, 3, 12, 12)):
        net.zero_grad()
        (net(x) * torch.arange(11.0)).sum().backward()
        assert all(bool(p.grad.isfinite().all()) for p in net.parameters() if p.grad is not None)
    assert float(net[0][0].weight.grad.abs().sum()) > 0.1


def test_half_precision_gives_float32():
    net = two_scales(small().bfloat16())
    with torch.no_grad():
        assert net(torch.rand(2, 3, 12, 12).bfloat16()).dtype == torch.float32
