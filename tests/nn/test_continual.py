"""The life of a task: added, trained, finished, evaluated under weights that moved on, reopened."""

import copy

import pytest
import torch
from torch import Tensor, nn

from confitune.errors import ConfituneError
from confitune.nn import ContinualNet, XconvBatchNorm2d, convert_xconv_bn
from confitune.nn.xconv import XconvNorm


def xconv_layers(net: ContinualNet) -> dict[str, XconvNorm]:
    return {name: module for name, module in net.backbone.named_modules() if isinstance(module, XconvNorm)}


@pytest.fixture
def net(backbone) -> ContinualNet:
    torch.manual_seed(0)
    return ContinualNet(backbone())


def test_the_network_of_these_tests_is_paired_as_drawn(net):
    assert net.conversion.pairs == {"stem_bn": "stem", "bn": "conv", "shortcut_bn": "shortcut"}
    assert net.conversion.fallbacks == {"last_bn": "reads the output of add"}


def test_an_old_task_is_normalised_by_what_its_data_would_measure_today():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    net = ContinualNet(nn.Sequential(*layers))
    conv, norm = net.backbone[0], net.backbone[1]
    net.add_task("old", 2)
    x = torch.rand(6, 3, 8, 8)
    net.train()(x)
    net.finish_task()
    net.add_task("new", 2)
    with torch.no_grad():
        conv.weight.normal_()
        conv.bias.normal_()
    stale = norm.running_mean.clone()
    net.eval()(x, "old")
    today = conv(x).mean((0, 2, 3))
    torch.testing.assert_close(norm.running_mean, today)
    assert (stale - today).abs().max() > 0.1


@pytest.mark.parametrize("means", ["window", "phase"])
def test_recovered_mean_of_a_stored_task_is_what_prepare_puts_into_the_layer(backbone, learn, means):
    torch.manual_seed(0)
    net = ContinualNet(backbone(), means=means)
    for seed, task in enumerate("abc"):
        learn(net, task, 2 + seed, seed=seed, size=8 + seed)  # phase means count at the size they were measured at
    for task in "abc":
        # Asked while another task is live, then prepared.
        recovered = {name: layer.recovered_mean(task) for name, layer in xconv_layers(net).items()}
        net.prepare(task)
        for name, layer in xconv_layers(net).items():
            assert torch.equal(layer.running_mean, recovered[name]), (task, name)
            assert torch.equal(layer.recovered_mean(), recovered[name]), (task, name)


def test_recovered_mean_of_a_task_needs_a_finished_one(net, learn, backbone):
    with pytest.raises(ConfituneError, match="no task 'x'; tasks: none yet"):
        net.backbone.bn.recovered_mean("x")
    # What is stored of a task in training is older than what is live: no answer rather than an old one.
    learn(net, "a", 2, finish=False)
    learn(net, "b", 2, finish=False)
    for task in "ab":
        with pytest.raises(ConfituneError, match=f"task '{task}' is not finished, so its input statistics still move"):
            net.backbone.bn.recovered_mean(task)
    net.finish_task()
    assert torch.equal(net.backbone.bn.recovered_mean("b"), net.backbone.bn.recovered_mean())
    alone = backbone()
    convert_xconv_bn(alone)
    with pytest.raises(ConfituneError, match="stored tasks live in a ContinualNet"):
        alone.bn.recovered_mean("a")


def test_an_unfinished_task_is_evaluated_with_the_ordinary_running_mean(net, learn, backbone):
    stock = backbone().train()
    stock.load_state_dict(net.backbone.state_dict())
    net.add_task("a", 2)
    x = torch.rand(4, 3, 8, 8)
    with torch.no_grad():
        net.train()(x)
        stock(x)
        assert torch.equal(net.eval()(x), net.head(stock.eval()(x)))
        running = net.backbone.bn.running_mean.clone()
        net.finish_task()
        net(x)
    # One step of momentum 0.1 lags; finishing recovers the whole mean.
    assert not torch.allclose(net.backbone.bn.running_mean, running)
    torch.testing.assert_close(net.backbone.bn.running_mean, running * 10)


def test_a_new_task_starts_from_the_last_ones_state_with_empty_statistics(net, learn):
    learn(net, "a", 2, seed=1)
    net.prepare("a")
    before = {key: value.clone() for key, value in net.backbone.state_dict().items()}
    net.add_task("b", 3)
    after = net.backbone.state_dict()
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert all(layer.input_statistics.batches == 0 for layer in xconv_layers(net).values())
    assert net.current_task == net.last_task == "b"
    assert net.head.weight.shape == (3, 8)
    # Also where another task was in use in between.
    learn(net, "b", 3, seed=2)
    net.prepare("b")
    before = {key: value.clone() for key, value in net.backbone.state_dict().items()}
    net.eval()(torch.rand(2, 3, 8, 8), "a")
    net.add_task("c", 3)
    after = net.backbone.state_dict()
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_heads_are_drawn_from_the_given_generator_as_torch_does(net):
    net.add_task("a", 4, torch.Generator().manual_seed(5))
    first = net.head.weight.clone()
    net.add_task("b", 4, torch.Generator().manual_seed(5))
    assert torch.equal(net.head.weight, first)
    generator = torch.Generator().manual_seed(5)
    expected = torch.empty(4, 8).uniform_(-(8**-0.5), 8**-0.5, generator=generator)
    assert torch.equal(first, expected)


# ---- when recovery is done again -------------------------------------------------------------------------------------


@pytest.fixture
def recoveries(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for every mean that is recovered."""
    calls: list[str] = []
    original = XconvNorm.recovered_mean

    def spy(self: XconvNorm, task: str | None = None) -> Tensor:
        calls.append(type(self).__name__)
        return original(self, task)

    monkeypatch.setattr(XconvNorm, "recovered_mean", spy)
    return calls


def test_means_are_recovered_once_for_given_weights(net, learn, recoveries):
    learn(net, "a", 2)
    net.eval()
    x = torch.rand(2, 3, 8, 8)

    def evaluate() -> int:
        recoveries.clear()
        net(x)
        return len(recoveries)

    assert evaluate() == 0  # finishing the task has made it ready
    net.prepare("a")
    assert evaluate() == 0
    with torch.no_grad():
        net.backbone.conv.weight.mul_(1.01)
    assert evaluate() == 3
    assert evaluate() == 0
    # Neither affine parameters nor the head enter a recovered mean.
    with torch.no_grad():
        net.backbone.bn.weight.mul_(1.01)
        net.head.weight.mul_(1.01)
    assert evaluate() == 0
    # What a graph replay does: memory changes and no tensor version tells.
    net.backbone.conv.weight.data.mul_(1.01)
    assert evaluate() == 0
    net.weights_moved()
    assert evaluate() == 3
    torch.testing.assert_close(net.backbone.bn.running_mean, net.backbone.bn.recovered_mean())
    net.set_task("a")
    assert evaluate() == 0
    learn(net, "b", 2, finish=False)
    assert len(recoveries) == 0  # an unfinished task has nothing to recover
    net.eval()
    assert evaluate() == 0
    net.set_task("a")
    assert evaluate() == 3
    # There and back without a use: the slot's means are the other task's.
    net.set_task("b")
    net.set_task("a")
    assert evaluate() == 3
    torch.testing.assert_close(net.backbone.bn.running_mean, net.backbone.bn.recovered_mean("a"))


def test_an_optimizer_step_and_a_loaded_state_count_as_moves(net, learn, recoveries):
    learn(net, "a", 2)
    x = torch.rand(2, 3, 8, 8)
    net.eval()
    optimizer = torch.optim.SGD(net.conv_parameters(), 0.1)
    net(x).sum().backward()
    recoveries.clear()
    optimizer.step()
    net(x)
    assert len(recoveries) == 3
    net.load_state_dict(net.state_dict())
    net(x)
    assert len(recoveries) == 6
    net.double()
    net(x.double())
    assert len(recoveries) == 9
    assert net.backbone.bn.running_mean.dtype == torch.float64
    assert net.tasks["a"].row.dtype == torch.float64


def test_a_spectral_norm_that_moves_without_its_weight_counts_too():
    torch.manual_seed(0)
    conv = torch.nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 4, 3), n_power_iterations=1)
    net = ContinualNet(nn.Sequential(conv, nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    net.add_task("a", 2)
    x = torch.rand(4, 3, 8, 8)
    net.train()(x)
    net.finish_task()
    net.eval()(x)
    conv.train()(x)
    conv.eval()
    net(x)
    torch.testing.assert_close(net.backbone[1].running_mean, conv(x).mean((0, 2, 3)))


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_a_finished_task_is_not_trained_until_it_is_reopened(net, learn):
    x = learn(net, "a", 2)[0]
    with pytest.raises(ConfituneError, match=r"task 'a' is finished; reopen\('a'\) to train it on"):
        net.train()(x)
    with pytest.raises(ConfituneError, match="task 'a' is finished already"):
        net.finish_task()
    learn(net, "b", 3, seed=1)
    expected = {name: layer.recovered_mean("a") for name, layer in xconv_layers(net).items()}
    outputs = net.eval()(x, "a").detach()
    net.reopen("a")
    # Its state under today's weights is where it goes on from.
    assert torch.equal(net(x), outputs)
    for name, layer in xconv_layers(net).items():
        assert torch.equal(layer.running_mean, expected[name])
        assert layer.input_statistics.batches == 0
    assert not net.tasks["a"].finished
    with pytest.raises(ConfituneError, match=r"task 'a' is not finished: set_task\('a'\)"):
        net.reopen("a")
    with pytest.raises(ConfituneError, match="task 'a' has seen no training batch"):
        net.finish_task()
    learn(net, "a", seed=2)
    assert net.tasks["a"].finished
    assert list(net.tasks) == ["a", "b"]
    with pytest.raises(ConfituneError, match="no task 'z'; tasks: 'a', 'b'"):
        net.reopen("z")


def test_a_task_is_finished_only_after_training(net):
    net.add_task("a", 2)
    with pytest.raises(ConfituneError, match="task 'a' has seen no training batch: train it before finishing it"):
        net.finish_task()
    net.eval()(torch.rand(2, 3, 8, 8))
    with pytest.raises(ConfituneError, match="no training batch"):
        net.finish_task()
    assert not net.tasks["a"].finished


def test_a_pass_needs_batches(backbone):
    net = ContinualNet(backbone(), statistics="pass")
    net.add_task("a", 2)
    net.train()(torch.rand(2, 3, 8, 8))
    with pytest.raises(ConfituneError, match=r"statistics='pass' needs the task's training batches: finish_task"):
        net.finish_task()
    with pytest.raises(ConfituneError, match="no training batch"):
        net.finish_task([])
    assert not net.tasks["a"].finished
    net.finish_task([torch.rand(2, 3, 8, 8)])
    assert net.tasks["a"].finished


def test_names_of_tasks_and_classes_are_their_own(net):
    net.add_task("a", ["cat", "dog"])
    assert net.tasks["a"].classes == ("cat", "dog")
    with pytest.raises(ConfituneError, match="there is a task 'a' already"):
        net.add_task("a", 3)
    for classes in (["cat", "cat"], [], 0):
        with pytest.raises(ConfituneError, match="task 'b' needs one or more classes with names of their own"):
            net.add_task("b", classes)
    assert list(net.tasks) == ["a"]
    assert net.current_task == "a"


def test_an_unknown_task_is_answered_with_the_known_ones(net):
    with pytest.raises(ConfituneError, match="no task yet"):
        net(torch.rand(2, 3, 8, 8))
    with pytest.raises(ConfituneError, match="no task yet"):
        _ = net.last_task
    net.add_task("birds", 2)
    net.add_task("cars", 2)
    for call in (net.set_task, net.prepare, net.task_state_dict, lambda name: net(torch.rand(2, 3, 8, 8), name)):
        with pytest.raises(ConfituneError, match=r"no task 'bird'; tasks: 'birds', 'cars'\. Add it with add_task"):
            call("bird")
    assert net.current_task == "cars"


def test_another_image_size_is_refused_for_finished_tasks_of_recovered_means(net, learn, backbone):
    learn(net, "a", 2, size=8)
    net.eval()(torch.rand(2, 3, 8, 8))
    with pytest.raises(ConfituneError, match=r"task 'a' was trained on 8x8 images, these are 8x10.*resize the images"):
        net(torch.rand(2, 3, 8, 10))
    with pytest.raises(ConfituneError, match="trained on 8x8"):
        net(torch.rand(2, 3, 16, 16), torch.zeros(2, dtype=torch.long))
    # Another task may have another size; an unfinished one is not bound yet.
    learn(net, "b", 2, size=12, finish=False)
    net.eval()(torch.rand(2, 3, 8, 8))
    net.finish_task()
    assert net(torch.rand(2, 3, 12, 12)).shape == (2, 2)
    with pytest.raises(ConfituneError, match="task 'b' was trained on 12x12"):
        net(torch.rand(2, 3, 8, 8))
    # The size is the task's own, whatever was trained last.
    learn(net, "c", 2, size=10, finish=False)
    learn(net, "d", 2, size=14, finish=False)
    net.set_task("c")
    net.finish_task()
    assert net.tasks["c"].image_size == (10, 10)
    net.set_task("d")
    net.finish_task()
    assert net.tasks["d"].image_size == (14, 14)
    plain = ContinualNet(backbone(), norm="task")
    learn(plain, "a", 2, size=8)
    assert plain.eval()(torch.rand(2, 3, 16, 16)).shape == (2, 2)


def test_a_backbone_must_return_feature_vectors():
    maps = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    with pytest.raises(ConfituneError, match=r"returns \[N, 4, 222, 222\] where feature vectors \[N, F\] are needed"):
        ContinualNet(maps)
    assert not isinstance(maps[1], XconvBatchNorm2d)

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.bn(self.conv(x)).mean((2, 3))
            return y, y

    with pytest.raises(ConfituneError, match="returns no single tensor where feature vectors"):
        ContinualNet(Pair())


# ---- modes and parts -------------------------------------------------------------------------------------------------


def test_frozen_norms_stay_as_they_were_trained(backbone, learn):
    torch.manual_seed(0)
    net = ContinualNet(backbone(), norm="frozen")
    buffers = {name: buffer.clone() for name, buffer in net.backbone.named_buffers()}
    learn(net, "a", 2)
    learn(net, "b", 3, seed=1)
    assert net.train().training
    assert not any(m.training for m in net.backbone.modules() if isinstance(m, nn.BatchNorm2d))
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in net.backbone.named_buffers())


def test_shared_norms_are_ordinary_ones(backbone, learn):
    torch.manual_seed(0)
    net = ContinualNet(backbone(), norm="shared")
    before = net.backbone.bn.running_mean.clone()
    learn(net, "a", 2)
    assert type(net.backbone.bn) is nn.BatchNorm2d
    assert not torch.equal(net.backbone.bn.running_mean, before)
    assert net.conversion is None


def test_momentum_is_the_papers_unless_told_otherwise(backbone):
    def slow() -> nn.Module:
        model = backbone()
        model.bn.momentum = 0.01
        return model

    assert ContinualNet(slow()).backbone.bn.momentum == 0.1
    kept = ContinualNet(slow(), momentum=None)
    assert kept.backbone.bn.momentum == 0.01
    # The input statistics move with the norm they belong to.
    assert kept.backbone.bn.input_statistics.momentum == 0.01
    assert kept.backbone.stem_bn.input_statistics.momentum == 0.1


def test_every_backbone_parameter_is_a_norms_or_a_convolutions(net):
    norms = {id(p) for p in net.norm_parameters()}
    convs = {id(p) for p in net.conv_parameters()}
    layers = [net.backbone.stem_bn, net.backbone.bn, net.backbone.shortcut_bn, net.backbone.last_bn]
    assert norms == {id(p) for layer in layers for p in (layer.weight, layer.bias)}
    assert not norms & convs
    assert norms | convs == {id(p) for p in net.backbone.parameters()}


def test_a_deep_copy_is_a_network_of_its_own(net, learn):
    x = learn(net, "a", 2)[0]
    learn(net, "b", 3, seed=1)
    before = {task: net.eval()(x, task).detach() for task in "ab"}
    state = copy.deepcopy(net.state_dict())
    twin = copy.deepcopy(net)
    assert twin.backbone.bn.conv is twin.backbone.conv
    learn(twin, "c", 2, seed=2)
    assert list(net.tasks) == ["a", "b"]
    for key, value in net.state_dict().items():
        if isinstance(value, Tensor):
            assert torch.equal(value, state[key]), key
    for task, expected in before.items():
        assert torch.equal(net.eval()(x, task), expected)
        assert not torch.allclose(twin.eval()(x, task), expected)
    recovered = twin.backbone.bn.recovered_mean("a")
    twin.prepare("a")
    assert torch.equal(twin.backbone.bn.running_mean, recovered)


# ---- batches and counters --------------------------------------------------------------------------------------------


def counters(net: ContinualNet) -> dict[str, int]:
    """How many batches each batch norm has counted, read from the saved state: a lost buffer is a lost key."""
    state = net.backbone.state_dict()
    return {key: int(value) for key, value in state.items() if key.endswith("num_batches_tracked")}


def counts(net: ContinualNet) -> list[int]:
    return [statistics.batches for statistics in net._memory.statistics.values()]


def batches_of(count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(6, 3, 8, 8, generator=generator, dtype=dtype) * (1 + i) + i for i in range(count)]


@pytest.mark.parametrize("norm", ["xconv", "task", "shared", "frozen"])
def test_batch_norms_count_a_batch_once_in_training_and_never_else(backbone, norm):
    torch.manual_seed(0)
    net = ContinualNet(backbone(), norm=norm)
    net.add_task("a", 2)
    names = {f"{layer}.num_batches_tracked" for layer in ("stem_bn", "bn", "shortcut_bn", "last_bn")}
    assert counters(net) == dict.fromkeys(names, 0)
    x = batches_of(1)[0]
    for forwards in range(1, 4):
        net.train()(x)
        expected = 0 if norm == "frozen" else forwards
        assert counters(net) == dict.fromkeys(names, expected)
        net.eval()(x)
        assert counters(net) == dict.fromkeys(names, expected)


def test_a_norm_that_someone_froze_does_not_count(net):
    net.add_task("a", 2)
    net.train()
    net.backbone.bn.eval()
    net(batches_of(1)[0])
    found = counters(net)
    assert found.pop("bn.num_batches_tracked") == 0
    assert set(found.values()) == {1}


def test_a_norm_without_momentum_counts_for_its_own_average(backbone):
    torch.manual_seed(0)
    stock = backbone()
    stock.bn.momentum = None
    net = ContinualNet(copy.deepcopy(stock), norm="task", momentum=None)
    net.add_task("a", 2)
    net.train()
    stock.train()
    with torch.no_grad():
        for x in batches_of(3):
            net(x)
            stock(x)
    assert set(counters(net).values()) == {3}
    torch.testing.assert_close(net.backbone.bn.running_mean, stock.bn.running_mean)
    torch.testing.assert_close(net.backbone.bn.running_var, stock.bn.running_var)


class Stumbles(nn.Module):
    """Passes features through, and raises in the given calls (from 1 on)."""

    def __init__(self, *bad: int) -> None:
        super().__init__()
        self.bad, self.calls = bad, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls in self.bad:
            raise RuntimeError("stumbled")
        return x


def stumbling(backbone, *bad: int, **options) -> tuple[ContinualNet, Stumbles]:
    """A network whose last layer raises in training only when told to: converting it takes calls of its own."""
    torch.manual_seed(0)
    last = Stumbles()
    net = ContinualNet(nn.Sequential(backbone(), last), **options)
    last.calls, last.bad = 0, bad
    net.add_task("a", 2)
    return net.train(), last


def test_an_error_in_the_backbone_leaves_the_counters_where_they_were(backbone):
    net, _ = stumbling(backbone, 2)
    x = batches_of(1)[0]
    net(x)
    before = counters(net)
    assert set(before.values()) == {1}
    with pytest.raises(RuntimeError, match="stumbled"):
        net(x)
    assert counters(net) == before
    net(x)
    assert set(counters(net).values()) == {2}


def test_a_replayed_step_counts_and_settles_sizes_as_a_step_does(net, backbone):
    x, y = batches_of(2)
    net.add_task("a", 2)
    net.train()(x)
    remembered = net.remembered()
    assert remembered[0] == (8, 8)
    assert remembered[1] == [(8, 8), (8, 8)]
    net.add_task("b", 2)
    twin = copy.deepcopy(net)
    assert not net.sizes_known
    assert net.remembered() == (None, [None, None])
    net.replayed(remembered)
    twin(x)
    assert net.sizes_known
    assert net.remembered() == twin.remembered() == remembered
    assert counts(net) == counts(twin) == [1, 1]
    for mine, its in zip(net._memory.statistics.values(), twin._memory.statistics.values(), strict=True):
        assert mine.share == its.share == pytest.approx(0.1)
    # No graph ran here, so the "replayed" batch was one of zeros; the next has a share of a tenth.
    net(y)
    assert counts(net) == [2, 2]
    columns = nn.functional.unfold(y, 3, padding=1).mean((0, 2)).reshape(3, 3, 3)
    torch.testing.assert_close(net.backbone.stem_bn.input_means, 0.1 * columns)
    net.finish_task()
    assert net.tasks["b"].batches == (2, 2)
    assert net.tasks["b"].image_size == (8, 8)


def test_a_replayed_step_without_tracking_counts_nothing(net):
    net.add_task("a", 2)
    net.train()(batches_of(1)[0])
    remembered = net.remembered()
    net.add_task("b", 2)
    net.track(False)
    net.replayed(remembered)
    assert counts(net) == [0, 0]
    assert net.remembered() == ((8, 8), [None, None])
    net.track(True)
    net.replayed(remembered)
    assert counts(net) == [1, 1]


def test_a_replayed_step_has_moved_the_weights(net, learn, recoveries):
    x = learn(net, "a", 2)[0]
    net.eval()(x)
    remembered = net.remembered()
    recoveries.clear()
    net.backbone.conv.weight.data.mul_(1.5)  # as a graph does it: no tensor version tells
    net.track(False)
    net.replayed(remembered)
    net(x)
    assert len(recoveries) == 3
    torch.testing.assert_close(net.backbone.bn.running_mean, net.backbone.bn.recovered_mean("a"))


@pytest.mark.parametrize("momentum", [0.1, 0.3])
def test_measured_moments_are_those_of_batch_norm_without_momentum(backbone, momentum):
    torch.manual_seed(0)
    net = ContinualNet(backbone(), momentum=momentum).double()
    net.add_task("a", 2)
    net.train()
    batches = batches_of(4, dtype=torch.float64)
    net(batches[0])  # what was there before does not count
    stock = backbone().double().train()
    stock.load_state_dict(net.backbone.state_dict())
    norms = {name: module for name, module in stock.named_modules() if isinstance(module, nn.BatchNorm2d)}
    for norm in norms.values():
        norm.reset_running_stats()
        norm.momentum = None
    with torch.no_grad():
        for x in batches:
            stock(x)
    net.measure(iter(batches))
    for name, norm in norms.items():
        mine = net.backbone.get_submodule(name)
        torch.testing.assert_close(mine.running_mean, norm.running_mean, rtol=0, atol=1e-12)
        torch.testing.assert_close(mine.running_var, norm.running_var, rtol=0, atol=1e-12)
        assert mine.momentum == momentum
    assert counts(net) == [4, 4]
    # The input statistics say the same: a mean recovered from them is the mean of the outputs.
    for name, layer in xconv_layers(net).items():
        torch.testing.assert_close(layer.recovered_mean(), norms[name].running_mean, rtol=0, atol=1e-12)


def test_measuring_takes_batches_as_it_is_told_to(net):
    batches = batches_of(3)
    twin = copy.deepcopy(net)
    for one in (net, twin):
        one.add_task("a", 2, torch.Generator().manual_seed(0))
    net.measure([x / 2 for x in batches])
    twin.measure(batches, lambda x: twin(x / 2))
    for name, layer in xconv_layers(net).items():
        its = xconv_layers(twin)[name]
        assert torch.equal(layer.running_var, its.running_var)
        assert torch.equal(layer.input_means, its.input_means)


@pytest.mark.parametrize("means", ["window", "phase"])
@pytest.mark.parametrize("at_once", [2, 3, 5, 9])
def test_batches_measured_at_once_give_the_bits_of_one_after_the_other(backbone, means, at_once):
    torch.manual_seed(0)
    one = ContinualNet(backbone(), statistics="pass", means=means)
    one.add_task("a", 2, torch.Generator().manual_seed(0))
    several = copy.deepcopy(one)
    batches, given = batches_of(5), []

    def take_in(*group):
        given.append(len(group))
        several.take_in(*(lambda x=x: x for x in group))

    one.measure(batches)
    for _ in range(2):  # lanes that were used before hold something
        given.clear()
        several.measure(iter(batches), take_in, at_once)
    assert given == [len(batches[start : start + at_once]) for start in range(0, 5, at_once)]
    for name, layer in xconv_layers(one).items():
        its = xconv_layers(several)[name]
        for attribute in ("running_mean", "running_var", "input_means"):
            assert torch.equal(getattr(layer, attribute), getattr(its, attribute)), (name, attribute)
        assert its.input_statistics.batches == 5
        assert int(its.num_batches_tracked) == 2 * int(layer.num_batches_tracked) == 10
    one.finish_task(batches)
    several.finish_task(batches, take_in, at_once)
    assert torch.equal(one.tasks["a"].row, several.tasks["a"].row)
    x = batches[0]
    assert torch.equal(one.eval()(x), several.eval()(x))


def test_a_lane_that_breaks_off_leaves_the_networks_own_buffers_in_place(backbone):
    net = ContinualNet(backbone(), statistics="pass")
    net.add_task("a", 2)
    buffers = {name: buffer.data_ptr() for name, buffer in net.backbone.named_buffers()}
    batches = batches_of(4)

    def take_in(*group):
        def broken():
            raise RuntimeError("stumbled")

        net.take_in(lambda: group[0], broken)

    with pytest.raises(RuntimeError, match="stumbled"):
        net.measure(batches, take_in, 2)
    assert {name: buffer.data_ptr() for name, buffer in net.backbone.named_buffers()} == buffers
    fresh = copy.deepcopy(net)
    for one in (net, fresh):
        one.measure(batches)
    for found, expected in zip(xconv_layers(net).values(), xconv_layers(fresh).values(), strict=True):
        assert torch.equal(found.input_means, expected.input_means)


@pytest.mark.parametrize("training", [True, False])
def test_measuring_leaves_everything_right_even_if_a_batch_raises(backbone, training):
    net, last = stumbling(backbone, 3, statistics="pass")
    net.track(False)
    net.train(training)
    norms = [module for module in net.backbone.modules() if isinstance(module, nn.BatchNorm2d)]
    norms[1].momentum = 0.25
    batches = batches_of(4)
    with pytest.raises(RuntimeError, match="stumbled"):
        net.measure(batches)
    assert [norm.momentum for norm in norms] == [0.1, 0.25, 0.1, 0.1]
    assert [s.tracking for s in net._memory.statistics.values()] == [False] * 2
    assert [s.cumulative for s in net._memory.statistics.values()] == [False] * 2
    assert set(counters(net).values()) == {2}
    assert len(counters(net)) == 4
    assert net.training == training
    # Measured again, nothing of the first attempt is left.
    assert last.calls == 3
    clean, _ = stumbling(backbone, statistics="pass")
    for one in (net, clean):
        one.measure(batches)
    expected_state = clean.backbone.state_dict()
    for name, found in net.backbone.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            assert torch.equal(found, expected_state[name]), name
    for found, expected in zip(xconv_layers(net).values(), xconv_layers(clean).values(), strict=True):
        assert torch.equal(found.input_means, expected.input_means)
    # And an ordinary step is one again, no part of a measurement.
    for one in (net, clean):
        one.track(True)
        one.train()(batches[0])
    for found, expected in zip(xconv_layers(net).values(), xconv_layers(clean).values(), strict=True):
        assert torch.equal(found.input_means, expected.input_means)
        if found.momentum == expected.momentum:
            assert torch.equal(found.running_mean, expected.running_mean)


def test_measuring_follows_the_network_to_another_precision(backbone):
    torch.manual_seed(0)
    net = ContinualNet(backbone(), statistics="pass")
    net.add_task("a", 2)
    net.measure(batches_of(3))
    net.double()
    batches = batches_of(3, dtype=torch.float64)
    net.measure(batches)
    fresh = copy.deepcopy(net)
    fresh._sums = []
    fresh.measure(batches)
    for found, expected in zip(xconv_layers(net).values(), xconv_layers(fresh).values(), strict=True):
        torch.testing.assert_close(found.running_var, expected.running_var, rtol=1e-13, atol=0)


def test_training_goes_on_after_a_measurement_that_broke_off(backbone):
    net, _ = stumbling(backbone, 3)
    x = batches_of(1)[0]
    with pytest.raises(RuntimeError, match="stumbled"):
        net.measure([x, x, x])
    net(x)  # the same batch all along: whatever is kept of the measurement, an average is of this one
    columns = nn.functional.unfold(x, 3, padding=1).mean((0, 2)).reshape(3, 3, 3)
    torch.testing.assert_close(net.backbone[0].stem_bn.input_means, columns)


# ---- tasks taken up again --------------------------------------------------------------------------------------------


def taken_up_again(net: ContinualNet, x: Tensor, earlier: Tensor) -> None:
    """One more batch: a tenth of the window means is its, the rest is what was there."""
    net.track(True)
    net.train()(x)
    columns = nn.functional.unfold(x, 3, padding=1).mean((0, 2)).reshape(3, 3, 3)
    torch.testing.assert_close(net.backbone.stem_bn.input_means, 0.9 * earlier + 0.1 * columns)


def test_a_task_goes_on_after_one_of_another_size(net, learn):
    learn(net, "a", 2, size=8, finish=False)
    earlier = net.backbone.stem_bn.input_means.clone()
    learn(net, "b", 2, size=12, finish=False)
    net.set_task("a")
    taken_up_again(net, batches_of(1)[0], earlier)


def test_an_unfinished_task_goes_on_in_another_network(net, learn, backbone):
    learn(net, "a", 2, finish=False)
    other = ContinualNet(backbone())
    other.load_task_state_dict("a", net.task_state_dict("a"))
    taken_up_again(other, batches_of(1)[0], net.backbone.stem_bn.input_means)


def test_a_saved_network_goes_on_though_nothing_was_pending(net, learn, backbone):
    learn(net, "a", 2, finish=False)
    net.task_state_dict("a")  # brings the tables up to date
    other = ContinualNet(backbone())
    other.load_state_dict(copy.deepcopy(net.state_dict()))
    taken_up_again(other, batches_of(1)[0], net.backbone.stem_bn.input_means)
