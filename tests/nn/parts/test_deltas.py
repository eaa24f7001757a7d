"""Low-rank changes of weights: what a layer computes with one, where they start, tasks kept apart."""

import copy
import math

import pytest
import timm
import torch
from torch import nn

from confitune.errors import ConfituneError
from confitune.nn import ContinualNet, Deltas, Head, Norms, XconvNorms, build_model


def network(rank=2, norms=None, seed=0, products=True):
    torch.manual_seed(seed)
    backbone = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1, groups=2, padding_mode="reflect"),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, groups=16, dilation=2),  # depthwise
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 12),
    )
    return ContinualNet(backbone, [norms or Norms(keep_pretrained=True), Deltas(rank, products=products), Head()])


def change(net, size=0.1):
    """Give the live task some change."""
    with torch.no_grad():
        for parameter in net.parts["deltas"].offered():
            parameter.add_(size * torch.randn(parameter.shape))


def with_tasks(net, count=2):
    for task in range(count):
        net.add_task(f"task{task}", 3 + task)
        change(net)
        with torch.no_grad():
            net.train()(torch.randn(4, 3, 12, 12))
        net.finish_task()
    return net.eval()


def test_changes_every_layer_that_is_larger_than_its_change():
    deltas = network(rank=2).parts["deltas"]
    assert list(deltas.layers) == ["0", "3", "5", "8"]
    assert [tuple(a.shape) for a in deltas.a] == [(2, 3), (2, 4), (2, 1), (2, 16)]
    assert [tuple(window.shape) for window in deltas.windows] == [(2, 9), (2, 9), (2, 9), (2, 1)]
    assert [tuple(b.shape) for b in deltas.b] == [(8, 2), (16, 2), (16, 2), (12, 2)]
    whole = network(rank=2, products=False).parts["deltas"]
    assert [tuple(a.shape) for a in whole.a] == [(2, 27), (2, 36), (2, 9), (2, 16)]
    assert not len(whole.windows)
    assert list(network(rank=6).parts["deltas"].layers) == ["0", "3", "8"]  # 6 * (16 + 1 + 9) > 16 * 9
    with pytest.raises(ConfituneError, match="1 or more"):
        Deltas(0)


def test_a_new_task_starts_without_a_change():
    net = network()
    x = torch.randn(2, 3, 12, 12)
    before = net.backbone.eval()(x)
    with_tasks(net)
    net.add_task("new", 2)
    net.eval()
    with torch.no_grad(), net.as_pretrained():
        assert torch.equal(net.features(x), before)
    assert all(not b.any() for b in net.parts["deltas"].b)


def test_the_pretrained_network_can_be_used_while_a_finished_task_is_live():
    net = network()
    x = torch.randn(2, 3, 12, 12)
    before = net.backbone.eval()(x)
    with_tasks(net)
    net.eval()
    for task in [*net.tasks, None]:
        if task is None:
            net.drop_task(list(net.tasks)[-1])
        else:
            own = net(x, task)
            assert not torch.equal(net.features(x), before)
        with net.as_pretrained():
            assert torch.equal(net.backbone(x), before)
        if task is not None:
            assert torch.equal(net(x), own)


@pytest.mark.parametrize("products", [True, False])
def test_a_change_can_be_learned_from_its_default_start(products):
    net = network(products=products)
    net.add_task("new", 2)
    net.train()(torch.randn(4, 3, 12, 12)).square().sum().backward()
    assert all(b.grad.any() for b in net.parts["deltas"].b)
    assert all(not b.any() for b in net.parts["deltas"].b)


@pytest.mark.parametrize("training", [True, False])
def test_computes_with_the_sum_of_weight_and_change(training):
    net = network()
    plain = copy.deepcopy(net.backbone)
    for layer in plain.modules():
        vars(layer).pop("forward", None)
    net.add_task("a", 2)
    change(net)
    with torch.no_grad():
        deltas = net.parts["deltas"]
        rows = [torch.einsum("ri,rk->rik", *pair) for pair in zip(deltas.a, deltas.windows, strict=True)]
        for name, a, b in zip(deltas.layers, rows, deltas.b, strict=True):
            weight = plain.get_submodule(name).weight
            weight.add_(torch.einsum("or,rik->oik", b, a).view_as(weight))
    x = torch.randn(4, 3, 12, 12)
    torch.testing.assert_close(net.train(training).features(x), plain.train(training)(x))


def test_gradients_reach_the_change_and_not_the_weight():
    net = network()
    net.add_task("a", 2)
    change(net)
    for parameter in net.groups()["weights"]:
        parameter.requires_grad_(False)
    net.train()(torch.randn(4, 3, 12, 12)).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in net.parts["deltas"].offered())
    assert all(p.grad is None for p in net.groups()["weights"])
    assert "deltas" in net.groups()
    assert {id(p) for p in net.groups()["deltas"]}.isdisjoint(map(id, net.shared_parameters().values()))


def test_the_default_rank_is_what_some_numbers_allow():
    """Of 3 x 3 convolutions more than of 1 x 1 ones."""
    sizes = {}
    for name in ("resnet18", "tf_efficientnet_lite0"):
        net = ContinualNet(build_model(name), [Norms(), Deltas(), Head()])
        deltas = net.parts["deltas"]
        sizes[name] = deltas.rank, sum(parameter.numel() for parameter in deltas.offered())
        assert sizes[name][1] <= 36_000
    assert (sizes["resnet18"][0], sizes["tf_efficientnet_lite0"][0]) == (4, 1)
    assert network(rank=None).parts["deltas"].rank == 4  # no more, however small a network is


def test_whole_rows_start_along_leading_right_singular_vectors():
    net = network(rank=2, products=False)
    net.add_task("a", 2)
    deltas = net.parts["deltas"]
    directions = {name: torch.randn_like(layer.weight) for name, layer in deltas.layers.items()}
    deltas.start_along(directions)
    for name, a in zip(deltas.layers, deltas.a, strict=True):
        matrix = directions[name].flatten(1)
        most = torch.linalg.svdvals(matrix)[:2].square().sum()  # that two directions can hold
        torch.testing.assert_close(a @ a.T, torch.eye(2), atol=0.05, rtol=0)
        assert (matrix @ a.T).square().sum() > 0.97 * most


def test_products_start_along_what_leads_in_a_sum_of_products():
    net = network(rank=2)
    net.add_task("a", 2)
    deltas, expected, directions = net.parts["deltas"], {}, {}
    for name, layer in deltas.layers.items():
        outputs, inputs, *window = layer.weight.shape
        b, a, windows = (
            torch.linalg.qr(torch.randn(size, 1))[0][:, 0] for size in (outputs, inputs, math.prod(window))
        )
        expected[name] = torch.outer(a, windows)
        directions[name] = torch.einsum("o,ik->oik", b, expected[name]).reshape(layer.weight.shape)
    deltas.start_along(directions)
    for name, a, windows in zip(deltas.layers, deltas.a, deltas.windows, strict=True):
        found = torch.outer(a[0], windows[0])
        torch.testing.assert_close(found * (found * expected[name]).sum().sign(), expected[name], atol=1e-4, rtol=0)


def test_tasks_are_kept_apart_and_mixed_batches_treat_each_image_by_its_own():
    net = with_tasks(network(), 3)
    x, index = torch.randn(6, 3, 12, 12), torch.tensor([0, 1, 2, 2, 1, 0])
    with torch.no_grad():
        alone = [net(x, f"task{task}") for task in range(3)]
        mixed = net(x, index)
    for image, task in enumerate(index.tolist()):
        torch.testing.assert_close(mixed[image, : 3 + task], alone[task][image])
    assert not torch.allclose(alone[0][:, :3], alone[1][:, :3], atol=1e-3)


@pytest.mark.parametrize("name", ["mobilenetv2_100", "tf_efficientnet_lite0", "vit_tiny_patch16_224"])
def test_mixed_batches_on_real_networks(name):
    torch.manual_seed(0)
    backbone = timm.create_model(name, img_size=32) if name.startswith("vit") else build_model(name)
    parts = [Norms(keep_pretrained=True), Deltas(1), Head()]
    net = ContinualNet(backbone, parts, example_input=torch.zeros(2, 3, 32, 32))
    for task in ("a", "b"):
        net.add_task(task, 3)
        change(net, 0.03)
        with torch.no_grad():
            net.train()(torch.randn(4, 3, 32, 32))
        net.finish_task()
    net.eval()
    x = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        mixed = net(x, torch.tensor([0, 1, 1, 0]))
        torch.testing.assert_close(mixed[[0, 3]], net(x, "a")[[0, 3]], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(mixed[[1, 2]], net(x, "b")[[1, 2]], atol=2e-5, rtol=1e-4)


def test_a_task_with_a_head_alone_uses_the_unchanged_weights():
    net = network()
    x = torch.randn(2, 3, 12, 12)
    before = net.backbone.eval()(x)
    net.add_task("bare", 2)
    net.eval()
    net.features(x)
    net.finish_task(owns=["head"])
    with_tasks(net)
    net.set_task("bare")
    with torch.no_grad():
        assert torch.equal(net.features(x), before)
        net(x, "task1")
        net.set_task("bare")
        assert torch.equal(net.features(x), before)
    assert net.storage()["bare"].parts == {"head": 2 * 12 + 2}


def test_state_goes_out_and_in():
    net = with_tasks(network())
    other = network(seed=0)
    other.load_shared_state_dict(net.shared_state_dict())
    x = torch.randn(2, 3, 12, 12)
    for task in net.tasks:
        other.load_task_state_dict(task, net.task_state_dict(task))
        with torch.no_grad():
            assert torch.equal(other.eval()(x, task), net(x, task))
    assert not any("delta" in key for key in net.shared_state_dict())
    clone = copy.deepcopy(net)
    change(net)
    with torch.no_grad():
        assert torch.equal(clone(x, "task0"), other(x, "task0"))


@pytest.mark.parametrize("order", [1, -1])
def test_means_are_not_recovered_through_changed_weights(order):
    backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net = ContinualNet(backbone, [XconvNorms(), Deltas(), Head()][::order])
    with pytest.raises(ConfituneError, match=r"the mean of 1 cannot be recovered: .* use Norms, not XconvNorms"):
        net.add_task("a", 2)
