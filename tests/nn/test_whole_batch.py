"""Parts of a batch, each with a process of its own, do together what one does with the whole batch.

Threads stand in for processes here: what they add up goes over a table instead of a network.
"""

import copy
import threading
from dataclasses import dataclass, field

import pytest
import torch
from timm.layers import BatchNormAct2d
from torch import nn

from confitune.nn import ContinualNet
from confitune.nn.whole_batch import WholeBatchNorm, whole_moments
from confitune.ranks import Ranks


class Table:
    """Where threads put down what each has and look at what the others have."""

    def __init__(self, size):
        self.barrier, self.rows = threading.Barrier(size, timeout=60), [None] * size


@dataclass(frozen=True)
class ThreadRanks(Ranks):
    table: Table = field(default=None, compare=False, repr=False)

    def gathered(self, row):
        self.table.rows[self.rank] = row.detach().clone()
        self.table.barrier.wait()
        whole = torch.stack(self.table.rows)
        self.table.barrier.wait()
        return whole

    def add_up(self, tensors):
        for tensor in tensors:
            tensor.copy_(self.gathered(tensor.reshape(-1)).sum(0).view_as(tensor))


def together(size, work):
    """What work(ranks) returns in each of so many threads."""
    table, found, errors = Table(size), [None] * size, []

    def one(rank):
        try:
            found[rank] = work(ThreadRanks(rank, size, table=table))
        except BaseException as error:
            errors.append(error)
            table.barrier.abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found


LAYERS = {
    "2d": lambda: nn.BatchNorm2d(4),
    "1d": lambda: nn.BatchNorm1d(4),
    "1d, [N, C]": lambda: nn.BatchNorm1d(4),
    "with activation": lambda: BatchNormAct2d(4, act_layer=nn.SiLU),
    "no affine": lambda: nn.BatchNorm2d(4, affine=False),
    "no running moments": lambda: nn.BatchNorm2d(4, track_running_stats=False),
    "cumulative": lambda: nn.BatchNorm2d(4, momentum=None),
    "batch only": lambda: nn.BatchNorm2d(4, momentum=1.0, eps=0.1),
}


def layer_and_batch(name, images):
    chance = torch.Generator().manual_seed(images)
    layer = LAYERS[name]().double()
    for tensor in layer.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape, generator=chance) + 0.5)
    shape = {"1d": (images, 4, 6), "1d, [N, C]": (images, 4)}.get(name, (images, 4, 3, 2))
    scale = torch.arange(1, images + 1).view(-1, *(1,) * (len(shape) - 1))  # parts unlike one another
    x = torch.randn(shape, generator=chance, dtype=torch.float64) * scale + scale
    return layer, x, torch.randn(shape, generator=chance, dtype=torch.float64)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("images", [6, 7])
@pytest.mark.parametrize("name", LAYERS)
def test_forward_backward_and_running_moments_are_the_whole_batch_s(name, images, size):
    layer, x, pull = layer_and_batch(name, images)

    def work(ranks):
        mine = copy.deepcopy(layer)
        part = ranks.part(x).clone().requires_grad_()
        for _ in range(2):
            with WholeBatchNorm(ranks):
                y = mine(part)
        (y * ranks.part(pull)).sum().backward()
        of_parameters = [p.grad for p in mine.parameters()]
        ranks.add_up(of_parameters)
        return y, part.grad, of_parameters, mine.state_dict()

    found = together(size, work)
    whole = x.clone().requires_grad_()
    for _ in range(2):
        y = layer(whole)
    (y * pull).sum().backward()
    torch.testing.assert_close(torch.cat([f[0] for f in found]), y, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(torch.cat([f[1] for f in found]), whole.grad, rtol=1e-10, atol=1e-10)
    for _, _, of_parameters, state in found:
        torch.testing.assert_close(of_parameters, [p.grad for p in layer.parameters()], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(dict(state), dict(layer.state_dict()), rtol=1e-10, atol=1e-10)


def test_a_part_may_be_one_image_alone():
    layer, x, _ = layer_and_batch("1d, [N, C]", 2)

    def work(ranks):
        with WholeBatchNorm(ranks):
            return copy.deepcopy(layer)(ranks.part(x))

    torch.testing.assert_close(torch.cat(together(2, work)), layer(x))


def test_moments_far_from_zero_do_not_cancel():
    """Sums of squares would lose all digits of a variance of 1 at a mean of 3000 in float32."""
    x = torch.randn(9, 2, 8, 8, generator=torch.Generator().manual_seed(0)) + 3000
    true = torch.var_mean(x.double(), (0, 2, 3), correction=0)
    for mean, var, count in together(2, lambda ranks: whole_moments(ranks.part(x), ranks)):
        torch.testing.assert_close(var.double(), true[0], rtol=1e-4, atol=0)
        torch.testing.assert_close(mean.double(), true[1], rtol=1e-6, atol=0)
        assert count == 9 * 64


def test_bfloat16_is_normalised_by_float32_moments():
    layer, x, pull = layer_and_batch("2d", 8)
    layer, x, pull = layer.float(), x.bfloat16(), pull.bfloat16()

    def work(ranks):
        mine, part = copy.deepcopy(layer), ranks.part(x).clone().requires_grad_()
        with WholeBatchNorm(ranks):
            y = mine(part)
        (y * ranks.part(pull)).sum().backward()
        assert y.dtype == part.grad.dtype == torch.bfloat16
        return y.float(), part.grad.float(), mine.running_mean

    found = together(2, work)
    whole = x.float().requires_grad_()
    y = layer(whole)
    (y * pull.float()).sum().backward()
    torch.testing.assert_close(torch.cat([f[0] for f in found]), y, rtol=0.01, atol=0.02)
    torch.testing.assert_close(torch.cat([f[1] for f in found]), whole.grad, rtol=0.01, atol=0.02)
    torch.testing.assert_close(found[0][2], layer.running_mean, rtol=1e-5, atol=1e-5)


def test_evaluation_mode_is_left_alone():
    """No message is sent: nobody else is there."""
    layer, x, _ = layer_and_batch("2d", 6)
    layer.eval()
    with WholeBatchNorm(Ranks(0, 2)):
        y = layer(x)
    assert torch.equal(y, layer(x))


def test_frozen_input_needs_no_message_backward():
    """Where only the affine parameters are trained, the moments' own gradients go nowhere."""
    layer, x, pull = layer_and_batch("2d", 6)
    sent = []

    def work(ranks):
        mine = copy.deepcopy(layer)
        with WholeBatchNorm(ranks):
            y = mine(ranks.part(x))
        ranks.table.barrier.wait()
        sent.append(list(ranks.table.rows))
        (y * ranks.part(pull)).sum().backward()
        assert all(before is now for before, now in zip(sent[0], ranks.table.rows, strict=True))
        return mine.weight.grad

    found = together(2, work)
    (layer(x) * pull).sum().backward()
    torch.testing.assert_close(sum(found), layer.weight.grad)


# ---- input statistics ------------------------------------------------------------------------------------------------


def small_net(statistics="running", means="window"):
    """Made before threads start: they share torch's random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 4, 3, 2, padding=1), nn.BatchNorm2d(4), nn.SiLU(), nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5)
        net = ContinualNet(
            nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), means=means, statistics=statistics
        )
    net.add_task("one", 2, torch.Generator().manual_seed(0))
    return net.double().train()


def some_batches(count, images=7, seed=0):
    chance = torch.Generator().manual_seed(seed)
    steps = torch.arange(count * images).view(count, images, 1, 1, 1)
    return torch.rand(count, images, 3, 9, 9, generator=chance, dtype=torch.float64) + steps / 10


def rows(nets):
    return [net.tasks["one"].row for net in nets]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("statistics", "means"), [("running", "window"), ("running", "phase"), ("pass", "window")])
def test_input_statistics_are_the_whole_batch_s(statistics, means, size):
    batches, fresh = some_batches(5), small_net(statistics, means)

    def work(ranks):
        net = copy.deepcopy(fresh)
        net.ranks = ranks
        for batch in batches:
            net(ranks.part(batch))
        net.finish_task([ranks.part(batch) for batch in batches])
        return net

    found = together(size, work)
    alone = small_net(statistics, means)
    for batch in batches:
        alone(batch)
    alone.finish_task(list(batches))
    for row in rows(found):
        torch.testing.assert_close(row, alone.tasks["one"].row, rtol=1e-10, atol=1e-10)
    for net in found:
        for norm, other in ((net.backbone[k], alone.backbone[k]) for k in (1, 4)):
            torch.testing.assert_close(norm.recovered_mean(), other.recovered_mean(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (3, 2)])
def test_a_state_saved_by_some_is_gone_on_with_by_others(before, after):
    batches, fresh = some_batches(4), small_net()

    def start(ranks):
        net = copy.deepcopy(fresh)
        net.ranks = ranks
        for batch in batches[:2]:
            net(ranks.part(batch))
        return net.state_dict()

    states = together(before, start)

    def go_on(ranks):
        net = copy.deepcopy(fresh)
        net.ranks = ranks
        net.load_state_dict(copy.deepcopy(states[0]))
        for batch in batches[2:]:
            net(ranks.part(batch))
        net.finish_task()
        return net

    found = together(after, go_on)
    alone = small_net()
    for batch in batches:
        alone(batch)
    alone.finish_task()
    for row in rows(found):
        torch.testing.assert_close(row, alone.tasks["one"].row, rtol=1e-10, atol=1e-10)


def test_saving_changes_nothing():
    """What is pending stays with each process; only a copy is brought together."""
    batches, fresh = some_batches(4), small_net()

    def work(ranks, saves):
        net = copy.deepcopy(fresh)
        net.ranks = ranks
        for batch in batches:
            net(ranks.part(batch))
            if saves:
                net.state_dict()
        net.finish_task()
        return net

    saved, not_saved = (rows(together(2, lambda ranks, s=saves: work(ranks, s))) for saves in (True, False))
    assert all(torch.equal(one, other) for one, other in zip(saved, not_saved, strict=True))


def test_a_copy_is_trained_by_the_same_processes():
    net = small_net()
    net.ranks = Ranks(1, 2)
    copied = copy.deepcopy(net)
    assert copied.ranks is net.ranks
    assert all(s.ranks is net.ranks for s in copied._memory.statistics.values())
