"""Variances of earlier tasks follow what a later task does to variances on its own images."""

import copy

import pytest
import torch
from torch import nn

from confitune import ConfituneError
from confitune.nn import ContinualNet
from confitune.nn.variance import MOST


def one_layer():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )


def images(seed, count=16):
    return torch.randn(count, 3, 10, 10, generator=torch.Generator().manual_seed(seed)) * (1 + seed) + seed


def learned(variance, backbone=one_layer, statistics="pass"):
    torch.manual_seed(0)
    net = ContinualNet(backbone(), variance=variance, statistics=statistics)
    net.add_task("a", 3)
    x = images(0)
    net.train()(x)
    net.finish_task([x])
    return net


@torch.no_grad()
def scale(net, factors):
    conv = net.backbone[0]
    conv.weight.mul_(factors.view(-1, 1, 1, 1))


@pytest.mark.parametrize("statistics", ["pass", "running"])
def test_a_task_sees_nothing_of_a_scaled_convolution(statistics):
    """Output = scale * weights * input: its moments scale alike for all tasks, and batch norm takes that out."""
    factors = torch.linspace(0.5, 3, 8)
    found = {}
    for variance in ("stored", "ratio"):
        net = learned(variance, statistics=statistics)
        x = images(0)
        before = net.eval()(x, "a")
        net.add_task("b", 2)
        net.train()(images(1))
        scale(net, factors)
        net.finish_task([images(1), images(2)])
        found[variance] = (net.eval()(x, "a") - before).abs().max().item()
    assert found["ratio"] < 1e-4 < 0.01 < found["stored"]


def test_ratios_add_up_over_tasks_and_rows_stay_as_they_are():
    net = learned("ratio")
    factors, x = torch.linspace(0.5, 2, 8), images(0)
    before, row = net.eval()(x, "a"), net.tasks["a"].row.clone()
    for task in ("b", "c"):
        net.add_task(task, 2)
        net.train()(images(1))
        scale(net, factors)
        net.finish_task([images(1)])
        torch.testing.assert_close(net.eval()(x, "a"), before, rtol=1e-4, atol=1e-4)
    ratio = net.drift.ratios()["1"]
    torch.testing.assert_close(ratio, factors**4, rtol=1e-3, atol=0)
    assert torch.equal(net.tasks["a"].row, row)
    # The task in the middle is right, too: its variances were kept when one ratio was in already.
    net.prepare("b")
    now = net.backbone[1].running_var.clone()
    net.train()
    twin = copy.deepcopy(net.backbone[0])(images(1)).var((0, 2, 3))
    torch.testing.assert_close(now, twin, rtol=0.02, atol=1e-3)


def test_a_channel_that_never_varied_stays_as_it_was():
    net = learned("ratio")
    with torch.no_grad():
        net.backbone[0].weight[0].zero_()
    net.add_task("b", 2)
    net.train()(images(1))
    net.finish_task([images(1)])
    assert net.drift.ratios()["1"][0] == 1
    net.prepare("a")
    assert (net.backbone[1].running_var >= 0).all()


def test_a_ratio_is_bounded():
    net = learned("ratio")
    net.add_task("b", 2)
    net.train()(images(1))
    scale(net, torch.tensor([1e3] * 4 + [1e-3] * 4))
    net.finish_task([images(1)])
    ratio = net.drift.ratios()["1"]
    assert (ratio[:4] == MOST).all()
    assert (ratio[4:] >= 1 / MOST - 1e-7).all()
    assert (ratio[4:] < 0.1).all()


def test_the_first_task_has_nothing_to_compare_and_later_ones_need_batches():
    net = ContinualNet(one_layer(), variance="ratio")
    net.add_task("a", 2)
    net.train()(images(0))
    net.finish_task()
    assert all((ratio == 1).all() for ratio in net.drift.ratios().values())
    net.add_task("b", 2)
    net.train()(images(1))
    with pytest.raises(ConfituneError, match=r"variance='ratio' needs the task's training batches"):
        net.finish_task()
    net.finish_task([images(1)])


def test_comparing_moves_no_statistic_and_leaves_no_hook(backbone):
    torch.manual_seed(0)
    nets = [ContinualNet(backbone(), variance=variance) for variance in ("ratio", "stored")]
    nets[1].load_state_dict({**nets[0].state_dict(), "_extra_state": nets[1].get_extra_state()})
    for net in nets:
        for seed, task in enumerate("ab"):
            net.add_task(task, 2, torch.Generator().manual_seed(seed))
            net.train()(images(seed))
            net.finish_task(iter([images(seed), images(seed + 2)]))
    rows = [net.tasks["a"].row for net in nets]
    assert torch.equal(*rows)  # nothing had drifted when it was kept
    for one, other in zip(nets[0].backbone.buffers(), nets[1].backbone.buffers(), strict=True):
        assert torch.equal(one, other)
    assert not any(module._forward_hooks for module in nets[0].backbone.modules())


def test_a_comparison_that_breaks_off_is_waited_for_still():
    net = learned("ratio")
    net.add_task("b", 2)
    net.train()(images(1))
    with pytest.raises(RuntimeError):
        net.finish_task([torch.zeros(4, 5, 10, 10)])
    assert net.drift.waits
    assert not net.drift.active
    assert all((ratio == 1).all() for ratio in net.drift.ratios().values())
    net.finish_task([images(1)])
    assert not net.drift.waits


def test_a_saved_network_goes_on_as_if_nothing_happened():
    net = learned("ratio")
    net.add_task("b", 2)
    net.train()(images(1))
    state = copy.deepcopy(net.state_dict())
    twin = ContinualNet(one_layer(), variance="ratio", statistics="pass")
    twin.load_state_dict(state)
    for one in (net, twin):
        scale(one, torch.linspace(0.5, 3, 8))
        one.finish_task([images(1)])
    x = images(0)
    assert torch.equal(net.eval()(x, "a"), twin.eval()(x, "a"))
    assert torch.equal(net.drift.ratios()["1"], twin.drift.ratios()["1"])
    with pytest.raises(ConfituneError, match="ratio"):
        ContinualNet(one_layer(), statistics="pass").load_state_dict(net.state_dict())


def test_what_all_tasks_share_has_the_drift():
    net = learned("ratio")
    net.add_task("b", 2)
    net.train()(images(1))
    scale(net, torch.linspace(0.5, 3, 8))
    net.finish_task([images(1)])
    x = images(0)
    twin = ContinualNet(one_layer(), variance="ratio", statistics="pass")
    twin.load_shared_state_dict(net.shared_state_dict())
    twin.load_task_state_dict("a", net.task_state_dict("a"))
    assert torch.equal(net.eval()(x, "a"), twin.eval()(x, "a"))
