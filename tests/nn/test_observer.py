"""What a network takes of training batches: which ones count, those that Python does not see, and a pass over all."""

import copy

import pytest
import timm
import torch
from torch import Tensor, nn

from confitune.nn import ContinualNet, Head, Norms, XconvNorms
from confitune.nn.observer import Observer


@pytest.fixture
def net(backbone) -> ContinualNet:
    torch.manual_seed(0)
    return ContinualNet(backbone(), [XconvNorms(), Head()])


def batches_of(count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(6, 3, 8, 8, generator=generator, dtype=dtype) * (1 + i) + i for i in range(count)]


def counters(net: ContinualNet) -> dict[str, int]:
    """How many batches each batch norm has counted."""
    state = net.backbone.state_dict()
    return {key: int(value) for key, value in state.items() if key.endswith("num_batches_tracked")}


def counts(net: ContinualNet) -> list[tuple[int, int]]:
    """How many batches each input's means are of, and how many of these are pending."""
    return [(inputs.batches, inputs.pending) for part in net.parts.values() for inputs in part.input_means]


def means(net: ContinualNet) -> list[Tensor]:
    net.observer.fold()
    return [table.clone() for inputs in net.parts["norms"].input_means for table in inputs.tables]


def moments(net: ContinualNet) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in net.backbone.named_buffers() if "running" in name}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return all(torch.equal(found[name], expected[name]) for name in expected)


def windows(x: Tensor) -> Tensor:
    """What the stem reads, [3, 3, 3], by cutting out every window."""
    return nn.functional.unfold(x, 3, padding=1).mean((0, 2)).reshape(3, 3, 3)


# ---- which batches count ---------------------------------------------------------------------------------------------

PARTS = {
    "xconv": lambda: [XconvNorms(), Head()],
    "task": lambda: [Norms(), Head()],
    "shared": lambda: [Head()],
    "pretrained": lambda: [Norms(affine=False, moments="pretrained"), Head()],
}


@pytest.mark.parametrize("parts", PARTS)
def test_a_batch_counts_once_in_training_and_never_else(backbone, parts):
    torch.manual_seed(0)
    net = ContinualNet(backbone(), PARTS[parts]())
    net.add_task("a", 2)
    names = {f"{layer}.num_batches_tracked" for layer in ("stem_bn", "bn", "shortcut_bn", "last_bn")}
    assert counters(net) == dict.fromkeys(names, 0)
    for forwards in range(1, 4):
        net.train()(batches_of(1)[0])
        net.eval()(batches_of(1)[0])
        assert counters(net) == dict.fromkeys(names, 0 if parts == "pretrained" else forwards)
        assert counts(net) == ([(forwards, forwards)] * 2 if parts == "xconv" else [])


def test_untracked_batches_leave_everything_as_it_was(net):
    net.add_task("a", 2)
    x, y = batches_of(2)
    net.train()(x)
    before = means(net), moments(net), counters(net), counts(net)
    net.observer.track(False)
    for _ in range(2):
        with net.observer.untracked():
            net(y)
        assert counts(net) == before[3]
    with pytest.raises(RuntimeError, match="channels"), net.observer.untracked():
        net.head(net.backbone(torch.rand(2, 4, 8, 8)))
    assert all(map(torch.equal, means(net), before[0]))
    assert same(moments(net), before[1])
    assert counters(net) == before[2]
    assert not any(inputs.tracking for inputs in net.parts["norms"].input_means)
    net.observer.track(True)
    net(y)
    torch.testing.assert_close(means(net)[0], 0.9 * windows(x) + 0.1 * windows(y))


# ---- batches that Python does not see --------------------------------------------------------------------------------


def test_a_replayed_step_counts_and_settles_sizes_as_a_step_does(net):
    x, y = batches_of(2)
    net.add_task("a", 2)
    assert not net.observer.sizes_known
    net.train()(2 * x)
    net(x)
    seen = net.observer.seen
    assert seen == ((8, 8), (((8, 8), 1), ((8, 8), 1)))
    net.add_task("b", 2)
    twin = copy.deepcopy(net)
    assert not net.observer.sizes_known
    assert net.observer.seen == (None, ((None, 1), (None, 1)))
    net.observer.replayed(seen)
    twin(x)
    assert net.observer.sizes_known
    assert net.observer.seen == twin.observer.seen == seen
    assert counts(net) == counts(twin) == [(1, 1), (1, 1)]
    # No graph ran here, so the "replayed" batch was the last one before it; the next has a share of a tenth.
    net(y)
    torch.testing.assert_close(means(net)[0], 0.9 * windows(x) + 0.1 * windows(y))
    net.finish_task()
    assert net.tasks["b"].image_size == (8, 8)
    assert net.tasks["b"].facts == {"stem.input_size": (8, 8, 2), "conv.input_size": (8, 8, 2)}


def test_a_replayed_step_without_tracking_counts_nothing(net):
    net.add_task("a", 2)
    net.train()(batches_of(1)[0])
    seen = net.observer.seen
    net.add_task("b", 2)
    net.observer.track(False)
    net.observer.replayed(seen)
    assert counts(net) == [(0, 0), (0, 0)]
    assert net.observer.seen == ((8, 8), ((None, 1), (None, 1)))
    net.observer.track(True)
    net.observer.replayed(seen)
    assert counts(net) == [(1, 1), (1, 1)]


class Graph:
    """Records a batch and replays it on others. On a CPU what is recorded runs, so its effects are taken back."""

    def __init__(self, net: ContinualNet, x: Tensor) -> None:
        self.net = net
        buffers = {id(b): b.clone() for b in net.buffers()}
        net.observer.recording = True
        net(x)
        net.observer.recording = False
        for buffer in net.buffers():
            buffer.copy_(buffers.get(id(buffer), torch.zeros_like(buffer)))
        self.seen = net.observer.seen

    def replay(self, x: Tensor) -> None:
        before = [(inputs.batches, inputs.pending) for inputs in self.net.parts["norms"].input_means]
        self.net.observer.recording = True
        self.net(x)
        self.net.observer.recording = False
        assert counts(self.net) == before
        self.net.observer.replayed(self.seen)


@pytest.mark.parametrize("recorded_at", [0, 2])
def test_one_graph_serves_the_first_batch_of_a_task_and_all_others(net, recorded_at):
    """Whichever of them it was recorded at: to the bit what batches give that do run."""
    batches, twin = batches_of(5), copy.deepcopy(net)
    net.add_task("a", 2, torch.Generator().manual_seed(0))
    net.train()
    for x in batches[:recorded_at]:
        net(x)
    graph = Graph(net, batches[recorded_at])
    assert counts(net) == [(recorded_at, recorded_at)] * 2
    for x in batches[recorded_at:]:
        graph.replay(x)
    net.finish_task()
    net.add_task("b", 2, torch.Generator().manual_seed(0))
    for x in batches:
        graph.replay(x)
    for task in "ab":
        twin.add_task(task, 2, torch.Generator().manual_seed(0))
        for x in batches:
            twin.train()(x)
        twin.finish_task()
    net.finish_task()
    for task in "ab":
        assert net.tasks[task].facts == twin.tasks[task].facts
        assert same(net.task_state_dict(task), twin.task_state_dict(task))


class Wayward(nn.Module):
    """Reads a convolution's input as often as it is told to, once where it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.other, self.other_bn = (
            nn.Conv2d(3, 3, 3, padding=1),
            nn.BatchNorm2d(3),
            nn.Conv2d(3, 4, 1),
            nn.BatchNorm2d(4),
        )
        self.times = 1

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.bn(self.conv(x)) + 1
        return self.other_bn(self.other(x)).mean((2, 3))


@pytest.mark.parametrize("graph", [False, True], ids=["run", "replayed"])
@pytest.mark.parametrize("times", [0, 1, 2, 3])
def test_each_time_that_a_layer_is_called_is_a_batch_of_it(times, graph):
    torch.manual_seed(0)
    net = ContinualNet(Wayward(), [XconvNorms(), Head()])
    net.add_task("a", 2)
    net.backbone.times = times
    conv, other = net.parts["norms"].input_means
    read: dict[nn.Module, list[Tensor]] = {net.backbone.conv: [], net.backbone.other: []}
    for module, planes in read.items():
        module.register_forward_pre_hook(lambda _, args, planes=planes: planes.append(args[0].detach()))
    net.train()
    recorded = Graph(net, batches_of(1)[0]) if graph else None
    for planes in read.values():
        planes.clear()
    for x in batches_of(3):
        (recorded.replay if recorded else net)(x)
    assert counts(net) == [(3 * times, 3 * times), (3, 3)]
    for inputs, planes in ((conv, read[net.backbone.conv]), (other, read[net.backbone.other])):
        expected: Tensor | None = None
        for x in planes:
            mean = x.movedim(1, -1).mean(0)
            expected = mean if expected is None else expected.lerp(mean, 0.1)
        assert expected is None or torch.equal(inputs._plane(), expected)
    assert len(read[net.backbone.conv]) == 3 * times


def test_a_forward_beside_the_tracked_one_is_not_recorded(net):
    """A method may look at other images in its step, in evaluation mode or untracked."""
    x, y = batches_of(2)
    net.add_task("a", 2)
    net.train()(x)
    net.observer.recording = True
    net(x)
    with net.observer.untracked():
        net(y)
    net.eval()(y)
    net.observer.recording = False
    assert net.observer.seen == ((8, 8), (((8, 8), 1), ((8, 8), 1)))
    assert counts(net) == [(1, 1), (1, 1)]


# ---- a pass with the final weights -----------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.1, 0.3])
def test_measured_moments_are_those_of_batch_norm_without_momentum(backbone, momentum):
    torch.manual_seed(0)
    net = ContinualNet(backbone(), [XconvNorms(), Head()], momentum=momentum).double()
    net.add_task("a", 2)
    batches = batches_of(4, dtype=torch.float64)
    net.train()(batches[0])  # what was there before does not count
    stock = backbone().double().train()
    stock.load_state_dict(net.backbone.state_dict())
    norms = {name: module for name, module in stock.named_modules() if isinstance(module, nn.BatchNorm2d)}
    for norm in norms.values():
        norm.reset_running_stats()
        norm.momentum = None
    with torch.no_grad():
        for x in batches:
            stock(x)
    assert bool(net.measure(iter(batches)))
    for name, norm in norms.items():
        mine = net.backbone.get_submodule(name)
        torch.testing.assert_close(mine.running_mean, norm.running_mean, rtol=0, atol=1e-12)
        torch.testing.assert_close(mine.running_var, norm.running_var, rtol=0, atol=1e-12)
        assert mine.momentum == momentum
    assert counts(net) == [(4, 0), (4, 0)]
    # The input means say the same: a mean recovered from them is the mean of the outputs.
    for name, layer in net.parts["norms"].layers.items():
        torch.testing.assert_close(layer.recovered_mean(), norms[name].running_mean, rtol=0, atol=1e-12)
    # The next training batch has its ordinary share again.
    net(5 * batches[0])
    measured = torch.stack([windows(x) for x in batches]).mean(0)
    torch.testing.assert_close(means(net)[0], (1 - momentum) * measured + momentum * windows(5 * batches[0]))


def test_measuring_takes_batches_as_it_is_told_to(net):
    batches = batches_of(3)
    net.add_task("a", 2)
    twin = copy.deepcopy(net)
    net.measure([x / 2 for x in batches])
    twin.measure(batches, lambda x: twin(x / 2))
    assert same(moments(twin), moments(net))
    assert all(map(torch.equal, means(twin), means(net)))


class Stumbles(nn.Module):
    """Passes features through, and raises in the given calls (from 1 on)."""

    def __init__(self) -> None:
        super().__init__()
        self.bad, self.calls = -1, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.bad:
            raise RuntimeError("stumbled")
        return x


def stumbling(backbone, bad: int, **options) -> ContinualNet:
    """A network whose last layer raises in the given training batch; tracing it takes calls of its own."""
    torch.manual_seed(0)
    last = Stumbles()
    net = ContinualNet(nn.Sequential(backbone(), last), [XconvNorms(**options), Head()])
    last.calls, last.bad = 0, bad
    net.add_task("a", 2)
    return net.train()


@pytest.mark.parametrize("bad", [1, 3])
def test_of_a_batch_that_is_broken_off_nothing_counts(backbone, bad):
    net, clean = stumbling(backbone, bad), stumbling(backbone, -1)
    batches = batches_of(5)
    for number, x in enumerate(batches, 1):
        if number == bad:
            with pytest.raises(RuntimeError, match="stumbled"):
                net(x)
            assert counts(net) == counts(clean)
        else:
            net(x)
            clean(x)
    assert counts(net) == [(4, 4), (4, 4)]
    assert all(map(torch.equal, means(net), means(clean)))


def test_a_backbone_that_is_called_by_itself_is_tracked_as_it_always_was(backbone):
    net, whole = stumbling(backbone, -1), stumbling(backbone, -1)
    for number, x in enumerate(batches_of(4)):
        (net if number == 1 else net.backbone)(x)
        whole(x)
        assert counts(net) == counts(whole) == [(number + 1, number + 1)] * 2
    assert all(map(torch.equal, means(net), means(whole)))


@pytest.mark.parametrize("training", [True, False])
def test_measuring_leaves_everything_right_even_if_a_batch_raises(backbone, training):
    net, clean = stumbling(backbone, 3, statistics="pass"), stumbling(backbone, -1, statistics="pass")
    net.train(training)
    norms = [module for module in net.backbone.modules() if isinstance(module, nn.BatchNorm2d)]
    batches = batches_of(4)
    with pytest.raises(RuntimeError, match="stumbled"):
        net.measure(batches)
    assert [norm.momentum for norm in norms] == [0.1] * 4
    assert [(i.tracking, i.cumulative) for i in net.parts["norms"].input_means] == [(False, False)] * 2
    assert net.training == training
    # Measured again, nothing of the first attempt is left; and an ordinary step is one again.
    for one in (net, clean):
        one.measure(batches)
    assert same(moments(net), moments(clean))
    assert all(map(torch.equal, means(net), means(clean)))
    for one in (net, clean):
        one.observer.track(True)
        one.train()(batches[0])
    assert same(moments(net), moments(clean))
    assert all(map(torch.equal, means(net), means(clean)))


def test_measuring_follows_the_network_to_another_precision(backbone):
    torch.manual_seed(0)
    net = ContinualNet(backbone(), [XconvNorms(statistics="pass"), Head()])
    net.add_task("a", 2)
    net.measure(batches_of(3))
    net.double()
    batches = batches_of(3, dtype=torch.float64)
    net.measure(batches)
    last = [net.backbone.bn.running_var.clone(), *means(net)]
    assert {tensor.dtype for tensor in last} == {torch.float64}
    net.observer = Observer(net.backbone, [net.parts["norms"]])  # one that never saw float32
    net.measure(batches)
    torch.testing.assert_close([net.backbone.bn.running_var, *means(net)], last, rtol=1e-13, atol=0)


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 3e38], ids=str)
def test_what_is_not_finite_is_said_and_leaves_nothing_behind(net, bad):
    net.add_task("a", 2)
    twin, weight = copy.deepcopy(net), net.backbone.stem.weight
    assert bool(net.measure([1e15 * x for x in batches_of(2)]))  # huge numbers are numbers
    with torch.no_grad():
        before = weight[0].clone()
        weight[0] = bad
    assert not bool(net.measure(batches_of(2)))
    with torch.no_grad():
        weight[0] = before
    for one in (net, twin):
        assert bool(one.measure(batches_of(3, seed=1)))
    assert same(moments(net), moments(twin))
    assert all(map(torch.equal, means(net), means(twin)))


def test_a_network_without_moments_has_nothing_to_measure():
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
    net = ContinualNet(vit, [Norms(), Head()], example_input=torch.zeros(2, 3, 32, 32))
    net.add_task("a", 2)
    before = {name: tensor.clone() for name, tensor in net.backbone.state_dict().items()}
    assert bool(net.measure([torch.rand(2, 3, 32, 32)]))
    assert same(net.backbone.state_dict(), before)


def test_a_norm_that_someone_froze_is_left_alone(net):
    net.add_task("a", 2)
    net.train()
    net.backbone.bn.eval()
    before = moments(net)
    net.observer.average(batches_of(1), net)
    after = moments(net)
    assert torch.equal(after["bn.running_mean"], before["bn.running_mean"])
    assert not torch.equal(after["stem_bn.running_mean"], before["stem_bn.running_mean"])
    assert counters(net)["bn.num_batches_tracked"] == 0
