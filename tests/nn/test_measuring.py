"""The end of a task: when the device is waited for, and statistics that are not finite: said, and gone again."""

import copy

import pytest
import torch

from confitune.errors import ConfituneError
from confitune.nn import ContinualNet, InfiniteError


@pytest.fixture
def net(backbone):
    torch.manual_seed(0)
    net = ContinualNet(backbone(), statistics="pass", variance="ratio")
    net.add_task("a", 2)
    return net


def batches(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 3, 8, 8, generator=generator) for _ in range(3)]


def finite(net):
    tables = [table for s in net._memory.statistics.values() for table in s.tables]
    return all(
        tensor.isfinite().all() for tensor in [*net.backbone.buffers(), *tables, net._memory.packed("unfinished")]
    )


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 3e38], ids=str)
@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize("training", [True, False])
def test_an_infinite_weight_is_said_and_leaves_nothing_behind(net, bad, at_once, training):
    twin = copy.deepcopy(net)
    weight = net.backbone.stem.weight
    with torch.no_grad():
        before = weight[0].clone()
        weight[0] = bad
    net.train(training)

    def forward(*parts):
        net.take_in(*(lambda part=part: part for part in parts))

    with pytest.raises(InfiniteError, match=r"the statistics of task 'a' are not finite.*try a smaller learning rate"):
        net.measure(batches(), forward, at_once)
    assert issubclass(InfiniteError, ConfituneError)
    assert net.training == training
    assert all(s.batches == 0 and s.size is None for s in net._memory.statistics.values())
    with torch.no_grad():
        weight[0] = before
    assert finite(net)
    # As if nothing had been measured: later measurements are those of a network that never saw it.
    for one in (net, twin):
        one.measure(batches(1), (lambda *parts, one=one: one.take_in(*(lambda p=p: p for p in parts))), at_once)
    mine, other = (dict(one.backbone.named_buffers()) for one in (net, twin))
    for name, buffer in other.items():
        if not name.endswith("num_batches_tracked"):
            assert torch.equal(mine[name], buffer), name
    for one, two in zip(net._memory.statistics.values(), twin._memory.statistics.values(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.tables, two.tables, strict=True))


def test_one_bad_image_is_enough(net):
    images = batches()
    images[1][2, 0, 3, 3] = float("inf")
    with pytest.raises(InfiniteError):
        net.measure(images)
    assert finite(net)
    net.measure(batches())


def test_a_task_that_cannot_be_measured_stays_unfinished_and_can_be_finished_later(net):
    net.finish_task(batches())
    net.add_task("b", 2)
    net.train()(batches(2)[0])
    weight = net.backbone.conv.weight
    with torch.no_grad():
        before = weight[0].clone()
        weight[0] = float("inf")
    with pytest.raises(InfiniteError, match="task 'b'"):
        net.finish_task(batches(2))
    assert not net.tasks["b"].finished
    assert net.drift.waits
    assert all((ratio == 1).all() for ratio in net.drift.ratios().values())
    with torch.no_grad():
        weight[0] = before
    net.finish_task(batches(2))
    assert net.tasks["b"].finished
    assert net.tasks["b"].row.isfinite().all()
    assert net.eval()(batches()[0], "a").isfinite().all()


def test_finite_ones_are_as_they_were(net):
    """Looking costs nothing: huge numbers are numbers."""
    net.measure([1e15 * x for x in batches()])
    assert max(table.abs().max().item() for s in net._memory.statistics.values() for table in s.tables) > 1e12


FORMS = {"pass": {}, "running": {"statistics": "running"}, "ratio": {"variance": "ratio"}, "rank": {"rank": 1}}


@pytest.fixture(params=FORMS.values(), ids=FORMS)
def second(request, backbone):
    """A network whose second task is trained and to be finished."""
    torch.manual_seed(0)
    net = ContinualNet(backbone(), **{"statistics": "pass", **request.param})
    for name in ("a", "b"):
        net.add_task(name, 2)
        net.train()(batches(2)[0])
        if name == "a":
            net.finish_task(batches())
    return net


def test_before_anything_is_waited_for_it_is_said_that_all_is_launched(second, monkeypatch):
    order, require = [], ContinualNet._require_finite

    def waits(net, finite):
        order.append("wait")
        require(net, finite)

    monkeypatch.setattr(ContinualNet, "_require_finite", waits)
    second.finish_task(batches(1), launched=lambda: order.append("launched"))
    assert order == ["launched", "wait"]
    assert second.tasks["b"].finished


def test_a_task_stays_unfinished_where_what_is_read_then_is_an_error(second):
    def bad_news():
        raise ValueError("the loss became nan")

    with pytest.raises(ValueError, match="became nan"):
        second.finish_task(batches(1), launched=bad_news)
    assert not second.tasks["b"].finished
    second.finish_task(batches(1))
    assert second.tasks["b"].finished
    assert second.eval()(batches()[0], "a").isfinite().all()


def test_a_finished_task_is_ready(second):
    x = batches(3)[0]
    second.finish_task(batches(1))
    second.eval()
    ready = second(x)
    second.prepare("a")
    assert torch.equal(second(x, "b"), ready)
    second.weights_moved()
    assert torch.equal(second(x, "b"), ready)
