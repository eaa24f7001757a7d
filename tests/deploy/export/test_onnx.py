"""Files give the network's logits in their own runtime, for any batch size, and say what they are."""

import json
import sys

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from confitune import __version__
from confitune.deploy.export.export import check_export, export_network
from confitune.errors import ConfituneError
from confitune.methods.ccll import Calibrations
from confitune.nn import Deltas, Norms, XconvNorms
from confitune.tasks import Preprocess
from deploy.shared import small

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

PREPROCESS = Preprocess(mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.3), resize=72, crop=64)


@pytest.mark.parametrize(
    ("model", "means"),
    [
        ("resnet18", "window"),
        ("tf_efficientnet_lite0", "phase"),
        ("torchvision:resnet18", "phase"),
        ("torchvision:mobilenet_v2", "window"),
    ],
)
def test_a_file_gives_the_networks_logits_for_one_image_and_for_ten(trained, images, tmp_path, model, means):
    net, x = trained(model, [XconvNorms(means)]), images(10)
    export_network(net, "pets", tmp_path / "pets.onnx", size=64)
    assert [path.name for path in tmp_path.iterdir()] == ["pets.onnx"]  # weights are inside
    session = onnxruntime.InferenceSession(tmp_path / "pets.onnx", providers=["CPUExecutionProvider"])
    assert net.current_task == "birds"
    with torch.no_grad():
        expected = net.eval()(x, "pets")
        assert (expected - expected.mean(0)).abs().max() > 0.01  # images are told apart
        for batch in (x, x[:1]):
            found = torch.tensor(session.run(["logits"], {"images": batch.numpy()})[0])
            torch.testing.assert_close(found, expected[: len(batch)], atol=1e-4, rtol=0)


class PreActivation(nn.Module):
    """Its first convolution's output goes past the norm that reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return (x + self.conv2(self.bn(x).relu())).relu().mean((2, 3))


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        (PreActivation, [XconvNorms]),
        (small, [Norms, Calibrations]),
        (small, [lambda: Norms(keep_pretrained=True), Deltas]),
    ],
    ids=["norms that stay", "calibrations", "deltas"],
)
def test_whatever_a_task_owns_is_in_its_file(trained, images, tmp_path, model, parts):
    net, path = trained(model(), [part() for part in parts], size=8), tmp_path / "birds.onnx"
    export_network(net, "birds", path, size=8)
    for count in (1, 10):
        assert check_export(path, net, "birds", images(count, 8)) < 1e-5


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        (lambda: "resnet18", [XconvNorms]),
        (lambda: "tf_efficientnet_lite0", [lambda: Norms(keep_pretrained=True), Deltas]),
        (small, [lambda: Norms(keep_pretrained=True), lambda: Deltas(1, products=False)]),
        (small, [Norms, Calibrations]),
        (PreActivation, [lambda: Norms(keep_pretrained=True)]),
    ],
    ids=["recovered means", "low-rank changes", "whole changes", "calibrations", "norms that stay"],
)
def test_one_file_holds_all_tasks(trained, images, tmp_path, model, parts):
    made = model()
    size = 64 if isinstance(made, str) else 8
    net, path = trained(made, [part() for part in parts], size=size), tmp_path / "all.onnx"
    if not any(part.input_means for part in net.parts.values()):
        net.add_task("fish", ["cod", "eel"])
        net.train()(images(4, size))
        net.finish_task(owns=["head"] if net.parts["norms"].pretrained() and "calibrations" not in net.parts else None)
    export_network(net, list(net.tasks), path, size=size)
    onnx.checker.check_model(onnx.load(path))
    for task in net.tasks:
        for count in (1, 5):
            assert check_export(path, net, task, images(count, size)) < 1e-4
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    logits = session.run(None, {"images": images(2, size).numpy(), "task": np.array(0)})[0]
    assert logits.shape == (2, 4)
    assert np.isneginf(logits[:, 3:]).all()  # pets has three classes
    assert b"site-packages" not in path.read_bytes()


def test_an_onnx_file_says_how_to_use_it(net, tmp_path):
    path = tmp_path / "new" / "pets.onnx"
    export_network(net, "pets", path, size=(8, 8), preprocess=PREPROCESS)
    model = onnx.load(path)
    onnx.checker.check_model(model)
    facts = {fact.key: fact.value for fact in model.metadata_props}
    assert {key: json.loads(value) for key, value in facts.items()} == {
        "confitune": __version__,
        "tasks": [{"name": "pets", "classes": ["cat", "dog", "hare"]}],
        "size": [8, 8],
        "steps": [["resize", 72], ["crop", 64]],
        "mean": [0.5, 0.4, 0.3],
        "std": [0.2, 0.25, 0.3],
    }
    shapes = [
        [dimension.dim_param or dimension.dim_value for dimension in tensor.type.tensor_type.shape.dim]
        for tensor in (*model.graph.input, *model.graph.output)
    ]
    assert shapes == [["batch", 3, 8, 8], ["batch", 3]]
    assert [tensor.name for tensor in (*model.graph.input, *model.graph.output)] == ["images", "logits"]
    assert "BatchNormalization" not in {node.op_type for node in model.graph.node}


def test_no_file_tells_where_it_was_written(net, tmp_path):
    export_network(net, "pets", tmp_path / "pets.onnx", size=8)
    content = (tmp_path / "pets.onnx").read_bytes()
    assert b"site-packages" not in content
    assert b"export.py" not in content


@pytest.mark.parametrize("package", ["onnx", "onnxscript"])
def test_writing_onnx_says_what_to_install(net, tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfituneError, match=rf"need the package {package}, .*: pip install 'confitune\[export\]'"):
        export_network(net, "pets", tmp_path / "pets.onnx", size=8)


def test_running_onnx_says_what_to_install(net, images, tmp_path, monkeypatch):
    export_network(net, "pets", tmp_path / "pets.onnx", size=8)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ConfituneError, match=r"need the package onnxruntime, .*: pip install 'confitune\[export\]'"):
        check_export(tmp_path / "pets.onnx", net, "pets", images(2, 8))
