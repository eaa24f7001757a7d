"""Means at test time: in batches or not, and the files that they wait in."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from confitune.analysis import ShiftRecorder, ShiftResult
from confitune.analysis.moments import moments_at_test
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


@pytest.fixture
def resumed(make_run, sequence, settings, tmp_path):
    """A recorder of a run that has ended, whose file of the first task a test may change."""
    net = make_run("confit").net
    make_run("confit", net=net, listeners=(ShiftRecorder(net, sequence, settings, tmp_path),)).run()
    return ShiftRecorder(net, sequence, settings, tmp_path)


def test_moments_wait_in_a_file_to_the_last_bit(make_run, sequence, settings, tmp_path):
    net = make_run("confit").net
    recorder = ShiftRecorder(net, sequence, settings, tmp_path)
    make_run("confit", net=net, listeners=(recorder,)).run()
    kept = {name: torch.stack(means) for name, means in moments_at_test(net, sequence[0], settings).items()}
    recorder.task_ended(0, [])
    assert all(torch.equal(found, kept[name]) for name, found in load_file(tmp_path / AFTER_FIRST_TASK).items())
    assert recorder.result().d1 == [0.0] * len(kept)


def test_a_file_of_another_kind_is_refused(resumed, tmp_path):
    save_file({"true/0": torch.zeros(6).double()}, tmp_path / AFTER_FIRST_TASK)
    with pytest.raises(ConfituneError, match="start this run anew"):
        resumed.result()


@pytest.mark.parametrize("other", ["0 3", "0 1", "0"])
def test_a_file_of_another_network_is_refused(resumed, tmp_path, other):
    save_file({name: torch.ones(2, 5).double() for name in other.split()}, tmp_path / AFTER_FIRST_TASK)
    with pytest.raises(ConfituneError, match=r"of another network: .*'0': 5.*'0': 6, '3': 8"):
        resumed.result()
