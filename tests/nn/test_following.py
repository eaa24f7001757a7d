"""Moments of earlier tasks follow what a later task does to the network, seen on its images."""

import copy

import pytest
import torch
from torch import nn

from confitune import ConfituneError
from confitune.nn import ContinualNet
from confitune.nn.xconv import XconvNorm


def deep():
    """Four convolutions with all there is to geometry; the third is read by two."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Conv2d(12, 12, 3, padding=1, groups=12),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Conv2d(12, 10, 1),
        nn.BatchNorm2d(10),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


def images(seed, count=64):
    return torch.randn(count, 3, 12, 12, generator=torch.Generator().manual_seed(seed)) + 0.3 * seed


def learned(make=deep, **options):
    net = ContinualNet(make(), statistics="pass", **options)
    net.add_task("a", 3)
    net.train()(images(0))
    net.finish_task([images(0)])
    return net


@torch.no_grad()
def move(net, seed=0, far=0.3):
    """All convolutions go somewhere else."""
    draw = torch.Generator().manual_seed(seed)
    for norm in net.modules():
        if isinstance(norm, XconvNorm):
            for parameter in norm.conv.parameters():
                parameter.add_(far * parameter.std() * torch.randn(parameter.shape, generator=draw))


def errors(net, task, x):
    """Of the mean in use, in deviations, and of the variance in use, relative: the worst channel of each layer."""
    found = []

    def look(norm, args):
        mean, var = args[0].mean((0, 2, 3)), args[0].var((0, 2, 3))
        found.append(
            (
                ((norm.running_mean - mean) / (var + norm.eps).sqrt()).abs().max().item(),
                ((norm.running_var + norm.eps) / (var + norm.eps) - 1).abs().max().item(),
            )
        )

    hooks = [n.register_forward_pre_hook(look) for n in net.modules() if isinstance(n, XconvNorm)]
    with torch.no_grad():
        net.eval()(x, task)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("options", [{}, {"means": "phase"}], ids=str)
def test_on_the_same_images_every_moment_is_the_true_one(options):
    """What is seen on the later task's images is then what happened to the earlier one's."""
    off = {}
    for follow in ("weights", "images"):
        net = learned(follow=follow, **options)
        assert max(map(max, errors(net, "a", images(0)))) < (1e-3 if not options else 0.2)
        net.add_task("b", 2)
        net.train()(images(0))
        move(net)
        net.finish_task([images(0)])
        off[follow] = errors(net, "a", images(0))
    assert max(map(max, off["weights"][1:])) > 0.1
    if options:  # phase means are not exact at borders to begin with
        assert sum(map(sum, off["images"])) < 0.5 * sum(map(sum, off["weights"]))
    else:
        assert max(map(max, off["images"])) < 2e-3


def test_it_adds_up_over_tasks_and_earlier_rows_stay_as_they_are():
    net = learned(follow="images")
    row = net.tasks["a"].row.clone()
    for number, name in enumerate("bcd"):
        net.add_task(name, 2)
        net.train()(images(0))
        move(net, number, 0.1)
        net.finish_task([images(0)[:32], images(0)[32:]])
    assert torch.equal(net.tasks["a"].row, row)
    for task in "abcd":
        # Batches of 32 have moments of their own, which are averaged: nearly those of all 64.
        assert max(map(max, errors(net, task, images(0)))) < 0.05, task


def test_the_current_task_is_measured_as_without():
    rows = {}
    for follow in ("weights", "images"):
        net = learned(follow=follow)
        net.add_task("b", 2)
        net.train()(images(1))
        move(net)
        net.finish_task([images(1)])
        rows[follow] = net.eval()(images(1), "b")
        assert net.current_task == "b"
    torch.testing.assert_close(rows["images"], rows["weights"], rtol=1e-4, atol=1e-4)


def test_products_of_low_rank_are_of_what_is_kept():
    net = learned(follow="images", rank=2)
    net.add_task("b", 2)
    net.train()(images(0))
    move(net, far=0.1)
    net.finish_task([images(0)])
    assert max(mean for mean, _ in errors(net, "a", images(0))) < 0.3


def test_the_pretrained_state_follows_from_the_first_task_on():
    off = {}
    for follow in ("weights", "images"):
        net = ContinualNet(deep(), statistics="pass", follow=follow, keep_pretrained=True)
        with torch.no_grad():  # a state of pre-training that fits the images
            for norm in net.modules():
                if isinstance(norm, nn.BatchNorm2d):
                    norm.momentum = 1.0
            net.backbone.train()(images(0))
        net = ContinualNet(_plain(net), statistics="pass", follow=follow, keep_pretrained=True)
        net.add_task("a", 3)
        with net.at_pretrained(measured=64):
            net.features_of(images(0))
        net.train()(images(0))
        move(net)
        net.finish_task([images(0)])
        net.add_task("b", 2)
        net.finish_pretrained(torch.zeros(2, 10), torch.zeros(2))
        off[follow] = errors(net, "b", images(0))
    assert max(map(max, off["weights"][1:])) > 0.1
    assert max(map(max, off["images"])) < 2e-3


def _plain(net):
    """The unconverted network with the state that is live."""
    plain = deep()
    plain.load_state_dict(net.backbone.state_dict(), strict=False)
    return plain


@pytest.mark.parametrize("keep", [False, True])
def test_it_comes_back_from_saved_states(keep):
    net = learned(follow="images", keep_pretrained=keep)
    if keep:
        net.add_task("p", 2)
        with net.at_pretrained(measured=64):
            net.features_of(images(2))
        net.finish_pretrained(torch.ones(2, 10), torch.zeros(2))
    net.add_task("b", 2)
    net.train()(images(1))
    move(net)
    resumed = learned(follow="images", keep_pretrained=keep)
    resumed.load_state_dict(copy.deepcopy(net.state_dict()))  # in the middle of a task
    for one in (net, resumed):
        one.finish_task([images(1)])
    twin = ContinualNet(deep(), statistics="pass", follow="images", keep_pretrained=keep)
    twin.load_shared_state_dict(net.shared_state_dict())
    for task in net.tasks:
        twin.load_task_state_dict(task, net.task_state_dict(task))
    for task in net.tasks:
        expected = net.eval()(images(0), task)
        assert torch.equal(resumed.eval()(images(0), task), expected)
        assert torch.equal(copy.deepcopy(net).eval()(images(0), task), expected)
        torch.testing.assert_close(twin.eval()(images(0), task), expected)


def test_what_cannot_be_is_said():
    with pytest.raises(ConfituneError, match="follows variances, too"):
        ContinualNet(deep(), follow="images", variance="ratio")
    net = learned(follow="images")
    net.add_task("b", 2)
    net.train()(images(1))
    with pytest.raises(ConfituneError, match="follow='images' needs the task's training batches"):
        net.finish_task()
