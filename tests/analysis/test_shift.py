"""Shift against a forward pass written out, weights moved by hand, every kind of run, and runs broken off."""

import copy

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from confitune.analysis.shift import AFTER_FIRST_TASK, ShiftRecorder, moments_at_test, paired_convs
from confitune.engine import Listener
from confitune.errors import ConfituneError
from confitune.methods import create_method
from confitune.nn import ContinualNet, Head, build_model

CASES = ["finetune", "hierarchical", "finetune-xconv", "confit", "task-bn"]
KINDS = ["finetune", "task-bn", "confit"]  # norms that are shared, stored, recovered


class Killed(Exception):
    pass


class Killer(Listener):
    def __init__(self, task):
        self.task = task

    def task_started(self, task, name, first_epoch):
        if task == self.task:
            raise Killed


class Copies(Listener):
    """Keeps the network as it was after each task."""

    def __init__(self, net):
        self.net, self.after = net, []

    def task_ended(self, task, accuracies):
        self.after.append(copy.deepcopy(self.net))


def stored(norm, x):
    return norm.running_mean, norm.running_var


def measured_by_hand(tested, task, by_hand):
    """True and running means of task `task`, by convolution."""
    net, norms = tested
    with torch.no_grad():
        outputs, _ = by_hand(net, task, stored)
    true = {conv: x.mean((0, 2, 3)).numpy() for conv, x in outputs.items()}
    return true, {conv: norm.running_mean.double().numpy() for conv, norm in norms.items()}


@pytest.mark.parametrize("method", CASES)
def test_d0_d1_d2_of_a_run(make_run, sequence, settings, at_test, by_hand, method, tmp_path):
    run = make_run(method)
    copies, recorder = Copies(run.net), ShiftRecorder(run.net, sequence, settings, tmp_path)
    make_run(method, net=run.net, listeners=(recorder, copies)).run()
    task = sequence[0]
    (true1, running1), _, (true3, running3) = (
        measured_by_hand(at_test(net, task), task, by_hand) for net in copies.after
    )
    result = recorder.result()
    assert result["layers"] == ["0", "3"]
    norm = np.linalg.norm
    np.testing.assert_allclose(result["d0"], [norm(running1[n] - true1[n]) for n in "03"], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(result["d1"], [norm(true1[n] - true3[n]) for n in "03"], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(result["d2"], [norm(running3[n] - true3[n]) for n in "03"], rtol=1e-4, atol=1e-6)
    assert min(result["d1"]) > 1e-3  # something moved


@pytest.mark.parametrize("method", ["bn-only", "best"])
def test_nothing_shifts_where_the_backbone_rests(make_run, sequence, settings, method, tmp_path):
    net = make_run(method).net
    recorder = ShiftRecorder(net, sequence, settings, tmp_path)
    make_run(method, net=net, listeners=(recorder,)).run()
    assert recorder.result()["d1"] == [0.0, 0.0]
    assert recorder.result()["d2"] == recorder.result()["d0"]


@pytest.mark.parametrize("method", KINDS)
def test_weights_moved_by_hand(make_backbone, sequence, settings, method, tmp_path):
    """The first convolution's bias moves by (3, 4, 0, ...): its output by exactly that, 5 in all."""
    net = create_method(method).network(make_backbone())
    first = sequence[0]
    net.add_task(first.name, 3)
    with torch.no_grad():
        net.train()(first.preprocess(first.train.pixels[first.train.rows]))
    net.finish_task()
    recorder = ShiftRecorder(net, sequence[:2], settings, tmp_path)
    recorder.run_started("finetune", ["dark", "bright"], 1, 0)
    recorder.task_ended(0, [0.0])
    with torch.no_grad():
        net.backbone[0].bias[:2] += torch.tensor([3.0, 4.0])
    recorder.task_ended(1, [0.0, 0.0])
    result = recorder.result()
    assert result["d1"][0] == pytest.approx(5.0, rel=1e-5)
    true, used = moments_at_test(net, first, settings)["0"].numpy()
    gap = true - used
    assert result["d2"][0] == pytest.approx(np.linalg.norm(gap), rel=1e-6)
    if method == "confit":  # recovered through today's bias
        assert result["d2"][0] == pytest.approx(result["d0"][0], abs=1e-5)
        assert result["d1"][1] == pytest.approx(0.0, abs=1e-5)  # normalised away: the next layer sees what it saw
    else:  # the stored mean stays behind by what the bias moved
        gap[:2] -= [3.0, 4.0]
        assert result["d0"][0] == pytest.approx(np.linalg.norm(gap), rel=1e-4)
        assert result["d1"][1] > 0.1


@pytest.mark.parametrize("method", KINDS)
def test_the_task_at_hand_is_the_one_asked_for(make_run, sequence, settings, at_test, by_hand, method):
    net = make_run(method).net
    make_run(method, net=net).run()
    for task in sequence:
        true, running = measured_by_hand(at_test(net, task), task, by_hand)
        found = moments_at_test(net, task, settings)
        assert found["3"].dtype == torch.float64
        for name in "03":
            np.testing.assert_allclose(found[name][0], true[name], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(found[name][1], running[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("finished", [True, False])
def test_measuring_changes_nothing(make_run, sequence, settings, same_state, state_of, finished):
    net = make_run("confit").net
    make_run("confit", net=net).run()
    if not finished:
        net.reopen("bright")
        with torch.no_grad():
            net.train()(sequence[1].preprocess(sequence[1].train.pixels[:6]))
    before, hooks = state_of(net), [len(m._forward_hooks) for m in net.modules()]
    moments_at_test(net, sequence[0], settings)
    assert same_state(before, state_of(net))
    assert hooks == [len(m._forward_hooks) for m in net.modules()]


def test_a_watched_run_is_the_same_run(make_run, sequence, settings, tmp_path):
    alone = make_run("confit").run()
    net = make_run("confit").net
    watched = make_run("confit", net=net, listeners=(ShiftRecorder(net, sequence, settings, tmp_path),)).run()
    assert watched.final_sha256 == alone.final_sha256


def test_float32_whatever_is_around(make_run, sequence, settings):
    net = make_run("confit").net
    make_run("confit", net=net).run()
    exact = moments_at_test(net, sequence[0], settings)
    with torch.autocast("cpu", torch.bfloat16):
        within = moments_at_test(net, sequence[0], settings.model_copy(update={"precision": "bf16"}))
    assert all(torch.equal(exact[name], within[name]) for name in exact)


@pytest.mark.parametrize("method", ["confit", "finetune"])
@pytest.mark.parametrize("task", [1, 2])
def test_resumed_equals_undisturbed(make_run, sequence, settings, tmp_path, method, task):
    net = make_run(method).net
    whole = ShiftRecorder(net, sequence, settings, tmp_path)
    make_run(method, net=net, listeners=(whole,)).run()
    undisturbed = whole.result()
    net = make_run(method).net
    broken = ShiftRecorder(net, sequence, settings, tmp_path)
    with pytest.raises(Killed):
        make_run(method, net=net, listeners=(broken, Killer(task)), folder=tmp_path).run()
    net = make_run(method).net
    resumed = ShiftRecorder(net, sequence, settings, tmp_path)
    run = make_run(method, net=net, listeners=(resumed,), folder=tmp_path)
    assert run.resume()
    run.run()
    assert resumed.result() == undisturbed


def test_broken_off_after_the_last_task(make_run, sequence, settings, tmp_path):
    net = make_run("confit").net
    whole = ShiftRecorder(net, sequence, settings, tmp_path)
    make_run("confit", net=net, listeners=(whole,), folder=tmp_path).run()
    net = make_run("confit").net
    late = ShiftRecorder(net, sequence, settings, tmp_path)
    run = make_run("confit", net=net, listeners=(late,), folder=tmp_path)
    assert run.resume()
    run.run()
    assert late.result() == whole.result()


def test_resumed_without_what_was_measured(make_run, sequence, settings, tmp_path):
    with pytest.raises(Killed):
        make_run("confit", listeners=(Killer(1),), folder=tmp_path).run()
    net = make_run("confit").net
    recorder = ShiftRecorder(net, sequence, settings, tmp_path)
    run = make_run("confit", net=net, listeners=(recorder,), folder=tmp_path)
    assert run.resume()
    with pytest.raises(ConfituneError, match="start this run anew"):
        run.run()


def test_what_an_earlier_run_left_is_not_taken(make_run, sequence, settings, tmp_path):
    path = tmp_path / AFTER_FIRST_TASK
    path.write_bytes(b"of another run")
    net = make_run("confit").net
    recorder = ShiftRecorder(net, sequence, settings, tmp_path)
    recorder.run_started("confit", [task.name for task in sequence], 2, 0)
    assert not path.exists()
    path.write_bytes(b"broken")
    with pytest.raises(ConfituneError, match="cannot be read"):
        recorder.run_started("confit", [task.name for task in sequence], 2, 1)


@pytest.mark.parametrize("method", ["joint", "single-task"])
def test_no_network_of_all_tasks(make_run, sequence, settings, method, tmp_path):
    net = make_run(method).net
    with pytest.raises(ConfituneError, match="no shift"):
        make_run(method, net=net, listeners=(ShiftRecorder(net, sequence, settings, tmp_path),)).run()


def test_calibrated_and_unpaired_networks_are_refused(make_run, sequence, settings):
    with pytest.raises(ConfituneError, match="calibrat"):
        paired_convs(make_run("ccll").net)
    bare = ContinualNet(nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()), [Head()])
    bare.add_task("dark", 3)
    with pytest.raises(ConfituneError, match="nothing to watch"):
        moments_at_test(bare, sequence[0], settings)


def test_before_the_end_there_is_no_result(make_run, sequence, settings, tmp_path):
    with pytest.raises(ConfituneError, match="cannot be read"):
        ShiftRecorder(make_run("confit").net, sequence, settings, tmp_path).result()


def test_one_task_alone(make_backbone, sequence, settings, make_run, tmp_path):
    net = make_run("finetune").net
    recorder = ShiftRecorder(net, sequence[:1], settings, tmp_path)
    net.add_task("dark", 3)
    recorder.run_started("finetune", ["dark"], 1, 0)
    recorder.task_ended(0, [0.0])
    assert recorder.result()["d1"] == [0.0, 0.0]
    assert recorder.result()["d2"] == recorder.result()["d0"]


@pytest.mark.parametrize("method", [*KINDS, "best"])
def test_the_20_convolutions_of_resnet18_in_network_order(sequence, settings, method):
    model = build_model("resnet18")
    expected = {name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}
    net = create_method(method).network(model)
    net.add_task("dark", 3)
    found = moments_at_test(net, sequence[0], settings.model_copy(update={"eval_batch_size": 64}))
    assert len(found) == 20
    assert set(found) == expected
    assert list(found)[:3] == ["conv1", "layer1.0.conv1", "layer1.0.conv2"]
    assert list(found)[-3:] == ["layer4.0.downsample.0", "layer4.1.conv1", "layer4.1.conv2"]


@pytest.mark.parametrize("size", [1, 5, 64])
def test_batches_split_or_not(make_run, sequence, settings, size):
    net = make_run("confit").net
    make_run("confit", net=net).run()
    whole = moments_at_test(net, sequence[0], settings.model_copy(update={"eval_batch_size": len(sequence[0].test)}))
    split = moments_at_test(net, sequence[0], settings.model_copy(update={"eval_batch_size": size}))
    for name in "03":
        np.testing.assert_allclose(split[name], whole[name], rtol=1e-5, atol=1e-6)


def test_moments_wait_in_a_file_to_the_last_bit(make_run, sequence, settings, tmp_path):
    net = make_run("confit").net
    recorder = ShiftRecorder(net, sequence, settings, tmp_path)
    make_run("confit", net=net, listeners=(recorder,)).run()
    kept = moments_at_test(net, sequence[0], settings)
    recorder.task_ended(0, [])
    assert all(torch.equal(found, kept[name]) for name, found in load_file(tmp_path / AFTER_FIRST_TASK).items())
    assert recorder.result()["d1"] == [0.0] * len(kept)
