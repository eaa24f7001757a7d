"""Exporting leaves the network as it is, and a file that does not give its logits is found out."""

import logging

import pytest
import torch
from torch import Tensor, nn

from confitune.deploy.export import export as exporting, onnx as onnx_format
from confitune.deploy.export.export import check_export, export_network
from confitune.errors import ConfituneError
from confitune.nn import Norms

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


def test_a_check_returns_the_largest_difference(net, images, tmp_path):
    path, x = tmp_path / "pets.onnx", images(4, 8)
    export_network(net, "pets", path, size=8)
    with torch.no_grad():
        exact = net.eval()(x, "pets")
        net.set_task("birds")
        net.tasks["pets"].row[-1] += 5e-5  # the bias of the last class, below what is rounding
        assert check_export(path, net, "pets", x) == pytest.approx(5e-5, rel=0.02)
        assert (net(x, "pets") - exact).abs().max().item() == pytest.approx(5e-5, rel=0.02)


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
