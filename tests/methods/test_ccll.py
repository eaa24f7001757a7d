"""CCLL: small convolutions per task that leave everything older to the bit as it was; the linear probe beside it."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from confitune.engine import Listener, TrainSettings
from confitune.methods import create_method
from confitune.methods.ccll import Calibration, Calibrations
from confitune.nn import ContinualNet, Head, Norms, build_model


class Logits(Listener):
    """After every task, the logits of all tasks' test images; before it, the backbone as it starts."""

    def __init__(self, tasks):
        self.tasks, self.seen, self.starts, self.convs = tasks, [], [], []

    def watch(self, run):
        self.run = run
        return run

    def task_started(self, task, name, first_epoch):
        self.starts.append(self.run.net.task_state_dict(name))

    def task_ended(self, task, accuracies):
        net = self.run.net
        was_training = net.training
        net.eval()
        with torch.no_grad():
            self.seen.append(
                [net(t.preprocess(t.test.pixels[t.test.rows]), t.name).clone() for t in self.tasks[: task + 1]]
            )
        net.train(was_training)
        self.convs.append([p.detach().clone() for p in net.groups()["weights"]])


@pytest.fixture
def watched(make_run, tasks):
    def make(method, options=None, **settings):
        look = Logits(tasks)
        return look.watch(make_run(method, options, listeners=(look,), **settings)), look

    return make


CASES = {
    "ccll": ("ccll", {}),
    "ccll identity": ("ccll", {"start": "identity"}),
    "ccll frozen": ("ccll", {"frozen": "always"}),
    "ccll groups": ("ccll", {"group": 4}),
    "linear-probe": ("linear-probe", None),
}


@pytest.mark.parametrize(("method", "options"), CASES.values(), ids=CASES)
def test_old_tasks_stay_as_they_were_to_the_bit(watched, method, options):
    run, look = watched(method, options and {method: options}, epochs=4)
    result = run.run()
    for index in range(3):
        for later in look.seen[index:]:
            assert torch.equal(later[index], look.seen[index][index])
        assert len(set(result.accuracy_matrix[index][index:])) == 1
    assert result.fgt == 0


@pytest.mark.parametrize("start", ["random", "identity"])
def test_calibrations_learn(watched, start):
    run, look = watched("ccll", {"ccll": {"start": start}}, epochs=15)
    assert run.run().learning_acc > 70  # chance is 36
    state = run.net.task_state_dict("minus")
    for key in (
        "1.calibration.spatial.weight",
        "4.calibration.gate.conv.weight",
        "4.calibration.gate.norm.bias",
        "1.weight",
    ):
        assert (state[key] - look.starts[2][key]).abs().max() > 1e-5


@pytest.mark.parametrize("seed", [0, 1])
def test_the_identity_start_is_the_pre_trained_network_to_the_bit(make_net, seed):
    x = torch.randn(9, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    found = []
    for start in ("identity", "random"):
        net = make_net("ccll", {"ccll": {"start": start}}, weights_seed=seed)
        net.add_task("one", 3, torch.Generator().manual_seed(0))
        with torch.no_grad():
            found.append(net.eval().backbone(x))
    with torch.no_grad():
        pretrained = make_net("finetune", weights_seed=seed).eval().backbone(x)
    assert torch.equal(found[0], pretrained)
    assert not torch.allclose(found[1], pretrained, atol=1e-2)


def test_in_training_mode_the_identity_start_is_the_network_in_training_mode(make_net):
    x = torch.randn(9, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    plain, identity = make_net("finetune"), make_net("ccll", {"ccll": {"start": "identity"}})
    identity.add_task("one", 3)
    with torch.no_grad():
        assert torch.equal(identity.train().backbone(x), plain.train().backbone(x))
        assert torch.equal(identity.backbone[1].running_mean, plain.backbone[1].running_mean)


def calibrations(net):
    return torch.cat([p.detach().reshape(-1) for p in net.groups()["calibrations"]])


def test_the_random_start_is_drawn_from_the_generator(make_net):
    found = []
    for seed in (5, 5, 6):
        net = make_net("ccll")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(len(found))  # which must not matter
            net.add_task("one", 3, torch.Generator().manual_seed(seed))
        found.append(calibrations(net))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_every_task_draws_a_start_of_its_own(watched):
    run, look = watched("ccll", epochs=1)
    run.run()
    starts = [start["1.calibration.spatial.weight"] for start in look.starts]
    assert not torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[1], starts[2])
    again, other = watched("ccll", epochs=1)
    again.run()
    assert torch.equal(other.starts[2]["1.calibration.spatial.weight"], starts[2])


def assert_uniform(values, bound):
    assert values.abs().max() <= bound
    assert values.abs().max() > 0.97 * bound
    assert abs(values.mean()) < 0.05 * bound
    assert values.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)


@pytest.mark.parametrize("channels", [255, 250, 257])
def test_the_random_start_knows_smaller_groups(channels):
    calibration = Calibration(channels, "random", 4)
    calibration.reset(torch.Generator().manual_seed(0))
    assert_uniform(calibration.spatial.weight.detach(), (9 * calibration.spatial.weight.shape[1]) ** -0.5)


def test_a_loaded_network_starts_tasks_from_the_same_batch_norm(make_net):
    net, other = make_net("ccll"), make_net("ccll", weights_seed=1)
    net.add_task("one", 2)
    net.finish_task()
    other.load_state_dict(net.state_dict())
    for each in (net, other):
        each.add_task("two", 2)
    assert torch.equal(other.backbone[1].weight, net.backbone[1].weight)
    assert torch.equal(other.backbone[4].running_var, net.backbone[4].running_var)


def test_the_first_tasks_base_is_trained_in_the_first_task_only(watched, make_net):
    before = [p.detach() for p in make_net("ccll").groups()["weights"]]
    run, look = watched("ccll")
    run.run()
    assert all(not torch.equal(old, new) for old, new in zip(before, look.convs[0], strict=True))
    for later in look.convs[1:]:
        assert all(torch.equal(old, new) for old, new in zip(look.convs[0], later, strict=True))


def test_the_pre_trained_base_is_never_trained(watched, make_net):
    before = [p.detach() for p in make_net("ccll").groups()["weights"]]
    run, look = watched("ccll", {"ccll": {"frozen": "always"}})
    run.run()
    for later in look.convs:
        assert all(torch.equal(old, new) for old, new in zip(before, later, strict=True))


def test_every_task_starts_from_the_pre_trained_batch_norm(watched, make_net):
    run, look = watched("ccll", {"ccll": {"start": "identity"}})
    run.run()
    pretrained = make_net("finetune").backbone.state_dict()
    keys = [key for key in pretrained if key.split(".")[0] in ("1", "4") and "num_batches" not in key]
    assert len(keys) == 8
    for start in look.starts:
        for key in keys:
            assert torch.equal(start[key], pretrained[key]), key
        assert not any(start[key].any() for key in start if "calibration" in key and "norm" not in key)
    # ... and did not stay there:
    assert not torch.equal(run.net.task_state_dict("minus")["1.weight"], pretrained["1.weight"])


def test_its_paper_trains_150_epochs_and_divides_the_rate_at_50_100_and_125():
    settings = TrainSettings(**create_method("ccll").settings)
    assert (settings.epochs, settings.lr) == (150, 0.01)
    expected = [1.0] * 50 + [0.1] * 50 + [0.01] * 25 + [0.001] * 25
    assert [settings.lr_factor(epoch) for epoch in range(150)] == pytest.approx(expected)


def test_its_options_reach_parts_and_stages():
    default = create_method("ccll")
    chosen = create_method("ccll", {"ccll": {"start": "identity", "frozen": "always", "group": 4}})
    assert [method.parts()[1].kind for method in (default, chosen)] == [
        "Calibrations(random, groups of 1)",
        "Calibrations(identity, groups of 4)",
    ]
    trained = {"head", "norms", "calibrations"}
    assert [stage.trains for index in (0, 1) for stage in default.stages(7, index)] == [{*trained, "weights"}, trained]
    assert [stage.trains for index in (0, 1) for stage in chosen.stages(7, index)] == [trained, trained]
    assert [stage.epochs for index in (0, 1) for stage in chosen.stages(7, index)] == [7, 7]


# ---- a calibration ---------------------------------------------------------------------------------------------------


def grouped(weight: np.ndarray, x: np.ndarray) -> np.ndarray:
    """A grouped convolution with padding that keeps the size, channel by channel."""
    channels, size, kernel = weight.shape[:3]
    (height, width), edge = x.shape[2:], kernel // 2
    padded = np.pad(x, ((0, 0), (0, 0), (edge, edge), (edge, edge)))
    found = np.zeros_like(x)
    for out in range(channels):
        group = out // size * size
        for k in range(size):
            for i in range(kernel):
                for j in range(kernel):
                    found[:, out] += weight[out, k, i, j] * padded[:, group + k, i : i + height, j : j + width]
    return found


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("start", "scale"), [("random", 1), ("identity", 2)])
@pytest.mark.parametrize(("channels", "most", "group"), [(8, 1, 1), (8, 4, 4), (6, 4, 3), (10, 4, 2), (5, 4, 1)])
def test_a_calibration_is_a_grouped_3x3_before_and_a_grouped_gate_after_the_norm(
    start, scale, channels, most, group, training
):
    torch.manual_seed(0)
    calibration = Calibration(channels, start, most).double().train(training)
    spatial, gate = calibration.spatial, calibration.gate
    assert (spatial.weight.shape, gate.conv.weight.shape) == ((channels, group, 3, 3), (channels, group, 1, 1))
    assert spatial.bias is None
    assert gate.conv.bias is None
    for parameter in calibration.parameters():
        nn.init.normal_(parameter, 0, 0.5)
    gate.norm.running_mean.normal_()
    gate.norm.running_var.uniform_(0.5, 2)
    mean, var = gate.norm.running_mean.numpy().copy(), gate.norm.running_var.numpy().copy()
    x = torch.randn(3, channels, 5, 4, dtype=torch.float64)
    norm = nn.BatchNorm2d(channels).double().eval()
    nn.init.normal_(norm.weight)
    norm.register_forward_pre_hook(calibration.before)
    norm.register_forward_hook(calibration.after)
    with torch.no_grad():
        found = norm(x).numpy()
        y = x.numpy() + grouped(spatial.weight.numpy(), x.numpy())
        y = y / np.sqrt(1 + norm.eps) * norm.weight.numpy()[:, None, None]
        total = grouped(gate.conv.weight.numpy(), y.mean((2, 3), keepdims=True))[:, :, 0, 0]
        if training:
            mean, var = total.mean(0), total.var(0)
        total = (total - mean) / np.sqrt(var + gate.norm.eps) * gate.norm.weight.numpy() + gate.norm.bias.numpy()
    expected = y * (scale / (1 + np.exp(-total)))[:, :, None, None]
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_the_random_start_is_as_torch_initialises_convolutions():
    calibration = Calibration(256, "random", 4)
    calibration.reset(torch.Generator().manual_seed(0))
    assert_uniform(calibration.spatial.weight.detach(), 36**-0.5)
    assert_uniform(calibration.gate.conv.weight.detach(), 4**-0.5)


def test_calibrations_of_resnet18_have_the_half_percent_that_their_paper_states():
    net = ContinualNet(build_model("resnet18"), [Norms(start="pretrained"), Calibrations(), Head()])
    net.add_task("a", 2)
    # Of 4,800 channels: 9 of the 3x3, 1 of the gate, 2 of its norm; and on top this norm's moments and the batch norms.
    weights = sum(p.numel() for p in net.groups()["calibrations"])
    assert weights == 12 * 4_800
    of_imagenet100 = sum(p.numel() for p in net.backbone.parameters()) + 100 * 513  # with its head
    assert round(100 * weights / of_imagenet100, 2) == 0.51
    assert dict(net.storage()["a"].parts) == {"norms": 4 * 4_800, "calibrations": 14 * 4_800, "head": 1026}


def test_groups_of_four_have_the_numbers_that_confits_paper_counts():
    net = ContinualNet(build_model("resnet18"), [Norms(start="pretrained"), Calibrations(group=4), Head()])
    layers = net.parts["calibrations"].layers
    assert sum(layer.spatial.weight.numel() for layer in layers) == 172_800
