"""Errors of both moments against a forward pass written out, and against weights that were scaled by hand."""

import copy
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from confitune.analysis import LayerMoments, ShiftRecorder, ShiftResult, moments_at_test
from confitune.analysis.moments import read_moments, write_moments
from confitune.analysis.shift import AFTER_FIRST_TASK
from confitune.engine import Listener
from confitune.errors import ConfituneError
from confitune.nn import ContinualNet, Head, Norms, XconvNorms

RESULTS = Path(__file__).parents[2] / "results"
KINDS = ("true_mean", "true_variance", "used_mean", "used_variance")
FORMS = {"shared": lambda: [], "task": lambda: [Norms()], "xconv": lambda: [XconvNorms()]}


class Copies(Listener):
    """Keeps the network as it was after each task."""

    def __init__(self, net):
        self.net, self.after = net, []

    def task_ended(self, task, accuracies):
        self.after.append(copy.deepcopy(self.net))


def by_channel(tested, task, by_hand):
    """True mean and variance, used mean and variance of each convolution, from all test images at once."""
    net, norms = tested
    with torch.no_grad():
        outputs, _ = by_hand(net, task, lambda norm, x: (norm.running_mean, norm.running_var))
    return {
        conv: [
            *(x.mean((0, 2, 3)).numpy(), x.var((0, 2, 3), correction=0).numpy()),
            *(norms[conv].running_mean.double().numpy(), norms[conv].running_var.double().numpy()),
        ]
        for conv, x in outputs.items()
    }


def rms(values):
    return pytest.approx(np.sqrt(np.mean(values**2)), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("method", ["finetune", "task-bn", "confit"])
def test_errors_of_a_run(make_run, sequence, settings, at_test, by_hand, method, tmp_path):
    net = make_run(method).net
    copies, recorder = Copies(net), ShiftRecorder(net, sequence, settings, tmp_path)
    make_run(method, net=net, listeners=(recorder, copies)).run()
    first, _, last = (by_channel(at_test(after, sequence[0]), sequence[0], by_hand) for after in copies.after)
    result, eps = recorder.result(), 1e-5
    for found, conv in zip(result.errors, "03", strict=True):
        for when, (mean, variance, used_mean, used_variance) in (("first", first[conv]), ("last", last[conv])):
            assert found[f"mean error, {when}"] == rms((used_mean - mean) / np.sqrt(variance + eps))
            assert found[f"variance error, {when}"] == rms(np.log((used_variance + eps) / (variance + eps)))
        assert found["variance moved"] == rms(np.log((last[conv][1] + eps) / (first[conv][1] + eps)))
        assert found["variance moved"] > 1e-2  # there was something to follow


def scaled_after_the_first_task(make_backbone, sequence, settings, tmp_path, form, scale, eps=1e-12):
    """What is measured of a network whose first convolution was scaled when the second task was learned."""
    backbone = make_backbone()
    for layer in (1, 4):
        backbone[layer].eps = eps
    net = ContinualNet(backbone, [*FORMS[form](), Head()], momentum=1.0)  # moments of the last batch: all images
    recorder = ShiftRecorder(net, sequence[:2], settings, tmp_path)
    recorder.run_started("finetune", ["dark", "bright"], 1, 0)
    for place, task in enumerate(sequence[:2]):
        net.add_task(task.name, len(task.classes))
        pixels = task.preprocess(task.train.pixels[task.train.rows])
        net.train()
        if place == 1:
            with torch.no_grad():
                net.backbone[0].weight.mul_(scale[:, None, None, None])
                net.backbone[0].bias.mul_(scale)
        net(pixels)
        net.finish_task()
        recorder.task_ended(place, [0.0] * (place + 1))
    return recorder.result()


@pytest.mark.parametrize("form", FORMS)
def test_a_convolution_scaled_by_a_known_factor(make_backbone, sequence, settings, tmp_path, form):
    """Times 4, which float32 does exactly: variances are 16 times what they were, whatever the images."""
    result = scaled_after_the_first_task(make_backbone, sequence, settings, tmp_path, form, torch.full((6,), 4.0))
    layer, next_layer = result.errors
    assert layer["variance moved"] == pytest.approx(math.log(16), rel=1e-9)
    if form != "shared":  # a variance that is 16 times too small, but for what it was off before
        before = layer["variance error, first"]
        assert layer["variance error, last"] == pytest.approx(math.log(16), abs=before)
        assert before < 0.5
        assert next_layer["variance moved"] > 0.1
    if form == "xconv":  # means are four times as large, deviations too
        assert layer["mean error, last"] == pytest.approx(layer["mean error, first"], rel=1e-4)


def test_one_channel_alone(make_backbone, sequence, settings, tmp_path):
    scale = torch.ones(6)
    scale[4] = 0.5
    result = scaled_after_the_first_task(make_backbone, sequence, settings, tmp_path, "xconv", scale)
    assert result.errors[0]["variance moved"] == pytest.approx(math.log(4) / math.sqrt(6), rel=1e-9)


def test_eps_is_the_batch_norms_own(make_backbone, sequence, settings, tmp_path):
    """With an eps that drowns every variance, nothing that batch norm divides by has moved."""
    result = scaled_after_the_first_task(
        make_backbone, sequence, settings, tmp_path, "task", torch.full((6,), 2.0), eps=1000.0
    )
    assert 0 < result.errors[0]["variance moved"] < 0.01
    assert result.errors[0]["mean error, last"] < 0.2


@pytest.mark.parametrize("size", [1, 5, 64])
def test_batches_split_or_not(make_run, sequence, settings, size):
    net = make_run("confit").net
    make_run("confit", net=net).run()
    whole = moments_at_test(net, sequence[0], settings.model_copy(update={"eval_batch_size": len(sequence[0].test)}))
    split = moments_at_test(net, sequence[0], settings.model_copy(update={"eval_batch_size": size}))
    for name in "03":
        for kind in KINDS:
            np.testing.assert_allclose(getattr(split[name], kind), getattr(whole[name], kind), rtol=1e-5, atol=1e-6)


def test_a_variance_beside_a_large_mean(make_backbone, sequence, settings):
    """A mean square of 1e8 and a variance around 1: sums of squares in float32 would lose it."""
    net = ContinualNet(make_backbone(), [Norms(), Head()])
    net.add_task("dark", 3)
    before = moments_at_test(net, sequence[0], settings)["0"]
    with torch.no_grad():
        net.backbone[0].bias += 1e4
    after = moments_at_test(net, sequence[0], settings)["0"]
    np.testing.assert_allclose(after.true_variance, before.true_variance, rtol=1e-2)
    np.testing.assert_allclose(after.true_mean - 1e4, before.true_mean, atol=2e-3)


# ---- files -----------------------------------------------------------------------------------------------------------

BEFORE = {
    **{"dataset": "d", "method": "m", "seed": 1, "task": "a", "last_task": "b"},
    **{"layers": ["x", "y"], "d0": [0.1, 0.2], "d1": [0.25, 1], "d2": [1, 2.0]},
}
ERRORS = {"mean error, last": 0.5, "variance moved": 1.0}


def test_a_result_from_before_has_no_errors(tmp_path):
    (tmp_path / "shift.json").write_text(json.dumps(BEFORE))
    result = ShiftResult.load(tmp_path / "shift.json")
    assert (result.d0, result.d1, result.d2) == ([0.1, 0.2], [0.25, 1.0], [1.0, 2.0])
    assert result.errors == []


def test_every_result_in_the_repository_can_be_read():
    paths = sorted(RESULTS.glob("*/runs/**/shift.json"))
    assert len(paths) > 20
    for path in paths:
        assert ShiftResult.load(path).method == path.parts[-3]


def test_a_result_with_errors_is_saved_and_loaded(tmp_path):
    result = ShiftResult.model_validate({**BEFORE, "errors": [ERRORS] * 2})
    result.save(tmp_path / "shift.json")
    assert ShiftResult.load(tmp_path / "shift.json") == result


@pytest.mark.parametrize("changed", [{"d1": [0.1]}, {"errors": [ERRORS]}])
def test_a_result_that_misses_a_layer_is_refused(tmp_path, changed):
    (tmp_path / "shift.json").write_text(json.dumps({**BEFORE, **changed}))
    with pytest.raises(ConfituneError, match=r"not a saved ShiftResult: (?s:.*)2 layers, but lists of"):
        ShiftResult.load(tmp_path / "shift.json")


def test_moments_wait_in_a_file_to_the_last_bit(tmp_path):
    draw = torch.Generator().manual_seed(0)
    kept = {
        name: LayerMoments(eps, *(torch.rand(3, generator=draw).double() for _ in KINDS))
        for name, eps in (("z", 0.1), ("a.b", 1e-3))
    }
    write_moments(tmp_path / "kept", "dark", kept)
    found = read_moments(tmp_path / "kept", "dark")
    assert list(found) == ["z", "a.b"]
    for name, layer in kept.items():
        assert found[name].eps == layer.eps
        assert all(torch.equal(getattr(found[name], kind), getattr(layer, kind)) for kind in KINDS)


def test_a_file_without_variances_is_refused(tmp_path):
    tensors = {f"{kind}/0": torch.zeros(6).double() for kind in ("true", "running")}
    save_file(tensors, tmp_path / "kept", {"task": "dark", "layers": '["0"]'})
    with pytest.raises(ConfituneError, match="start this run anew"):
        read_moments(tmp_path / "kept", "dark")


@pytest.mark.parametrize("other", ["0 3", "0 1", "0"])
def test_a_file_of_another_network_is_refused(make_run, sequence, settings, tmp_path, other):
    net = make_run("confit").net
    make_run("confit", net=net, listeners=(ShiftRecorder(net, sequence, settings, tmp_path),)).run()
    kept = {name: LayerMoments(1e-5, *(torch.ones(5).double() for _ in KINDS)) for name in other.split()}
    write_moments(tmp_path / AFTER_FIRST_TASK, "dark", kept)
    recorder = ShiftRecorder(net, sequence, settings, tmp_path)
    recorder.run_started("confit", [task.name for task in sequence], 2, len(sequence))
    with pytest.raises(ConfituneError, match=r"of another network: .*'0': 5.*'0': 6, '3': 8"):
        recorder.result()
