"""Norms of a task's own: of every kind of layer, of pre-training, and tasks that own none."""

import copy

import pytest
import timm
import torch
from torch import Tensor, nn

from confitune.errors import ConfituneError
from confitune.nn import ContinualNet, Head, Moments, Norms


def aged(model: nn.Module, seed: int = 0) -> nn.Module:
    """Norms that are not the initial ones."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "bn" in name and tensor.is_floating_point():
                tensor.uniform_(0.5, 1.5, generator=generator)
    return model


def norms_of(net: ContinualNet) -> dict[str, Tensor]:
    return {key: tensor.clone() for key, tensor in net.parts["norms"].live(False).items()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return list(found) == list(expected) and all(torch.equal(found[key], expected[key]) for key in expected)


# ---- layers of other kinds -------------------------------------------------------------------------------------------


def convnext() -> nn.Module:
    return timm.create_model("convnext_atto", pretrained=False)


def vit() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", pretrained=False, img_size=32, depth=2)


def grouped() -> nn.Module:
    """Group norm over planes, then one without affine parameters, layer norm over a plane, RMS norm over vectors."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=4, padding=1),
        nn.GroupNorm(3, 6, affine=False),
        nn.LayerNorm([6, 8, 8], bias=False),
        nn.Flatten(),
        nn.Linear(384, 5),
        nn.RMSNorm(5),
    )


# Scales and shifts. ConvNeXt-Atto (40, 80, 160 and 320 channels; 2, 2, 6 and 2 blocks): stem 40, blocks 80 + 160 + 960
# + 640, before the three downsamplings 40 + 80 + 160, head 320. ViT-Tiny of 2 blocks (192 channels): 2 * 2 + 1 norms.
NUMBERS = {"convnext": 2 * (40 + 1840 + 280 + 320), "vit": 2 * 5 * 192, "grouped": 2 * 4 + 6 * 8 * 8 + 5}
MADE = {"convnext": convnext, "vit": vit, "grouped": grouped}
EXAMPLE = torch.zeros(2, 3, 32, 32)


@pytest.mark.parametrize("name", MADE)
def test_norms_without_moments_live_as_those_with(name, learn, check_mixed, tmp_path):
    torch.manual_seed(0)
    net = ContinualNet(MADE[name](), [Norms(), Head()], example_input=EXAMPLE)
    for seed, (task, classes) in enumerate({"a": 2, "b": 4}.items(), 1):
        learn(net, task, classes, seed=seed, steps=2, size=32)
    # Each task keeps its own, and the numbers are those of the architecture.
    assert [storage.beside_head for storage in net.storage().values()] == [NUMBERS[name]] * 2
    states = {task: net.task_state_dict(task) for task in "ab"}
    changed = [key for key in states["a"] if key.endswith(".weight") and key != "head.weight"]
    assert changed
    assert not any(torch.equal(states["a"][key], states["b"][key]) for key in changed)
    for task in "ab":
        net.set_task(task)
        assert all(torch.equal(tensor, states[task][key]) for key, tensor in norms_of(net).items())
    # Moving a task's norms moves that task alone.
    x = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        before = {task: net.eval()(x, task) for task in "ab"}
        net.load_task_state_dict("a", states["a"] | {changed[-1]: states["a"][changed[-1]] + 0.5})
        assert (net(x, "a") - before["a"]).abs().max() > 1e-4
        assert torch.equal(net(x, "b"), before["b"])
    # And its state is all there is of it.
    net.load_task_state_dict("a", states["a"])
    net.load_task_state_dict("again", states["a"])
    with torch.no_grad():
        assert torch.equal(net(x, "again"), before["a"])
    net.drop_task("again")
    check_mixed(net, 32)
    assert all("forward" not in vars(module) for module in net.modules())


def test_a_network_without_norms_is_refused():
    backbone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(ConfituneError, match="Sequential has no normalisation layer that a task could own"):
        ContinualNet(backbone, [Norms(), Head()])


@pytest.mark.parametrize("base", [nn.BatchNorm2d, nn.GroupNorm])
def test_a_norm_with_a_forward_of_its_own_is_a_norm(base, learn, check_mixed):
    class Doubled(base):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    torch.manual_seed(0)
    norm = Doubled(4) if base is nn.BatchNorm2d else Doubled(2, 4)
    backbone = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net = ContinualNet(backbone, [Norms(), Head()])
    learn(net, "a", 2)
    learn(net, "b", 3, seed=1)
    assert net.storage()["a"].beside_head == (16 if base is nn.BatchNorm2d else 8)
    check_mixed(net)


# ---- moments and starts ----------------------------------------------------------------------------------------------


def test_pretrained_moments_never_move(backbone, learn):
    torch.manual_seed(0)
    net = ContinualNet(aged(backbone()), [Norms(moments="pretrained"), Head()])
    buffers = {name: buffer.clone() for name, buffer in net.backbone.named_buffers()}
    batch = learn(net, "a", 2)[0]
    learn(net, "b", 3, seed=1, finish=False)
    assert net.train().training
    assert not any(m.training for m in net.backbone.modules() if isinstance(m, nn.BatchNorm2d))
    net.measure([batch, batch])
    with net.evaluating(batch_moments=True):
        net.features(batch)
    assert not any(m.training for m in net.backbone.modules() if isinstance(m, nn.BatchNorm2d))
    net.finish_task()
    assert same(dict(net.backbone.named_buffers()), buffers)
    # Scales and shifts are each task's own, moments nobody's.
    assert net.storage()["a"].beside_head == 2 * (6 + 8 + 8 + 8)
    assert "bn.running_mean" not in net.task_state_dict("a")
    assert "bn.running_mean" in net.shared_state_dict()
    assert not torch.equal(net.task_state_dict("a")["bn.weight"], net.task_state_dict("b")["bn.weight"])


def test_a_part_may_own_nothing(backbone, learn):
    """Shared norms in evaluation mode throughout: what a linear probe wants."""
    torch.manual_seed(0)
    net = ContinualNet(aged(backbone()), [Norms(affine=False, moments="pretrained"), Head()])
    learn(net, "a", 2)
    assert net.storage()["a"].beside_head == 0
    assert net.parts["norms"].offered() == []
    assert "bn.weight" in net.shared_parameters()


def test_a_task_may_start_from_the_pretrained_norms(backbone, learn):
    torch.manual_seed(0)
    net = ContinualNet(aged(backbone()), [Norms(start="pretrained"), Head()])
    pretrained = norms_of(net)
    learn(net, "a", 2)
    assert not same(norms_of(net), pretrained)
    net.add_task("b", 2)
    assert same(norms_of(net), pretrained)
    previous = ContinualNet(aged(backbone()), [Norms(), Head()])
    learn(previous, "a", 2)
    before = norms_of(previous)
    previous.add_task("b", 2)
    assert same(norms_of(previous), before)


# ---- tasks that own a head alone -------------------------------------------------------------------------------------

X = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(7))


def keeping(backbone, seed: int = 0) -> ContinualNet:
    torch.manual_seed(seed)
    return ContinualNet(aged(backbone(), seed), [Norms(keep_pretrained=True), Head()])


@pytest.fixture
def plain(backbone, learn) -> ContinualNet:
    """Tasks of a head, of everything, and of a head, of 2, 5 and 3 classes; convolutions stay where they are."""
    net = keeping(backbone)
    for parameter in net.groups()["weights"]:
        parameter.requires_grad_(False)
    learn(net, "a", 2, seed=1, owns=["head"])
    learn(net, "b", 5, seed=2)
    learn(net, "c", 3, seed=3, owns=["head"])
    return net.eval()


@torch.no_grad()
def logits(net: ContinualNet, tasks: str = "abc") -> list[Tensor]:
    return [net.eval()(X.to(next(net.parameters())), task) for task in tasks]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


def test_a_task_of_a_head_is_a_head_and_nothing_else(plain):
    for task, classes in (("a", 2), ("c", 3)):
        entry, storage = plain.tasks[task], plain.storage()[task]
        assert (entry.finished, entry.owns) == (True, ("head",))
        assert (storage.beside_head, storage.parts["head"]) == (0, 9 * classes)
        assert set(plain.task_state_dict(task)) == {"head.weight", "head.bias", "image_size", "finished"}
        assert torch.equal(entry.row[: 8 * classes].view(classes, 8), plain.task_state_dict(task)["head.weight"])
    assert plain.tasks["b"].owns == ("norms", "head")
    assert plain.storage()["b"].beside_head == 4 * (6 + 8 + 8 + 8)


def test_it_uses_the_pretrained_norms_to_the_bit(plain, backbone):
    torch.manual_seed(0)
    pretrained = aged(backbone()).eval()
    with torch.no_grad():
        features = pretrained(X)
        for order in ("cab", "bca", "aabbcc"):
            for task in order:
                plain.set_task(task)
                if task == "b":
                    assert not torch.allclose(plain.features(X), features, atol=1e-2)
                else:
                    assert torch.equal(plain.features(X), features)


def test_it_mixes_with_others(plain, check_mixed):
    check_mixed(plain)
    with torch.no_grad():
        plain.backbone.conv.weight.add_(0.05)
    check_mixed(plain)


def test_a_new_task_starts_from_the_last_one_that_owns_everything(plain, backbone):
    of_b = plain.task_state_dict("b")
    plain.set_task("c")
    plain.add_task("d", 2)
    assert all(torch.equal(tensor, of_b[key]) for key, tensor in norms_of(plain).items())
    # Where none does, from the pre-trained ones.
    net = keeping(backbone)
    pretrained = norms_of(net)
    net.add_task("a", 2)
    net.train()(X)
    net.finish_task(["head"])
    net.add_task("b", 2)
    assert same(norms_of(net), pretrained)


def test_it_can_be_reopened_trained_and_finished(plain, learn):
    before = logits(plain)
    plain.reopen("a")
    assert not plain.tasks["a"].finished
    assert plain.tasks["a"].owns == ("norms", "head")
    assert_equal(logits(plain), before)
    learn(plain, "a", 2, seed=4)
    assert plain.storage()["a"].beside_head == plain.storage()["b"].beside_head
    assert (logits(plain, "a")[0] - before[0]).abs().max() > 0.01
    assert_equal(logits(plain, "bc"), before[1:])


@pytest.mark.parametrize("current", ["a", "b"])
def test_a_saved_network_is_the_same_network(plain, backbone, tmp_path, current):
    expected, twin = logits(plain), keeping(backbone, 5)
    plain.set_task(current)
    torch.save(plain.state_dict(), tmp_path / "net.pt")
    twin.load_state_dict(torch.load(tmp_path / "net.pt", weights_only=True))
    assert twin.current_task == current
    assert_equal(logits(twin), expected)


@pytest.mark.parametrize("order", ["shared first", "tasks first"])
def test_what_is_shared_and_each_task_go_to_another_network(plain, backbone, order, check_mixed):
    expected, twin = logits(plain), keeping(backbone, 5)
    shared, states = plain.shared_state_dict(), {task: plain.task_state_dict(task) for task in "abc"}
    torch.manual_seed(0)
    assert torch.equal(shared["bn.running_var"], aged(backbone()).bn.running_var)
    if order == "shared first":
        twin.load_shared_state_dict(shared)
    for task, state in states.items():
        twin.load_task_state_dict(task, state)
    if order == "tasks first":
        twin.load_shared_state_dict(shared)  # while a task on the pre-trained norms is live
    assert_equal(logits(twin, "c"), expected[2:])
    assert_equal(logits(twin), expected)
    check_mixed(twin)


def test_shared_weights_loaded_over_an_unfinished_task_leave_its_norms(plain, learn):
    learn(plain, "d", 2, seed=5, finish=False)
    before, shared = norms_of(plain), copy.deepcopy(plain.shared_state_dict())
    plain.load_shared_state_dict({key: tensor + 1 if "bn" in key else tensor for key, tensor in shared.items()})
    assert same(norms_of(plain), before)
    assert torch.equal(plain.shared_state_dict()["bn.weight"], shared["bn.weight"] + 1)
    with pytest.raises(ConfituneError, match=r"2 tensors are missing, unknown or of another shape \(bn.weight, x"):
        plain.load_shared_state_dict({"x" if key == "bn.weight" else key: value for key, value in shared.items()})


def test_a_copy_and_another_precision_keep_them(plain, learn):
    expected, twin = logits(plain), copy.deepcopy(plain)
    learn(twin, "d", 2, seed=8)
    with torch.no_grad():
        twin.parts["norms"].row.add_(1)
    assert_equal(logits(plain), expected)
    assert (logits(twin, "c")[0] - expected[2]).abs().max() > 1e-3
    plain.double()
    assert plain.tasks["a"].row.dtype == plain.parts["norms"].row.dtype == torch.float64
    for mine, other in zip(logits(plain), expected, strict=True):
        torch.testing.assert_close(mine.float(), other, rtol=1e-4, atol=1e-5)


def test_a_network_without_the_pretrained_norms_refuses_a_task_that_needs_them(backbone, plain):
    without = ContinualNet(backbone(), [Norms(), Head()])
    with pytest.raises(ConfituneError, match=r"stem_bn\.weight must .* and is missing"):
        without.load_task_state_dict("b", plain.task_state_dict("a"))
    with pytest.raises(ConfituneError, match="the shared weights are those of another network"):
        without.load_shared_state_dict(plain.shared_state_dict())


def test_trying_the_pretrained_norms_gives_all_of_an_unfinished_task_back(plain, learn):
    learn(plain, "d", 2, seed=5, finish=False)
    before, pretrained = norms_of(plain), plain.parts["norms"].pretrained()
    with plain.as_pretrained():
        assert not plain.training
        assert same(norms_of(plain), pretrained)
        features = plain.features(X)
    assert plain.training
    assert same(norms_of(plain), before)
    plain.set_task("a")
    assert torch.equal(plain.eval().features(X), features)


def test_batch_moments_are_used_and_not_kept(backbone, learn):
    torch.manual_seed(0)
    net = ContinualNet(backbone(), [Norms(), Head()])
    learn(net, "a", 2, finish=False)
    before = {key: value.clone() for key, value in net.backbone.state_dict().items()}
    stock = copy.deepcopy(net.backbone).train()
    with net.evaluating(batch_moments=True):
        found = net.features(X)
    with torch.no_grad():
        assert torch.equal(found, stock(X))
    assert same(net.backbone.state_dict(), before)
    assert all(m.training and m.track_running_stats for m in net.backbone.modules() if isinstance(m, nn.BatchNorm2d))


# ---- moments of a task's own, and tasks that do without --------------------------------------------------------------


@pytest.fixture
def with_moments():
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    backbone[1].running_mean.normal_()
    return ContinualNet(backbone, [Norms(moments="pretrained", keep_pretrained=True), Moments(), Head()])


def train_task(net, name, own):
    net.add_task(name, 2)
    net.parts["moments"].own = own
    with torch.no_grad():
        net.train()(torch.randn(16, 3, 8, 8) + 3)
        net.backbone[1].weight.add_(0.5)
    net.finish_task(None if own else ["norms", "head"])


def test_only_a_task_with_own_moments_is_trained_with_those_of_batches_and_stores_them(with_moments):
    pretrained = with_moments.backbone[1].running_mean.clone()
    train_task(with_moments, "near", own=False)
    assert torch.equal(with_moments.backbone[1].running_mean, pretrained)
    train_task(with_moments, "far", own=True)
    assert not torch.equal(with_moments.backbone[1].running_mean, pretrained)
    storage = with_moments.storage()
    assert dict(storage["near"].parts) == {"norms": 8, "head": 10}
    assert dict(storage["far"].parts) == {"norms": 8, "moments": 8, "head": 10}
    with_moments.prepare("near")
    assert torch.equal(with_moments.backbone[1].running_mean, pretrained)


def test_mixed_batches_treat_each_image_with_its_tasks_moments(with_moments):
    train_task(with_moments, "near", own=False)
    train_task(with_moments, "far", own=True)
    x = torch.randn(6, 3, 8, 8) + 3
    index = torch.tensor([0, 1, 1, 0, 1, 0])
    with torch.no_grad():
        mixed = with_moments.eval()(x, index)
        for place, name in enumerate(("near", "far")):
            torch.testing.assert_close(
                mixed[index == place], with_moments(x, name)[index == place], rtol=1e-4, atol=1e-5
            )


def test_a_task_without_own_moments_comes_back_from_its_state(with_moments):
    train_task(with_moments, "near", own=False)
    state, x = with_moments.task_state_dict("near"), torch.randn(4, 3, 8, 8)
    with torch.no_grad():
        expected = with_moments.eval()(x, "near").clone()
        with_moments.drop_task("near")
        train_task(with_moments, "far", own=True)
        with_moments.load_task_state_dict("near", state)
        assert with_moments.tasks["near"].owns == ("norms", "head")
        assert torch.equal(with_moments.eval()(x, "near"), expected)
