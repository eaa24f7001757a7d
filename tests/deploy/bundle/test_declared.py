"""What a bundle's files declare is checked before memory is taken for it."""

import pytest
import torch
from torch import nn

from confitune.deploy import Bundle, BundleError, changing
from confitune.deploy.bundle import TaskRecord
from confitune.nn import backbones
from deploy.shared import NETWORK, add, perturbed


@pytest.mark.parametrize(
    ("key", "tensor", "message"),
    [
        ("head.weight", torch.zeros(2, 7), r"head\.weight must have shape \(2, \d+\) and is of shape \(2, 7\)"),
        ("head.weight", torch.zeros(5000, 64), "2 class names for a head of 5000 classes"),
        ("head.bias", None, r"head\.bias must have shape \(2,\) and is missing"),
        ("finished", torch.ones(1000, dtype=torch.bool), "its task is not marked as finished"),
        ("finished", torch.tensor(False), "its task is not marked as finished"),
        ("finished", None, "its task is not marked as finished"),
        (
            "image_size",
            torch.tensor([10**9, 10**9]),
            r"learned from images of \[1000000000, 1000000000\] pixels, not 32",
        ),
        ("image_size", torch.zeros(9), "learned from images of very many pixels, not 32"),
        ("some.input_size", torch.tensor([10**9, 4, 1]), "impossible for images of 32 pixels"),
        ("some.input_size", torch.tensor([-4, 4, 1]), "impossible for images of 32 pixels"),
    ],
)
def test_a_file_that_declares_other_tensors_is_refused_before_any_is_copied(
    backbone, real, tmp_path, monkeypatch, key, tensor, message
):
    hostile = {**perturbed(real, 1, 2), key: tensor}
    if tensor is None:
        del hostile[key]
    bundle = Bundle(tmp_path / "model", NETWORK)
    with changing(bundle) as change:
        add(change, "good", real, 1, shared=backbone)
        change.add_task("bad", TaskRecord(classes=("a", "b"), file=change.store_task(hostile, ["a", "b"])))
    net = bundle.load_network(["good"])
    monkeypatch.setattr(torch, "cat", lambda *_: pytest.fail("memory was taken"))
    with pytest.raises(BundleError, match=rf"{bundle.record('bad').file.sha256}.* what a bundle keeps: .*{message}"):
        bundle.load_task(net, "bad")
    assert list(net.tasks) == ["good"]


def test_a_backbone_of_another_network_is_refused(real, tmp_path):
    bundle = Bundle(tmp_path / "model", NETWORK)
    with changing(bundle) as change:
        add(change, "a", real, 1, shared={"stem.weight": torch.zeros(200_000)})
    with pytest.raises(BundleError, match=r"what a bundle keeps: the shared weights are those of another network"):
        bundle.load_network()


@pytest.mark.parametrize("load", [Bundle.load_network, Bundle.load_pretrained])
def test_a_network_that_the_file_cannot_hold_is_not_built(real, tmp_path, monkeypatch, load):
    bundle = Bundle(tmp_path / "model", NETWORK)
    with changing(bundle) as change:
        change.store_pretrained(nn.Linear(3, 1, bias=False))
        add(change, "a", real, 1, shared={"stem.weight": torch.zeros(3)})
    monkeypatch.setattr("confitune.deploy.bundle.bundle.build_model", lambda name: pytest.fail("memory was taken"))
    with pytest.raises(
        BundleError,
        match=r"what a bundle keeps: 1\d\d bytes cannot be the weights of test_byobnet",
    ):
        load(bundle)


def test_a_network_that_cannot_be_looked_at_without_memory_is_not_built_either(real, tmp_path, monkeypatch):
    """torchvision's RegNets read their own numbers while they are built; the largest would take gigabytes."""
    bundle = Bundle(tmp_path / "model", NETWORK.model_copy(update={"model": "torchvision:regnet_y_400mf"}))
    with changing(bundle) as change:
        add(change, "a", real, 1, shared={"stem.weight": torch.zeros(50_000)})
    real_build = backbones.build_model

    def build(name):
        assert torch.empty(0).device.type == "meta", "memory was taken"
        return real_build(name)

    monkeypatch.setattr(backbones, "build_model", build)
    with pytest.raises(BundleError, match="bytes cannot be the weights of torchvision:regnet_y_400mf"):
        bundle.load_network()
