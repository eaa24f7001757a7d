"""The classifiers of tasks."""

import pytest
import torch

from confitune.nn import ContinualNet, Head


@pytest.fixture
def net(backbone) -> ContinualNet:
    torch.manual_seed(0)
    return ContinualNet(backbone(), [Head()])


def test_heads_are_drawn_from_the_given_generator_as_torch_does(net):
    net.add_task("a", 4, torch.Generator().manual_seed(5))
    first = [parameter.clone() for parameter in net.head.offered()]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)  # which must not matter
        net.add_task("b", 4, torch.Generator().manual_seed(5))
    generator, bound = torch.Generator().manual_seed(5), 8**-0.5
    for found, again, shape in zip(first, net.head.offered(), ((4, 8), (4,)), strict=True):
        expected = torch.empty(shape).uniform_(-bound, bound, generator=generator)
        assert torch.equal(found, expected)
        assert torch.equal(again, expected)


def test_logits_are_linear_in_the_features(net):
    net.add_task("a", 3)
    x = torch.rand(4, 3, 8, 8)
    weight, bias = net.head.offered()
    torch.testing.assert_close(net.eval()(x), net.features(x) @ weight.T + bias)


def test_tasks_of_the_same_size_share_a_live_layer_that_goes_with_the_last_of_them(net, learn):
    for seed, (task, classes) in enumerate({"a": 2, "b": 3, "c": 3}.items()):
        learn(net, task, classes, seed=seed)
    x = torch.rand(2, 3, 8, 8)
    expected = net.eval()(x, "a")
    net.drop_task("b")
    assert set(net.head.linears) == {"2", "3"}
    net.drop_task("c")
    assert set(net.head.linears) == {"2"}
    assert torch.equal(net(x, "a"), expected)
    learn(net, "d", 3, seed=9)
    assert set(net.head.linears) == {"2", "3"}
    assert all(layer.training for layer in net.head.linears.values())


def test_a_head_is_made_where_the_backbone_is_and_in_its_mode(net):
    net.double().eval()
    net.add_task("a", 3)
    assert net.head.linear.weight.dtype == torch.float64
    assert not net.head.linear.training
