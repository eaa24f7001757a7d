"""Exported files give the network's logits in their own runtimes, for any batch size, and say what they are."""

import json
import logging
import sys

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from confitune import __version__
from confitune.deploy.export import check_export, export as exporting, export_network, onnx as onnx_format
from confitune.errors import ConfituneError
from confitune.methods.ccll import Calibrations
from confitune.nn import Deltas, Norms, XconvNorms
from confitune.tasks import Preprocess

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

PREPROCESS = Preprocess(mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.3), resize=72, crop=64)


def small() -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers)


@pytest.fixture
def net(trained):
    return trained(small(), size=8)


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


def test_a_check_returns_the_largest_difference(net, images, tmp_path):
    path, x = tmp_path / "pets.onnx", images(4, 8)
    export_network(net, "pets", path, size=8)
    with torch.no_grad():
        exact = net.eval()(x, "pets")
        net.set_task("birds")
        net.tasks["pets"].row[-1] += 5e-5  # the bias of the last class, below what is rounding
        assert check_export(path, net, "pets", x) == pytest.approx(5e-5, rel=0.02)
        assert (net(x, "pets") - exact).abs().max().item() == pytest.approx(5e-5, rel=0.02)


# ---- what a file says about itself -----------------------------------------------------------------------------------


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


def test_exporting_is_quiet_and_leaves_the_network(net, images, tmp_path, capfd, recwarn, caplog):
    level, before = logging.getLogger("torch").level, [tensor.clone() for tensor in net.parameters()]
    export_network(net, "pets", tmp_path / "pets.onnx", size=8)
    check_export(tmp_path / "pets.onnx", net, "pets", images(2, 8))
    assert capfd.readouterr() == ("", "")
    assert not recwarn.list
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert logging.getLogger("torch").level == level
    assert (net.current_task, net.training) == ("birds", True)
    assert all(map(torch.equal, net.parameters(), before))


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_file_that_no_longer_fits_is_found_out(net, images, tmp_path):
    path, x = tmp_path / "pets.onnx", images(4, 8)
    export_network(net, "pets", path, size=8)
    with pytest.raises(ConfituneError, match=r"gives logits of shape \(4, 3\), task 'birds' .*\(4, 4\)"):
        check_export(path, net, "birds", x)
    with torch.no_grad():
        net.backbone[0].weight.mul_(1.1)
    with pytest.raises(ConfituneError, match=r"differ by up to .* export it again"):
        check_export(path, net, "pets", x)
    with pytest.raises(ConfituneError, match="differ by up to nan"):
        check_export(path, net, "pets", x * float("nan"))


def test_large_logits_may_differ_more(net, images, tmp_path, monkeypatch):
    path, x = tmp_path / "pets.onnx", images(4, 8)
    export_network(net, "pets", path, size=8)
    with torch.no_grad():
        largest = net.eval()(x, "pets").abs().max().item()
    for scale, fits in ((0.9, True), (1.1, False)):
        added = scale * 1e-4 * max(1.0, 1000 * largest)
        monkeypatch.setattr(
            onnx_format, "run", lambda path, x, task, added=added: 1000 * net(x, "pets").detach() + added
        )
        monkeypatch.setattr(exporting, "copied_to_cpu", lambda net: lambda x, task: 1000 * net(x, task))
        if fits:
            assert check_export(path, net, "pets", x) == pytest.approx(added, rel=0.01)
        else:
            with pytest.raises(ConfituneError, match="differ by up to"):
                check_export(path, net, "pets", x)


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


class AsksItsInput(nn.Module):
    """Goes another way where an image is bright: no exporter can write that down."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.conv(x))
        return x.mean((2, 3)) if x.sum().item() > 0 else x.amax((2, 3))


def test_a_network_that_cannot_be_exported_is_named(trained, tmp_path):
    net = trained(AsksItsInput(), size=8)
    with pytest.raises(ConfituneError, match=r"\.onnx files cannot take AsksItsInput"):
        export_network(net, "pets", tmp_path / "pets.onnx", size=8)
    assert not list(tmp_path.iterdir())


def test_mistakes_are_explained(net, trained, images, tmp_path):
    path = tmp_path / "pets.onnx"
    with pytest.raises(ConfituneError, match=r"trained on images of \(8, 8\).* size=\(8, 8\), not \(16, 16\)"):
        export_network(net, "pets", path, size=16)
    with pytest.raises(ConfituneError, match="no task 'cars'"):
        export_network(net, "cars", path, size=8)
    with pytest.raises(ConfituneError, match=r"pets\.pth: files end in \.onnx"):
        export_network(net, "pets", tmp_path / "pets.pth", size=8)
    with pytest.raises(ConfituneError, match=r"does not run on images of \(2, 2\)"):
        export_network(trained(AsksItsInput(), [Norms()], size=8), "pets", path, size=2)
    with pytest.raises(ConfituneError, match="does not run"):
        check_export(path, net, "pets", images(2, 8))
    path.write_bytes(b"no model")
    with pytest.raises(ConfituneError, match=r"pets\.onnx does not run"):
        check_export(path, net, "pets", images(2, 8))
