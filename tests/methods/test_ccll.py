"""CCLL: small convolutions per task that leave everything older to the bit as it was; the linear probe beside it."""

import math

import pytest
import torch

from confitune.engine import Listener, TrainSettings
from confitune.methods import create_method
from confitune.nn.parts.calibrations import Calibration


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
