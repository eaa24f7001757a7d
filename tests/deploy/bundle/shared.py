"""What several tests of bundles use."""

import json

import torch

from confitune.deploy import Bundle, changing
from confitune.deploy.bundle import TaskRecord
from deploy.shared import NETWORK as SMALLER, backbone_of

NETWORK = SMALLER.model_copy(update={"size": 64})


def backbone_name(path, manifest="bundle.json"):
    """The backbone that a manifest names, as `contents` calls it."""
    return backbone_of(path, manifest).relative_to(path).as_posix()


def sums_name(path, manifest="bundle.json"):
    """The sums of features that a manifest names, likewise."""
    return f"features/{json.loads((path / manifest).read_bytes())['sums']['sha256']}.safetensors"


def no_way_back(path):
    """Without what is kept of the state before the last change."""
    backbone_of(path, "bundle.before.json").unlink()
    (path / sums_name(path, "bundle.before.json")).unlink()
    (path / "bundle.before.json").unlink()
    return path


def by_hand(path, net, network=NETWORK):
    """A bundle of all tasks of a network."""
    bundle = Bundle(path, network)
    with changing(bundle) as change:
        for task, entry in net.tasks.items():
            record = TaskRecord(
                classes=entry.classes,
                file=change.store_task(net.task_state_dict(task), entry.classes),
                accuracy=87.5,
                images=12,
                epochs=3,
                learned="2026-05-01T12:00:00+00:00",
            )
            change.add_task(task, record, net.shared_state_dict(), checked={task: 75.0})
    return bundle


def same_tensors(first, second):
    return first.keys() == second.keys() and all(
        first[key].dtype == second[key].dtype and torch.equal(first[key], second[key]) for key in first
    )


def some_pixels(count=4, size=32):
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def logits(bundle, task):
    return bundle.load_network([task]).eval()(some_pixels(), task)


def read_everything(path):
    bundle = Bundle.open(path)
    for task in bundle.tasks:
        bundle.task_state(task)
        bundle.held_out(task)
        bundle.features(task)
    bundle.label_space()
    bundle.load_pretrained()
    return bundle.load_network(list(bundle.tasks))
