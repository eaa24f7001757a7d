"""The state that pre-training left: it follows the convolutions, and tasks that share it keep a head alone."""

import copy

import pytest
import torch
from torch import nn

from confitune.errors import ConfituneError
from confitune.nn import ContinualNet
from confitune.nn.memory import TaskEntry
from confitune.nn.xconv import XconvNorm


@torch.no_grad()
def aged(module, seed=0):
    """Batch norms that look pre-trained."""
    generator = torch.Generator().manual_seed(seed)
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.weight.uniform_(0.5, 1.5, generator=generator)
            norm.bias.uniform_(-0.5, 0.5, generator=generator)
            norm.running_mean.normal_(0, 0.5, generator=generator)
            norm.running_var.uniform_(0.5, 2, generator=generator)
            norm.num_batches_tracked.fill_(7)
    return module


def two_blocks(stride=2, padding=1, groups=2, bias=True):
    torch.manual_seed(0)
    return aged(
        nn.Sequential(
            *(nn.Conv2d(4, 8, 3, stride, padding, groups=groups, bias=bias), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.Conv2d(8, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        )
    )


def images(seed=0, count=6, channels=4, size=9):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, channels, size, size, generator=generator) * (1 + seed % 3) + (seed % 5) / 2


def settle(net, task, x, classes=2, seed=0):
    """Add a task that is measured on these images in one batch and shares the pre-trained state; its features."""
    net.add_task(task, classes, torch.Generator().manual_seed(seed))
    with net.at_pretrained(len(x)):
        features = net.features_of(x)
    weight, bias = head(net, classes, seed, x.dtype)
    net.finish_pretrained(weight, bias)
    return features


def head(net, classes, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = (classes, net.features), (classes,)
    return tuple(torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)


@torch.no_grad()
def move(net, seed=3, size=0.2):
    """Change all that tasks share."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in net.conv_parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter) * size)


def mean_of(values):
    return values.mean((0, 2, 3))


def means(net):
    """Running means of the live slot, by layer."""
    return {name: norm.running_mean.clone() for name, norm in net._memory.norms.items()}


def tables(net):
    """What is kept of M, by tensor."""
    return {key: part.clone() for key, part in net.pretrained.parts().items() if "input_means" in key}


# ---- it follows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("stride", "padding", "groups"), [(1, 0, 1), (2, 1, 1), (3, 2, 1), (2, 1, 2), (1, 2, 4)])
@torch.no_grad()
def test_a_mean_moves_by_what_the_true_output_mean_moves(stride, padding, groups, bias):
    backbone, x = two_blocks(stride, padding, groups, bias).double(), images().double()
    conv, norm, _, second, second_norm = backbone[:5]
    then, second_then = norm.running_mean.clone(), second_norm.running_mean.clone()
    output = mean_of(conv(x))
    between = backbone.eval()[:3](x)  # what the second convolution read when M was measured
    second_output = mean_of(second(between))
    net = ContinualNet(backbone, keep_pretrained=True)
    settle(net, "a", x)
    conv.weight.add_(torch.randn_like(conv.weight) * 3)
    if bias:
        conv.bias.add_(torch.randn(8))
    second.weight.mul_(-2)
    net.eval().prepare("a")
    torch.testing.assert_close(norm.running_mean, then + mean_of(conv(x)) - output)
    torch.testing.assert_close(second_norm.running_mean, second_then + mean_of(second(between)) - second_output)
    for layer in (norm, second_norm):
        assert torch.equal(layer.recovered_mean("a"), layer.running_mean)
    assert (norm.running_mean - then).abs().max() > 0.1


@pytest.mark.parametrize("means_kept", ["window", "phase"])
@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("variance", ["stored", "ratio"])
def test_where_nothing_moved_the_network_is_the_pretrained_one(means_kept, rank, variance):
    backbone, x = two_blocks(), images()
    original = copy.deepcopy(backbone).eval()
    net = ContinualNet(backbone, means=means_kept, rank=rank, variance=variance, keep_pretrained=True)
    with torch.no_grad():
        expected = original(x)
    features = settle(net, "a", x)
    torch.testing.assert_close(features, expected, rtol=1e-5, atol=1e-6)
    net.eval().prepare("a")
    for place in (1, 4):
        for field in ("running_mean", "running_var", "weight", "bias"):
            mine, other = getattr(net.backbone[place], field), getattr(original[place], field)
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    weight, bias = head(net, 2)
    with torch.no_grad():
        torch.testing.assert_close(net(x), expected @ weight.T + bias, rtol=1e-4, atol=1e-5)


def test_a_task_that_moved_the_network_leaves_the_state_where_it_would_be_measured(backbone, learn):
    """A layer without a convolution of its own keeps its mean, all others follow."""
    torch.manual_seed(0)
    net = ContinualNet(aged(backbone()), keep_pretrained=True)
    x = images(channels=3, size=8)
    then, start = means(net), copy.deepcopy(net.backbone)
    net.add_task("trained", 3)
    with net.at_pretrained(len(x)):
        net.features_of(x)
    learn(net, "trained", 3, seed=1)
    settle(net, "settled", images(1, channels=3, size=8))  # M is an average from here on, the means are not
    net.eval().prepare()
    now = means(net)
    moved = mean_of(net.backbone.stem(x) - start.stem(x)).detach()
    torch.testing.assert_close(now["stem_bn"], then["stem_bn"] + moved, rtol=1e-4, atol=1e-5)
    assert moved.abs().max() > 1e-3
    assert torch.equal(now["last_bn"], then["last_bn"])
    assert net.backbone.last_bn.running_var.equal(start.last_bn.running_var)


# ---- measured more than once -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("moved", [False, True])
def test_measuring_again_averages_by_images_and_leaves_todays_means(moved):
    net = ContinualNet(two_blocks().double(), keep_pretrained=True)
    settle(net, "a", images(0, 6).double())
    first = tables(net)
    if moved:
        move(net)
    net.eval().prepare("a")
    today = means(net)
    others = images(1, 3).double()
    state = copy.deepcopy(net.backbone)  # as it is while the others are measured
    settle(net, "b", others, 3)
    assert net.pretrained.images == 9
    net.prepare("b")
    torch.testing.assert_close(means(net), today)
    with torch.no_grad():
        read = {"0": others, "3": state[:3](others)}
    for place in ("0", "3"):
        conv = net.backbone[int(place)]
        size = conv.weight.shape[2:]
        padded = nn.functional.pad(read[place], (conv.padding[1],) * 2 + (conv.padding[0],) * 2)
        # The window at tap (i, j): what a convolution with a one there would read.
        windows = nn.functional.unfold(padded, size, stride=conv.stride).mean((0, 2)).view(-1, *size)
        expected = (6 * first[f"{place}.input_means"] + 3 * windows) / 9
        torch.testing.assert_close(tables(net)[f"{place}.input_means"], expected)
    both = torch.cat([images(0, 6).double(), others])
    output = mean_of(net.backbone[0](both)).detach()
    move(net, seed=9)
    net.prepare("a")
    gained = mean_of(net.backbone[0](both)).detach() - output
    torch.testing.assert_close(net.backbone[1].running_mean, today["1"] + gained)


def test_several_batches_are_averaged_as_one():
    nets = [ContinualNet(two_blocks(), keep_pretrained=True) for _ in range(2)]
    x = images(0, 6)
    settle(nets[0], "a", x)
    nets[1].add_task("a", 2)
    with nets[1].at_pretrained(6):
        for part in x.split(2):
            nets[1].features_of(part)
    torch.testing.assert_close(tables(nets[1]), tables(nets[0]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("means_kept", ["window", "phase"])
def test_planes_of_another_size_leave_it_alone(means_kept):
    net = ContinualNet(two_blocks(), means=means_kept, keep_pretrained=True)
    settle(net, "a", images(0))
    before = copy.deepcopy(net.pretrained.state())
    settle(net, "b", images(1, size=12))
    after = net.pretrained.state()
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert (net.pretrained.images, net.tasks["b"].image_size) == (6, (12, 12))
    net.eval()
    assert net(images(2, size=12), "b").isfinite().all()
    with pytest.raises(ConfituneError, match="was trained on 12x12 images"):
        net(images(2), "b")


def test_an_error_while_measuring_leaves_everything_as_it_was():
    net = ContinualNet(two_blocks(), keep_pretrained=True)
    net.add_task("a", 2)
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(RuntimeError), net.at_pretrained(6):
        net.features_of(images(0, channels=5))
    same(net.state_dict(), before, leave=("image_size",))  # that it saw, it knows
    assert net.training
    assert net.pretrained.images == 0
    assert torch.is_grad_enabled()


def same(found, expected, leave=()):
    """Equal to the bit."""
    assert list(found) == list(expected)
    for key in expected:
        mine, other = found[key], expected[key]
        if key in leave:
            continue
        if isinstance(other, torch.Tensor):
            assert torch.equal(mine, other), key
        elif isinstance(other, dict):
            same(mine, other, leave)
        elif isinstance(other, list) and other and isinstance(other[0], dict):
            for one, two in zip(mine, other, strict=True):
                same(one, two, leave)
        elif isinstance(other, list) and other and isinstance(other[0], torch.Tensor):
            assert all(torch.equal(one, two) for one, two in zip(mine, other, strict=True)), key
        else:
            assert mine == other, key


@pytest.mark.parametrize("means_kept", ["window", "phase"])
def test_trying_gives_all_of_an_unfinished_task_back(backbone, learn, means_kept):
    torch.manual_seed(0)
    net = ContinualNet(aged(backbone()), means=means_kept, variance="ratio", keep_pretrained=True)
    x = images(channels=3, size=8)
    settle(net, "first", x)
    learn(net, "a", 2, seed=1, finish=False)
    net._store_current()  # folds what is pending
    before = copy.deepcopy(net.state_dict())
    with net.at_pretrained():
        assert not net.training
        net.features_of(x)
    with net.trying():
        net.measure([x, x])
        net.eval()
        net.features_of(x)
    assert net.training
    same(net.state_dict(), before)


# ---- variances -------------------------------------------------------------------------------------------------------


def test_variances_follow_what_a_trained_task_does_to_them():
    net = ContinualNet(two_blocks(bias=False), variance="ratio", keep_pretrained=True)
    then = [norm.running_var.clone() for norm in net._memory.norms.values()]
    x, factors = images(0), torch.linspace(0.5, 3, 8)
    net.add_task("trained", 3)
    with net.at_pretrained(len(x)):
        net.features_of(x)
    net.train()(images(1))
    with torch.no_grad():
        net.backbone[0].weight.mul_(factors.view(-1, 1, 1, 1))
    net.finish_task([images(1), images(2)])
    settle(net, "settled", x)
    net.eval().prepare("settled")
    torch.testing.assert_close(net.backbone[1].running_var, then[0] * factors**2, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(net.backbone[4].running_var, then[1], rtol=1e-5, atol=1e-6)
    stored = ContinualNet(two_blocks(bias=False), keep_pretrained=True)
    settle(stored, "settled", x)
    assert torch.equal(stored.backbone[1].running_var, then[0])


def test_a_settled_task_has_nothing_to_compare_and_the_next_one_has():
    net = ContinualNet(two_blocks(), variance="ratio", keep_pretrained=True)
    settle(net, "a", images(0))
    assert not net.drift.waits
    assert all((ratio == 1).all() for ratio in net.drift.ratios().values())
    net.add_task("b", 2)
    assert net.drift.waits


# ---- tasks that share it ---------------------------------------------------------------------------------------------

KINDS = {
    "window": {},
    "phase": {"means": "phase"},
    "rank": {"rank": 2},
    "best": {"rank": 2, "statistics": "pass", "variance": "ratio"},
}


@pytest.fixture(params=KINDS)
def mixed(request, backbone, learn):
    """A network of a settled, a trained and a settled task, of 2, 5 and 3 classes."""
    return make_mixed(backbone, learn, **KINDS[request.param])


def make_mixed(backbone, learn, **options):
    torch.manual_seed(0)
    net = ContinualNet(aged(backbone()), keep_pretrained=True, **options)
    settle(net, "a", images(0, channels=3, size=8), 2)
    learn(net, "b", 5, seed=1)
    settle(net, "c", images(2, channels=3, size=8), 3, seed=2)
    return net.eval()


X = images(7, channels=3, size=8)


@torch.no_grad()
def logits(net, tasks="abc", x=X):
    return [net.eval()(x.to(next(net.parameters())), task) for task in tasks]


def assert_equal(found, expected):
    assert len(found) == len(expected)
    assert all(torch.equal(mine, other) for mine, other in zip(found, expected, strict=True))


def test_a_settled_task_is_a_head_and_nothing_else(mixed):
    storage = mixed.storage()
    for task, classes in (("a", 2), ("c", 3)):
        entry = mixed.tasks[task]
        assert (entry.finished, entry.pretrained, entry.image_size) == (True, True, (8, 8))
        weight, bias = head(mixed, classes, {"a": 0, "c": 2}[task])
        assert torch.equal(entry.row, torch.cat([weight.flatten(), bias]))
        assert (storage[task].norm_numbers, storage[task].head_numbers) == (0, classes * 8 + classes)
        assert storage[task].bytes == 4 * (classes * 8 + classes)
    assert storage["b"].norm_numbers == mixed.numbers_per_task > 0


def test_tasks_are_what_they_were_however_often_one_goes_back_and_forth(mixed):
    expected, row = logits(mixed), mixed.pretrained.row.clone()
    for order in ("cab", "bca", "aabbcc"):
        assert_equal([logits(mixed, task)[0] for task in order], [expected["abc".index(task)] for task in order])
    assert torch.equal(mixed.pretrained.row, row)
    # Both settled tasks are the same network under two heads.
    features = mixed.features_of(X)
    assert mixed.current_task == "c"
    for place, classes, seed in ((0, 2, 0), (2, 3, 2)):
        weight, bias = head(mixed, classes, seed)
        torch.testing.assert_close(expected[place], features @ weight.T + bias, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_mixed_batch_equals_task_by_task_before_and_after_a_move(mixed):
    index = torch.tensor([0, 1, 2, 2, 1, 0])
    for _ in range(2):
        alone = logits(mixed)
        found = mixed(X, index)
        for place, (task, classes) in enumerate((("a", 2), ("b", 5), ("c", 3))):
            own = index == place
            torch.testing.assert_close(found[own, :classes], alone[place][own], rtol=0, atol=1e-5, msg=task)
            assert (found[own, classes:] == float("-inf")).all()
        move(mixed, size=0.02)


def test_a_settled_task_can_be_reopened_trained_and_finished(mixed, learn):
    before = logits(mixed)
    mixed.reopen("a")
    entry = mixed.tasks["a"]
    assert (entry.finished, entry.pretrained) == (False, False)
    assert entry.row.numel() > mixed.numbers_per_task
    torch.testing.assert_close(logits(mixed, "a")[0], before[0], rtol=1e-5, atol=1e-6)
    assert_equal(logits(mixed, "c"), before[2:])
    x = learn(mixed, "a", 2, seed=4)[0]
    assert (entry.finished, entry.pretrained) == (True, False)
    assert mixed.storage()["a"].norm_numbers == mixed.numbers_per_task
    conv, norm = mixed.backbone.stem, mixed.backbone.stem_bn
    assert (logits(mixed, "a")[0] - before[0]).abs().max() > 0.01
    assert_equal(logits(copy.deepcopy(mixed), "a"), logits(mixed, "a"))
    if mixed.statistics == "running":
        return
    with torch.no_grad():  # a pass: the means of what it was trained on, not pre-training's
        mixed.prepare("a")
        assert (norm.running_mean - mean_of(conv(x))).abs().max() < 0.5


def test_a_task_after_it_starts_from_the_pretrained_state(mixed):
    original = mixed.pretrained.parts()
    mixed.add_task("d", 2)
    for name, norm in mixed._memory.norms.items():
        for field in ("weight", "bias"):
            assert torch.equal(getattr(norm, field), original[f"{name}.{field}"])
        if isinstance(norm, XconvNorm):
            assert torch.equal(norm.running_mean, norm.recovered_mean("c"))
    assert not mixed.tasks["d"].pretrained
    assert all(s.batches == 0 for s in mixed._memory.statistics.values())


# ---- in and out ------------------------------------------------------------------------------------------------------


@pytest.fixture(params=KINDS)
def pair(request, backbone, learn):
    """Such a network whose convolutions moved since, and a fresh one of other weights."""
    net = make_mixed(backbone, learn, **KINDS[request.param])
    move(net, size=0.02)
    torch.manual_seed(1)
    return net, ContinualNet(aged(backbone(), 5), keep_pretrained=True, **KINDS[request.param])


@pytest.mark.parametrize("current", ["a", "b"])
def test_a_saved_network_is_the_same_network(pair, tmp_path, current):
    net, twin = pair
    expected = logits(net)
    net.set_task(current)
    torch.save(net.state_dict(), tmp_path / "net.pt")
    twin.load_state_dict(torch.load(tmp_path / "net.pt", weights_only=False))
    assert twin.current_task == current
    assert_equal(logits(twin), expected)
    assert twin.pretrained.images == 12
    move(net, 8, 0.02)
    move(twin, 8, 0.02)
    assert_equal(logits(twin), logits(net))


@pytest.mark.parametrize("order", ["shared first", "tasks first"])
def test_what_is_shared_and_each_task_go_to_another_network(pair, order):
    net, twin = pair
    expected = logits(net)
    shared, states = net.shared_state_dict(), {task: net.task_state_dict(task) for task in "abc"}
    assert set(states["a"]) == {"head.weight", "head.bias", "pretrained", "image_size", "finished"}
    if order == "shared first":
        twin.load_shared_state_dict(shared)
    for task in "bac" if order == "tasks first" else "abc":
        twin.load_task_state_dict(task, states[task])
    if order == "tasks first":
        twin.load_shared_state_dict(shared)  # while a settled task is in the live slot
    assert_equal(logits(twin, "c"), expected[2:])
    assert_equal(logits(twin), expected)
    assert twin.tasks["a"] == TaskEntry(
        ("0", "1"), twin.tasks["a"].row, True, True, image_size=(8, 8), sizes=(), batches=()
    )
    with torch.no_grad():
        assert_equal([twin(X, torch.tensor([2] * 6))], [net(X, torch.tensor([2] * 6))])


@pytest.mark.parametrize("current", ["b", "c"])
def test_shared_weights_loaded_over_a_network_in_use(pair, current):
    """Whatever is in the live slot then: variances and the pre-trained state are among what is shared."""
    net, _ = pair
    expected, shared = logits(net), copy.deepcopy(net.shared_state_dict())
    move(net, 8, 0.05)
    with torch.no_grad():
        net.pretrained.row.mul_(1.5)
        for ratio in net.drift.ratios().values() if net.drift is not None else ():
            ratio.mul_(2)
    net.set_task("a")
    logits(net, current)
    net.load_shared_state_dict(shared)
    assert_equal(logits(net, current), [expected["abc".index(current)]])
    assert_equal(logits(net), expected)


def test_a_copy_is_a_network_of_its_own(pair):
    net, _ = pair
    expected = logits(net)
    twin = copy.deepcopy(net)
    assert twin.pretrained is twin._memory.pretrained is not net.pretrained
    assert twin.pretrained._memory is twin._memory is not net._memory
    assert_equal(logits(twin), expected)
    move(twin)
    settle(twin, "d", X)
    assert_equal(logits(net), expected)
    assert (logits(twin, "c")[0] - expected[2]).abs().max() > 1e-3


def test_another_precision(pair):
    net, _ = pair
    expected = logits(net)
    net.double()
    assert net.pretrained.row.dtype == net.tasks["a"].row.dtype == torch.float64
    found = logits(net)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.float(), other, rtol=1e-4, atol=1e-5)
    assert_equal([mine.float() for mine in logits(net.float())], [*logits(net)])
    settle(net.double(), "d", X.double(), 4)
    assert logits(net, "d")[0].dtype == torch.float64


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_a_network_that_does_not_keep_it_says_so(backbone, learn):
    net, without = make_mixed(backbone, learn), ContinualNet(backbone())
    without.add_task("a", 2)
    with pytest.raises(ConfituneError, match=r"does not keep its pre-trained state: ContinualNet\(keep_pretrained"):
        without.at_pretrained().__enter__()
    with pytest.raises(ConfituneError, match="does not keep its pre-trained state"):
        without.finish_pretrained(*head(without, 2))
    with pytest.raises(ConfituneError, match="task 'a' shares the pre-trained state, which this network does not keep"):
        without.load_task_state_dict("a", net.task_state_dict("a"))
    assert not without.tasks["a"].finished
    with pytest.raises(ConfituneError, match="pretrained state"):
        without.load_state_dict(net.state_dict())
    with pytest.raises(ConfituneError, match="the shared weights are those of another network"):
        without.load_shared_state_dict(net.shared_state_dict())


@pytest.mark.parametrize("norm", ["task", "shared", "frozen"])
def test_it_is_for_xconv_batch_norm(backbone, norm):
    net = ContinualNet(backbone(), norm=norm, keep_pretrained=True)
    assert net.pretrained is None
    assert net.kind == (norm,)


def test_a_task_is_finished_once_and_after_measuring():
    net = ContinualNet(two_blocks(), keep_pretrained=True)
    net.add_task("a", 2)
    with pytest.raises(ConfituneError, match="has not been measured yet"):
        net.finish_pretrained(*head(net, 2))
    with net.at_pretrained():  # nothing is measured by this
        net.features_of(images())
    with pytest.raises(ConfituneError, match="has not been measured yet"):
        net.finish_pretrained(*head(net, 2))
    with net.at_pretrained(6):
        net.features_of(images())
    net.finish_pretrained(*head(net, 2))
    with pytest.raises(ConfituneError, match="task 'a' is finished already"):
        net.finish_pretrained(*head(net, 2))
    with pytest.raises(ConfituneError, match="task 'a' is finished already"):
        net.finish_task([images()])
    with pytest.raises(ConfituneError, match=r"reopen\('a'\)"):
        net.train()(images())


def test_a_settled_task_says_that_it_is_finished(backbone, learn):
    net = make_mixed(backbone, learn)
    state = {**net.task_state_dict("a"), "finished": torch.tensor(False)}
    with pytest.raises(ConfituneError, match="shares the pre-trained state and says that it is not finished"):
        net.load_task_state_dict("other", state)
