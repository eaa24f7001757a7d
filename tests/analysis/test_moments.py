"""Means at test time: in batches or not, and the files that they wait in."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from confitune.analysis import LayerMoments, ShiftRecorder, ShiftResult, moments_at_test
from confitune.analysis.moments import read_moments, write_moments
from confitune.analysis.shift import AFTER_FIRST_TASK
from confitune.engine import read_results
from confitune.errors import ConfituneError

RESULTS = Path(__file__).parents[2] / "results"
KINDS = ("true_mean", "used_mean")


@pytest.mark.parametrize("size", [1, 5, 64])
def test_batches_split_or_not(make_run, sequence, settings, size):
    net = make_run("confit").net
    make_run("confit", net=net).run()
    whole = moments_at_test(net, sequence[0], settings.model_copy(update={"eval_batch_size": len(sequence[0].test)}))
    split = moments_at_test(net, sequence[0], settings.model_copy(update={"eval_batch_size": size}))
    for name in "03":
        for kind in KINDS:
            np.testing.assert_allclose(getattr(split[name], kind), getattr(whole[name], kind), rtol=1e-5, atol=1e-6)


# ---- files -----------------------------------------------------------------------------------------------------------

BEFORE = {
    **{"dataset": "d", "method": "m", "seed": 1, "task": "a", "last_task": "b"},
    **{"layers": ["x", "y"], "d0": [0.1, 0.2], "d1": [0.25, 1], "d2": [1, 2.0]},
}


def test_a_result_from_before_had_errors_which_are_left_out():
    result = ShiftResult.model_validate({**BEFORE, "errors": [{"variance moved": 1.0}] * 2})
    assert (result.d0, result.d1, result.d2) == ([0.1, 0.2], [0.25, 1.0], [1.0, 2.0])


def test_every_result_in_the_repository_can_be_read():
    results = [result for path in RESULTS.glob("*/runs.jsonl") for result in read_results(path)]
    found = [(ShiftResult.model_validate(result.measured["shift"]), result) for result in results if result.measured]
    assert len(found) > 20
    assert all(shift.method == result.method for shift, result in found)


def test_a_result_that_misses_a_layer_is_refused():
    with pytest.raises(ValueError, match="2 layers, but lists of"):
        ShiftResult.model_validate({**BEFORE, "d1": [0.1]})


def test_moments_wait_in_a_file_to_the_last_bit(tmp_path):
    draw = torch.Generator().manual_seed(0)
    kept = {name: LayerMoments(*(torch.rand(3, generator=draw).double() for _ in KINDS)) for name in ("z", "a.b")}
    write_moments(tmp_path / "kept", "dark", kept)
    found = read_moments(tmp_path / "kept", "dark")
    assert list(found) == ["z", "a.b"]
    for name, layer in kept.items():
        assert all(torch.equal(getattr(found[name], kind), getattr(layer, kind)) for kind in KINDS)


def test_a_file_of_another_kind_is_refused(tmp_path):
    tensors = {f"{kind}/0": torch.zeros(6).double() for kind in ("true", "running")}
    save_file(tensors, tmp_path / "kept", {"task": "dark", "layers": '["0"]'})
    with pytest.raises(ConfituneError, match="start this run anew"):
        read_moments(tmp_path / "kept", "dark")


@pytest.mark.parametrize("other", ["0 3", "0 1", "0"])
def test_a_file_of_another_network_is_refused(make_run, sequence, settings, tmp_path, other):
    net = make_run("confit").net
    make_run("confit", net=net, listeners=(ShiftRecorder(net, sequence, settings, tmp_path),)).run()
    kept = {name: LayerMoments(*(torch.ones(5).double() for _ in KINDS)) for name in other.split()}
    write_moments(tmp_path / AFTER_FIRST_TASK, "dark", kept)
    recorder = ShiftRecorder(net, sequence, settings, tmp_path)
    recorder.run_started("confit", [task.name for task in sequence], 2, len(sequence))
    with pytest.raises(ConfituneError, match=r"of another network: .*'0': 5.*'0': 6, '3': 8"):
        recorder.result()
