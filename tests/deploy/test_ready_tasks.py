"""Tasks in memory: which they are, what images give in their networks, and what a changed bundle leaves of them."""

import pytest
import torch

from confitune.deploy import Bundle, BundleError, changing
from confitune.deploy.ready_tasks import ReadyTasks
from deploy.shared import damage_task

CPU = torch.device("cpu")


@pytest.fixture
def images():
    """Inputs of a network, and what features there are of them."""
    return torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def in_memory(tasks):
    assert set(tasks.net.tasks) == set(tasks._heads)
    return list(tasks._heads)


@torch.no_grad()
def test_logits_and_features_are_those_of_the_network(taught, images):
    bundle = Bundle.open(taught(2))
    tasks, size = ReadyTasks(bundle, CPU, 2), bundle.network.size
    x = torch.nn.functional.interpolate(images, size=(size, size))
    for name in ("stripes", "reds"):
        net = bundle.load_network([name]).eval()
        assert torch.allclose(tasks.logits(x, [name] * 3), net(x), atol=1e-5)
        assert torch.allclose(tasks.features(x, name), net.features(x), atol=1e-5)
        assert tasks.network_for(name).current_task == name
    assert torch.allclose(tasks.features(x), bundle.load_pretrained().eval()(x), atol=1e-5)


def test_the_task_used_longest_ago_makes_room(taught_once):
    tasks = ReadyTasks(Bundle.open(taught_once[6]), CPU, 2)
    for task, held in (
        ("reds", ["reds"]),
        ("stripes", ["reds", "stripes"]),
        ("reds", ["stripes", "reds"]),
        ("greens", ["reds", "greens"]),
        ("reds", ["greens", "reds"]),
    ):
        tasks.network_for(task)
        assert in_memory(tasks) == held


def test_tasks_that_have_not_changed_stay_in_memory(taught):
    path = taught(3)
    tasks = ReadyTasks(Bundle.open(path), CPU, 3)
    for name in ("reds", "stripes", "greens"):
        tasks.network_for(name)
    net, head = tasks.net, tasks._heads["reds"]
    with changing(Bundle.open(path)) as change:
        change.remove_task("stripes")
        change.rename_task("greens", "leaves")
    tasks.follow(Bundle.open(path))
    assert in_memory(tasks) == ["reds"]
    assert tasks.net is net
    assert tasks._heads["reds"] is head
    assert tasks.network_for("leaves").tasks["leaves"].classes == ("greens 0", "greens 1")
    with pytest.raises(BundleError, match="no task 'greens'"):
        tasks.network_for("greens")


def test_with_another_backbone_all_are_read_anew(taught):
    tasks = ReadyTasks(Bundle.open(taught(2)), CPU, 3)
    before = {key: tensor.clone() for key, tensor in tasks.network_for("reds").shared_state_dict().items()}
    tasks.follow(Bundle.open(taught(3, "more")))  # learned one more task, which moved what they share
    assert in_memory(tasks) == []
    after = tasks.network_for("greens").shared_state_dict()
    assert any(not torch.equal(before[key], after[key]) for key in before)


def test_a_task_that_cannot_be_read_is_named_until_it_can(taught):
    path = taught(2)
    whole = {file: file.read_bytes() for file in (path / "tasks").iterdir()}
    file = damage_task(path, "reds")
    tasks = ReadyTasks(Bundle.open(path), CPU, 2)
    tasks.network_for("stripes")
    assert tasks.unreadable == set()
    with pytest.raises(BundleError, match="is damaged"):
        tasks.network_for("reds")
    assert (tasks.unreadable, in_memory(tasks)) == ({"reds"}, ["stripes"])
    file.write_bytes(whole[file])
    tasks.network_for("reds")
    assert tasks.unreadable == set()
