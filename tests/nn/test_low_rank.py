"""Window means kept as a product of thin tables."""

import pytest
import torch
from torch import nn

from confitune import ConfituneError
from confitune.nn import ContinualNet
from confitune.nn.low_rank import factored, is_shorter, product
from confitune.nn.xconv import XconvNorm


def table(rank, channels=32, k=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(channels, rank, generator=generator)
    return (left @ torch.randn(rank, k * k, generator=generator)).reshape(channels, k, k)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_table_of_that_rank_comes_back(rank):
    original = table(rank)
    (kept,) = factored([original], rank)
    assert kept.shape == (32 + 9, rank)
    torch.testing.assert_close(product(kept, original.shape), original, rtol=1e-4, atol=1e-5)


def test_tables_of_all_shapes_at_once_are_what_each_is_alone():
    shapes = [(32, 3), (3, 7), (64, 3), (9, 3), (32, 1), (5, 3)]
    tables = [table(4, channels, k, seed) for seed, (channels, k) in enumerate(shapes)]
    for original, together in zip(tables, factored(tables, 2), strict=True):
        (alone,) = factored([original], 2)
        torch.testing.assert_close(together, alone)
        singular = torch.linalg.svdvals(original.flatten(1).double())
        error = (product(together, original.shape) - original).double().norm()
        torch.testing.assert_close(error, singular[2:].norm(), rtol=1e-3, atol=1e-5)
    assert factored([], 2) == []


def test_a_table_of_a_lower_rank_takes_nothing_for_the_rest():
    original = table(1)
    (kept,) = factored([original], 3)
    assert kept.isfinite().all()
    torch.testing.assert_close(product(kept, original.shape), original, rtol=1e-4, atol=1e-5)
    (nothing,) = factored([torch.zeros(32, 3, 3)], 2)
    assert not nothing.any()


def test_nothing_of_that_rank_is_nearer():
    original = table(5)
    singular = torch.linalg.svdvals(original.reshape(32, 9).double())
    error = (product(factored([original], 2)[0], original.shape) - original).double().norm()
    torch.testing.assert_close(error, singular[2:].norm(), rtol=1e-4, atol=0)


def test_the_numbers_do_not_depend_on_signs_that_a_library_chooses():
    original = table(2)
    right = factored([original], 2)[0][32:]
    assert (right.gather(0, right.abs().argmax(0)[None]) > 0).all()


def test_only_where_it_is_shorter():
    assert is_shorter((64, 3, 3), 2)
    assert not is_shorter((64, 1, 1), 1)
    assert not is_shorter((3, 7, 7), 3)
    assert not is_shorter((64, 3, 3), None)


def learned(rank, means="window"):
    torch.manual_seed(0)
    backbone = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    )
    net = ContinualNet(backbone, rank=rank, means=means, statistics="pass")
    x = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(1)) + 1
    net.add_task("a", 2)
    net.train()(x)
    net.finish_task([x])
    return net, x


def test_a_task_takes_fewer_numbers_and_says_so():
    full, low = learned(None)[0], learned(2)[0]
    fewer = (16 * 9 - 2 * (16 + 9)) + (3 * 9 - 2 * (3 + 9))
    assert full.numbers_per_task - low.numbers_per_task == fewer
    assert low.storage()["a"].norm_numbers == low.numbers_per_task
    assert low.tasks["a"].row.numel() == low.numbers_per_task + 2 * 32 + 2


def test_it_is_used_as_it_is_kept():
    net, x = learned(1)
    at_once = net.eval()(x)
    net.add_task("b", 2)
    assert torch.equal(net.eval()(x, "a"), at_once)


def test_means_are_nearer_to_the_exact_ones_than_phase_means():
    exact, _ = learned(None)
    errors = {}
    for name, (net, _) in {"rank 3": learned(3), "phase": learned(None, "phase")}.items():
        norm = net.backbone[4]
        assert isinstance(norm, XconvNorm)
        errors[name] = (norm.recovered_mean("a") - exact.backbone[4].recovered_mean("a")).norm().item()
    assert errors["rank 3"] < 0.5 * errors["phase"]


def test_full_rank_is_exact():
    net, x = learned(9)
    exact, _ = learned(None)
    assert torch.equal(net.eval()(x), exact.eval()(x))


def test_states_go_in_and_out_and_another_rank_is_refused():
    net, x = learned(2)
    twin, _ = learned(2)
    twin.load_task_state_dict("other", net.task_state_dict("a"))
    assert torch.equal(twin.eval()(x, "other"), net.eval()(x))
    with pytest.raises(ConfituneError, match="input_means must have shape"):
        learned(3)[0].load_task_state_dict("other", net.task_state_dict("a"))
    with pytest.raises(ConfituneError, match="rank 2"):
        learned(None)[0].load_state_dict(net.state_dict())
    with pytest.raises(ConfituneError, match="a rank of 0 keeps nothing"):
        learned(0)
